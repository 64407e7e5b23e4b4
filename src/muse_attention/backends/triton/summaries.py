"""Stages 2 and 3: summarise every bucket for every query cluster, and accumulate over the blocks a query sees.

Means of keys are stored less the `key_offset` of their head, wherever a structure or an argument holds them.

Buckets are summarised side by side. To accumulate them, a program owns some key clusters as seen from a query cluster,
and walks over the blocks: what it has accumulated so far is the summary that the queries of the next block see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups, Tiles
from muse_attention.backends.triton.numbers import (
    arithmetic,
    cdiv,
    exp_of_less,
    fitting,
    gradient_dtype,
    load_rows,
    padded,
    power_of_two,
    store_rows,
)
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Summaries


@dataclass(frozen=True)
class ScoredSummaries(Summaries):
    """Summaries, and how far the keys behind them are apart. (Without second order nobody looks at that.)"""

    deviation: Tensor
    """(H, Q, nb, K): square root of `E |k - kbar|^2 / D` under the summary's weights"""
    most: Tensor
    """(H, nb, K): `sqrt(2 log n)` of `n` keys"""

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return *self.parts(), self.deviation, self.most

    def tables_of_logits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.log_mass, self.key_mean, self.deviation, self.most


@dataclass(frozen=True)
class Accumulated:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""

    seen: ScoredSummaries
    """(H, Q, nb, K, ...)"""
    mass_before: Tensor
    """(H, Q, nb, K): log-mass of the blocks before; the log-mass of `seen` itself if these are all it sees"""
    mass_after: Tensor
    """(H, Q, nb, K): log-mass of the blocks after; `mass_before` if nothing after is seen"""


