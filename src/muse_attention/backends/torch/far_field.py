"""Everything beyond the own block in vectorised PyTorch: the stages one after another, a few heads at a time.

Nothing large is kept for backward: clusters and selection are kept, summaries are recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends.torch import (
    clustering,
    dipole,
    error_control,
    merging,
    retrieval,
    segments,
    selection,
    summaries,
)
from muse_attention.backends.torch.grouping import join, with_spare_row
from muse_attention.backends.torch.layout import FarField, Heads, by_key_head, head_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Partial, Selection, SelectionShapes, Side

_NO_SHAPES = SelectionShapes((0,), (0, 1), -1)
"""Where a selection is at hand."""


def find_clusters(sides: list[Side], config: MuSeConfig) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Centroids and assignment of each side, and how the keys, the last one, are spread about theirs."""
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        found = _cluster(sides, config)
    else:
        found = [of_side for side in sides for of_side in _cluster([side], config)]
    spread = _find_key_spread(sides[-1].vectors, *found[-1]) if config.needs_spread else None
    return found, spread


def _cluster(sides: list[Side], config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Of sides with the same number of clusters."""
    clusters = sides[0].clusters
    length, head_dim = sides[0].vectors.shape[2:]
    heads = [(head, side) for side in sides for head in side.vectors.reshape(-1, length, head_dim)]
    dtype = compute_dtype(sides[0].vectors.dtype)
    parts = [
        clustering.cluster(
            torch.stack([head.to(dtype) * side.factor for head, side in heads[group]]),
            [side.cap for _, side in heads[group]],
            clusters,
            config,
        )
        for group in head_groups(len(heads), 2 * length * (clusters + head_dim))
    ]
    centroids, assignment = (torch.cat(part) for part in zip(*parts, strict=True))
    tensors = [side.vectors for side in sides]
    sizes = [tensor.shape[0] * tensor.shape[1] for tensor in tensors]
    return [
        (some.clone().view(*tensor.shape[:2], clusters, head_dim), assigned.clone().view(tensor.shape[:3]))
        for tensor, some, assigned in zip(tensors, centroids.split(sizes), assignment.split(sizes), strict=True)
    ]


def _find_key_spread(key: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """(batch, key heads, D): variance of the keys about their centroids in each dimension, scaled to a mean of 1."""
    batch, heads, _, head_dim = key.shape
    spread = [
        clustering.spread_of(*head)
        for head in zip(key.flatten(0, 1), centroids.flatten(0, 1), assignment.flatten(0, 1), strict=True)
    ]
    return torch.stack(spread).view(batch, heads, head_dim)


def attend(
    own: Partial,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    chosen: Selection | None,
    shapes: SelectionShapes,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Partial, Selection, Tensor]:
    """Merge the far field into `own`; also the selection, `chosen` if there is one, else of these `shapes`, and what
    `attend_backward` wants to be told: nothing."""
    of_rows = query.shape[:3]
    heads = Heads.of(query, key, value, clusters, scale)
    shared_by = heads.query.shape[1]
    rows = None if chosen is None else _selection_by_key_head(chosen, shared_by)
    out, lse = by_key_head(own.out, shared_by), by_key_head(own.lse, shared_by)
    results = [
        _attend_heads(
            Partial(heads.rows(out[group]), lse[group].flatten()),
            heads[group],
            None if rows is None else _rows_of(rows, group),
            shapes,
            config,
            is_causal=is_causal,
        )
        for group in heads.groups(config)
    ]
    opened = torch.cat([selected.opened for _, selected in results])
    retrieved = torch.cat([selected.retrieved for _, selected in results])
    return (
        Partial(
            join([partial.out for partial, _ in results]).to(query.dtype).view(*of_rows, value.shape[-1]),
            join([partial.lse for partial, _ in results]).view(of_rows),
        ),
        Selection(opened.view(*of_rows, *opened.shape[1:]), retrieved.view(*of_rows, *retrieved.shape[1:])),
        opened.new_empty(0),
    )


def attend_backward(
    own: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    selected: Selection,
    merged: Partial,
    memory: Tensor,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradients of the far field to those of the own block. `memory` is what `attend` left: nothing."""
    heads = Heads.of(query, key, value, clusters, scale)
    shared_by = heads.query.shape[1]
    rows = _selection_by_key_head(selected, shared_by)
    grad_out, out, lse = (by_key_head(tensor, shared_by) for tensor in (grad_out, merged.out, merged.lse))
    grad_lse = None if grad_lse is None else by_key_head(grad_lse, shared_by)
    of_own = [by_key_head(gradient, heads_of) for gradient, heads_of in zip(own, (shared_by, 1, 1), strict=True)]
    gradients = [
        _attend_heads_backward(
            [gradient[group].to(heads.dtype) for gradient in of_own],
            grad_out[group],
            None if grad_lse is None else grad_lse[group],
            Partial(out[group], lse[group]),
            heads[group],
            _rows_of(rows, group),
            config,
            is_causal=is_causal,
        )
        for group in heads.groups(config)
    ]
    grad_query, grad_key, grad_value = (join(part) for part in zip(*gradients, strict=True))
    return (
        grad_query.to(query.dtype).view(query.shape),
        grad_key.to(key.dtype).view(key.shape),
        grad_value.to(value.dtype).view(value.shape),
    )


def _selection_by_key_head(selected: Selection, shared_by: int) -> Selection:
    return Selection(by_key_head(selected.opened, shared_by), by_key_head(selected.retrieved, shared_by))


def _rows_of(selected: Selection, group: slice) -> Selection:
    return Selection(selected.opened[group].flatten(0, 2), selected.retrieved[group].flatten(0, 2))


def _attend_heads(
    own: Partial,
    heads: Heads,
    chosen: Selection | None,
    shapes: SelectionShapes,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> tuple[Partial, Selection]:
    partials = [own]
    far = heads.far_field(config)
    if config.monopole or chosen is None:
        of_summaries, chosen = _attend_to_summaries(far, own.lse, chosen, shapes, config, is_causal=is_causal)
        partials.append(of_summaries)
    if chosen.opened.shape[-1] > 0:
        pairs = far.pairs(chosen, config)
        partials.append(retrieval.attend(far.queries, far.key_rows, far.value_rows, pairs, far.buckets))
    return merging.merge(partials), chosen


def _attend_to_summaries(
    far: FarField,
    own_lse: Tensor,
    chosen: Selection | None,
    shapes: SelectionShapes,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> tuple[Partial, Selection]:
    rows = far.queries.shape[0]
    table = with_spare_row(rows, far.values.shape[-1], far.queries)
    partial = Partial(table, torch.full_like(table[:, 0], -torch.inf))
    filled = chosen
    if filled is None:
        filled = Selection(
            *(table.new_full((rows + 1, *shape), shapes.none, dtype=torch.int32) for shape in shapes.both)
        )
    if config.tolerance is not None:
        _control_error(far, own_lse, chosen is None, filled, partial, config, is_causal=is_causal)
    else:
        for part in far.parts(config):
            scored = part.score(is_causal=is_causal)
            selection.select_and_attend(
                scored, filled, partial, is_causal=is_causal, select=chosen is None, attend=config.monopole
            )
            if config.dipole != "none":
                correction = part.correction(scored.accumulated, config, is_causal=is_causal)
                partial.out[:-1] += dipole.shift_values(correction, part.residuals, part.segments)
    if chosen is None:
        filled = Selection(filled.opened[:-1], filled.retrieved[:-1])
    return Partial(partial.out[:-1], partial.lse[:-1]), filled


def _control_error(
    far: FarField,
    own_lse: Tensor,
    select: bool,
    filled: Selection,
    partial: Partial,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> None:
    """Selection by tolerance and attention to the rest, again if a head would retrieve more than its budget."""
    rule = error_control.Tolerance.of(config, own_lse, far.keys.shape[1]) if select else None

    def walk(rule: error_control.Tolerance | None) -> None:
        for part in far.parts(config):
            scored = part.score(is_causal=is_causal)
            error_control.select_and_attend(scored, rule, filled, partial, is_causal=is_causal)

    walk(rule)
    within_budget = None if rule is None else rule.within(config.retrieved_clusters)
    if within_budget is not None:
        filled.retrieved.zero_()
        walk(within_budget)


def _attend_heads_backward(
    own: list[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    merged: Partial,
    heads: Heads,
    selected: Selection,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = own
    far = heads.far_field(config)

    def add(to_queries: Tensor, to_keys: Tensor, to_values: Tensor) -> None:
        grad_query.add_(to_queries.view_as(grad_query), alpha=heads.scale)
        grad_key.add_(to_keys.view_as(grad_key))
        grad_value.add_(to_values.view_as(grad_value))

    row_lse = merged.lse.flatten()
    row_grad = heads.rows(grad_out)
    delta = merging.shared_delta(heads.rows(merged.out), row_grad, None if grad_lse is None else grad_lse.flatten())
    if selected.opened.shape[-1] > 0:
        pairs = far.pairs(selected, config)
        add(
            *retrieval.attend_backward(
                row_grad, row_lse, delta, far.queries, far.key_rows, far.value_rows, pairs, far.buckets
            )
        )
    if config.monopole:
        add(*_summaries_backward(row_grad, row_lse, delta, far, selected, config, is_causal=is_causal))
    return grad_query, grad_key, grad_value


def _summaries_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    far: FarField,
    selected: Selection,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_residuals, grad_keys, grad_values = (
        with_spare_row(rows.shape[0], rows.shape[1], rows) for rows in (far.residuals, far.key_rows, far.value_rows)
    )
    for part in far.parts(config):
        scored = part.score(is_causal=is_causal)
        of_buckets, seen = scored.summaries, scored.accumulated
        if config.dipole != "none":
            correction = part.correction(seen, config, is_causal=is_causal)
            shift = dipole.shift_values(correction, part.residuals, part.segments)
            # Every summary term's value gained `shift`, so `dO . value - delta` gains `dO . shift`. (One part only.)
            delta = delta - (grad_out * shift).sum(-1)
        rule = selection if config.tolerance is None else error_control
        gradients = segments.Gradients(scored, grad_out, lse, delta)
        rule.attend_backward(scored, selected, gradients, is_causal=is_causal, fill_in=grad_residuals)
        grad_buckets, grad_seen = gradients.of_buckets, gradients.accumulated
        if config.dipole != "none":
            of_summaries, _ = _attend_to_summaries(far, lse, selected, _NO_SHAPES, config, is_causal=is_causal)
            share = (of_summaries.lse - lse).clamp(max=0).exp()[:, None]
            to_residuals, to_matrix = dipole.shift_values_backward(
                share * grad_out, correction, part.residuals, part.segments
            )
            to_keys, to_values, to_seen = dipole.find_correction_backward(
                config.dipole,
                to_matrix,
                correction,
                part.keys,
                part.values,
                seen,
                config.block_size,
                is_causal=is_causal,
                differentiable_aggregation=config.differentiable_aggregation,
            )
            grad_residuals[:-1] += to_residuals
            grad_keys[:-1] += to_keys.flatten(0, 1)
            grad_values[:-1] += to_values.flatten(0, 1)
            summaries.accumulate_backward(
                to_seen,
                of_buckets,
                seen,
                is_causal=is_causal,
                add_to=grad_buckets,
                shares_are_frozen=not config.differentiable_aggregation,
            )
        summaries.accumulate_backward(
            grad_seen,
            of_buckets,
            seen,
            is_causal=is_causal,
            add_to=grad_buckets,
        )
        summaries.summarise_backward(
            grad_buckets,
            of_buckets,
            part.keys,
            part.values,
            part.centroids,
            part.buckets,
            differentiable_aggregation=config.differentiable_aggregation,
            add_to=(grad_keys, grad_values),
        )
    return grad_residuals[:-1], grad_keys[:-1], grad_values[:-1]
