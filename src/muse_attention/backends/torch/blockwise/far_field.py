"""Everything beyond the own block with a tolerance: a key head at a time, and its queries block after block.

Nothing large is kept for backward: clusters and selection are kept, summaries are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise import retrieval
from muse_attention.backends.torch.blockwise.buckets import Buckets
from muse_attention.backends.torch.blockwise.columns import Columns, kept, products, weigh
from muse_attention.backends.torch.blockwise.query_slots import Slots, most_slots, slot_rows
from muse_attention.backends.torch.blockwise.slopes import Slopes, find_slopes
from muse_attention.backends.torch.blockwise.summaries import Spread, Table, summarise, summarise_backward
from muse_attention.backends.torch.grouping import take_rows, transposed, with_padding
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.expected_error import LEAST_PLAIN_SPREAD
from muse_attention.core.exponential import exp_
from muse_attention.core.generations import Generations
from muse_attention.core.merging import merge
from muse_attention.core.precision import compute_dtype
from muse_attention.core.query_tiles import NO_ROW
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Partial, Selection

SCORED_AT_ONCE = 1 << 20
"""About as many logits of summaries in one batch of slots: few enough for a cache, and enough for few calls."""
FAINTEST = 1e-20
"""If the summaries that are not retrieved sum to less than this share of the largest one, float32 may have lost them:
they are weighed again without it."""
SUMMARY_ELEMENTS = 1 << 25
"""Numbers in the summaries held at a time: beyond that, the query heads of a key head go in groups."""


@torch.no_grad()
def attend(own: Partial, call: Call, chosen: Selection | None) -> tuple[Partial, Selection]:
    """Merge the far field into `own`; also the selection, `chosen` if there is one."""
    shapes = SelectionShapes.of(call.config, call.query.shape[2], is_causal=call.is_causal)
    selection = chosen or shapes.none(call.query)
    out, lse = own.out.clone(), own.lse.clone()
    for head in _heads(call):
        for block in head.blocks():
            at = block.at
            of_own = Partial(out[at].to(head.dtype), lse[at].to(head.dtype))
            first = selection.retrieved[at[:2]][block.number]  # a view
            merged = _attend_block(block, of_own, first, decide=chosen is None)
            out[at], lse[at] = merged.out.to(out.dtype), merged.lse
    return Partial(out, lse), selection


@torch.no_grad()
def attend_backward(
    own: tuple[Tensor, Tensor, Tensor],
    call: Call,
    merged: Partial,
    selected: Selection,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradients of the far field to those of the own block."""
    grad_query, grad_key, grad_value = (gradient.to(compute_dtype(call.query.dtype)) for gradient in own)
    for head in _heads(call):
        gradients = [table.zeros_like() for table in head.tables]
        transposed_values = [transposed(table.value_mean) for table in head.tables]
        to_keys, to_values = torch.zeros_like(head.buckets.keys), torch.zeros_like(head.buckets.values)
        for block in head.blocks():
            at = block.at
            wide_grad = grad_out[at].to(head.dtype)
            # `delta` and `L` are all that a term's backward needs from the other terms.
            delta = (merged.out[at].to(head.dtype) * wide_grad).sum(-1)
            delta = delta if grad_lse is None else delta - grad_lse[at]
            to_queries = _attend_block_backward(
                block,
                wide_grad,
                merged.lse[at],
                delta,
                selected.retrieved[at[:2]][block.number],
                transposed_values[block.generation][block.place],
                add_to=(gradients[block.generation], to_keys, to_values),
            )
            grad_query[at] += call.scale * to_queries
        summarise_backward(
            gradients,
            head.tables,
            head.buckets,
            head.centroids,
            head.generations,
            differentiable_aggregation=call.config.differentiable_aggregation,
            add_to=(to_keys, to_values),
        )
        order = head.buckets.order
        grad_key[head.at].index_add_(0, order, to_keys[:-1])
        grad_value[head.at].index_add_(0, order, to_values[:-1])
    return grad_query.to(call.query.dtype), grad_key.to(call.key.dtype), grad_value.to(call.value.dtype)


