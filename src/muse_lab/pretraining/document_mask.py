"""Samples whose documents are kept apart: positions restart, and no target is in another document.

An end mark is the last token of every document, so the tokens of a sample tell where its documents begin. A row of a
packed corpus is filled up with end marks, which are a document by themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muse_attention.sizes import format_size
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.model.chunked_loss import IGNORED


class SeparateDocuments(NamedTuple):
    """The arguments of a model, each (batch, length)."""

    input_ids: Tensor
    position_ids: Tensor
    """0 at the first token of every document"""
    shift_labels: Tensor
    """the token after each one; `IGNORED` after an end mark, where the next document would be predicted"""


def separate_documents(tokens: Tensor, end: int) -> SeparateDocuments:
    """Inputs and targets of (batch, length + 1) samples whose end mark is `end`."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    is_end = ids == end
    before = torch.nn.functional.pad(is_end, (2, 0))
    follows_end, follows_two_ends = before[:, 1:-1], before[:, 1:-1] & before[:, :-2]
    starts = follows_end & ~(is_end & follows_two_ends)
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begin = torch.where(starts, index, 0).cummax(1).values
    return SeparateDocuments(ids, index - begin, torch.where(is_end, IGNORED, targets))


def check_packed(corpus: Corpus, length: int, document_mask: bool) -> None:
    """Raise ValueError if a corpus is packed into rows that training would cut or join."""
    row = corpus.manifest.settings.get("pack")
    if row and not (document_mask and row == length):
        raise ValueError(
            f"the corpus in {corpus.folder} is packed into rows of {format_size(row)} tokens: train with "
            f"document_mask=true length={format_size(row)}, or prepare it without --pack"
        )
