"""Everything beyond the own block in vectorised PyTorch: the stages one after another, a few heads at a time.

Nothing large is kept for backward: clusters and selection are kept, summaries are recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends.torch import dipole, retrieval, selection, summaries
from muse_attention.backends.torch.grouping import join
from muse_attention.backends.torch.layout import (
    FarField,
    as_rows,
    by_key_head,
    far_field,
    groups_of_heads,
    with_key_heads,
)
from muse_attention.core.call import Call
from muse_attention.core.merging import merge
from muse_attention.core.precision import compute_dtype
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Partial, Selection


def attend(own: Partial, call: Call, chosen: Selection | None) -> tuple[Partial, Selection]:
    """Merge the far field into `own`; also the selection, `chosen` if there is one."""
    of_rows = call.query.shape[:3]
    heads = with_key_heads(call)
    shared_by = heads.query.shape[1]
    rows = None if chosen is None else _selection_by_key_head(chosen, shared_by)
    out, lse = by_key_head(own.out, shared_by), by_key_head(own.lse, shared_by)
    results = [
        _attend_heads(
            Partial(as_rows(out[group]), lse[group].flatten()),
            far_field(heads, group),
            None if rows is None else _rows_of(rows, group),
        )
        for group in groups_of_heads(heads)
    ]
    opened = torch.cat([selected.opened for _, selected in results])
    retrieved = torch.cat([selected.retrieved for _, selected in results])
    return (
        Partial(
            join([partial.out for partial, _ in results]).to(call.query.dtype).view(*of_rows, call.value.shape[-1]),
            join([partial.lse for partial, _ in results]).view(of_rows),
        ),
        Selection(opened.view(*of_rows, *opened.shape[1:]), retrieved.view(*of_rows, *retrieved.shape[1:])),
    )


def attend_backward(
    own: tuple[Tensor, Tensor, Tensor],
    call: Call,
    merged: Partial,
    selected: Selection,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradients of the far field to those of the own block."""
    heads = with_key_heads(call)
    shared_by = heads.query.shape[1]
    rows = _selection_by_key_head(selected, shared_by)
    grad_out, out, lse = (by_key_head(tensor, shared_by) for tensor in (grad_out, merged.out, merged.lse))
    grad_lse = None if grad_lse is None else by_key_head(grad_lse, shared_by)
    of_own = [by_key_head(gradient, heads_each) for gradient, heads_each in zip(own, (shared_by, 1, 1), strict=True)]
    gradients = [
        _attend_heads_backward(
            [gradient[group].to(compute_dtype(call.query.dtype)) for gradient in of_own],
            grad_out[group],
            None if grad_lse is None else grad_lse[group],
            Partial(out[group], lse[group]),
            far_field(heads, group),
            call.scale,
            _rows_of(rows, group),
        )
        for group in groups_of_heads(heads)
    ]
    grad_query, grad_key, grad_value = (join(part) for part in zip(*gradients, strict=True))
    return (
        grad_query.to(call.query.dtype).view(call.query.shape),
        grad_key.to(call.key.dtype).view(call.key.shape),
        grad_value.to(call.value.dtype).view(call.value.shape),
    )


def _selection_by_key_head(selected: Selection, shared_by: int) -> Selection:
    return Selection(by_key_head(selected.opened, shared_by), by_key_head(selected.retrieved, shared_by))


def _rows_of(selected: Selection, group: slice) -> Selection:
    return Selection(selected.opened[group].flatten(0, 2), selected.retrieved[group].flatten(0, 2))


def _attend_heads(own: Partial, far: FarField, chosen: Selection | None) -> tuple[Partial, Selection]:
    partials = [own]
    if far.config.monopole or chosen is None:
        of_summaries, chosen = _attend_to_summaries(far, chosen)
        partials.append(of_summaries)
    if chosen.opened.shape[-1] > 0:
        picks = far.picks(chosen)
        partials.append(retrieval.attend(far.queries, far.key_rows, far.value_rows, picks, far.buckets))
    return merge(partials), chosen


