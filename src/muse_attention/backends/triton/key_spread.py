"""How far the keys of a head are from their centroids, dimension by dimension: the metric of second-order summaries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded, power_of_two
from muse_attention.backends.triton.row_tiles import load_rows
from muse_attention.backends.triton.runtime.launching import kernel

_PARTS = 128
"""Pieces of a sequence that different programs sum."""
_TILE = 64


def find_key_spread(keys: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """(G, D): variance of (G, N, D) keys about their centroids in each dimension, scaled to a mean of 1."""
    heads, length, head_dim = keys.shape
    parts = min(_PARTS, cdiv(length, _TILE))
    sums, largest = centroids.new_empty(heads, parts, head_dim), centroids.new_empty(heads, parts)
    spread = centroids.new_empty(heads, head_dim)
    constants = {"D": head_dim, "DP": padded(head_dim), "ACC": arithmetic(keys.dtype)["ACC"]}
    _sum_squares[(parts, heads)](
        keys_ptr=keys, centroids_ptr=centroids, assignment_ptr=assignment, sums_ptr=sums, largest_ptr=largest,
        length=length, clusters=centroids.shape[1], TILE=_TILE, **constants,
    )  # fmt: skip
    _scale_to_mean[(heads,)](
        sums_ptr=sums, largest_ptr=largest, spread_ptr=spread, parts=parts, PARTS=power_of_two(parts), num_warps=8,
        **constants,
    )  # fmt: skip
    return spread


@triton.jit
def _square_of_ratio(part, whole):
    """`(part / whole)^2`, or `part^2` if the whole is 0."""
    ratio = part / tl.where(whole > 0, whole, 1.0)
    return ratio * ratio


@kernel(stage="clustering", do_not_specialize=["length", "clusters"])
def _sum_squares(
    keys_ptr, centroids_ptr, assignment_ptr, sums_ptr, largest_ptr, length, clusters, TILE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of a part of the sequence, in units of the largest residual there: squares of large ones would overflow.

    Grid: (parts, G). `keys_ptr`: (G, N, D); `centroids_ptr`: (G, K, D); `assignment_ptr`: (G, N) int32; `sums_ptr`:
    (G, parts, D); `largest_ptr`: (G, parts).
    """
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros([DP], ACC)  # [D]
    unit = tl.max(tl.zeros([TILE], ACC), 0)
    rows = tl.cdiv(tl.cdiv(length, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, length), TILE):
        offs_row = begin + tl.arange(0, TILE)  # [TILE]
        mask_row = offs_row < length  # [TILE]
        cluster = tl.load(assignment_ptr + head * length + offs_row, mask=mask_row, other=0)  # [TILE]
        key = load_rows(keys_ptr, head * length, offs_row, mask_row, D, DP).to(ACC)  # [TILE, D]
        key = tl.where(tl.abs(key) < float("inf"), key, 0.0)
        residual = key - load_rows(centroids_ptr, head * clusters, cluster, mask_row, D, DP).to(ACC)  # [TILE, D]
        larger = tl.maximum(unit, tl.max(tl.max(tl.abs(residual), 1), 0))
        scaled = residual / tl.where(larger > 0, larger, 1.0)  # [TILE, D]
        total = total * _square_of_ratio(unit, larger) + tl.sum(scaled * scaled, 0)
        unit = larger
    offs_d = tl.arange(0, DP)  # [D]
    at = head * tl.num_programs(0) + part
    tl.store(sums_ptr + at * D + offs_d, total, mask=offs_d < D)
    tl.store(largest_ptr + at, unit)


@kernel(stage="clustering", do_not_specialize=["parts"])
def _scale_to_mean(
    sums_ptr, largest_ptr, spread_ptr, parts, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr
):
    """The sums of all parts, in units of their mean over the dimensions; 1 where all are 0.

    Grid: (G,). `sums_ptr`: (G, parts, D); `largest_ptr`: (G, parts); `spread_ptr`: (G, D).
    """
    # scalar, [PARTS], [D]
    head, offs_part, offs_d = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, DP)
    units = tl.load(largest_ptr + head * parts + offs_part, mask=offs_part < parts, other=0.0)  # [PARTS]
    some = load_rows(sums_ptr, head * parts, offs_part, offs_part < parts, D, DP)  # [PARTS, D]
    total = tl.sum(some * _square_of_ratio(units, tl.max(units, 0))[:, None], 0)  # [D]
    mean = tl.sum(total, 0) / D
    ptrs = spread_ptr + head * D + offs_d  # [D]
    tl.store(ptrs, tl.where(mean > 0, total / tl.where(mean > 0, mean, 1.0), 1.0), mask=offs_d < D)
