"""Stage 6: merge partial softmaxes; in the backward pass, find the `delta` that they share, and add up gradients."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import load_row, load_rows, store_rows
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
        out_ptr=own.out, lse_ptr=own.lse, far_out_ptr=far.out, far_lse_ptr=far.lse, pair_out_ptr=retrieved.out,
        pair_lse_ptr=retrieved.lse, rows=heads * length, picks=picks, HAS_SUMMARIES=from_summaries is not None,
        DV=value_dim, TILE=_TILE, ACC=accumulator(own.out.dtype),
    )  # fmt: skip


def find_delta(
    merged: Partial,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    segments: Groups | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Partial, Tensor]:
    """`delta = sum(dO * O) - dL` of each query, (H, N). With `L` it is all that the gradient of a term needs of the
    others.

    Also returns `(dO, L - shift)` and `delta` in the order of `segments`, in which `shift` (H, N) is given; without
    segments these are `(dO, L)` and `delta` themselves.
    """
    heads, length, value_dim = grad_out.shape
    delta = torch.empty_like(merged.lse)
    ordered, sorted_delta = Partial(grad_out, merged.lse), delta
    if segments is not None:
        ordered = Partial(torch.empty_like(grad_out), torch.empty_like(merged.lse))
        sorted_delta = torch.empty_like(delta)
    # (A kernel needs a tensor even for an argument that it does not read.)
    _find_delta[(cdiv(length, _TILE), heads)](
        out_ptr=merged.out, lse_ptr=merged.lse, grad_out_ptr=grad_out,
        grad_lse_ptr=delta if grad_lse is None else grad_lse, order_ptr=delta if segments is None else segments.order,
        shift_ptr=delta if shift is None else shift, delta_ptr=delta, sorted_grad_ptr=ordered.out,
        sorted_lse_ptr=ordered.lse, sorted_delta_ptr=sorted_delta, length=length, HAS_GRAD_LSE=grad_lse is not None,
        HAS_ORDER=segments is not None, DV=value_dim, TILE=_TILE, ACC=accumulator(grad_out.dtype),
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
        total_ptr=own, from_summaries_ptr=summaries.centred, summaries_factor_ptr=summaries.offset_factor,
        from_pairs_ptr=retrieved.centred, pairs_factor_ptr=retrieved.offset_factor, has_bucket_ptr=has_bucket,
        key_offset_ptr=key_offset, length=length, shared_by=heads // key_offset.shape[0], picks=picks,
        HAS_SUMMARIES=from_summaries is not None, SCALE=scale, D=head_dim, TILE=_TILE, ACC=accumulator(own.dtype),
    )  # fmt: skip


@kernel(stage="merging", do_not_specialize=["rows", "picks"])
def _merge(
    out_ptr, lse_ptr, far_out_ptr, far_lse_ptr, pair_out_ptr, pair_lse_ptr, rows, picks, HAS_SUMMARIES: tl.constexpr,
    DV: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The softmax over all terms of each query, from the partial ones.

    Grid: (H N / TILE,). `out_ptr`, `far_out_ptr`: (H, N, DV) and `lse_ptr`, `far_lse_ptr`: (H, N), the first of each in
    place; `pair_out_ptr`: (G, L, DV); `pair_lse_ptr`: (G, L).
    """
    first, offs_row = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)  # scalar, [TILE]
    mask_row = first + offs_row < rows  # [TILE]
    pair_lse_ptr += first * picks
    own = tl.load(lse_ptr + first + offs_row, mask=mask_row, other=0.0)  # [TILE]
    largest = own  # [TILE]
    if HAS_SUMMARIES:
        far = tl.load(far_lse_ptr + first + offs_row, mask=mask_row, other=0.0)  # [TILE]
        largest = tl.maximum(largest, far)
    for pick in range(picks):
        log = tl.load(pair_lse_ptr + offs_row * picks + pick, mask=mask_row, other=float("-inf"))  # [TILE]
        largest = tl.maximum(largest, log)
    # The own block holds at least the query's own key, so the largest is not -inf.
    share = tl.exp(own - largest)  # [TILE]
    total = share  # [TILE]
    weighted = load_rows(out_ptr, first, offs_row, mask_row, DV).to(ACC) * share[:, None]  # [TILE, DV]
    if HAS_SUMMARIES:
        share = tl.exp(far - largest)
        total += share
        weighted += load_rows(far_out_ptr, first, offs_row, mask_row, DV).to(ACC) * share[:, None]
    for pick in range(picks):
        offs_pair = offs_row * picks + pick  # [TILE]
        log = tl.load(pair_lse_ptr + offs_pair, mask=mask_row, other=float("-inf"))
        share = tl.exp(log - largest)
        total += share
        mask_pair = mask_row & (log != float("-inf"))  # [TILE]
        weighted += load_rows(pair_out_ptr, first * picks, offs_pair, mask_pair, DV).to(ACC) * share[:, None]
    tl.debug_barrier()  # (Of a row that is spread over warps, every warp has loaded the lse before one writes it.)
    store_rows(out_ptr, first, offs_row, mask_row, weighted / total[:, None], DV)
    tl.store(lse_ptr + first + offs_row, largest + tl.log(total), mask=mask_row)