def _attend_to_summaries(far: FarField, chosen: Selection | None) -> tuple[Partial, Selection]:
    rows, config = far.queries.shape[0], far.config
    table = far.queries.new_zeros(rows + 1, far.values.shape[-1])  # the last row takes the padding, here and below
    partial = Partial(table, torch.full_like(table[:, 0], -torch.inf))
    filled = chosen
    if filled is None:
        shapes = SelectionShapes.of(config, far.keys.shape[1], is_causal=far.is_causal)
        opened, retrieved = (
            table.new_full((rows + 1, *shape[1:]), shapes.nothing, dtype=shapes.dtype) for shape in shapes[:2]
        )
        filled = Selection(opened, retrieved)
    for part in far.parts():
        scored = part.score()
        selection.select_and_attend(scored, filled, partial, select=chosen is None, attend=config.monopole)
        if config.dipole != "none":
            correction = dipole.find_correction(part, scored.accumulated)
            partial.out[:-1] += dipole.shift_values(correction, part.residuals, part.segments)
    if chosen is None:
        filled = Selection(filled.opened[:-1], filled.retrieved[:-1])
    return Partial(partial.out[:-1], partial.lse[:-1]), filled


def _attend_heads_backward(
    own: list[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    merged: Partial,
    far: FarField,
    scale: float,
    selected: Selection,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = own

    def add(to_queries: Tensor, to_keys: Tensor, to_values: Tensor) -> None:
        grad_query.add_(to_queries.view_as(grad_query), alpha=scale)
        grad_key.add_(to_keys.view_as(grad_key))
        grad_value.add_(to_values.view_as(grad_value))

    lse, grad_out = merged.lse.flatten(), as_rows(grad_out)
    # `delta` and `L` are all that a term's backward needs from the other terms.
    delta = (as_rows(merged.out) * grad_out).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse.flatten()
    if selected.opened.shape[-1] > 0:
        of_keys = (far.queries, far.key_rows, far.value_rows, far.picks(selected), far.buckets)
        add(*retrieval.attend_backward(grad_out, lse, delta, *of_keys))
    if far.config.monopole:
        add(*_summaries_backward(grad_out, lse, delta, far, selected))
    return grad_query, grad_key, grad_value


def _summaries_backward(
    grad_out: Tensor, lse: Tensor, delta: Tensor, far: FarField, selected: Selection
) -> tuple[Tensor, Tensor, Tensor]:
    config = far.config
    grad_residuals, grad_keys, grad_values = (
        rows.new_zeros(rows.shape[0] + 1, rows.shape[1]) for rows in (far.residuals, far.key_rows, far.value_rows)
    )
    for part in far.parts():
        scored = part.score()
        of_buckets, seen = scored.summaries, scored.accumulated
        if config.dipole != "none":
            correction = dipole.find_correction(part, seen)
            shift = dipole.shift_values(correction, part.residuals, part.segments)
            # Every summary term's value gained `shift`, so `dO . value - delta` gains `dO . shift`. (One part only.)
            delta = delta - (grad_out * shift).sum(-1)
        grad_buckets, grad_seen = selection.attend_backward(
            scored, selected, grad_out, lse, delta, fill_in=grad_residuals
        )
        if config.dipole != "none":
            of_summaries, _ = _attend_to_summaries(far, selected)
            share = (of_summaries.lse - lse).clamp(max=0).exp()[:, None]
            to_residuals, to_matrix = dipole.shift_values_backward(
                share * grad_out, correction, part.residuals, part.segments
            )
            to_keys, to_values, to_seen = dipole.find_correction_backward(to_matrix, correction, part, seen)
            grad_residuals[:-1] += to_residuals
            grad_keys[:-1] += to_keys.flatten(0, 1)
            grad_values[:-1] += to_values.flatten(0, 1)
            summaries.accumulate_backward(
                to_seen,
                of_buckets,
                seen,
                is_causal=far.is_causal,
                add_to=grad_buckets,
                shares_are_frozen=not config.differentiable_aggregation,
            )
        summaries.accumulate_backward(grad_seen, of_buckets, seen, is_causal=far.is_causal, add_to=grad_buckets)
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
