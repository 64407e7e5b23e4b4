"""How far the keys of a head are from their centroids, dimension by dimension: the metric of second-order summaries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import arithmetic, cdiv, load_rows, padded, power_of_two
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
        keys, centroids, assignment, sums, largest, length, centroids.shape[1], TILE=_TILE, **constants
    )
    _scale_to_mean[(heads,)](sums, largest, spread, parts, PARTS=power_of_two(parts), num_warps=8, **constants)
    return spread


@triton.jit
def _square_of_ratio(part, whole):
    ratio = part / tl.where(whole > 0, whole, 1.0)
    return ratio * ratio


@kernel(do_not_specialize=["length", "clusters"])
def _sum_squares(
    keys, centroids, assignment, sums, largest, length, clusters, TILE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of a part of the sequence, in units of the largest residual there: squares of large ones would overflow."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros([DP], ACC)
    unit = tl.max(tl.zeros([TILE], ACC), 0)
    rows = tl.cdiv(tl.cdiv(length, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, length), TILE):
        row = begin + tl.arange(0, TILE)
        is_row = row < length
        cluster = tl.load(assignment + head * length + row, mask=is_row, other=0)
        key = load_rows(keys, head * length, row, is_row, D, DP).to(ACC)
        key = tl.where(tl.abs(key) < float("inf"), key, 0.0)
        residual = key - load_rows(centroids, head * clusters, cluster, is_row, D, DP).to(ACC)
        larger = tl.maximum(unit, tl.max(tl.max(tl.abs(residual), 1), 0))
        scaled = residual / tl.where(larger > 0, larger, 1.0)
        total = total * _square_of_ratio(unit, larger) + tl.sum(scaled * scaled, 0)
        unit = larger
    dim = tl.arange(0, DP)
    at = head * tl.num_programs(0) + part
    tl.store(sums + at * D + dim, total, mask=dim < D)
    tl.store(largest + at, unit)


@kernel(do_not_specialize=["parts"])
def _scale_to_mean(
    sums, largest, spread, parts, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr
):
    head, part, dim = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, DP)
    units = tl.load(largest + head * parts + part, mask=part < parts, other=0.0)
    some = load_rows(sums, head * parts, part, part < parts, D, DP)
    total = tl.sum(some * _square_of_ratio(units, tl.max(units, 0))[:, None], 0)
    mean = tl.sum(total, 0) / D
    tl.store(spread + head * D + dim, tl.where(mean > 0, total / tl.where(mean > 0, mean, 1.0), 1.0), mask=dim < D)
