"""What each tile of queries retrieves: what is expected of the summaries, and what a search finds."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.pieces import (
    PIECE_SIZE,
    SIZES_OF_KEYS,
    begin_of_list,
    list_pieces,
    load_listed,
    ranges_of_columns,
)
from muse_attention.backends.triton.blockwise.rows import (
    SIZES_OF_COLUMNS,
    Residuals,
    first_column,
    load_tile,
    score_columns,
    visible_columns,
)
from muse_attention.backends.triton.blockwise.summaries import Columns, load_numbers
from muse_attention.backends.triton.device_functions import LOG2_E, dot, in_range, load_rows, weigh
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel
from muse_attention.core.expected_error import DEVIATIONS_OF_SUSPICION, LARGEST_GROWTH, SUSPICION

DECIDE = {
    128: {"COLUMNS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"COLUMNS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    512: {"COLUMNS": 32, "num_warps": 4, "num_stages": 1},
}
SEARCH = {
    128: {"KEYS": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"KEYS": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    512: {"KEYS": 32, "num_warps": 4, "num_stages": 1},
}
DECIDE_BY_REGISTERS = {128: {"COLUMNS": 32}, 256: {"num_warps": 8}}
SEARCH_BY_REGISTERS = {128: {"KEYS": 64}, 256: {"KEYS": 64}}
"""What differs where matrix units read operands from registers."""
_FOUND_AT_ONCE = 512
"""Columns of which a program reads or writes what it found at once."""
_LOWEST = tl.constexpr(-3e38)
"""Below every logit but -inf, that of a column that is not visible."""


def decide(
    first_rows: Tensor, own_lse: Tensor, key_assignment: Tensor, heads: Heads, residuals: Residuals, columns: Columns
) -> None:
    """Write (H, nb, tiles, seen blocks K) uint8 `first_rows`, which hold `NO_ROW`.

    `own_lse` is the own block's, (H, N); `key_assignment` is (G, N).
    """
    order, geometry = heads.order, heads.geometry
    config = geometry.config
    tiles = geometry.blocks * geometry.query_tiles
    assert config.tolerance is not None
    searches = config.search is not None
    weight = 1.0 if config.search is None else config.search
    suspected_rows = torch.empty_like(first_rows) if searches else first_rows
    least = torch.empty_like(residuals.width) if searches else residuals.width
    shared = {"first_rows_ptr": first_rows, "least_ptr": least, **order.query_arguments, "ROWS": geometry.rows}
    of_columns = {name: of for name, of in arguments_of(columns).items() if name != "value_mean_ptr"}
    _decide_on_columns[(tiles, geometry.heads)](
        **shared, **arguments_of(residuals), **of_columns, suspected_rows_ptr=suspected_rows, lse_ptr=own_lse,
        **geometry.sizes(*SIZES_OF_COLUMNS), mean_size=config.mean_bucket, tolerance=config.tolerance,
        log_weight=math.log(weight), log_suspicion=math.log(SUSPICION), CAUTION=config.caution,
        DEVIATIONS=DEVIATIONS_OF_SUSPICION, LARGEST_GROWTH=LARGEST_GROWTH, IS_CAUSAL=geometry.is_causal,
        SEARCHES=searches, SECOND_ORDER=config.uses_second_order, D=heads.compiled["D"], ACC=heads.compiled["ACC"],
        **heads.fit(DECIDE, DECIDE_BY_REGISTERS),
    )  # fmt: skip
    if not searches:
        return
    for begin, end in ranges_of_columns(geometry):
        found = order.queries.new_empty(geometry.heads, tiles, end - begin)
        listed = list_pieces(suspected_rows, begin, end, order, geometry)
        _search_keys[(tiles, geometry.heads)](
            **shared, queries_ptr=heads.queries, keys_ptr=heads.keys, key_order_ptr=order.keys,
            key_assignment_ptr=key_assignment, found_ptr=found, begin=begin, end=end, **listed,
            **geometry.sizes(*SIZES_OF_KEYS, "key_clusters"), SCALE=heads.scale, IS_CAUSAL=geometry.is_causal,
            COLUMNS=_FOUND_AT_ONCE, D=heads.compiled["D"], ACC=heads.compiled["ACC"],
            **heads.fit(SEARCH, SEARCH_BY_REGISTERS),
        )  # fmt: skip


@triton.jit
def _expected_error(log_weight, sigma, CAUTION: tl.constexpr, LARGEST_GROWTH: tl.constexpr):
    """The gain of a weight per deviation, if its logit were `CAUTION` deviations above its estimate."""
    growth = tl.exp2(tl.minimum(CAUTION * sigma, LARGEST_GROWTH) * LOG2_E) - 1.0
    return tl.exp2(log_weight * LOG2_E) * growth / CAUTION


@triton.jit
def _first_row(is_wanted, ROWS: tl.constexpr):
    """[COLUMNS]: the first row of [ROWS, COLUMNS] that wants each column, or 255."""
    first, _ = _first_rows(tl.where(is_wanted, 1.0, 0.0), ROWS)
    return first


@triton.jit
def _first_rows(flags, ROWS: tl.constexpr):
    """[COLUMNS] twice: the first row of [ROWS, COLUMNS] flags that has 1, and that has 16, in each column, or 255.

    Matrix units pack four rows into one number, so that the minimum is over a quarter of the rows, mostly within a
    thread. It takes half as long as a minimum over all rows.
    """
    GROUPS: tl.constexpr = max(16, ROWS // 4)
    offs_row, offs_group = tl.arange(0, ROWS), tl.arange(0, GROUPS)  # [ROWS], [GROUPS]
    bit = tl.where(offs_row[:, None] // 4 == offs_group[None, :], 1 << (offs_row[:, None] % 4), 0)  # [ROWS, GROUPS]
    # [COLUMNS, GROUPS]
    bits = tl.dot(tl.trans(flags.to(tl.float16)), bit.to(tl.float16)).to(tl.int32)
    return _first_of_groups(bits & 15), _first_of_groups(bits >> 4)


@triton.jit
def _first_of_groups(bits):
    """[COLUMNS]: the first bit that is set in a row of [COLUMNS, GROUPS] groups of four, or 255."""
    first = tl.where(bits % 2 > 0, 0, tl.where(bits % 4 > 0, 1, tl.where(bits % 8 > 0, 2, 3)))  # [COLUMNS, GROUPS]
    offs_group = tl.arange(0, bits.shape[1])  # [GROUPS]
    return tl.min(tl.where(bits > 0, offs_group[None, :] * 4 + first, 255), 1)


@kernel(
    stage="selection",
    do_not_specialize=[*SIZES_OF_COLUMNS, "mean_size", "tolerance", "log_weight", "log_suspicion"],
)
def _decide_on_columns(
    residuals_ptr, shift_ptr, width_ptr, numbers_ptr, key_mean_ptr, query_order_ptr, tile_begin_ptr, tile_info_ptr,
    first_rows_ptr, suspected_rows_ptr, least_ptr, lse_ptr, length, block_size, blocks, seen_blocks, query_clusters,
    key_clusters, summarised, query_tiles, mean_size, tolerance, log_weight, log_suspicion, CAUTION: tl.constexpr,
    DEVIATIONS: tl.constexpr, LARGEST_GROWTH: tl.constexpr, IS_CAUSAL: tl.constexpr, SEARCHES: tl.constexpr,
    SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Decide from the summaries what a tile's queries retrieve, and what they search.

    Grid: (nb tiles, H). Residuals, columns, orders and tiles as in the classes of these names; `first_rows_ptr`,
    `suspected_rows_ptr`: (H, nb tiles, seen blocks K) uint8, the latter for what is searched; `least_ptr`: (H, nb B),
    the logit that a search looks for, in the order of places; `lse_ptr`: (H, N), of the own block.
    """
    head = tl.program_id(1).to(tl.int64)
    # (Tiles that see the most come first.)
    number_of_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = head * tl.num_programs(0) + number_of_tile
    own_block = number_of_tile // query_tiles
    columns = (own_block if IS_CAUSAL else blocks) * key_clusters
    begin, rows, cluster = load_tile(tile_begin_ptr, tile_info_ptr, tile)
    if (rows == 0) | (columns == 0):
        return
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    place = head * blocks * block_size + begin
    position = tl.load(query_order_ptr + place + offs_row, mask=mask_row, other=0)  # [ROWS]
    residual = load_rows(residuals_ptr, place, offs_row, mask_row, D)  # [ROWS, D]
    shift = tl.load(shift_ptr + place + offs_row, mask=mask_row, other=0.0)  # [ROWS]
    width = tl.load(width_ptr + place + offs_row, mask=mask_row, other=0.0)  # [ROWS]
    cluster_base = first_column(head, own_block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL)
    first_rows_ptr += tile * seen_blocks * key_clusters
    suspected_rows_ptr += tile * seen_blocks * key_clusters

    # 1. The lse with all summaries, the reference for the weight of each. What the key offset adds is left out.
    top = tl.load(lse_ptr + head * length + position, mask=mask_row, other=0.0) - shift  # [ROWS]
    mass = tl.full([ROWS], 1.0, ACC)
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        means = load_rows(key_mean_ptr, cluster_base, offs_column, mask_column, D)  # [COLUMNS, D]
        masses, deviations, limits, _ = load_numbers(numbers_ptr, cluster_base, offs_column, mask_column)
        logits = score_columns(residual, width, means, masses, deviations, limits, SECOND_ORDER, ACC)
        top, weights, kept = weigh(logits, top, MAY_BE_EMPTY=False)  # [ROWS], [ROWS, COLUMNS], [ROWS]
        mass = mass * kept + tl.sum(weights, 1)
    reference_lse = top + tl.log(mass)  # [ROWS]
    if SEARCHES:
        tl.store(least_ptr + place + offs_row, reference_lse + shift + log_weight, mask=mask_row)
        suspicion = tl.where(mask_row, reference_lse + (log_weight + log_suspicion), float("inf"))  # [ROWS]

    # 2. The first row that wants each column. Without caution, `exp(logit - lse) * sigma` reaches the tolerance where
    # its logarithm does.
    threshold = reference_lse + tl.log(tolerance) - tl.log(width)  # [ROWS]
    threshold = tl.where((tolerance > 0) & ~(threshold < _LOWEST), threshold, _LOWEST)
    threshold = tl.where(mask_row, threshold, float("inf"))
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        means = load_rows(key_mean_ptr, cluster_base, offs_column, mask_column, D)  # [COLUMNS, D]
        masses, deviations, limits, log_errors = load_numbers(numbers_ptr, cluster_base, offs_column, mask_column)
        logits = score_columns(residual, width, means, masses, deviations, limits, SECOND_ORDER, ACC)
        if (CAUTION > 0) | SEARCHES:
            # (`n` keys are `exp(limit^2 / 2)`.)
            error_factors = tl.sqrt(mean_size) * tl.exp2(limits * limits * (-0.25 * LOG2_E))  # [COLUMNS]
            error_deviations = tl.exp2(log_errors * LOG2_E) / error_factors  # [COLUMNS]
            sigma = width[:, None] * error_deviations[None, :]  # [ROWS, COLUMNS]
        if CAUTION > 0:
            error = _expected_error(logits - reference_lse[:, None], sigma, CAUTION, LARGEST_GROWTH)
            is_wanted = error * error_factors[None, :] >= tolerance  # [ROWS, COLUMNS]
            is_wanted &= (logits > float("-inf")) & mask_row[:, None]
        else:
            is_wanted = logits + log_errors[None, :] >= threshold[:, None]  # [ROWS, COLUMNS]
        if SEARCHES:
            is_suspected = logits + tl.minimum(DEVIATIONS * sigma, LARGEST_GROWTH) >= suspicion[:, None]
            flags = tl.where(is_wanted, 1.0, 0.0) + tl.where(is_suspected, 16.0, 0.0)  # [ROWS, COLUMNS]
            first_row, suspected_row = _first_rows(flags, ROWS)  # [COLUMNS] each
            suspected_row = tl.where(suspected_row < first_row, suspected_row, 255)
            tl.store(suspected_rows_ptr + offs_column, suspected_row.to(tl.uint8), mask=offs_column < columns)
        else:
            first_row = _first_row(is_wanted, ROWS)  # [COLUMNS]
        tl.store(first_rows_ptr + offs_column, first_row.to(tl.uint8), mask=offs_column < columns)


