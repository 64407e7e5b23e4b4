"""The tests of the laboratory run where its packages are installed. Those of needles share a tokenizer and samples,
those of measurements a model, and those of comparisons two trained runs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from muse_lab.pretraining.data.corpus import Corpus
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


@pytest.fixture(scope="module")
def decode(tokenizer: Tokenizer) -> Callable[[Any], str]:
    return lambda tokens: tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)


@pytest.fixture(scope="session")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus whose tokenizer knows the words of needles, which nobody may change."""
    from tests.needle_models import needle_corpus, needle_tokenizer

    return needle_corpus(needle_tokenizer(), tmp_path_factory.mktemp("needles"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of letters, and `text.txt` and a longer `long.txt` beside it; nobody may change them."""
    from tests.models import write_model_folder

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model_folder(folder)
    for name, times in {"text.txt": 20, "long.txt": 80}.items():
        (folder.parent / name).write_text("the quick brown fox jumps over the lazy dog; " * times)
    return folder


@pytest.fixture(scope="session")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same tokens, called exact and muse, which nobody may change."""
    from muse_lab.pretraining.recipes import override
    from muse_lab.pretraining.training import train
    from tests.lab.test_compare import RECIPE

    folder = tmp_path_factory.mktemp("runs")
    train(corpus, override(RECIPE, ["attention=exact"]), folder / "exact")
    train(corpus, RECIPE, folder / "muse")
    return folder


@pytest.fixture
def copies(trained: Path, tmp_path: Path) -> Path:
    """Of these runs, to be broken."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"
