"""Needle samples to capture heads on: the token before each uid that is asked for must look its definition up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from muse_lab.evaluation.texts import Samples, describe_texts, read_texts
from muse_lab.models import PreTrainedTokenizerBase
from muse_lab.pretraining.data.tokenizer import Tokenizer
from muse_lab.pretraining.needles.haystacks import TextHaystack
from muse_lab.pretraining.needles.samples import BUCKETS, NeedleSamples
from muse_lab.records.captured_heads import LookupAt

KIND = "single"
_HAYSTACK = 4
"""Texts are read up to this many times the tokens of a sample."""


def read_needle_samples(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Path], length: int, number: int
) -> tuple[Samples, tuple[LookupAt, ...]]:
    """Samples with one needle each, at one depth after another, and what is looked up in them."""
    if number < 1:
        raise ValueError(f"cannot measure {number} samples; use at least 1")
    backend = fast_tokenizer(tokenizer)
    source = f"needles in {describe_texts(texts)}"
    haystack = TextHaystack.encode(backend, read_texts(texts), enough=_HAYSTACK * length, source=source)
    writer = NeedleSamples(backend, haystack, begin=tokenizer("").input_ids)
    samples = [writer.make(KIND, length, index % BUCKETS, index // BUCKETS) for index in range(number)]
    lookups = tuple(
        LookupAt(index, question.answer.start - 1, tuple(question.definition))
        for index, sample in enumerate(samples)
        for question in sample.questions
    )
    return Samples(torch.stack([torch.from_numpy(sample.tokens) for sample in samples]), source), lookups


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The fast tokenizer behind one of transformers; raises ValueError if it does not know where its tokens are."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens are; use a fast tokenizer")
    return backend
