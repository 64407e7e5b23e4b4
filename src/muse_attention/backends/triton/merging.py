"""Stage 6: merge partial softmaxes; in the backward pass, find the `delta` that they share, and add up gradients."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import accumulator, cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Partial

_TILE = 64


def merge(own: Partial, from_summaries: Partial | None, from_pairs: Partial | None, picks: int) -> None:
    """Merge `from_summaries` (H, N, Dv) and `from_pairs` (G, L, Dv), `picks` per query, into `own` (H, N, Dv)."""
    heads, length, value_dim = own.out.shape
    far, retrieved = from_summaries or own, from_pairs or own
    _merge[(cdiv(heads * length, _TILE),)](
        own_out_ptr=own.out, own_lse_ptr=own.lse, far_out_ptr=far.out, far_lse_ptr=far.lse, pair_out_ptr=retrieved.out,
        pair_lse_ptr=retrieved.lse, out_ptr=own.out, lse_ptr=own.lse, rows=heads * length, picks=picks,
        HAS_SUMMARIES=from_summaries is not None, DV=value_dim, TILE=_TILE, ACC=accumulator(own.out.dtype),
    )  # fmt: skip


def shared_delta(
    merged: Partial, grad_out: Tensor, grad_lse: Tensor | None, segments: Groups, shift: Tensor
) -> tuple[Tensor, Partial, Tensor]:
    """`delta = sum(dO * O) - dL` of each query, (H, N). With `L` it is all that the gradient of a term needs of the
    others.

    Also returns `(dO, L - shift)` and `delta` in the order of `segments`, in which `shift` (H, N) is given.
    """
    heads, length, value_dim = grad_out.shape
    delta, sorted_delta = torch.empty_like(merged.lse), torch.empty_like(merged.lse)
    ordered = Partial(torch.empty_like(grad_out), torch.empty_like(merged.lse))
    _find_delta[(cdiv(length, _TILE), heads)](
        out_ptr=merged.out, lse_ptr=merged.lse, grad_out_ptr=grad_out,
        grad_lse_ptr=merged.lse if grad_lse is None else grad_lse, order_ptr=segments.order, shift_ptr=shift,
        delta_ptr=delta, sorted_grad_ptr=ordered.out, sorted_lse_ptr=ordered.lse, sorted_delta_ptr=sorted_delta,
        length=length, HAS_GRAD_LSE=grad_lse is not None, DV=value_dim, TILE=_TILE, ACC=accumulator(grad_out.dtype),
    )  # fmt: skip
    return delta, ordered, sorted_delta


def add_to_queries(
    own: Tensor,
    from_summaries: QueryGradients | None,
    from_pairs: QueryGradients | None,
    picks: int,
    has_bucket: Tensor,
    key_offset: Tensor,
    *,
    scale: float,
) -> None:
    """Add `scale` (`from_summaries` + the sum of `from_pairs` over the query's pairs) to `own`, the gradients of
    queries.

    `from_summaries` has a gradient for each of (H, N) queries, `from_pairs` for each of (G, L) pairs, `picks` per
    query; `key_offset` is (G, D). `has_bucket` has an integer for each pair, negative if the pair has no bucket.
    """
    heads, length, head_dim = own.shape
    # (A kernel needs a tensor even for an argument that it does not read.)
    nothing = QueryGradients(own, own)
    summaries, retrieved = from_summaries or nothing, from_pairs or nothing
    _add_to_queries[(cdiv(length, _TILE), heads)](
        own_ptr=own, from_summaries_ptr=summaries.centred, summaries_factor_ptr=summaries.offset_factor,
        from_pairs_ptr=retrieved.centred, pairs_factor_ptr=retrieved.offset_factor, has_bucket_ptr=has_bucket,
        key_offset_ptr=key_offset, total_ptr=own, length=length, shared_by=heads // key_offset.shape[0], picks=picks,
        HAS_SUMMARIES=from_summaries is not None, SCALE=scale, D=head_dim, TILE=_TILE, ACC=accumulator(own.dtype),
    )  # fmt: skip


@kernel(stage="merging", do_not_specialize=["rows", "picks"])
def _merge(
    own_out_ptr, own_lse_ptr, far_out_ptr, far_lse_ptr, pair_out_ptr, pair_lse_ptr, out_ptr, lse_ptr, rows, picks,
    HAS_SUMMARIES: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The softmax over all terms of each query, from the partial ones.

    Grid: (H N / TILE,). `own_out_ptr`, `far_out_ptr`, `out_ptr`: (H, N, DV); `own_lse_ptr`, `far_lse_ptr`, `lse_ptr`:
    (H, N); `pair_out_ptr`: (G, L, DV); `pair_lse_ptr`: (G, L).
    """
    offs_row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]
    offs_dv = tl.arange(0, padded(DV))  # [DV]
    mask_row = offs_row < rows  # [TILE]
    mask = mask_row[:, None] & (offs_dv < DV)[None, :]  # [TILE, DV]
    offs = offs_row[:, None] * DV + offs_dv[None, :]  # [TILE, DV]
    own = tl.load(own_lse_ptr + offs_row, mask=mask_row, other=0.0)  # [TILE]
    largest = own  # [TILE]
    if HAS_SUMMARIES:
        far = tl.load(far_lse_ptr + offs_row, mask=mask_row, other=0.0)  # [TILE]
        largest = tl.maximum(largest, far)
    for pick in range(picks):
        log = tl.load(pair_lse_ptr + offs_row * picks + pick, mask=mask_row, other=float("-inf"))  # [TILE]
        largest = tl.maximum(largest, log)
    # The own block holds at least the query's own key, so the largest is not -inf.
    share = tl.exp(own - largest)  # [TILE]
    total = share  # [TILE]
    weighted = tl.load(own_out_ptr + offs, mask=mask, other=0.0).to(ACC) * share[:, None]  # [TILE, DV]
    if HAS_SUMMARIES:
        share = tl.exp(far - largest)
        total += share
        weighted += tl.load(far_out_ptr + offs, mask=mask, other=0.0).to(ACC) * share[:, None]
    for pick in range(picks):
        offs_pair = offs_row * picks + pick  # [TILE]
        log = tl.load(pair_lse_ptr + offs_pair, mask=mask_row, other=float("-inf"))
        share = tl.exp(log - largest)
        total += share
        mask_pair = mask_row & (log != float("-inf"))  # [TILE]
        mask_out = mask_pair[:, None] & (offs_dv < DV)[None, :]  # [TILE, DV]
        out = tl.load(pair_out_ptr + offs_pair[:, None] * DV + offs_dv[None, :], mask=mask_out, other=0.0)  # [TILE, DV]
        weighted += out.to(ACC) * share[:, None]
    tl.store(out_ptr + offs, weighted / total[:, None], mask=mask)
    tl.store(lse_ptr + offs_row, largest + tl.log(total), mask=mask_row)


