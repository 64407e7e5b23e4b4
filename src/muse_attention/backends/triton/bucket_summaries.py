"""Stage 2: a summary of each bucket for each query cluster, and gradients of keys and values from the summaries.

Every mean of keys is stored less the `key_offset` of its head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import (
    add_dot,
    dot,
    exp_of_less,
    load_row,
    load_rows,
    store_rows,
    weigh,
)
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import accumulator, cdiv, fitting, gradient_dtype, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.tiles import Tiles, load_places, load_tile
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Summaries

SUMMARISE = {
    128: {"TILE": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3},
    256: {"TILE": 32, "KEYS": 32, "num_warps": 2, "num_stages": 3},
    512: {"TILE": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1},
}
SMALL_BUCKET = 20
"""If buckets have at most this many keys on average, keys are loaded 16 at a time."""
SUMMARISE_BACKWARD = {
    128: {"TILE": 16, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"TILE": 32, "num_warps": 4, "num_stages": 2},
    512: {"TILE": 16, "num_warps": 4, "num_stages": 1},
}
ROWS_OF_TILE = 64
"""Keys in a tile, all of one bucket: one program sums their gradients."""


@dataclass(frozen=True)
class PairGradients:
    """Gradients of the keys and values of each bucket tile, in pieces to be summed."""

    keys: Tensor
    """(G, pieces, rows of a tile, D)"""
    values: Tensor
    """(G, pieces, rows of a tile, Dv)"""
    before: Tensor
    """(G, bucket tiles + 1) int32: the pieces of a tile are those from one entry to the next"""

    @property
    def pieces(self) -> int:
        """Room in each head."""
        return self.keys.shape[1]


def new_gradient(summaries: Summaries) -> Summaries:
    """Uninitialised memory for the gradient of summaries."""
    dtype = gradient_dtype(summaries.key_mean.dtype)
    return Summaries(
        torch.empty_like(summaries.log_mass),
        torch.empty_like(summaries.key_mean, dtype=dtype),
        torch.empty_like(summaries.value_mean, dtype=dtype),
    )


def pointers(summaries: Summaries, prefix: str = "") -> dict[str, Tensor]:
    """Log-masses and means, or their gradients, as arguments of kernels."""
    return {**pointers_of_logits(summaries, prefix), f"{prefix}value_mean_ptr": summaries.value_mean}


def pointers_of_logits(summaries: Summaries, prefix: str = "") -> dict[str, Tensor]:
    """What logits are computed from, as arguments of kernels: all but the means of values."""
    return {f"{prefix}mass_ptr": summaries.log_mass, f"{prefix}key_mean_ptr": summaries.key_mean}


def summarise(
    keys: Tensor, values: Tensor, centroids: Tensor, buckets: Groups, key_offset: Tensor, *, blocks: int
) -> Summaries:
    """(H, Q, nb, K, ...) summaries of (G, N, D) keys and (G, N, Dv) values, both in the order of `buckets`, for
    (H, Q, D) query centroids. The (G, D) `key_offset` is subtracted from the means of keys."""
    heads, query_clusters, head_dim = centroids.shape
    key_heads, length, value_dim = values.shape
    key_clusters = buckets.number // blocks
    shape = (heads, query_clusters, blocks, key_clusters)
    summaries = Summaries(
        keys.new_empty(shape, dtype=compute_dtype(keys.dtype)),
        keys.new_empty(*shape, head_dim),
        keys.new_empty(*shape, value_dim),
    )
    # (Matrix units want 64 rows, even if fewer query clusters fill them.)
    launch = dict(fitting(SUMMARISE, head_dim, value_dim, keys.dtype))
    if length <= SMALL_BUCKET * blocks * key_clusters:
        launch["KEYS"] = 16
    # (The first axis of a grid alone may have more than 65,535 programs.)
    _summarise[(key_clusters * blocks, cdiv(query_clusters, launch["TILE"]), heads)](
        keys_ptr=keys, values_ptr=values, centroids_ptr=centroids, starts_ptr=buckets.starts, key_offset_ptr=key_offset,
        **pointers(summaries), length=length, blocks=blocks, query_clusters=query_clusters, key_clusters=key_clusters,
        shared_by=heads // key_heads, D=head_dim, DV=value_dim, ACC=accumulator(keys.dtype), **launch,
    )  # fmt: skip
    return summaries


def summarise_backward(
    gradient: Summaries | None,
    log_mass: Tensor | None,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    buckets: Groups,
    bucket_tiles: Tiles,
    pair_gradients: PairGradients | None,
    *,
    blocks: int,
    differentiable_aggregation: bool,
    add_to: tuple[Tensor, Tensor],
) -> None:
    """Add the gradients of keys and values to `add_to`, in the order of the inputs.

    They come from the `gradient` of the summaries, as `accumulate_backward` leaves it, and from `pair_gradients`.
    """
    heads, query_clusters, head_dim = centroids.shape
    key_heads, length, value_dim = values.shape
    # (A kernel needs a tensor even for an argument that it does not read.)
    tables = pointers(Summaries(keys, keys, keys) if gradient is None else gradient, "grad_")
    pieces = pair_gradients or PairGradients(keys, keys, buckets.starts)
    _summarise_backward[bucket_tiles.grid](
        **tables, mass_ptr=keys if log_mass is None else log_mass, keys_ptr=keys, values_ptr=values,
        centroids_ptr=centroids, order_ptr=buckets.order, **bucket_tiles.arguments, pair_keys_ptr=pieces.keys,
        pair_values_ptr=pieces.values, pieces_before_ptr=pieces.before, grad_keys_ptr=add_to[0],
        grad_values_ptr=add_to[1], length=length, blocks=blocks, query_clusters=query_clusters,
        key_clusters=buckets.number // blocks, shared_by=heads // key_heads,
        max_pieces=0 if pair_gradients is None else pair_gradients.pieces, D=head_dim, DV=value_dim,
        HAS_SUMMARIES=gradient is not None, HAS_PAIRS=pair_gradients is not None,
        IS_FROZEN=not differentiable_aggregation, KEYS=ROWS_OF_TILE, ACC=accumulator(keys.dtype),
        **_clamped(SUMMARISE_BACKWARD, query_clusters, keys, values),
    )  # fmt: skip


def _clamped(launch: dict[int, dict[str, int]], query_clusters: int, keys: Tensor, values: Tensor) -> dict[str, int]:
    """The launch settings, with no more query clusters at a time than there are."""
    fit = fitting(launch, keys.shape[-1], values.shape[-1], keys.dtype)
    return {**fit, "TILE": min(fit["TILE"], padded(query_clusters))}


@kernel(stage="summaries", do_not_specialize=["length", "blocks", "query_clusters", "key_clusters", "shared_by"])
def _summarise(
    keys_ptr, values_ptr, centroids_ptr, starts_ptr, key_offset_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, length,
    blocks, query_clusters, key_clusters, shared_by, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Summaries of one bucket for a tile of query clusters.

    Grid: (K nb, Q / TILE, H). `keys_ptr`: (G, N, D) and `values_ptr`: (G, N, DV), in the order of the buckets;
    `centroids_ptr`: (H, Q, D); `starts_ptr`: (G, K nb + 1) int32; `key_offset_ptr`: (G, D); `mass_ptr`:
    (H, Q, nb, K); `key_mean_ptr`: (H, Q, nb, K, D); `value_mean_ptr`: (H, Q, nb, K, DV).
    """
    key_cluster, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head = tl.program_id(2).to(tl.int64)
    key_head = head // shared_by
    first_cluster = tl.program_id(1) * TILE
    offs_place, offs_cluster = tl.arange(0, KEYS), tl.arange(0, TILE)  # [KEYS], [TILE]
    mask_cluster = first_cluster + offs_cluster < query_clusters  # [TILE]
    starts_ptr += key_head * (blocks * key_clusters + 1) + key_cluster * blocks
    first_row, end = tl.load(starts_ptr + block), tl.load(starts_ptr + block + 1)
    offset = load_row(key_offset_ptr, key_head, D)  # [D]

    # 1. Sums over its keys, of weights relative to the largest so far.
    # [TILE, D]
    centroid = load_rows(centroids_ptr, head * query_clusters + first_cluster, offs_cluster, mask_cluster, D)
    centroid = centroid.to(keys_ptr.dtype.element_ty)
    largest = tl.full([TILE], float("-inf"), ACC)
    total = tl.zeros([TILE], ACC)
    key_sum = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    value_sum = tl.zeros([TILE, padded(DV)], ACC)  # [TILE, DV]
    rounded_total = tl.zeros([TILE], ACC)
    for begin in range(first_row, end, KEYS):
        offs_row = begin + offs_place  # [KEYS]
        mask_row = offs_row < end  # [KEYS]
        keys = load_rows(keys_ptr, key_head * length, offs_row, mask_row, D)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length, offs_row, mask_row, DV)  # [KEYS, DV]
        logits = dot(centroid, tl.trans(keys), ACC)  # [TILE, KEYS]
        logits = tl.where(mask_row[None, :], logits, float("-inf"))
        largest, weights, kept = weigh(logits, largest)  # [TILE], [TILE, KEYS], [TILE]
        total = total * kept + tl.sum(weights, 1)
        # (Means are divided by the sum of the rounded weights, as the products use them: rounding cancels.)
        weights = weights.to(keys.dtype)
        rounded_total = rounded_total * kept + tl.sum(weights.to(ACC), 1)
        key_sum = add_dot(weights, keys, key_sum * kept[:, None])
        value_sum = add_dot(weights, values, value_sum * kept[:, None])

    # 2. Means. Query clusters are `blocks * key_clusters` entries apart.
    base = ((head * query_clusters + first_cluster) * blocks + block) * key_clusters + key_cluster
    offs_summary = offs_cluster * blocks * key_clusters  # [TILE]
    is_empty = total == 0  # [TILE]
    mass_ptrs = mass_ptr + base + offs_summary  # [TILE]
    tl.store(mass_ptrs, tl.where(is_empty, float("-inf"), largest + tl.log(total)), mask=mask_cluster)
    inverse = 1.0 / tl.where(is_empty, 1.0, rounded_total)  # [TILE]
    key_sum = tl.where(is_empty[:, None], 0.0, key_sum * inverse[:, None] - offset[None, :])
    value_sum *= inverse[:, None]
    store_rows(key_mean_ptr, base, offs_summary, mask_cluster, key_sum, D)
    store_rows(value_mean_ptr, base, offs_summary, mask_cluster, value_sum, DV)