@dataclass(frozen=True)
class _Head:
    """A key head, and some query heads that share it."""

    call: Call
    at: tuple[int, int]
    """sequence and key head"""
    query_heads: range
    generations: Generations
    centroids: Tensor
    """(R, S, Q, D)"""
    buckets: Buckets
    tables: list[Table]
    transposed_keys: list[Tensor]
    """(R, Q, D, buckets) of each table"""
    spread: Spread
    slopes: Slopes | None

    @property
    def dtype(self) -> torch.dtype:
        return self.buckets.keys.dtype

    def blocks(self) -> Iterator[_Block]:
        """All blocks that see any other, for each query head."""
        config = self.call.config
        for place, query_head in enumerate(self.query_heads):
            for number in range(max(self.call.first_block, self.call.is_causal), self.generations.blocks):
                generation = self.generations.of_block(number)
                seen = (number if self.call.is_causal else self.generations.blocks) * config.key_clusters
                columns = self._columns(place, generation, seen)
                if not self.call.is_causal:
                    columns = columns.without(self.buckets.of_block(number))
                rows = slice(number * config.block_size, (number + 1) * config.block_size)
                yield _Block(self, place, (self.at[0], query_head, rows), number, generation, columns)

    def _columns(self, place: int, generation: int, seen: int) -> Columns:
        """Columns of the first `seen` buckets, from the table of a generation."""
        table, size = self.tables[generation], self.buckets.sizes[:seen].to(self.dtype)
        variance = self.spread.tilted[generation][place, :, :seen]
        # Where a centroid looks at one key of a bucket, its weights do not tell how far away the others are.
        error_deviation = torch.maximum(variance, LEAST_PLAIN_SPREAD * self.spread.plain[:seen]).sqrt()
        return Columns(
            table.log_mass[place, :, :seen],
            self.transposed_keys[generation][place, ..., :seen],
            table.value_mean[place, :, :seen],
            variance.sqrt(),
            (2 * size.clamp(min=1).log()).sqrt(),
            error_deviation,
            torch.where(size > 0, (size / self.call.config.mean_bucket).rsqrt(), torch.nan),
        )