def summarise(
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    buckets: Groups,
    blocks: int,
    key_clusters: int,
    key_offset: Tensor,
    squares: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[ScoredSummaries, Accumulated]:
    """Summaries of (G, N, D) keys and (G, N, Dv) values, in the order of `buckets`, from (H, Q, D) query centroids.

    Means of keys are less the (G, D) `key_offset`. With `squares`, (G, N), the `square_distances` of the keys, also how
    far these are apart.
    """
    heads, query_clusters, head_dim = centroids.shape
    key_heads, length, value_dim = values.shape
    shape = (heads, query_clusters, blocks, key_clusters)
    wide = compute_dtype(keys.dtype)
    has_spread = squares is not None

    def new() -> ScoredSummaries:
        log_mass = keys.new_empty(shape, dtype=wide)
        return ScoredSummaries(
            log_mass,
            keys.new_empty(*shape, head_dim),
            keys.new_empty(*shape, value_dim),
            torch.empty_like(log_mass) if has_spread else log_mass,
            log_mass.new_empty(heads, blocks, key_clusters) if has_spread else log_mass,
        )

    of_buckets, seen = new(), new()
    before = seen.log_mass if is_causal else torch.empty_like(seen.log_mass)
    after = before if is_causal else torch.empty_like(seen.log_mass)
    # (All query clusters of a tile that there are: matrix units want 64 rows, even if some are none.)
    launch = dict(fitting(SUMMARISE, head_dim, value_dim, keys.dtype))
    if length <= SMALL_BUCKET * blocks * key_clusters:
        launch["KEYS"] = 16
    constants = {"D": head_dim, "DP": padded(head_dim), "DV": value_dim, "DVP": padded(value_dim)}
    constants |= {"IS_CAUSAL": is_causal, "HAS_SPREAD": has_spread}
    # (The first axis of a grid alone may have more than 65,535 programs.)
    _summarise[(key_clusters * blocks, cdiv(query_clusters, launch["TILE"]), heads)](
        keys, values, centroids, buckets.starts, key_offset, key_offset if squares is None else squares,
        *of_buckets.tables(), seen.most, length, blocks, query_clusters, key_clusters, heads // key_heads, **constants,
        **arithmetic(keys.dtype), **launch,
    )  # fmt: skip
    tile = _clusters_at_once(key_clusters, head_dim, value_dim)
    _accumulate[(cdiv(key_clusters, tile), query_clusters, heads)](
        *of_buckets.tables()[:4], *seen.tables()[:4], before, after, blocks, key_clusters, TILE=tile,
        ACC=arithmetic(wide)["ACC"], **constants,
    )  # fmt: skip
    return of_buckets, Accumulated(seen, before, after)


def _clusters_at_once(key_clusters: int, head_dim: int, value_dim: int) -> int:
    """What a program that walks over the blocks holds."""
    return max(1, min(power_of_two(key_clusters), 2048 // max(padded(head_dim), padded(value_dim))))


def accumulate_backward(
    gradient: Summaries,
    of_buckets: Summaries,
    accumulated: Accumulated,
    listed: Tensor,
    key_offset: Tensor,
    *,
    is_causal: bool,
    differentiable_aggregation: bool,
    add_to: Summaries,
) -> None:
    """Add to `add_to` the gradients of each block's summaries, from the `gradient` of the accumulated ones.

    `listed` (H, Q, K) is not negative for the clusters in which `add_to` has anything to be added to.

    The gradient of a log-mass is taken at fixed sums instead of fixed means: it lacks what the gradients of the means
    have along the means. In that form shares of it simply add up. In `gradient` these sums are of keys less the
    `key_offset`; what is left in `add_to` is for sums of the keys themselves, or, where aggregation is frozen, at fixed
    means again.
    """
    heads, query_clusters, blocks, key_clusters, head_dim = gradient.key_mean.shape
    value_dim = gradient.value_mean.shape[-1]
    tile = _clusters_at_once(key_clusters, head_dim, value_dim)
    _accumulate_backward[(cdiv(key_clusters, tile), query_clusters, heads)](
        *gradient.parts(), *of_buckets.parts(), accumulated.seen.log_mass, accumulated.mass_before,
        accumulated.mass_after, listed, key_offset, *add_to.parts(), blocks, key_clusters,
        heads // key_offset.shape[0], D=head_dim, DP=padded(head_dim), DV=value_dim, DVP=padded(value_dim),
        IS_CAUSAL=is_causal, IS_FROZEN=not differentiable_aggregation, TILE=tile,
        ACC=arithmetic(of_buckets.log_mass.dtype)["ACC"],
    )  # fmt: skip


def summarise_backward(
    gradient: Summaries | None,
    log_mass: Tensor | None,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    buckets: Groups,
    bucket_tiles: Tiles,
    of_pairs: PairGradients | None,
    *,
    blocks: int,
    differentiable_aggregation: bool,
    add_to: tuple[Tensor, Tensor],
) -> None:
    """Add the gradients of keys and values to `add_to`, in the order of the inputs.

    They come from the `gradient` of the summaries, as `accumulate_backward` leaves it, and from what `of_pairs` holds.
    """
    heads, query_clusters, head_dim = centroids.shape
    key_heads, length, value_dim = values.shape
    # (A kernel takes a tensor even where it does not look at it.)
    has_summaries = gradient is not None and log_mass is not None
    tables = (keys,) * 4 if gradient is None or log_mass is None else (*gradient.parts(), log_mass)
    pairs = (keys, keys, buckets.starts) if of_pairs is None else (of_pairs.keys, of_pairs.values, of_pairs.before)
    _summarise_backward[bucket_tiles.grid](
        *tables, keys, values, centroids, buckets.order, *bucket_tiles.parts(), *pairs, *add_to, length, blocks,
        query_clusters, buckets.number // blocks, heads // key_heads, 0 if of_pairs is None else of_pairs.most,
        D=head_dim, DP=padded(head_dim), DV=value_dim, DVP=padded(value_dim), HAS_SUMMARIES=has_summaries,
        HAS_PAIRS=of_pairs is not None, IS_FROZEN=not differentiable_aggregation, KEYS=ROWS_OF_TILE,
        **arithmetic(keys.dtype), **_few(SUMMARISE_BACKWARD, query_clusters, keys, values),
    )  # fmt: skip


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
    def most(self) -> int:
        return self.keys.shape[1]


ROWS_OF_TILE = 64
"""Keys of one bucket whose gradients one program sums."""
SUMMARISE = {
    128: {"TILE": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3},
    256: {"TILE": 32, "KEYS": 32, "num_warps": 2, "num_stages": 3},
    512: {"TILE": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1},
}
SMALL_BUCKET = 20
"""Keys of a bucket on average, up to which keys are taken 16 at a time."""
SUMMARISE_BACKWARD = {
    128: {"TILE": 16, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"TILE": 32, "num_warps": 4, "num_stages": 2},
    512: {"TILE": 16, "num_warps": 4, "num_stages": 1},
}


def _few(launch: dict[int, dict[str, int]], query_clusters: int, keys: Tensor, values: Tensor) -> dict[str, int]:
    """No more query clusters at a time than there are."""
    fit = fitting(launch, keys.shape[-1], values.shape[-1], keys.dtype)
    return {**fit, "TILE": min(fit["TILE"], padded(query_clusters))}


def new_gradient(of_buckets: Summaries) -> Summaries:
    """Room for the gradient of summaries; every entry is to be written."""
    dtype = gradient_dtype(of_buckets.key_mean.dtype)
    return Summaries(
        torch.empty_like(of_buckets.log_mass),
        torch.empty_like(of_buckets.key_mean, dtype=dtype),
        torch.empty_like(of_buckets.value_mean, dtype=dtype),
    )


@triton.jit
def _exp_of_difference(part, whole):
    """`exp(part - whole)`, at most 1; 0 where the part is empty."""
    return tl.where(part == float("-inf"), 0.0, tl.exp(tl.minimum(part - whole, 0.0)))


@triton.jit
def _log_of_sum(first, second):
    largest = tl.maximum(first, second)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.log(tl.exp(first - shift) + tl.exp(second - shift)) + shift
    return tl.where(largest == float("-inf"), largest, total)


@triton.jit
def _most(number, ACC: tl.constexpr):
    """`sqrt(2 log n)`; 0 for none or one."""
    return tl.sqrt(2.0 * tl.log(tl.maximum(number, 1).to(ACC)))


@triton.jit
def _load_point(row, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr):
    """A key. One that is not finite must poison what attends to it, not the spread of its bucket."""
    dim = tl.arange(0, DP)
    point = tl.load(row + dim, mask=dim < D, other=0.0).to(ACC)
    return tl.where(tl.abs(point) < float("inf"), point, 0.0)


@triton.jit
def _finite_square(square):
    """What rounding or overflow made of a sum of squares: 0 if it is negative or no number."""
    return tl.where((square > 0) & (square < float("inf")), square, 0.0)


@triton.jit
def _joint_variance(first, second, first_mean, second_mean, first_share, second_share, D: tl.constexpr):
    """Of two sets of keys as one: the mean inside the sets, and that of their means."""
    between = (first_mean - second_mean) * tl.sqrt(first_share * second_share)[:, None]
    return first * first_share + second * second_share + _finite_square(tl.sum(between * between, 1)) / D


@kernel(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters", "shared_by"])
def _summarise(
    keys, values, centroids, starts, key_offset, squares, mass, key_mean, value_mean, deviation, most, seen_most,
    length, blocks, query_clusters, key_clusters, shared_by, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SPREAD: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One bucket, as seen from some query clusters."""
    key_cluster, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head = tl.program_id(2).to(tl.int64)
    key_head = head // shared_by
    first_cluster = tl.program_id(1) * TILE
    place, number = tl.arange(0, KEYS), tl.arange(0, TILE)
    is_cluster = first_cluster + number < query_clusters
    starts += key_head * (blocks * key_clusters + 1) + key_cluster * blocks
    first_row, end = tl.load(starts + block), tl.load(starts + block + 1)
    dim = tl.arange(0, DP)
    offset = tl.load(key_offset + key_head * D + dim, mask=dim < D, other=0.0)
    if HAS_SPREAD:
        if first_cluster == 0:
            before, whole = first_row - tl.load(starts), tl.load(starts + blocks) - tl.load(starts)
            size = (head * blocks + block) * key_clusters + key_cluster
            tl.store(most + size, _most(end - first_row, ACC))
            tl.store(seen_most + size, _most(before if IS_CAUSAL else whole - (end - first_row), ACC))
        # (What the second moment is about.)
        point = _load_point(keys + (key_head * length + tl.minimum(first_row, length - 1)) * D, D, DP, ACC) - offset

    # 1. Sums over its keys, of weights relative to the largest so far.
    centroid = load_rows(centroids, head * query_clusters + first_cluster, number, is_cluster, D, DP)
    centroid = centroid.to(keys.dtype.element_ty)
    largest = tl.full([TILE], float("-inf"), ACC)
    total = tl.zeros([TILE], ACC)
    key_sum = tl.zeros([TILE, DP], ACC)
    value_sum = tl.zeros([TILE, DVP], ACC)
    moment = tl.zeros([TILE], ACC)
    rounded_total = tl.zeros([TILE], ACC)
    for begin in range(first_row, end, KEYS):
        row = begin + place
        is_row = row < end
        some_keys = load_rows(keys, key_head * length, row, is_row, D, DP)
        some_values = load_rows(values, key_head * length, row, is_row, DV, DVP)
        logits = tl.dot(centroid, tl.trans(some_keys), input_precision=PRECISION, out_dtype=ACC)
        logits = tl.where(is_row[None, :], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = exp_of_less(logits, shift[:, None])
        kept = tl.exp(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        # (Means are divided by the sum of the weights they are made of, or what should cancel does not.)
        weights = weights.to(some_keys.dtype)
        rounded_total = rounded_total * kept + tl.sum(weights.to(ACC), 1)
        if HAS_SPREAD:
            squared = tl.load(squares + key_head * length + row, mask=is_row, other=0.0)
            moment = moment * kept + tl.sum(weights.to(ACC) * squared[None, :], 1)
        key_sum = tl.dot(weights, some_keys, key_sum * kept[:, None], input_precision=PRECISION, out_dtype=ACC)
        value_sum = tl.dot(weights, some_values, value_sum * kept[:, None], input_precision=PRECISION, out_dtype=ACC)
        largest = larger

    # 2. Means and deviation. Those of the next query cluster lie `blocks * key_clusters` further.
    at = ((head * query_clusters + first_cluster) * blocks + block) * key_clusters + key_cluster
    summary = number * blocks * key_clusters
    is_empty = total == 0
    tl.store(mass + at + summary, tl.where(is_empty, float("-inf"), largest + tl.log(total)), mask=is_cluster)
    inverse = 1.0 / tl.where(is_empty, 1.0, rounded_total)
    key_sum = tl.where(is_empty[:, None], 0.0, key_sum * inverse[:, None] - offset[None, :])
    value_sum *= inverse[:, None]
    if HAS_SPREAD:
        off = tl.where(is_empty[:, None], 0.0, key_sum - point[None, :])
        variance = _finite_square(moment * inverse - tl.sum(off * off, 1)) / D
        variance = tl.where(end - first_row > 1, variance, 0.0)
        tl.store(deviation + at + summary, tl.sqrt(variance), mask=is_cluster)
    store_rows(key_mean, at, summary, is_cluster, key_sum, D, DP)
    store_rows(value_mean, at, summary, is_cluster, value_sum, DV, DVP)


@kernel(do_not_specialize=["blocks", "key_clusters"])
def _accumulate(
    mass, key_mean, value_mean, deviation, seen_mass, seen_key_mean, seen_value_mean, seen_deviation, mass_before,
    mass_after, blocks, key_clusters, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_SPREAD: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    query_cluster = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_cluster = cluster < key_clusters
    entry = query_cluster * blocks * key_clusters

    # 1. What comes before each block. With causal attention that is all it sees.
    before_log = tl.full([TILE], float("-inf"), ACC)
    before_keys = tl.zeros([TILE, DP], ACC)
    before_values = tl.zeros([TILE, DVP], ACC)
    before_variance = tl.zeros([TILE], ACC)
    for block in range(blocks):
        at = entry + block * key_clusters
        tl.store(mass_before + at + cluster, before_log, mask=is_cluster)
        store_rows(seen_key_mean, at, cluster, is_cluster, before_keys, D, DP)
        store_rows(seen_value_mean, at, cluster, is_cluster, before_values, DV, DVP)
        log_mass = tl.load(mass + at + cluster, mask=is_cluster, other=float("-inf"))
        own_keys = load_rows(key_mean, at, cluster, is_cluster, D, DP).to(ACC)
        own_values = load_rows(value_mean, at, cluster, is_cluster, DV, DVP).to(ACC)
        together = _log_of_sum(before_log, log_mass)
        share, share_before = _exp_of_difference(log_mass, together), _exp_of_difference(before_log, together)
        if HAS_SPREAD:
            tl.store(seen_deviation + at + cluster, tl.sqrt(before_variance), mask=is_cluster)
            own_deviation = tl.load(deviation + at + cluster, mask=is_cluster, other=0.0)
            before_variance = _joint_variance(
                before_variance, own_deviation * own_deviation, before_keys, own_keys, share_before, share, D
            )
        before_keys = before_keys * share_before[:, None] + own_keys * share[:, None]
        before_values = before_values * share_before[:, None] + own_values * share[:, None]
        before_log = together

    # 2. Now backwards: what comes after each block joins what was seen before it.
    if not IS_CAUSAL:
        after_log = tl.full([TILE], float("-inf"), ACC)
        after_keys = tl.zeros([TILE, DP], ACC)
        after_values = tl.zeros([TILE, DVP], ACC)
        after_variance = tl.zeros([TILE], ACC)
        tl.debug_barrier()
        for step in range(blocks):
            at = entry + (blocks - 1 - step) * key_clusters
            before_log = tl.load(mass_before + at + cluster, mask=is_cluster, other=float("-inf"))
            together = _log_of_sum(before_log, after_log)
            share_before, share = _exp_of_difference(before_log, together), _exp_of_difference(after_log, together)
            before_keys = load_rows(seen_key_mean, at, cluster, is_cluster, D, DP).to(ACC)
            before_values = load_rows(seen_value_mean, at, cluster, is_cluster, DV, DVP).to(ACC)
            if HAS_SPREAD:
                before_deviation = tl.load(seen_deviation + at + cluster, mask=is_cluster, other=0.0)
                both = _joint_variance(
                    before_deviation * before_deviation, after_variance, before_keys, after_keys, share_before, share, D
                )
                tl.store(seen_deviation + at + cluster, tl.sqrt(both), mask=is_cluster)
            both_keys = before_keys * share_before[:, None] + after_keys * share[:, None]
            both_values = before_values * share_before[:, None] + after_values * share[:, None]
            tl.store(mass_after + at + cluster, after_log, mask=is_cluster)
            tl.store(seen_mass + at + cluster, together, mask=is_cluster)
            store_rows(seen_key_mean, at, cluster, is_cluster, both_keys, D, DP)
            store_rows(seen_value_mean, at, cluster, is_cluster, both_values, DV, DVP)
            log_mass = tl.load(mass + at + cluster, mask=is_cluster, other=float("-inf"))
            together = _log_of_sum(after_log, log_mass)
            share, share_before = _exp_of_difference(log_mass, together), _exp_of_difference(after_log, together)
            own_keys = load_rows(key_mean, at, cluster, is_cluster, D, DP).to(ACC)
            own_values = load_rows(value_mean, at, cluster, is_cluster, DV, DVP).to(ACC)
            if HAS_SPREAD:
                own_deviation = tl.load(deviation + at + cluster, mask=is_cluster, other=0.0)
                after_variance = _joint_variance(
                    after_variance, own_deviation * own_deviation, after_keys, own_keys, share_before, share, D
                )
            after_keys = after_keys * share_before[:, None] + own_keys * share[:, None]
            after_values = after_values * share_before[:, None] + own_values * share[:, None]
            after_log = together


@kernel(do_not_specialize=["blocks", "key_clusters", "shared_by"])
def _accumulate_backward(
    grad_mass, grad_key_mean, grad_value_mean, mass, key_mean, value_mean, seen_mass, mass_before, mass_after, listed,
    key_offset, add_mass, add_key_mean, add_value_mean, blocks, key_clusters, shared_by, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_FROZEN: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """With `omega = exp(mu_b' - muA_b)`, the share of block `b'` in what block `b` sees, block `b'` receives the sum
    over all such `b` of `omega` times the gradient at `b`. Where block `b` sees blocks on both sides, `omega` is the
    share of `b'` in its side times the share of that side; each factor is at most 1, so nothing overflows."""
    query_cluster = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_cluster = cluster < key_clusters
    dim = tl.arange(0, DP)
    of_key_head = tl.program_id(2) // shared_by * D
    offset = tl.load(key_offset + of_key_head + dim, mask=dim < D, other=0.0)
    has_own = tl.load(listed + query_cluster * key_clusters + cluster, mask=is_cluster, other=-1) >= 0
    sides: tl.constexpr = 1 if IS_CAUSAL else 2
    for side in tl.static_range(sides):
        side_mass = mass_before if side == 0 else mass_after
        running = tl.zeros([TILE], ACC)
        running_keys = tl.zeros([TILE, DP], ACC)
        running_values = tl.zeros([TILE, DVP], ACC)
        mass_passed = tl.full([TILE], float("-inf"), ACC)
        for step in range(blocks):
            block = blocks - 1 - step if side == 0 else step
            at = (query_cluster * blocks + block) * key_clusters
            # `running` is the sum over the blocks b passed so far of exp(mass_passed - side_b) times the gradient at b.
            share = _exp_of_difference(tl.load(mass + at + cluster, mask=is_cluster, other=float("-inf")), mass_passed)
            adds = is_cluster & (has_own if side == 0 else True)
            d_keys = load_rows(add_key_mean, at, cluster, adds, D, DP).to(ACC)
            d_values = load_rows(add_value_mean, at, cluster, adds, DV, DVP).to(ACC)
            d_mass = tl.load(add_mass + at + cluster, mask=adds, other=0.0) + running * share
            d_keys += running_keys * share[:, None]
            d_values += running_values * share[:, None]
            if side == sides - 1:
                if IS_FROZEN:
                    # From fixed sums back to fixed means.
                    d_mass += tl.sum(d_keys * load_rows(key_mean, at, cluster, is_cluster, D, DP).to(ACC), 1)
                    d_mass += tl.sum(d_values * load_rows(value_mean, at, cluster, is_cluster, DV, DVP).to(ACC), 1)
                else:
                    # (What the sums of keys gain by the offset. As the gradient will be read: rounded.)
                    rounded = d_keys.to(add_key_mean.dtype.element_ty).to(ACC)
                    d_mass -= tl.sum(rounded * offset[None, :], 1)
            store_rows(add_key_mean, at, cluster, is_cluster, d_keys, D, DP)
            store_rows(add_value_mean, at, cluster, is_cluster, d_values, DV, DVP)
            tl.store(add_mass + at + cluster, d_mass, mask=is_cluster)

            side_log = tl.load(side_mass + at + cluster, mask=is_cluster, other=float("-inf"))
            # Where nothing is seen, nothing was attended to: there is no gradient, written or not.
            sees = is_cluster & (side_log > float("-inf"))
            here_keys = load_rows(grad_key_mean, at, cluster, sees, D, DP).to(ACC)
            here_values = load_rows(grad_value_mean, at, cluster, sees, DV, DVP).to(ACC)
            here = tl.load(grad_mass + at + cluster, mask=sees, other=0.0)
            if not IS_CAUSAL:
                seen_log = tl.load(seen_mass + at + cluster, mask=is_cluster, other=float("-inf"))
                of_side = _exp_of_difference(side_log, seen_log)
                here_keys *= of_side[:, None]
                here_values *= of_side[:, None]
                here *= of_side
            kept = _exp_of_difference(side_log, mass_passed)
            running = here + running * kept
            running_keys = here_keys + running_keys * kept[:, None]
            running_values = here_values + running_values * kept[:, None]
            mass_passed = side_log


@kernel(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters", "shared_by", "most_pieces"])
def _summarise_backward(
    grad_mass, grad_key_mean, grad_value_mean, mass, keys, values, centroids, order, tile_group, tile_begin, tile_end,
    pair_keys, pair_values, pieces_before, grad_keys, grad_values, length, blocks, query_clusters, key_clusters,
    shared_by, most_pieces, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HAS_SUMMARIES: tl.constexpr, HAS_PAIRS: tl.constexpr, IS_FROZEN: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    place = tl.load(tile_begin + tile) + tl.arange(0, KEYS)
    is_row = place < tl.load(tile_end + tile)
    d_keys = tl.zeros([KEYS, DP], ACC)
    d_values = tl.zeros([KEYS, DVP], ACC)
    if HAS_SUMMARIES:
        some_keys = load_rows(keys, key_head * length, place, is_row, D, DP)
        some_values = load_rows(values, key_head * length, place, is_row, DV, DVP)
        all_clusters = shared_by * query_clusters
        number = tl.arange(0, TILE)
        summary = number * blocks * key_clusters
        for begin in range(0, all_clusters, TILE):
            is_cluster = begin + number < all_clusters
            first = key_head * all_clusters + begin
            at = first * blocks * key_clusters + bucket % blocks * key_clusters + bucket // blocks
            centroid = load_rows(centroids, first, number, is_cluster, D, DP).to(some_keys.dtype)
            log_mass = tl.load(mass + at + summary, mask=is_cluster, other=float("inf"))
            d_key_mean = load_rows(grad_key_mean, at, summary, is_cluster, D, DP)
            d_value_mean = load_rows(grad_value_mean, at, summary, is_cluster, DV, DVP)
            d_logits = tl.load(grad_mass + at + summary, mask=is_cluster, other=0.0)[None, :]
            logits = tl.dot(some_keys, tl.trans(centroid), input_precision=PRECISION, out_dtype=ACC)
            weights = exp_of_less(logits, log_mass[None, :])
            if not IS_FROZEN:
                d_logits += tl.dot(
                    some_keys.to(d_key_mean.dtype), tl.trans(d_key_mean), input_precision=PRECISION, out_dtype=ACC
                )
                d_logits += tl.dot(
                    some_values.to(d_key_mean.dtype), tl.trans(d_value_mean), input_precision=PRECISION, out_dtype=ACC
                )
            d_logits = (weights * d_logits).to(d_key_mean.dtype)
            weights = weights.to(d_key_mean.dtype)
            d_keys = tl.dot(weights, d_key_mean, d_keys, input_precision=PRECISION, out_dtype=ACC)
            d_keys = tl.dot(d_logits, centroid.to(d_key_mean.dtype), d_keys, input_precision=PRECISION, out_dtype=ACC)
            d_values = tl.dot(weights, d_value_mean, d_values, input_precision=PRECISION, out_dtype=ACC)
    if HAS_PAIRS:
        at = pieces_before + key_head * (tl.num_programs(0) + 1) + tl.program_id(0)
        row = tl.arange(0, KEYS)
        for piece in range(tl.load(at), tl.load(at + 1)):
            first = (key_head * most_pieces + piece) * KEYS
            d_keys += load_rows(pair_keys, first, row, is_row, D, DP)
            d_values += load_rows(pair_values, first, row, is_row, DV, DVP)
    row = tl.load(order + key_head * length + place, mask=is_row, other=0)
    d_keys += load_rows(grad_keys, key_head * length, row, is_row, D, DP).to(ACC)
    d_values += load_rows(grad_values, key_head * length, row, is_row, DV, DVP).to(ACC)
    store_rows(grad_keys, key_head * length, row, is_row, d_keys, D, DP)
    store_rows(grad_values, key_head * length, row, is_row, d_values, DV, DVP)
