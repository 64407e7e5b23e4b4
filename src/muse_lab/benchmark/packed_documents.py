"""Packed documents: times of packed attentions, and of exact attention over the same documents in the same run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from muse_attention.attention import muse_attention
from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.documents.varlen import muse_attn_varlen_func
from muse_attention.fidelity.error import position_error
from muse_attention.sizes import format_size, parse_size
from muse_lab.benchmark.timing import Times, time_interleaved
from muse_lab.benchmark.workload import DTYPES, AttentionCall, CallSettings, Workload
from muse_lab.records.machine import describe_machine
from muse_lab.records.stored_results import StoredResults
from muse_lab.synthetic import clustered_qkv


@dataclass(frozen=True, kw_only=True)
class DocumentsSettings(CallSettings):
    documents: tuple[int, ...]
    """lengths, in the order in which they lie in the row"""


@dataclass(frozen=True)
class PackedCase:
    attention: str
    times: Times
    error: float | None
    """relative squared error of the output, against the baseline's; None for the baseline"""


@dataclass
class DocumentsResults(StoredResults):
    command = "muse bench --documents"
    packages = ()

    settings: DocumentsSettings
    packed: list[PackedCase] = field(default_factory=list)
    """the baseline first"""

    @property
    def named(self) -> list[str]:
        """Empty: a configuration of packed documents may depend on the length of each."""
        return []

    def speedup(self, case: PackedCase) -> float:
        """Speed-up of forward and backward over the baseline."""
        return self.packed[0].times.forward_backward_median / case.times.forward_backward_median


def parse_documents(text: str) -> tuple[int, ...]:
    """The lengths in `"32k,2k,2k"` or `"32k,2kx4"`."""
    lengths: list[int] = []
    for part in text.split(","):
        size, times, count = part.strip().partition("x")
        if times and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"cannot read the documents {part.strip()!r}: write them like 32k,2k,2k or 1kx64")
        lengths += [parse_size(size)] * (int(count) if times else 1)
    return tuple(lengths)


def format_documents(lengths: tuple[int, ...]) -> str:
    """Lengths in the notation of `parse_documents`."""
    runs = ((length, len(list(same))) for length, same in itertools.groupby(lengths))
    return ",".join(format_size(length) + (f"x{count}" if count > 1 else "") for length, count in runs)


def measure_documents(
    settings: DocumentsSettings, configs: list[str], on_turn: Callable[[int, int], None]
) -> DocumentsResults:
    """Times of the baseline, of each configuration (`""` is the default), and of `muse_attention` for one document."""
    boundaries = DocumentBoundaries.from_lengths(settings.documents)
    workload = _workload(settings)
    baseline, attend = _baseline(settings, boundaries)
    attentions = {baseline: attend}
    for config in configs:
        name = f"muse:{config}" if config else "muse"
        attentions[f"{name}, packed"] = functools.partial(_packed, boundaries, config or None)
        if len(settings.documents) == 1:
            attentions[f"{name}, muse_attention"] = functools.partial(_single_document, config or None)
    times = time_interleaved(list(attentions.values()), workload, settings.repeats, on_turn)
    with torch.no_grad():
        exact = workload.forward(next(iter(attentions.values())))
        errors = [float(position_error(workload.forward(attention), exact).mean()) for attention in attentions.values()]
    cases = [
        PackedCase(name, own_times, None if place == 0 else error)
        for place, (name, own_times, error) in enumerate(zip(attentions, times, errors, strict=True))
    ]
    return DocumentsResults(describe_machine(), settings, packed=cases)


def _workload(settings: DocumentsSettings) -> Workload:
    """Clustered synthetic data for each document, (tokens, heads, head_dim)."""
    documents = [
        clustered_qkv(
            1, settings.heads, length, settings.head_dim, key_heads=settings.key_heads, seed=settings.seed + place
        )
        for place, length in enumerate(settings.documents)
    ]
    packed = (
        torch.cat([tensor[0].transpose(0, 1) for tensor in tensors]).to(settings.device, DTYPES[settings.dtype])
        for tensors in zip(*documents, strict=True)
    )
    return Workload.of(*packed, is_causal=settings.causal, seed=settings.seed)


def _packed(
    boundaries: DocumentBoundaries, config: str | None, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    longest = boundaries.longest
    return muse_attn_varlen_func(
        query, key, value, boundaries, boundaries, longest, longest, causal=is_causal, config=config
    )


def _single_document(
    config: str | None, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
) -> Tensor:
    """`muse_attention` on the same tensors, as one document."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = muse_attention(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa, config=config)
    return out[0].transpose(0, 1)


def _baseline(settings: DocumentsSettings, boundaries: DocumentBoundaries) -> tuple[str, AttentionCall]:
    """Exact attention inside each document, and its name."""
    if settings.device == "cpu":
        of_each = functools.partial(_each_by_sdpa, list(boundaries.lengths))
        return "scaled_dot_product_attention of each document", of_each
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *boundaries.ends], dtype=torch.int32, device=settings.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1, 0 if is_causal else -1)}
        options |= {"enable_gqa": True} if enable_gqa else {}  # torch 2.11 does not know it
        out: Any = varlen_attn(query, key, value, ends, ends, boundaries.longest, boundaries.longest, **options)
        return out

    return "varlen_attn", attend


def _each_by_sdpa(
    lengths: list[int], query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
) -> Tensor:
    documents = zip(*(tensor.transpose(0, 1)[None].split(lengths, 2) for tensor in (query, key, value)), strict=True)
    attend = functools.partial(scaled_dot_product_attention, is_causal=is_causal, enable_gqa=enable_gqa)
    outs = [attend(*document) for document in documents]
    return torch.cat([out[0].transpose(0, 1) for out in outs])
