"""Stage 3: for each block, one summary per key cluster of all blocks that it sees, and its gradients.

A program has some key clusters of one query cluster and walks over the blocks: what it has accumulated so far is the
summary that the queries of the next block see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.bucket_summaries import pointers
from muse_attention.backends.triton.device_functions import load_row, load_rows, store_rows
from muse_attention.backends.triton.numbers import accumulator, cdiv, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Summaries


@dataclass(frozen=True)
class Accumulated:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""

    seen: Summaries
    """(H, Q, nb, K, ...)"""
    mass_before: Tensor
    """(H, Q, nb, K): log-mass of the earlier blocks; that of `seen` itself with causal attention"""
    mass_after: Tensor
    """(H, Q, nb, K): log-mass of the later blocks; `mass_before` with causal attention"""


def accumulate(bucket_summaries: Summaries, *, is_causal: bool) -> Accumulated:
    """The summaries of all that each block sees."""
    heads, query_clusters, blocks, key_clusters = bucket_summaries.log_mass.shape
    seen = Summaries(*(torch.empty_like(part) for part in bucket_summaries.parts()))
    before = seen.log_mass if is_causal else torch.empty_like(seen.log_mass)
    after = before if is_causal else torch.empty_like(seen.log_mass)
    constants = _constants(bucket_summaries)
    _accumulate[(cdiv(key_clusters, constants["TILE"]), query_clusters, heads)](
        **pointers(bucket_summaries), **pointers(seen, "seen_"), mass_before_ptr=before, mass_after_ptr=after,
        blocks=blocks, key_clusters=key_clusters, IS_CAUSAL=is_causal, **constants,
    )  # fmt: skip
    return Accumulated(seen, before, after)


def accumulate_backward(
    gradient: Summaries,
    bucket_summaries: Summaries,
    accumulated: Accumulated,
    listed: Tensor,
    key_offset: Tensor,
    *,
    is_causal: bool,
    differentiable_aggregation: bool,
    add_to: Summaries,
) -> None:
    """Add to `add_to` the gradients of each block's summaries, from the `gradient` of the accumulated ones.

    `listed` (H, Q, K) is negative for clusters whose entries of `add_to` are not written yet.

    The gradient of a log-mass is taken with the sums of keys and values fixed, instead of their means: it lacks the
    component of the means' gradients along the means. In that form it is additive over blocks. In `gradient` these are
    sums of keys less the `key_offset`; the result in `add_to` refers to sums of the keys themselves, or to fixed means
    if aggregation is frozen.
    """
    heads, query_clusters, blocks, key_clusters = gradient.log_mass.shape
    constants = _constants(bucket_summaries)
    _accumulate_backward[(cdiv(key_clusters, constants["TILE"]), query_clusters, heads)](
        **pointers(gradient, "grad_"), **pointers(bucket_summaries), seen_mass_ptr=accumulated.seen.log_mass,
        mass_before_ptr=accumulated.mass_before, mass_after_ptr=accumulated.mass_after, listed_ptr=listed,
        key_offset_ptr=key_offset, **pointers(add_to, "add_"), blocks=blocks, key_clusters=key_clusters,
        shared_by=heads // key_offset.shape[0], IS_CAUSAL=is_causal, IS_FROZEN=not differentiable_aggregation,
        **constants,
    )  # fmt: skip


def _constants(summaries: Summaries) -> dict[str, Any]:
    """What is compiled in. A program holds `TILE` key clusters."""
    key_clusters = summaries.log_mass.shape[-1]
    head_dim, value_dim = summaries.key_mean.shape[-1], summaries.value_mean.shape[-1]
    return {
        "D": head_dim,
        "DV": value_dim,
        "TILE": max(1, min(power_of_two(key_clusters), 2048 // max(padded(head_dim), padded(value_dim)))),
        "ACC": accumulator(summaries.log_mass.dtype),
    }


@triton.jit
def _exp_of_difference(part, whole):
    """`exp(part - whole)`, at most 1; 0 where the part is empty."""
    return tl.where(part == float("-inf"), 0.0, tl.exp(tl.minimum(part - whole, 0.0)))


@triton.jit
def _log_of_sum(first, second):
    """`log(exp(first) + exp(second))`."""
    largest = tl.maximum(first, second)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.log(tl.exp(first - shift) + tl.exp(second - shift)) + shift
    return tl.where(largest == float("-inf"), largest, total)


@kernel(stage="summaries", do_not_specialize=["blocks", "key_clusters"])
def _accumulate(
    mass_ptr, key_mean_ptr, value_mean_ptr, seen_mass_ptr, seen_key_mean_ptr, seen_value_mean_ptr, mass_before_ptr,
    mass_after_ptr, blocks, key_clusters, D: tl.constexpr, DV: tl.constexpr, IS_CAUSAL: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For each block, one summary per key cluster of all the blocks it sees.

    Grid: (K / TILE, Q, H). `mass_ptr`, `seen_mass_ptr`, `mass_before_ptr`, `mass_after_ptr`: (H, Q, nb, K);
    `key_mean_ptr`, `seen_key_mean_ptr`: (H, Q, nb, K, D); `value_mean_ptr`, `seen_value_mean_ptr`: (H, Q, nb, K, DV).
    If attention is causal, `mass_before_ptr` is `seen_mass_ptr`.
    """
    query_cluster = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    offs_cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_cluster = offs_cluster < key_clusters  # [TILE]
    cluster_base = query_cluster * blocks * key_clusters

    # 1. Summaries of the blocks before each block. With causal attention that is all it sees.
    before_log = tl.full([TILE], float("-inf"), ACC)
    before_keys = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    before_values = tl.zeros([TILE, padded(DV)], ACC)  # [TILE, DV]
    for block in range(blocks):
        base = cluster_base + block * key_clusters
        tl.store(mass_before_ptr + base + offs_cluster, before_log, mask=mask_cluster)
        store_rows(seen_key_mean_ptr, base, offs_cluster, mask_cluster, before_keys, D)
        store_rows(seen_value_mean_ptr, base, offs_cluster, mask_cluster, before_values, DV)
        log_mass = tl.load(mass_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf"))  # [TILE]
        own_keys = load_rows(key_mean_ptr, base, offs_cluster, mask_cluster, D).to(ACC)  # [TILE, D]
        own_values = load_rows(value_mean_ptr, base, offs_cluster, mask_cluster, DV).to(ACC)  # [TILE, DV]
        together = _log_of_sum(before_log, log_mass)  # [TILE]
        # [TILE], [TILE]
        share, share_before = _exp_of_difference(log_mass, together), _exp_of_difference(before_log, together)
        before_keys = before_keys * share_before[:, None] + own_keys * share[:, None]
        before_values = before_values * share_before[:, None] + own_values * share[:, None]
        before_log = together

    # 2. Backwards: add the blocks after each block.
    if not IS_CAUSAL:
        after_log = tl.full([TILE], float("-inf"), ACC)
        after_keys = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
        after_values = tl.zeros([TILE, padded(DV)], ACC)  # [TILE, DV]
        tl.debug_barrier()
        for step in range(blocks):
            base = cluster_base + (blocks - 1 - step) * key_clusters
            before_log = tl.load(mass_before_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf"))
            together = _log_of_sum(before_log, after_log)
            share_before, share = _exp_of_difference(before_log, together), _exp_of_difference(after_log, together)
            before_keys = load_rows(seen_key_mean_ptr, base, offs_cluster, mask_cluster, D).to(ACC)
            before_values = load_rows(seen_value_mean_ptr, base, offs_cluster, mask_cluster, DV).to(ACC)
            both_keys = before_keys * share_before[:, None] + after_keys * share[:, None]  # [TILE, D]
            both_values = before_values * share_before[:, None] + after_values * share[:, None]  # [TILE, DV]
            tl.store(mass_after_ptr + base + offs_cluster, after_log, mask=mask_cluster)
            tl.store(seen_mass_ptr + base + offs_cluster, together, mask=mask_cluster)
            store_rows(seen_key_mean_ptr, base, offs_cluster, mask_cluster, both_keys, D)
            store_rows(seen_value_mean_ptr, base, offs_cluster, mask_cluster, both_values, DV)
            log_mass = tl.load(mass_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf"))
            together = _log_of_sum(after_log, log_mass)
            share, share_before = _exp_of_difference(log_mass, together), _exp_of_difference(after_log, together)
            own_keys = load_rows(key_mean_ptr, base, offs_cluster, mask_cluster, D).to(ACC)
            own_values = load_rows(value_mean_ptr, base, offs_cluster, mask_cluster, DV).to(ACC)
            after_keys = after_keys * share_before[:, None] + own_keys * share[:, None]
            after_values = after_values * share_before[:, None] + own_values * share[:, None]
            after_log = together


@kernel(stage="summaries", do_not_specialize=["blocks", "key_clusters", "shared_by"])
def _accumulate_backward(
    grad_mass_ptr, grad_key_mean_ptr, grad_value_mean_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, seen_mass_ptr,
    mass_before_ptr, mass_after_ptr, listed_ptr, key_offset_ptr, add_mass_ptr, add_key_mean_ptr, add_value_mean_ptr,
    blocks, key_clusters, shared_by, D: tl.constexpr, DV: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_FROZEN: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what each block's summaries receive from all blocks that see them.

    With `omega = exp(mu_b' - muA_b)`, the share of block `b'` in what block `b` sees, block `b'` receives the sum over
    all such `b` of `omega` times the gradient at `b`. Where block `b` sees blocks on both sides, `omega` is the share
    of `b'` in its side times the share of that side; each factor is at most 1, so nothing overflows.

    Grid: (K / TILE, Q, H). `*mass*_ptr`: (H, Q, nb, K); `*key_mean_ptr`: (H, Q, nb, K, D); `*value_mean_ptr`:
    (H, Q, nb, K, DV); `listed_ptr`: (H, Q, K) int16; `key_offset_ptr`: (G, D).
    """
    query_cluster = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    offs_cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_cluster = offs_cluster < key_clusters  # [TILE]
    offset = load_row(key_offset_ptr, tl.program_id(2) // shared_by, D)  # [D]
    # [TILE]
    is_listed = tl.load(listed_ptr + query_cluster * key_clusters + offs_cluster, mask=mask_cluster, other=-1) >= 0
    sides: tl.constexpr = 1 if IS_CAUSAL else 2
    for side in tl.static_range(sides):
        side_mass_ptr = mass_before_ptr if side == 0 else mass_after_ptr
        running = tl.zeros([TILE], ACC)
        running_keys = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
        running_values = tl.zeros([TILE, padded(DV)], ACC)  # [TILE, DV]
        mass_passed = tl.full([TILE], float("-inf"), ACC)
        for step in range(blocks):
            block = blocks - 1 - step if side == 0 else step
            base = (query_cluster * blocks + block) * key_clusters
            # `running` is the sum over the blocks b passed so far of exp(mass_passed - side_b) times the gradient at b.
            # [TILE]
            share = _exp_of_difference(
                tl.load(mass_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf")), mass_passed
            )
            mask_added = mask_cluster & (is_listed if side == 0 else True)  # [TILE]
            d_keys = load_rows(add_key_mean_ptr, base, offs_cluster, mask_added, D).to(ACC)  # [TILE, D]
            d_values = load_rows(add_value_mean_ptr, base, offs_cluster, mask_added, DV).to(ACC)  # [TILE, DV]
            d_mass = tl.load(add_mass_ptr + base + offs_cluster, mask=mask_added, other=0.0) + running * share  # [TILE]
            d_keys += running_keys * share[:, None]
            d_values += running_values * share[:, None]
            if side == sides - 1:
                if IS_FROZEN:
                    # From fixed sums back to fixed means.
                    own_keys = load_rows(key_mean_ptr, base, offs_cluster, mask_cluster, D)  # [TILE, D]
                    d_mass += tl.sum(d_keys * own_keys.to(ACC), 1)
                    own_values = load_rows(value_mean_ptr, base, offs_cluster, mask_cluster, DV)  # [TILE, DV]
                    d_mass += tl.sum(d_values * own_values.to(ACC), 1)
                else:
                    # (The offset's part of the sums of keys, with the gradient rounded as it will be read.)
                    rounded = d_keys.to(add_key_mean_ptr.dtype.element_ty).to(ACC)  # [TILE, D]
                    d_mass -= tl.sum(rounded * offset[None, :], 1)
            store_rows(add_key_mean_ptr, base, offs_cluster, mask_cluster, d_keys, D)
            store_rows(add_value_mean_ptr, base, offs_cluster, mask_cluster, d_values, DV)
            tl.store(add_mass_ptr + base + offs_cluster, d_mass, mask=mask_cluster)

            side_log = tl.load(side_mass_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf"))  # [TILE]
            # Where nothing is seen, nothing was attended to: there is no gradient, written or not.
            mask_seen = mask_cluster & (side_log > float("-inf"))  # [TILE]
            here_keys = load_rows(grad_key_mean_ptr, base, offs_cluster, mask_seen, D).to(ACC)  # [TILE, D]
            here_values = load_rows(grad_value_mean_ptr, base, offs_cluster, mask_seen, DV).to(ACC)  # [TILE, DV]
            here = tl.load(grad_mass_ptr + base + offs_cluster, mask=mask_seen, other=0.0)  # [TILE]
            if not IS_CAUSAL:
                # [TILE]
                seen_log = tl.load(seen_mass_ptr + base + offs_cluster, mask=mask_cluster, other=float("-inf"))
                side_share = _exp_of_difference(side_log, seen_log)  # [TILE]
                here_keys *= side_share[:, None]
                here_values *= side_share[:, None]
                here *= side_share
            kept = _exp_of_difference(side_log, mass_passed)  # [TILE]
            running = here + running * kept
            running_keys = here_keys + running_keys * kept[:, None]
            running_values = here_values + running_values * kept[:, None]
            mass_passed = side_log