@kernel(
    stage="summaries",
    do_not_specialize=["length", "blocks", "query_clusters", "key_clusters", "shared_by", "max_pieces"],
)
def _summarise_backward(
    grad_mass_ptr, grad_key_mean_ptr, grad_value_mean_ptr, mass_ptr, keys_ptr, values_ptr, centroids_ptr, order_ptr,
    tile_group_ptr, tile_begin_ptr, tile_end_ptr, pair_keys_ptr, pair_values_ptr, pieces_before_ptr, grad_keys_ptr,
    grad_values_ptr, length, blocks, query_clusters, key_clusters, shared_by, max_pieces, D: tl.constexpr,
    DV: tl.constexpr, HAS_SUMMARIES: tl.constexpr, HAS_PAIRS: tl.constexpr, IS_FROZEN: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the keys and values of a tile, from all summaries of its bucket and from pieces of pairs.

    Grid: that of the bucket tiles. `grad_mass_ptr`, `mass_ptr`: (H, Q, nb, K); `grad_key_mean_ptr`: (H, Q, nb, K, D);
    `grad_value_mean_ptr`: (H, Q, nb, K, DV); `keys_ptr`: (G, N, D) and `values_ptr`: (G, N, DV), in the order of the
    buckets; `centroids_ptr`: (H, Q, D); `order_ptr`: (G, N) int32; `pair_keys_ptr`: (G, pieces, KEYS, D);
    `pair_values_ptr`: (G, pieces, KEYS, DV); `pieces_before_ptr`: (G, tiles + 1) int32; `grad_keys_ptr`: (G, N, D) and
    `grad_values_ptr`: (G, N, DV), in the order of the inputs.
    """
    key_head, tile, bucket = load_tile(tile_group_ptr)
    if bucket < 0:
        return
    offs_place, mask_row = load_places(tile_begin_ptr, tile_end_ptr, tile, KEYS)  # [KEYS], [KEYS]
    d_keys = tl.zeros([KEYS, padded(D)], ACC)  # [KEYS, D]
    d_values = tl.zeros([KEYS, padded(DV)], ACC)  # [KEYS, DV]

    # 1. From the summaries, some query clusters at a time.
    if HAS_SUMMARIES:
        keys = load_rows(keys_ptr, key_head * length, offs_place, mask_row, D)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length, offs_place, mask_row, DV)  # [KEYS, DV]
        all_clusters = shared_by * query_clusters
        offs_cluster = tl.arange(0, TILE)
        offs_summary = offs_cluster * blocks * key_clusters  # [TILE]
        for begin in range(0, all_clusters, TILE):
            mask_cluster = begin + offs_cluster < all_clusters  # [TILE]
            first = key_head * all_clusters + begin
            base = first * blocks * key_clusters + bucket % blocks * key_clusters + bucket // blocks
            centroid = load_rows(centroids_ptr, first, offs_cluster, mask_cluster, D).to(keys.dtype)  # [TILE, D]
            log_mass = tl.load(mass_ptr + base + offs_summary, mask=mask_cluster, other=float("inf"))  # [TILE]
            d_key_mean = load_rows(grad_key_mean_ptr, base, offs_summary, mask_cluster, D)  # [TILE, D]
            d_value_mean = load_rows(grad_value_mean_ptr, base, offs_summary, mask_cluster, DV)  # [TILE, DV]
            d_logits = tl.load(grad_mass_ptr + base + offs_summary, mask=mask_cluster, other=0.0)[None, :]  # [1, TILE]
            logits = dot(keys, tl.trans(centroid), ACC)  # [KEYS, TILE]
            weights = exp_of_less(logits, log_mass[None, :])  # [KEYS, TILE]
            if not IS_FROZEN:
                d_logits += dot(keys.to(d_key_mean.dtype), tl.trans(d_key_mean), ACC)
                d_logits += dot(values.to(d_key_mean.dtype), tl.trans(d_value_mean), ACC)
            d_logits = (weights * d_logits).to(d_key_mean.dtype)  # [KEYS, TILE]
            weights = weights.to(d_key_mean.dtype)
            d_keys = add_dot(weights, d_key_mean, d_keys)
            d_keys = add_dot(d_logits, centroid.to(d_key_mean.dtype), d_keys)
            d_values = add_dot(weights, d_value_mean, d_values)

    # 2. From the pairs, piece by piece.
    if HAS_PAIRS:
        before_ptr = pieces_before_ptr + key_head * (tl.num_programs(0) + 1) + tl.program_id(0)
        offs_row = tl.arange(0, KEYS)
        for piece in range(tl.load(before_ptr), tl.load(before_ptr + 1)):
            first = (key_head * max_pieces + piece) * KEYS
            d_keys += load_rows(pair_keys_ptr, first, offs_row, mask_row, D)
            d_values += load_rows(pair_values_ptr, first, offs_row, mask_row, DV)

    # 3. Add to the gradients in memory.
    offs_row = tl.load(order_ptr + key_head * length + offs_place, mask=mask_row, other=0)
    d_keys += load_rows(grad_keys_ptr, key_head * length, offs_row, mask_row, D).to(ACC)
    d_values += load_rows(grad_values_ptr, key_head * length, offs_row, mask_row, DV).to(ACC)
    store_rows(grad_keys_ptr, key_head * length, offs_row, mask_row, d_keys, D)
    store_rows(grad_values_ptr, key_head * length, offs_row, mask_row, d_values, DV)