@kernel(stage="merging", do_not_specialize=["length"])
def _find_delta(
    out_ptr, lse_ptr, grad_out_ptr, grad_lse_ptr, order_ptr, shift_ptr, delta_ptr, sorted_grad_ptr, sorted_lse_ptr,
    sorted_delta_ptr, length, HAS_GRAD_LSE: tl.constexpr, HAS_ORDER: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """`delta = sum(dO * O) - dL`; if `HAS_ORDER`, also what backward passes need of the softmax, in that order.

    Grid: (N / TILE, H). `out_ptr`, `grad_out_ptr`, `sorted_grad_ptr`: (H, N, DV); `order_ptr`: (H, N) int32;
    `shift_ptr`: (H, N), in the order of the segments; all others: (H, N).
    """
    first = tl.program_id(1).to(tl.int64) * length
    offs_place = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_row = offs_place < length  # [TILE]
    offs_row = offs_place  # [TILE]
    if HAS_ORDER:
        offs_row = tl.load(order_ptr + first + offs_place, mask=mask_row, other=0)
    out = load_rows(out_ptr, first, offs_row, mask_row, DV)  # [TILE, DV]
    gradient = load_rows(grad_out_ptr, first, offs_row, mask_row, DV)  # [TILE, DV]
    delta = tl.sum(out.to(ACC) * gradient.to(ACC), 1)  # [TILE]
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + first + offs_row, mask=mask_row, other=0.0)
    tl.store(delta_ptr + first + offs_row, delta, mask=mask_row)
    if HAS_ORDER:
        tl.store(sorted_delta_ptr + first + offs_place, delta, mask=mask_row)
        lse = tl.load(lse_ptr + first + offs_row, mask=mask_row, other=0.0)  # [TILE]
        shift = tl.load(shift_ptr + first + offs_place, mask=mask_row, other=0.0)  # [TILE]
        tl.store(sorted_lse_ptr + first + offs_place, lse - shift, mask=mask_row)
        store_rows(sorted_grad_ptr, first, offs_place, mask_row, gradient, DV)


@kernel(stage="merging", do_not_specialize=["length", "shared_by", "picks"])
def _add_to_queries(
    total_ptr, from_summaries_ptr, summaries_factor_ptr, from_pairs_ptr, pairs_factor_ptr, has_bucket_ptr,
    key_offset_ptr, length, shared_by, picks, HAS_SUMMARIES: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries from all their terms.

    Grid: (N / TILE, H). `total_ptr`, in place, and `from_summaries_ptr`: (H, N, D); `summaries_factor_ptr`: (H, N);
    `from_pairs_ptr`: (G, L, D); `pairs_factor_ptr`: (G, L); `has_bucket_ptr`: (G, L) int32; `key_offset_ptr`: (G, D).
    """
    head = tl.program_id(1).to(tl.int64)
    offs_place = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_row = offs_place < length  # [TILE]
    offs_row = head * length + offs_place  # [TILE]
    summed = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    offset_factor = tl.zeros([TILE], ACC)
    if HAS_SUMMARIES:
        offset_factor += tl.load(summaries_factor_ptr + offs_row, mask=mask_row, other=0.0)
        summed += load_rows(from_summaries_ptr, 0, offs_row, mask_row, D).to(ACC)
    for pick in range(picks):
        offs_pair = offs_row * picks + pick  # [TILE]
        mask_pair = mask_row & (tl.load(has_bucket_ptr + offs_pair, mask=mask_row, other=-1) >= 0)  # [TILE]
        summed += load_rows(from_pairs_ptr, 0, offs_pair, mask_pair, D).to(ACC)
        offset_factor += tl.load(pairs_factor_ptr + offs_pair, mask=mask_pair, other=0.0)
    summed += offset_factor[:, None] * load_row(key_offset_ptr, head // shared_by, D)[None, :]
    own = load_rows(total_ptr, 0, offs_row, mask_row, D).to(ACC)  # [TILE, D]
    store_rows(total_ptr, 0, offs_row, mask_row, own + SCALE * summed, D)
