"""Stage 6: partial softmaxes into one, the one number per query their backward passes share, and sums of gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded
from muse_attention.backends.triton.pairs import Pairs
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Partial

_TILE = 64


def merge(
    own: Partial, of_summaries: Partial | None, of_pairs: Partial | None, pairs: Pairs | None, fill_in: Partial
) -> None:
    """The softmax over all terms: `own` (H, N, Dv), `of_summaries` (H, N, Dv), `of_pairs` (G, L, Dv), one for each of
    the `pairs`.

    `fill_in` may be `own`.
    """
    heads, length, value_dim = own.out.shape
    far, retrieved = of_summaries or own, of_pairs or own
    _merge[(cdiv(heads * length, _TILE),)](
        own.out, own.lse, far.out, far.lse, retrieved.out, retrieved.lse, fill_in.out, fill_in.lse, heads * length,
        *_of_rows(pairs, own.lse), IS_RAGGED=pairs is not None and pairs.is_ragged,
        HAS_SUMMARIES=of_summaries is not None, DV=value_dim, DVP=padded(value_dim), TILE=_TILE,
        ACC=arithmetic(own.out.dtype)["ACC"],
    )  # fmt: skip


def shared_delta(
    merged: Partial, grad_out: Tensor, grad_lse: Tensor | None, segments: Groups, shift: Tensor
) -> tuple[Tensor, Partial, Tensor]:
    """`delta = sum(dO * O) - dL` of each query, (H, N): with `L`, all that a term's backward needs to know of the rest.

    Also `(dO, L - shift)` and `delta` in the order of `segments`, which `shift` (H, N) is in.
    """
    heads, length, value_dim = grad_out.shape
    delta, sorted_delta = torch.empty_like(merged.lse), torch.empty_like(merged.lse)
    ordered = Partial(torch.empty_like(grad_out), torch.empty_like(merged.lse))
    _find_delta[(cdiv(length, _TILE), heads)](
        merged.out, merged.lse, grad_out, merged.lse if grad_lse is None else grad_lse, segments.order, shift, delta,
        ordered.out, ordered.lse, sorted_delta, length, HAS_GRAD_LSE=grad_lse is not None, DV=value_dim,
        DVP=padded(value_dim), TILE=_TILE, ACC=arithmetic(grad_out.dtype)["ACC"],
    )  # fmt: skip
    return delta, ordered, sorted_delta


def add_to_queries(
    own: Tensor,
    of_summaries: QueryGradients | None,
    of_pairs: QueryGradients | None,
    pairs: Pairs | None,
    has_bucket: Tensor,
    key_offset: Tensor,
    fill_in: Tensor,
    *,
    scale: float,
) -> None:
    """Gradients of queries: `own` + `scale` (`of_summaries` + the sum of `of_pairs` over the query's pairs).

    `of_summaries` are of (H, N), `of_pairs` of (G, L), `key_offset` is (G, D). Where every query has as many picks,
    `has_bucket` has an integer for each pair, which is negative if it has none.
    """
    heads, length, head_dim = own.shape
    tables = [
        table
        for gradients in (of_summaries, of_pairs)
        for table in ((own, own) if gradients is None else (gradients.centred, gradients.of_offset))
    ]
    _add_to_queries[(cdiv(length, _TILE), heads)](
        own, *tables, has_bucket, key_offset, fill_in, length, heads // key_offset.shape[0],
        *_of_rows(pairs, has_bucket), IS_RAGGED=pairs is not None and pairs.is_ragged,
        HAS_SUMMARIES=of_summaries is not None, SCALE=scale, D=head_dim, DP=padded(head_dim), TILE=_TILE,
        ACC=arithmetic(own.dtype)["ACC"],
    )  # fmt: skip


def _of_rows(pairs: Pairs | None, some: Tensor) -> tuple[Tensor, int, int, int]:
    """The pairs of each row as kernels take them: the first of each row, rows and room of a key head, and the picks."""
    if pairs is None:
        return some, 1, 0, 0
    return pairs.row_starts, pairs.row_starts.shape[1] - 1, pairs.shape[1], pairs.picks


@triton.jit
def _pairs_of_row(row_starts, row, is_row, rows_of_head, room, picks, IS_RAGGED: tl.constexpr):
    """The first pair of each row and their number, and the largest such number."""
    if IS_RAGGED:
        key_head = row // rows_of_head
        at = row_starts + key_head * (rows_of_head + 1) + row % rows_of_head
        start = tl.load(at, mask=is_row, other=0)
        number = tl.load(at + 1, mask=is_row, other=0) - start
        first = key_head * room + start
        most = tl.max(number, 0)
    else:
        number = tl.zeros_like(row).to(tl.int32) + picks
        first = row * picks
        most = picks
    return first, number, most


@kernel(do_not_specialize=["rows", "rows_of_head", "room", "picks"])
def _merge(
    own_out, own_lse, far_out, far_lse, pair_out, pair_lse, out, lse, rows, row_starts, rows_of_head, room, picks,
    IS_RAGGED: tl.constexpr, HAS_SUMMARIES: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr,
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
    first, number, most = _pairs_of_row(row_starts, row, is_row, rows_of_head, room, picks, IS_RAGGED)
    for pick in range(most):
        log = tl.load(pair_lse + first + pick, mask=is_row & (pick < number), other=float("-inf"))
        largest = tl.maximum(largest, log)
    # The own block holds at least the query's own key, so the largest is not -inf.
    share = tl.exp(own - largest)
    total = share
    weighted = tl.load(own_out + at, mask=inside, other=0.0).to(ACC) * share[:, None]
    if HAS_SUMMARIES:
        share = tl.exp(far - largest)
        total += share
        weighted += tl.load(far_out + at, mask=inside, other=0.0).to(ACC) * share[:, None]
    for pick in range(most):
        pair = first + pick
        log = tl.load(pair_lse + pair, mask=is_row & (pick < number), other=float("-inf"))
        share = tl.exp(log - largest)
        total += share
        exists = is_row & (log != float("-inf"))
        some = tl.load(
            pair_out + pair[:, None] * DV + column[None, :], mask=exists[:, None] & (column < DV)[None, :], other=0.0
        )
        weighted += some.to(ACC) * share[:, None]
    tl.store(out + at, weighted / total[:, None], mask=inside)
    tl.store(lse + row, largest + tl.log(total), mask=is_row)


@kernel(do_not_specialize=["length"])
def _find_delta(
    out, lse, grad_out, grad_lse, order, shift, delta, sorted_grad, sorted_lse, sorted_delta, length,
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
    shifted = tl.load(lse + row, mask=is_row, other=0.0) - tl.load(shift + place, mask=is_row, other=0.0)
    tl.store(sorted_lse + place, shifted, mask=is_row)
    tl.store(sorted_grad + place[:, None] * DV + column[None, :], gradient, mask=inside)


@kernel(do_not_specialize=["length", "shared_by", "rows_of_head", "room", "picks"])
def _add_to_queries(
    own, of_summaries, offset_of_summaries, of_pairs, offset_of_pairs, has_bucket, key_offset, total, length,
    shared_by, row_starts, rows_of_head, room, picks, IS_RAGGED: tl.constexpr, HAS_SUMMARIES: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    place, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    is_row = place < length
    row = head * length + place
    inside = is_row[:, None] & (dim < D)[None, :]
    at = row[:, None] * D + dim[None, :]
    summed = tl.zeros([TILE, DP], ACC)
    of_offset = tl.zeros([TILE], ACC)
    if HAS_SUMMARIES:
        of_offset += tl.load(offset_of_summaries + row, mask=is_row, other=0.0)
        summed += tl.load(of_summaries + at, mask=inside, other=0.0).to(ACC)
    first, number, most = _pairs_of_row(row_starts, row, is_row, rows_of_head, room, picks, IS_RAGGED)
    for pick in range(most):
        pair = first + pick
        exists = is_row & (pick < number)
        if not IS_RAGGED:
            exists &= tl.load(has_bucket + pair, mask=exists, other=-1) >= 0
        summed += tl.load(
            of_pairs + pair[:, None] * D + dim[None, :], mask=exists[:, None] & (dim < D)[None, :], other=0.0
        ).to(ACC)
        of_offset += tl.load(offset_of_pairs + pair, mask=exists, other=0.0)
    offset = tl.load(key_offset + head // shared_by * D + dim, mask=dim < D, other=0.0)
    summed += of_offset[:, None] * offset[None, :]
    tl.store(total + at, tl.load(own + at, mask=inside, other=0.0).to(ACC) + SCALE * summed, mask=inside)