@kernel(stage="selection", do_not_specialize=[*SIZES_OF_KEYS, "key_clusters", "begin", "end", "room"])
def _search_keys(
    queries_ptr, keys_ptr, key_assignment_ptr, query_order_ptr, tile_begin_ptr, tile_info_ptr, key_order_ptr, lists_ptr,
    listed_ptr, least_ptr, found_ptr, first_rows_ptr, begin, end, length, block_size, blocks, seen_blocks, query_tiles,
    key_room, shared_by, key_clusters, room, SCALE: tl.constexpr, GROWS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Find the first row of a tile for which a listed key of the columns `begin .. end - 1` has the least logit of that
    row or more, and retrieve the key's bucket from that row on.

    Grid: (nb tiles, H). `queries_ptr`: (H, N, D); `keys_ptr`: (G, N, D); `key_assignment_ptr`: (G, N) int32;
    `least_ptr`: (H, nb B); `found_ptr`: (H, nb tiles, end - begin) int32, scratch; `first_rows_ptr`:
    (H, nb tiles, seen blocks K) uint8; lists as `list_pieces` returns them.
    """
    head = tl.program_id(1).to(tl.int64)
    number_of_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = head * tl.num_programs(0) + number_of_tile
    pieces = tl.load(listed_ptr + tile)
    if pieces == 0:
        return
    first_place, rows, _ = load_tile(tile_begin_ptr, tile_info_ptr, tile)
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    place = head * blocks * block_size + first_place
    position = tl.load(query_order_ptr + place + offs_row, mask=mask_row, other=0)  # [ROWS]
    query = load_rows(queries_ptr, head * length, position, mask_row, D)  # [ROWS, D]
    # (Of logits that are still to be scaled.)
    least = tl.load(least_ptr + place + offs_row, mask=mask_row, other=float("inf")) / SCALE  # [ROWS]
    found_ptr += tile * (end - begin) - begin
    first_rows_ptr += tile * seen_blocks * key_clusters
    if IS_CAUSAL:
        end = tl.minimum(end, number_of_tile // query_tiles * key_clusters)
    for first in range(begin, end, COLUMNS):
        offs_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        tl.store(found_ptr + offs_column, tl.full([COLUMNS], 255, tl.int32), mask=offs_column < end)
    tl.debug_barrier()  # (What one thread writes, others read.)

    # 1. The first row of each piece. A listed piece that is found is written back as a negative number.
    PIECES: tl.constexpr = KEYS // PIECE_SIZE
    key_head = head // shared_by
    key_order_ptr += key_head * seen_blocks * key_room
    list_ptr = lists_ptr + begin_of_list(head, number_of_tile, blocks, query_tiles, room, GROWS)
    # [KEYS] each. (The next keys' positions are loaded early.)
    next_position, next_row = load_listed(list_ptr, key_order_ptr, 0, pieces, KEYS)
    for first in range(0, pieces, PIECES):
        key_position, searched_row = next_position, next_row
        key = load_rows(keys_ptr, key_head * length, key_position, key_position >= 0, D)  # [KEYS, D]
        next_position, next_row = load_listed(list_ptr, key_order_ptr, first + PIECES, pieces, KEYS)
        logits = dot(query, tl.trans(key), ACC)  # [ROWS, KEYS]
        # (Most keys are not what any row looks for, and one number for each row tells.)
        if tl.max(tl.where(tl.max(logits, 1) >= least, 1, 0), 0) > 0:
            of_keys = tl.where((key_position >= 0)[None, :], logits, float("-inf"))  # [ROWS, KEYS]
            largest = tl.max(tl.reshape(of_keys, (ROWS, PIECES, PIECE_SIZE)), 2)  # [ROWS, PIECES]
            row = tl.min(tl.reshape(searched_row, (PIECES, PIECE_SIZE)), 1)  # [PIECES]
            is_found = (largest >= least[:, None]) & (offs_row[:, None] >= row[None, :])  # [ROWS, PIECES]
            found_row = tl.min(tl.where(is_found, offs_row[:, None], 255), 0)  # [PIECES]
            offs_piece = first + tl.arange(0, PIECES)  # [PIECES]
            piece = tl.load(list_ptr + offs_piece, mask=offs_piece < pieces, other=0) >> 8  # [PIECES]
            tl.store(list_ptr + offs_piece, -1 - (piece * 256 + found_row), mask=found_row < 255)
    tl.debug_barrier()

    # 2. The first row of each column.
    for first in range(0, pieces, COLUMNS):
        offs_listed = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        entry = -1 - tl.load(list_ptr + offs_listed, mask=offs_listed < pieces, other=0)  # [COLUMNS]
        is_found = entry >= 0  # [COLUMNS]
        first_position = tl.load(key_order_ptr + (entry >> 8) * PIECE_SIZE, mask=is_found, other=0)  # [COLUMNS]
        cluster = tl.load(key_assignment_ptr + key_head * length + first_position, mask=is_found, other=0)  # [COLUMNS]
        column = first_position // block_size * key_clusters + in_range(cluster, key_clusters)  # [COLUMNS]
        tl.atomic_min(found_ptr + column, entry & 255, mask=is_found)
    tl.debug_barrier()

    # 3. Unless an earlier row wants it. (Atomics bypass the L1 cache.)
    for first in range(begin, end, COLUMNS):
        offs_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        mask_column = offs_column < end  # [COLUMNS]
        found_row = tl.load(found_ptr + offs_column, mask=mask_column, other=255, cache_modifier=".cg")  # [COLUMNS]
        first_row = tl.load(first_rows_ptr + offs_column, mask=mask_column, other=0).to(tl.int32)  # [COLUMNS]
        tl.store(first_rows_ptr + offs_column, found_row.to(tl.uint8), mask=found_row < first_row)