@dataclass(frozen=True)
class _Block:
    """The queries of one block and query head, and what they read."""

    head: _Head
    place: int
    """of the query head in `head.query_heads`"""
    at: tuple[int, int, slice]
    """sequence, query head, and positions"""
    number: int
    generation: int
    columns: Columns

    @property
    def slots_at_once(self) -> int:
        """The slots of a batch, if the most that there can be go in equal batches of about `SCORED_AT_ONCE` logits."""
        most = most_slots(self.config)
        batches = -(-most * slot_rows(self.config) * self.columns.log_mass.shape[1] // SCORED_AT_ONCE)
        return -(-most // min(most, batches))

    @property
    def config(self) -> MuSeConfig:
        return self.head.call.config

    def lay_out(self, *, multiple_of: int = 1) -> tuple[Slots, Tensor]:
        """The slots of the queries, and the scaled queries in them, (slots, rows, D)."""
        call = self.head.call
        assignment = call.clusters.query_assignment[self.at].long()
        slots = Slots.of(assignment, self.config, multiple_of=multiple_of)
        return slots, gather(call.query[self.at].to(self.head.dtype) * call.scale, slots.rows)

    def score(self, slots: Slots, queries: Tensor, *, together: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of all columns, (slots, rows, S); the residuals of the queries; and how far these reach."""
        call = self.head.call
        residuals = queries - self.head.centroids[self.place, self.generation][slots.cluster, None]
        assert call.clusters.key_spread is not None
        metric = call.clusters.key_spread[self.head.at][self.generation].to(residuals.dtype)
        reach = (residuals.square() * metric).sum(-1).sqrt_()
        second_order = self.config.uses_second_order
        logits = self.columns.logits(slots, residuals, reach, second_order=second_order, together=together)
        return logits, residuals, reach

    def slope(self, residuals: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What first order adds to the values of summaries for each query, (slots, rows, Dv); the (D, Dv) matrix and
        the factors by which residuals are multiplied. None without first order."""
        if self.head.slopes is None:
            return None
        matrix, factor = self.head.slopes.of_rows(self.place, self.number, reach)
        return (residuals * factor[..., None]) @ matrix, matrix, factor


def _heads(call: Call) -> Iterator[_Head]:
    config, clusters, generations = call.config, call.clusters, call.generations
    dtype = compute_dtype(call.query.dtype)
    shared_by = call.query.shape[1] // call.key.shape[1]
    dims = call.key.shape[3] + call.value.shape[3]
    of_query_head = config.query_clusters * config.key_clusters * generations.summarised_blocks * dims
    at_once = max(1, SUMMARY_ELEMENTS // of_query_head)
    for sequence in range(call.key.shape[0]):
        for key_head in range(call.key.shape[1]):
            at = (sequence, key_head)
            buckets = Buckets.of(
                call.key[at].to(dtype),
                call.value[at].to(dtype),
                clusters.key_assignment[at],
                generations.seen_blocks,
                config,
            )
            for begin in range(0, shared_by, at_once):
                heads = range(key_head * shared_by + begin, key_head * shared_by + min(shared_by, begin + at_once))
                centroids = clusters.query_centroids[sequence, heads.start : heads.stop].to(dtype)
                tables, spread = summarise(buckets, centroids, generations)
                keys = [transposed(table.key_mean) for table in tables]
                slopes = find_slopes(buckets, centroids, generations) if config.uses_first_order else None
                yield _Head(call, at, heads, generations, centroids, buckets, tables, keys, spread, slopes)


def _attend_block(block: _Block, own: Partial, selected: Tensor, *, decide: bool) -> Partial:
    """The softmax of all terms of a block. If `decide`, the (tiles, buckets) `selected` are filled in first."""
    config, columns = block.config, block.columns
    slots, queries = block.lay_out(multiple_of=block.slots_at_once)
    value_dim, seen = columns.values.shape[-1], columns.log_mass.shape[1]
    own_lse = gather(own.lse, slots.rows)
    first = queries.new_empty(*slots.tiles.shape, seen, dtype=torch.uint8)
    out, lse = queries.new_empty(*slots.rows.shape, value_dim), torch.empty_like(own_lse)
    for batch, batch_slots in slots.split(block.slots_at_once):
        logits, residuals, reach = block.score(batch_slots, queries[batch])
        weights, shift = weigh(logits)
        if decide:
            # (`logaddexp` rounds by place in the batch.)
            log_total = torch.stack([own_lse[batch] - shift, weights.sum(-1).log_()]).logsumexp(0)
            first[batch] = _decide(block, batch_slots, queries[batch], weights, reach, log_total, log_total + shift)
        else:
            first[batch] = _read_selection(batch_slots, selected, columns)
        weights.mul_(kept(batch_slots, first[batch], weights))
        total = weights.sum(-1)
        is_faint = (total < FAINTEST) & _has_rest(batch_slots, first[batch])
        if is_faint.any():  # (The other rows must not change by a bit.)
            logits, _, _ = block.score(batch_slots, queries[batch])
            logits.masked_fill_(kept(batch_slots, first[batch], logits) == 0, -torch.inf)
            of_rest, shift_of_rest = weigh(logits)
            weights = torch.where(is_faint[..., None], of_rest, weights)
            shift, total = torch.where(is_faint, shift_of_rest, shift), weights.sum(-1)
        sums = products(weights, columns.values, batch_slots)
        out[batch] = sums.div_(torch.where(total == 0, 1, total)[..., None])
        if slope := block.slope(residuals, reach):
            out[batch] += slope[0]
        lse[batch] = total.log_().add_(shift)
    if decide:
        is_tile = slots.tiles >= 0
        selected[slots.tiles[is_tile], :seen] = first[is_tile]
    tiles = (-1, config.tile)
    keys = retrieval.attend(
        with_padding(queries.view(*tiles, queries.shape[-1])),
        with_padding(slots.row_in_tile.view(tiles), NO_ROW),
        first.flatten(0, 1),
        block.head.buckets,
    )
    of_keys = Partial(keys.out[:-1].view_as(out), keys.lse[:-1].view_as(lse))
    merged = merge([Partial(gather(own.out, slots.rows), own_lse), Partial(out, lse), of_keys])
    return Partial(scatter(merged.out, slots.rows, own.out), scatter(merged.lse, slots.rows, own.lse))


def _decide(
    block: _Block, slots: Slots, queries: Tensor, weights: Tensor, reach: Tensor, log_total: Tensor, lse: Tensor
) -> Tensor:
    """(slots, tiles, S) uint8: the first row of each tile that wants each bucket. Arguments as in `Columns.decide`;
    `lse` is that of all summaries and the own block."""
    config = block.config
    wanted = block.columns.decide(slots, weights, reach, log_total, config)
    if config.search is None:
        return wanted
    suspected = block.columns.suspect(slots, weights, reach, log_total, config.search)
    tiles = (-1, config.tile)
    found = retrieval.search(
        with_padding(queries.reshape(*tiles, queries.shape[-1])),
        with_padding(slots.row_in_tile.reshape(tiles), NO_ROW),
        with_padding((lse + math.log(config.search)).reshape(tiles), torch.inf),
        suspected.masked_fill_(suspected >= wanted, NO_ROW).flatten(0, 1),
        block.head.buckets,
    )
    return torch.minimum(wanted, found.view_as(wanted))


def _attend_block_backward(
    block: _Block,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    selected: Tensor,
    of_values: Tensor,
    *,
    add_to: tuple[Table, Tensor, Tensor],
) -> Tensor:
    """The gradient of the scaled queries; those of the table, and of keys and values by bucket, are added."""
    config, columns = block.config, block.columns
    gradient, grad_keys, grad_values = add_to
    slots, queries = block.lay_out()
    seen = columns.log_mass.shape[1]
    d_mass, d_keys, d_values = (part[block.place, :, :seen] for part in gradient.parts())
    of_keys = block.head.tables[block.generation].key_mean[block.place, :, :seen]
    # Padding gets an infinite lse, and so no weight.
    row_lse = torch.where(slots.row_in_tile == NO_ROW, torch.inf, gather(lse.to(queries.dtype), slots.rows))
    row_grad, row_delta = gather(grad_out, slots.rows), gather(delta, slots.rows)
    first = _read_selection(slots, selected, columns)
    to_queries = torch.empty_like(queries)
    for batch, batch_slots in slots.split(block.slots_at_once):
        logits, residuals, reach = block.score(batch_slots, queries[batch], together=True)
        slope = block.slope(residuals, reach)
        batch_delta = row_delta[batch] if slope is None else row_delta[batch] - (row_grad[batch] * slope[0]).sum(-1)
        weights = exp_(logits.sub_(row_lse[batch][..., None]).clamp_(max=0))
        weights.mul_(kept(batch_slots, first[batch], weights))
        d_logits = (
            products(row_grad[batch], of_values[..., :seen], batch_slots, together=True)
            .sub_(batch_delta[..., None])
            .mul_(weights)
        )
        to_queries[batch] = products(d_logits, of_keys, batch_slots, together=True)
        if slope is not None:
            _, matrix, factor = slope
            to_queries[batch] += (row_grad[batch] @ matrix.mT) * (factor * weights.sum(-1))[..., None]
        for cluster, run in batch_slots.runs():
            to_logits = d_logits[run].flatten(0, 1)
            d_mass[cluster] += to_logits.sum(0)
            d_keys[cluster].addmm_(to_logits.mT, residuals[run].flatten(0, 1))
            d_values[cluster].addmm_(weights[run].flatten(0, 1).mT, row_grad[batch][run].flatten(0, 1))
    tiles = (-1, config.tile)
    by_tile = with_padding(to_queries.view(*tiles, queries.shape[-1]))
    retrieval.attend_backward(
        with_padding(row_grad.view(*tiles, row_grad.shape[-1])),
        with_padding(row_lse.view(tiles), torch.inf),
        with_padding(row_delta.view(tiles)),
        with_padding(queries.view(*tiles, queries.shape[-1])),
        with_padding(slots.row_in_tile.view(tiles), NO_ROW),
        first.flatten(0, 1),
        block.head.buckets,
        add_to=(by_tile, grad_keys, grad_values),
    )
    return scatter(
        by_tile[:-1].view_as(to_queries), slots.rows, grad_out.new_empty(grad_out.shape[0], queries.shape[-1])
    )


def _has_rest(slots: Slots, first: Tensor) -> Tensor:
    """(slots, rows) bool: rows that exist and do not retrieve every bucket."""
    last_wanted = first.amax(-1, keepdim=True)
    row = slots.row_in_tile.unflatten(1, (first.shape[1], -1))
    return ((row < last_wanted) & (row != NO_ROW)).flatten(1)


def _read_selection(slots: Slots, selected: Tensor, columns: Columns) -> Tensor:
    """(slots, tiles, S) uint8: the first rows of a selection."""
    first = selected[slots.tiles.clamp(min=0), : columns.log_mass.shape[1]]
    return first.masked_fill_((slots.tiles < 0)[..., None] | columns.error_factor.isnan(), NO_ROW)


def gather(table: Tensor, rows: Tensor) -> Tensor:
    """(slots, rows, ...) of a (queries, ...) table; 0 at padded places."""
    return take_rows(with_padding(table), rows)


def scatter(slots: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """The reverse; `like` has the shape and dtype of the result."""
    table = like.new_empty(like.shape[0] + 1, *like.shape[1:])
    table[rows] = slots
    return table[:-1]
