"""Stage 6: partial softmaxes into one, the one number per query their backward passes share, and sums of gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups
from muse_attention.kernels.numbers import arithmetic, padded
from muse_attention.structures import Partial

_TILE = 64


def merge(own: Partial, of_summaries: Partial | None, of_pairs: Partial | None, fill_in: Partial) -> None:
    """The softmax over all terms: `own` (H, N, Dv), `of_summaries` (H, N, Dv), `of_pairs` (H, N, P, Dv).

    `fill_in` may be `own`.
    """
    heads, length, value_dim = own.out.shape
    far, pairs = of_summaries or own, of_pairs or own
    _merge[(triton.cdiv(heads * length, _TILE),)](
        own.out, own.lse, far.out, far.lse, pairs.out, pairs.lse, fill_in.out, fill_in.lse, heads * length,
        0 if of_pairs is None else of_pairs.lse.shape[-1], HAS_SUMMARIES=of_summaries is not None, DV=value_dim,
        DVP=padded(value_dim), TILE=_TILE, ACC=arithmetic(own.out.dtype)["ACC"],
    )  # fmt: skip


def shared_delta(
    merged: Partial, grad_out: Tensor, grad_lse: Tensor | None, segments: Groups
) -> tuple[Tensor, Partial, Tensor]:
    """`delta = sum(dO * O) - dL` of each query, (H, N): with `L`, all that a term's backward needs to know of the rest.

    Also `(dO, L)` and `delta` in the order of `segments`.
    """
    heads, length, value_dim = grad_out.shape
    delta, sorted_delta = torch.empty_like(merged.lse), torch.empty_like(merged.lse)
    ordered = Partial(torch.empty_like(grad_out), torch.empty_like(merged.lse))
    _find_delta[(triton.cdiv(length, _TILE), heads)](
        merged.out, merged.lse, grad_out, merged.lse if grad_lse is None else grad_lse, segments.order, delta,
        ordered.out, ordered.lse, sorted_delta, length, HAS_GRAD_LSE=grad_lse is not None, DV=value_dim,
        DVP=padded(value_dim), TILE=_TILE, ACC=arithmetic(grad_out.dtype)["ACC"],
    )  # fmt: skip
    return delta, ordered, sorted_delta


def add_to_queries(
    own: Tensor, of_summaries: Tensor | None, of_pairs: Tensor | None, picks: Tensor, fill_in: Tensor, *, scale: float
) -> None:
    """Gradients of queries: `own` + `scale` (`of_summaries` + the sum of `of_pairs` over the queries' picks).

    `picks` has an integer for each pair, which is negative if the query has no such pick.
    """
    heads, length, head_dim = own.shape
    _add_to_queries[(triton.cdiv(heads * length, _TILE),)](
        own, own if of_summaries is None else of_summaries, own if of_pairs is None else of_pairs,
        picks, fill_in, heads * length, 0 if of_pairs is None else of_pairs.shape[-2],
        HAS_SUMMARIES=of_summaries is not None, SCALE=scale, D=head_dim, DP=padded(head_dim), TILE=_TILE,
        ACC=arithmetic(own.dtype)["ACC"],
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "picks"])
def _merge(
    own_out, own_lse, far_out, far_lse, pair_out, pair_lse, out, lse, rows, picks, HAS_SUMMARIES: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DVP)
    is_row = row < rows
    inside = is_row[:, None] & (column < DV)[None, :]
    at = row[:, None] * DV + column[None, :]
    own = tl.load(own_lse + row, mask=is_row, other=0.0)
    largest = own
    if HAS_SUMMARIES:
        far = tl.load(far_lse + row, mask=is_row, other=0.0)
        largest = tl.maximum(largest, far)
    for pick in range(picks):
        largest = tl.maximum(largest, tl.load(pair_lse + row * picks + pick, mask=is_row, other=0.0))
    # The own block holds at least the query's own key, so the largest is not -inf.
    share = tl.exp(own - largest)
    total = share
    weighted = tl.load(own_out + at, mask=inside, other=0.0).to(ACC) * share[:, None]
    if HAS_SUMMARIES:
        share = tl.exp(far - largest)
        total += share
        weighted += tl.load(far_out + at, mask=inside, other=0.0).to(ACC) * share[:, None]
    for pick in range(picks):
        pair = row * picks + pick
        log = tl.load(pair_lse + pair, mask=is_row, other=float("-inf"))
        share = tl.exp(log - largest)
        total += share
        exists = is_row & (log != float("-inf"))
        some = tl.load(
            pair_out + pair[:, None] * DV + column[None, :], mask=exists[:, None] & (column < DV)[None, :], other=0.0
        )
        weighted += some.to(ACC) * share[:, None]
    tl.store(out + at, weighted / total[:, None], mask=inside)
    tl.store(lse + row, largest + tl.log(total), mask=is_row)


@triton.jit(do_not_specialize=["length"])
def _find_delta(
    out, lse, grad_out, grad_lse, order, delta, sorted_grad, sorted_lse, sorted_delta, length,
    HAS_GRAD_LSE: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    place, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DVP)
    is_row = place < length
    place = head * length + place
    row = head * length + tl.load(order + place, mask=is_row, other=0)
    inside = is_row[:, None] & (column < DV)[None, :]
    at = row[:, None] * DV + column[None, :]
    gradient = tl.load(grad_out + at, mask=inside, other=0.0)
    found = tl.sum(gradient.to(ACC) * tl.load(out + at, mask=inside, other=0.0).to(ACC), 1)
    if HAS_GRAD_LSE:
        found -= tl.load(grad_lse + row, mask=is_row, other=0.0).to(ACC)
    tl.store(delta + row, found, mask=is_row)
    tl.store(sorted_delta + place, found, mask=is_row)
    tl.store(sorted_lse + place, tl.load(lse + row, mask=is_row, other=0.0), mask=is_row)
    tl.store(sorted_grad + place[:, None] * DV + column[None, :], gradient, mask=inside)


@triton.jit(do_not_specialize=["rows", "picks"])
def _add_to_queries(
    own, of_summaries, of_pairs, pick_table, total, rows, picks, HAS_SUMMARIES: tl.constexpr, SCALE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DP)
    is_row = row < rows
    inside = is_row[:, None] & (dim < D)[None, :]
    at = row[:, None] * D + dim[None, :]
    summed = tl.zeros([TILE, DP], ACC)
    if HAS_SUMMARIES:
        summed += tl.load(of_summaries + at, mask=inside, other=0.0).to(ACC)
    for pick in range(picks):
        pair = row * picks + pick
        exists = tl.load(pick_table + pair, mask=is_row, other=-1) >= 0
        summed += tl.load(
            of_pairs + pair[:, None] * D + dim[None, :], mask=exists[:, None] & (dim < D)[None, :], other=0.0
        ).to(ACC)
    tl.store(total + at, tl.load(own + at, mask=inside, other=0.0).to(ACC) + SCALE * summed, mask=inside)
