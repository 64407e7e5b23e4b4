"""Summaries of each bucket for the query centroids that may see it: log-mass, means of keys and values, error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import first_summary
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.device_functions import (
    add_dot,
    dot,
    finite_square,
    load_row,
    load_rows,
    log2_floor,
    store_rows,
    weigh,
)
from muse_attention.backends.triton.numbers import cdiv, gradient_dtype, padded
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel
from muse_attention.core.expected_error import LEAST_PLAIN_SPREAD
from muse_attention.core.precision import compute_dtype

SUMMARISE = {
    128: {"ROWS": 16, "KEYS": 32, "num_warps": 1, "num_stages": 1},
    256: {"ROWS": 16, "KEYS": 16, "num_warps": 1, "num_stages": 1},
    512: {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1},
}


_SIZES = ("length", "seen_blocks", "key_clusters", "generations", "summarised", "key_room", "shared_by")


@dataclass(frozen=True)
class Columns:
    """Summaries of all blocks that each generation may see, by query cluster. An empty bucket has log-mass -inf."""

    numbers: Tensor
    """(H, Q, T, K, 4): the log-mass; the *deviation*, the square root of the spread of the keys under the summary's
    weights; the *deviation limit*, beyond which mass no longer grows with the square, `sqrt(2 log n)` for `n` keys; and
    the *log error*, that of the error deviation (at least a share of the plain spread) divided by `sqrt(n / mean n)`"""
    key_mean: Tensor
    """(H, Q, T, K, D), without the key offset"""
    value_mean: Tensor
    """(H, Q, T, K, Dv)"""


@dataclass(frozen=True)
class ColumnGradients:
    """The gradient of a log-mass is taken with sums instead of means fixed, unless the weights are constants."""

    log_mass: Tensor
    key_mean: Tensor
    value_mean: Tensor

    @classmethod
    def new(cls, columns: Columns) -> ColumnGradients:
        dtype = gradient_dtype(columns.key_mean.dtype)
        return cls(
            columns.numbers.new_empty(columns.numbers.shape[:-1]),
            torch.empty_like(columns.key_mean, dtype=dtype),
            torch.empty_like(columns.value_mean, dtype=dtype),
        )


def summarise(heads: Heads, centroids: Tensor) -> Columns:
    """Summaries for (H, S, Q, D) centroids."""
    keys, geometry = heads.keys, heads.geometry
    config, generations = geometry.config, geometry.generations
    clusters = centroids.shape[2]
    shape = (geometry.heads, clusters, generations.summarised_blocks, config.key_clusters)
    columns = Columns(
        keys.new_empty(*shape, 4, dtype=compute_dtype(keys.dtype)),
        keys.new_empty(*shape, keys.shape[-1]),
        keys.new_empty(*shape, heads.values.shape[-1]),
    )
    launch = heads.fit(SUMMARISE)
    chunks = cdiv(generations.number * clusters, launch["ROWS"])
    _summarise_bucket[(geometry.columns, chunks, geometry.heads)](
        keys_ptr=keys, values_ptr=heads.values, centroids_ptr=centroids, key_offset_ptr=heads.key_offset,
        **heads.order.bucket_arguments, **arguments_of(columns), **geometry.sizes(*_SIZES), query_clusters=clusters,
        mean_size=config.mean_bucket, LEAST_PLAIN=LEAST_PLAIN_SPREAD, IS_CAUSAL=geometry.is_causal, **heads.compiled,
        **launch,
    )  # fmt: skip
    return columns


@triton.jit
def load_numbers(numbers_ptr, first, offs_column, mask_column):
    """[COLUMNS] each: log-masses, deviations, deviation limits and log errors of columns `first + offs_column`, as in
    `Columns`; masses and log errors are -inf where masked. Loaded once, as by `load_once`."""
    COLUMNS: tl.constexpr = offs_column.shape[0]
    offs = tl.arange(0, 4)[None, :]  # [1, 4]
    ptrs = numbers_ptr + first * 4 + offs_column[:, None] * 4 + offs  # [COLUMNS, 4]
    other = tl.where((offs == 0) | (offs == 3), float("-inf"), 0.0).to(numbers_ptr.dtype.element_ty)  # [1, 4]
    other = tl.broadcast_to(other, (COLUMNS, 4))
    numbers = tl.reshape(tl.load(ptrs, mask=mask_column[:, None], other=other), (COLUMNS, 2, 2))
    even, odd = tl.split(numbers)  # [COLUMNS, 2] each
    masses, limits = tl.split(even)
    deviations, log_error = tl.split(odd)
    return masses, deviations, limits, log_error


@kernel(stage="summaries", do_not_specialize=[*_SIZES, "query_clusters", "mean_size"])
def _summarise_bucket(
    keys_ptr, values_ptr, centroids_ptr, key_offset_ptr, key_order_ptr, key_starts_ptr, key_sizes_ptr, numbers_ptr,
    key_mean_ptr, value_mean_ptr, length, seen_blocks, query_clusters, key_clusters, generations, summarised, key_room,
    shared_by, mean_size, LEAST_PLAIN: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Summaries of one bucket for some of the query centroids that may see it.

    Grid: (seen blocks K, S Q / ROWS, H). `keys_ptr`: (G, N, D); `values_ptr`: (G, N, DV); `centroids_ptr`:
    (H, S, Q, D); `key_offset_ptr`: (G, D); `key_order_ptr`: (G, seen blocks, room) int32; `key_starts_ptr`,
    `key_sizes_ptr`: (G, seen blocks, K) int32; the others as in `Columns`.
    """
    bucket, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    block, key_cluster = bucket // key_clusters, bucket % key_clusters
    key_head = head // shared_by
    # The first generation that sees a block `b` has `2^(s+1) - 1 > b`.
    first_generation = log2_floor(block + 1) if IS_CAUSAL else 0
    first_row = first_generation * query_clusters + tl.program_id(1) * ROWS
    all_rows = generations * query_clusters
    if first_row >= all_rows:
        return
    bucket_index = key_head * seen_blocks * key_clusters + bucket
    size = tl.load(key_sizes_ptr + bucket_index)
    key_order_ptr += key_head * seen_blocks * key_room + tl.load(key_starts_ptr + bucket_index)
    offs_key, offs_row = tl.arange(0, KEYS), tl.arange(0, ROWS)  # [KEYS], [ROWS]
    mask_row = first_row + offs_row < all_rows  # [ROWS]
    offset = load_row(key_offset_ptr, key_head, D).to(ACC)  # [D]
    # Squares are taken about a key of the bucket, so that little cancels. One that is not finite must poison what
    # attends to it, not the spread of its bucket.
    member = tl.load(key_order_ptr, mask=size > 0, other=0)
    point = load_row(keys_ptr, key_head * length + member, D).to(ACC)  # [D]
    point = tl.where(tl.abs(point) < float("inf"), point, 0.0)

    # 1. Sums over its keys, of weights relative to the largest so far.
    # [ROWS, D]
    centroid = load_rows(centroids_ptr, head * all_rows + first_row, offs_row, mask_row, D)
    centroid = centroid.to(keys_ptr.dtype.element_ty)
    largest = tl.full([ROWS], float("-inf"), ACC)
    total, rounded_total, moment = tl.zeros([ROWS], ACC), tl.zeros([ROWS], ACC), tl.zeros([ROWS], ACC)
    key_sum = tl.zeros([ROWS, padded(D)], ACC)  # [ROWS, D]
    value_sum = tl.zeros([ROWS, padded(DV)], ACC)  # [ROWS, DV]
    plain_sum = tl.zeros([padded(D)], ACC)  # [D]
    plain_moment = 0.0
    for begin in range(0, size, KEYS):
        mask_key = begin + offs_key < size  # [KEYS]
        key_position = tl.load(key_order_ptr + begin + offs_key, mask=mask_key, other=0)  # [KEYS]
        keys = load_rows(keys_ptr, key_head * length, key_position, mask_key, D)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length, key_position, mask_key, DV)  # [KEYS, DV]
        from_point = tl.where(mask_key[:, None], keys.to(ACC) - point[None, :], 0.0)  # [KEYS, D]
        squared = tl.sum(from_point * from_point, 1)  # [KEYS]
        plain_sum += tl.sum(from_point, 0)
        plain_moment += tl.sum(squared, 0)
        logits = dot(centroid, tl.trans(keys), ACC)  # [ROWS, KEYS]
        logits = tl.where(mask_key[None, :], logits, float("-inf"))
        largest, weights, kept = weigh(logits, largest)  # [ROWS], [ROWS, KEYS], [ROWS]
        total = total * kept + tl.sum(weights, 1)
        # (Means are divided by the sum of the rounded weights, as the products use them: rounding cancels.)
        weights = weights.to(keys.dtype)
        rounded_total = rounded_total * kept + tl.sum(weights.to(ACC), 1)
        moment = moment * kept + tl.sum(weights.to(ACC) * squared[None, :], 1)
        key_sum = add_dot(weights, keys, key_sum * kept[:, None])
        value_sum = add_dot(weights, values, value_sum * kept[:, None])

    # 2. Means and spreads.
    is_empty = total == 0  # [ROWS]
    inverse = 1.0 / tl.where(is_empty, 1.0, rounded_total)  # [ROWS]
    key_sum = tl.where(is_empty[:, None], 0.0, key_sum * inverse[:, None])
    mean_from_point = tl.where(is_empty[:, None], 0.0, key_sum - point[None, :])  # [ROWS, D]
    # (Columns beyond D are 0 in all of these.)
    spread = finite_square(moment * inverse - tl.sum(mean_from_point * mean_from_point, 1)) / D  # [ROWS]
    plain_sum /= tl.maximum(size, 1)
    plain = finite_square(plain_moment / tl.maximum(size, 1) - tl.sum(plain_sum * plain_sum, 0)) / D
    spread = tl.where(size > 1, spread, 0.0)
    plain = tl.where(size > 1, plain, 0.0)
    number = tl.maximum(size, 1).to(ACC)

    # 3. Rows are (generation, query cluster).
    generation = (first_row + offs_row) // query_clusters  # [ROWS]
    slot = block + first_summary(generation) if IS_CAUSAL else block + generation * 0  # [ROWS]
    cluster = (first_row + offs_row) % query_clusters  # [ROWS]
    offs = (cluster * summarised + slot) * key_clusters + key_cluster  # [ROWS]
    head_base = head * query_clusters * summarised * key_clusters
    mass = tl.where(is_empty, float("-inf"), largest + tl.log(total))  # [ROWS]
    error_deviation = tl.sqrt(tl.maximum(spread, LEAST_PLAIN * plain))  # [ROWS]
    numbers_ptr += (head_base + offs) * 4  # [ROWS]
    tl.store(numbers_ptr, mass, mask=mask_row)
    tl.store(numbers_ptr + 1, tl.sqrt(spread), mask=mask_row)
    tl.store(numbers_ptr + 2, tl.sqrt(2.0 * tl.log(number)) + tl.zeros([ROWS], ACC), mask=mask_row)
    # (Finite: a tolerance of 0 is reached without any error.)
    log_error = tl.maximum(tl.log(error_deviation * tl.sqrt(mean_size / number)), -1e30)  # [ROWS]
    tl.store(numbers_ptr + 3, log_error, mask=mask_row)
    key_mean = tl.where(is_empty[:, None], 0.0, key_sum - offset[None, :])  # [ROWS, padded(D)]
    store_rows(key_mean_ptr, head_base, offs, mask_row, key_mean, D)
    store_rows(value_mean_ptr, head_base, offs, mask_row, value_sum * inverse[:, None], DV)