@kernel(stage="merging", do_not_specialize=["length"])
def _find_delta(
    out_ptr, lse_ptr, grad_out_ptr, grad_lse_ptr, order_ptr, shift_ptr, delta_ptr, sorted_grad_ptr, sorted_lse_ptr,
    sorted_delta_ptr, length, HAS_GRAD_LSE: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`delta = sum(dO * O) - dL`, and what backward passes need of the softmax, in the order of the segments.

    Grid: (N / TILE, H). `out_ptr`, `grad_out_ptr`, `sorted_grad_ptr`: (H, N, DV); `order_ptr`: (H, N) int32;
    `shift_ptr`: (H, N), in the order of the segments; all others: (H, N).
    """
    head = tl.program_id(1).to(tl.int64)
    offs_place, offs_dv = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, padded(DV))  # [TILE], [DV]
    mask_row = offs_place < length  # [TILE]
    offs_place = head * length + offs_place
    offs_row = head * length + tl.load(order_ptr + offs_place, mask=mask_row, other=0)  # [TILE]
    mask = mask_row[:, None] & (offs_dv < DV)[None, :]  # [TILE, DV]
    offs = offs_row[:, None] * DV + offs_dv[None, :]  # [TILE, DV]
    gradient = tl.load(grad_out_ptr + offs, mask=mask, other=0.0)  # [TILE, DV]
    delta = tl.sum(gradient.to(ACC) * tl.load(out_ptr + offs, mask=mask, other=0.0).to(ACC), 1)  # [TILE]
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + offs_row, mask=mask_row, other=0.0).to(ACC)
    tl.store(delta_ptr + offs_row, delta, mask=mask_row)
    tl.store(sorted_delta_ptr + offs_place, delta, mask=mask_row)
    lse = tl.load(lse_ptr + offs_row, mask=mask_row, other=0.0)  # [TILE]
    shift = tl.load(shift_ptr + offs_place, mask=mask_row, other=0.0)  # [TILE]
    shifted = lse - shift  # [TILE]
    tl.store(sorted_lse_ptr + offs_place, shifted, mask=mask_row)
    tl.store(sorted_grad_ptr + offs_place[:, None] * DV + offs_dv[None, :], gradient, mask=mask)


@kernel(stage="merging", do_not_specialize=["length", "shared_by", "picks"])
def _add_to_queries(
    own_ptr, from_summaries_ptr, summaries_factor_ptr, from_pairs_ptr, pairs_factor_ptr, has_bucket_ptr,
    key_offset_ptr, total_ptr, length, shared_by, picks, HAS_SUMMARIES: tl.constexpr, SCALE: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries from all their terms.

    Grid: (N / TILE, H). `own_ptr`, `from_summaries_ptr`, `total_ptr`: (H, N, D); `summaries_factor_ptr`: (H, N);
    `from_pairs_ptr`: (G, L, D); `pairs_factor_ptr`: (G, L); `has_bucket_ptr`: (G, L) int32; `key_offset_ptr`: (G, D).
    """
    head = tl.program_id(1).to(tl.int64)
    offs_place, offs_d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, padded(D))  # [TILE], [D]
    mask_row = offs_place < length  # [TILE]
    offs_row = head * length + offs_place  # [TILE]
    mask = mask_row[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    offs = offs_row[:, None] * D + offs_d[None, :]  # [TILE, D]
    summed = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    offset_factor = tl.zeros([TILE], ACC)
    if HAS_SUMMARIES:
        offset_factor += tl.load(summaries_factor_ptr + offs_row, mask=mask_row, other=0.0)
        summed += tl.load(from_summaries_ptr + offs, mask=mask, other=0.0).to(ACC)
    for pick in range(picks):
        offs_pair = offs_row * picks + pick  # [TILE]
        mask_pair = mask_row & (tl.load(has_bucket_ptr + offs_pair, mask=mask_row, other=-1) >= 0)  # [TILE]
        mask_gradient = mask_pair[:, None] & (offs_d < D)[None, :]  # [TILE, D]
        ptrs = from_pairs_ptr + offs_pair[:, None] * D + offs_d[None, :]  # [TILE, D]
        summed += tl.load(ptrs, mask=mask_gradient, other=0.0).to(ACC)
        offset_factor += tl.load(pairs_factor_ptr + offs_pair, mask=mask_pair, other=0.0)
    offset = tl.load(key_offset_ptr + head // shared_by * D + offs_d, mask=offs_d < D, other=0.0)  # [D]
    summed += offset_factor[:, None] * offset[None, :]
    tl.store(total_ptr + offs, tl.load(own_ptr + offs, mask=mask, other=0.0).to(ACC) + SCALE * summed, mask=mask)
