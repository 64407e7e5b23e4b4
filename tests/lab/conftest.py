"""The tests of the laboratory run where its packages are installed; those of needles share a tokenizer and samples."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from muse_lab.pretraining.needles.samples import NeedleSamples

_PACKAGES = ("transformers", "tokenizers", "typer", "rich", "matplotlib", "jinja2")

collect_ignore_glob = [] if all(map(importlib.util.find_spec, _PACKAGES)) else ["test_*.py"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tests.needle_models import needle_tokenizer

    return needle_tokenizer()


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def samples(tokenizer: Tokenizer) -> NeedleSamples:
    from muse_lab.pretraining.needles.samples import NeedleSamples
    from tests.needle_models import needle_haystack

    return NeedleSamples(tokenizer, needle_haystack(tokenizer))
