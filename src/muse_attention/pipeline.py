"""MuSe attention as a sequence of stages, forward and backward.

The output is one softmax over a mixed list of terms. Each stage attends to some of the terms and yields a `Partial`;
merging the partials gives the output `O` and the logsumexp `L`. No gradient flows through the merge: with
`delta = sum(dO * O) - dL`, the backward of a stage needs only `(dO, L, delta)` and its own inputs. A new kind of term
is a pair of functions in a stage, and a line in `_forward_heads` and in `_backward_heads`.

Nothing large is kept for backward: clusters and selection are kept, summaries are recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.stages import clustering, dipole, local, merging, retrieval, selection, summaries
from muse_attention.stages.grouping import Groups, group_rows, with_spare_row
from muse_attention.structures import Clusters, Partial, Selection, Summaries

WORKSPACE_ELEMENTS = 1 << 26
"""Numbers in the intermediate results held at a time: key heads go in groups that need about as many."""
SUMMARY_ELEMENTS = 1 << 24
"""Numbers in the summaries held at a time: query clusters go in groups whose summaries stay in cache."""


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float) -> Clusters:
    """Cluster the scaled queries and the keys of each head."""
    if not config.tilt:
        # Without a tilt every query cluster would see the same summaries, so one with centroid 0 stands for all.
        of_queries = (
            query.new_zeros(*query.shape[:2], 1, query.shape[3], dtype=compute_dtype(query.dtype)),
            query.new_zeros(query.shape[:3], dtype=torch.int32),
        )
        return Clusters(*of_queries, *_cluster_heads([(key, 1.0)], config.key_clusters, config)[0])
    if config.query_clusters != config.key_clusters:
        (of_queries,) = _cluster_heads([(query, scale)], config.query_clusters, config)
        (of_keys,) = _cluster_heads([(key, 1.0)], config.key_clusters, config)
    else:
        # Streaming is a chain of small steps: queries and keys take them together.
        of_queries, of_keys = _cluster_heads([(query, scale), (key, 1.0)], config.key_clusters, config)
    return Clusters(*of_queries, *of_keys)


def _cluster_heads(sides: list[tuple[Tensor, float]], clusters: int, config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Centroids and assignment of each (batch, heads, N, D) tensor, times its factor."""
    length, head_dim = sides[0][0].shape[2:]
    heads = [(head, factor) for tensor, factor in sides for head in tensor.reshape(-1, length, head_dim)]
    dtype = compute_dtype(sides[0][0].dtype)
    parts = [
        clustering.cluster(torch.stack([head.to(dtype) * factor for head, factor in heads[group]]), clusters, config)
        for group in _head_groups(len(heads), 2 * length * (clusters + head_dim))
    ]
    centroids, assignment = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes = [tensor.shape[0] * tensor.shape[1] for tensor, _ in sides]
    return [
        (some.clone().view(*tensor.shape[:2], clusters, head_dim), assigned.clone().view(tensor.shape[:3]))
        for (tensor, _), some, assigned in zip(sides, centroids.split(sizes), assignment.split(sizes), strict=True)
    ]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    chosen: Selection | None,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Partial, Selection]:
    """Output and lse, and the selection behind them. A `chosen` selection is used as it is."""
    shape = query.shape[:3]
    results = [
        _forward_heads(heads, picked, config, is_causal=is_causal, scale=scale)
        for _, heads, picked in _split_heads(query, key, value, clusters, chosen, config, scale)
    ]
    partials = [partial for partial, _ in results]
    selections = [selected for _, selected in results]
    opened = torch.cat([selected.opened for selected in selections])
    retrieved = torch.cat([selected.retrieved for selected in selections])
    return (
        Partial(
            torch.cat([partial.out for partial in partials]).to(query.dtype).view(*shape, value.shape[-1]),
            torch.cat([partial.lse for partial in partials]).view(shape),
        ),
        Selection(opened.view(*shape, *opened.shape[1:]), retrieved.view(*shape, *retrieved.shape[1:])),
    )


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    selected: Selection,
    merged: Partial,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Clusters and selection are constants."""
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    for group, heads, picked in _split_heads(query, key, value, clusters, selected, config, scale):
        assert picked is not None
        of_heads = [
            tensor.reshape(-1, *heads.query.shape[1:3], *tensor.shape[3:])[group]
            for tensor in (grad_out, merged.out, merged.lse)
        ]
        lse_part = None if grad_lse is None else grad_lse.reshape(-1, *heads.query.shape[1:3])[group]
        gradients.append(
            _backward_heads(
                of_heads[0],
                lse_part,
                Partial(of_heads[1], of_heads[2]),
                heads,
                picked,
                config,
                is_causal=is_causal,
                scale=scale,
            )
        )
    grad_query, grad_key, grad_value = (torch.cat(part) for part in zip(*gradients, strict=True))
    return (
        grad_query.to(query.dtype).view(query.shape),
        grad_key.to(key.dtype).view(key.shape),
        grad_value.to(value.dtype).view(value.shape),
    )


def _forward_heads(
    heads: _Heads, chosen: Selection | None, config: MuSeConfig, *, is_causal: bool, scale: float
) -> tuple[Partial, Selection]:
    own = local.attend(heads.query, heads.key, heads.value, config.block_size, is_causal=is_causal, scale=scale)
    partials = [Partial(heads.rows(own.out), own.lse.flatten())]
    far = heads.far_field(config)
    if far is None:
        return merging.merge(partials), chosen or _no_selection(heads, config)
    if chosen is None and not config.monopole and not config.retrieved_clusters:
        chosen = _no_selection(heads, config)
    if config.monopole or chosen is None:
        of_summaries, chosen = _attend_to_summaries(far, chosen, config, is_causal=is_causal)
        partials.append(of_summaries)
    if chosen.opened.shape[-1] > 0:
        picks = far.buckets_of(chosen)
        partials.append(retrieval.attend(far.queries, far.key_rows, far.value_rows, picks, far.buckets))
    return merging.merge(partials), chosen


def _attend_to_summaries(
    far: _FarField, chosen: Selection | None, config: MuSeConfig, *, is_causal: bool
) -> tuple[Partial, Selection]:
    rows = far.queries.shape[0]
    table = with_spare_row(rows, far.values.shape[-1], far.queries)
    partial = Partial(table, torch.full_like(table[:, 0], -torch.inf))
    filled = chosen
    if filled is None:
        k1, k2 = selection_shape(config, far.keys.shape[1])
        no_index = torch.full((rows + 1, k1, 1 + k2), -1, dtype=torch.int32, device=table.device)
        filled = Selection(no_index[..., 0].contiguous(), no_index[..., 1:].contiguous())
    for part in far.parts(config):
        of_buckets, seen = part.summaries(is_causal=is_causal)
        selection.select_and_attend(
            part.residuals,
            part.segments,
            of_buckets,
            seen,
            filled,
            partial,
            is_causal=is_causal,
            select=chosen is None,
            attend=config.monopole,
        )
        if config.dipole != "none":
            correction = part.correction(seen, config, is_causal=is_causal)
            partial.out[:-1] += dipole.shift_values(correction, part.residuals, part.segments)
    if chosen is None:
        filled = Selection(filled.opened[:-1], filled.retrieved[:-1])
    return Partial(partial.out[:-1], partial.lse[:-1]), filled


def _backward_heads(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    merged: Partial,
    heads: _Heads,
    selected: Selection,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    own = local.attend_backward(
        grad_out,
        grad_lse,
        heads.query,
        heads.key,
        heads.value,
        merged.out,
        merged.lse,
        config.block_size,
        is_causal=is_causal,
        scale=scale,
    )
    grad_query, grad_key, grad_value = (gradient.to(heads.dtype) for gradient in own)
    far = heads.far_field(config)
    if far is None:
        return grad_query, grad_key, grad_value

    def add(to_queries: Tensor, to_keys: Tensor, to_values: Tensor) -> None:
        grad_query.add_(to_queries.view_as(grad_query), alpha=scale)
        grad_key.add_(to_keys.view_as(grad_key))
        grad_value.add_(to_values.view_as(grad_value))

    row_lse = merged.lse.flatten()
    row_grad = heads.rows(grad_out)
    delta = merging.shared_delta(heads.rows(merged.out), row_grad, None if grad_lse is None else grad_lse.flatten())
    if selected.opened.shape[-1] > 0:
        picks = far.buckets_of(selected)
        add(
            *retrieval.attend_backward(
                row_grad, row_lse, delta, far.queries, far.key_rows, far.value_rows, picks, far.buckets
            )
        )
    if config.monopole:
        add(*_summaries_backward(row_grad, row_lse, delta, far, selected, config, is_causal=is_causal))
    return grad_query, grad_key, grad_value


def _summaries_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    far: _FarField,
    selected: Selection,
    config: MuSeConfig,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_residuals, grad_keys, grad_values = (
        with_spare_row(rows.shape[0], rows.shape[1], rows) for rows in (far.residuals, far.key_rows, far.value_rows)
    )
    for part in far.parts(config):
        of_buckets, seen = part.summaries(is_causal=is_causal)
        if config.dipole != "none":
            correction = part.correction(seen, config, is_causal=is_causal)
            shift = dipole.shift_values(correction, part.residuals, part.segments)
            # Every summary term's value gained `shift`, so `dO . value - delta` gains `dO . shift`.
            delta = delta - (grad_out * shift).sum(-1)
        grad_buckets, grad_seen = selection.attend_backward(
            grad_out,
            lse,
            delta,
            part.residuals,
            part.segments,
            of_buckets,
            seen,
            selected,
            is_causal=is_causal,
            fill_in=grad_residuals,
        )
        if config.dipole != "none":
            of_summaries, _ = _attend_to_summaries(far, selected, config, is_causal=is_causal)
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
            for target, source in zip(vars(grad_seen).values(), vars(to_seen).values(), strict=True):
                target += source
        summaries.accumulate_backward(
            grad_seen,
            of_buckets,
            seen,
            is_causal=is_causal,
            differentiable_aggregation=config.differentiable_aggregation,
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


@dataclass(frozen=True)
class _Heads:
    """Some key heads (of any sequence) and the query heads that share them: `G` and `R` of them."""

    query: Tensor
    """(G, R, N, D), unscaled, in the dtype of the inputs"""
    key: Tensor
    """(G, 1, N, D)"""
    value: Tensor
    """(G, 1, N, Dv)"""
    query_centroids: Tensor
    """(G, R, Q, D)"""
    query_assignment: Tensor
    """(G, R, N)"""
    key_assignment: Tensor
    """(G, N)"""
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.query.dtype)

    def rows(self, tensor: Tensor) -> Tensor:
        """(G, R, N, X) -> (G R N, X), in the dtype of the computation."""
        return tensor.to(self.dtype).flatten(0, 2)

    def far_field(self, config: MuSeConfig) -> _FarField | None:
        """What the stages beyond the own block work on; None if there is only one block."""
        key_heads, query_heads, length, _ = self.query.shape
        blocks = config.number_of_blocks(length)
        if blocks == 1:
            return None
        queries = self.rows(self.query) * self.scale
        device = queries.device
        block = torch.arange(length, device=device) // config.block_size
        head = torch.arange(key_heads, device=device)[:, None]
        # To the stages, the query clusters of all the query heads of a key head are simply its query clusters.
        per_head = self.query_centroids.shape[2]
        query_clusters = query_heads * per_head
        offset = torch.arange(query_heads, device=device)[:, None] * per_head
        centroids, assignment = _largest_first(self.query_centroids.to(self.dtype), self.query_assignment.long())
        query_cluster = assignment + offset  # (G, R, N)
        key_cluster = self.key_assignment.long()  # (G, N)
        segment = (block * key_heads + head[..., None]) * query_clusters + query_cluster
        bucket = (head * blocks + block) * config.key_clusters + key_cluster
        centroids = centroids.flatten(1, 2)  # (G, R Q, D)
        own_centroid = centroids.flatten(0, 1)[(head[..., None] * query_clusters + query_cluster).flatten()]
        return _FarField(
            queries=queries,
            residuals=queries - own_centroid,
            keys=self.key[:, 0].to(self.dtype).contiguous(),
            values=self.value[:, 0].to(self.dtype).contiguous(),
            centroids=centroids,
            key_cluster=key_cluster,
            segments=group_rows(segment.flatten(), key_heads * blocks * query_clusters),
            buckets=group_rows(bucket.flatten(), key_heads * blocks * config.key_clusters),
            blocks=blocks,
            key_clusters=config.key_clusters,
            query_heads=query_heads,
        )


@dataclass(frozen=True)
class _FarField:
    """Queries as rows, (G R N, ...); keys and values per key head; the groups they fall into."""

    queries: Tensor
    """(G R N, D), scaled"""
    residuals: Tensor
    """(G R N, D)"""
    keys: Tensor
    """(G, N, D)"""
    values: Tensor
    """(G, N, Dv)"""
    centroids: Tensor
    """(G, R Q, D)"""
    key_cluster: Tensor
    """(G, N) int64"""
    segments: Groups
    """rows of queries by (block, key head, query head, query cluster)"""
    buckets: Groups
    """rows of keys by (key head, block, key cluster)"""
    blocks: int
    key_clusters: int
    query_heads: int

    @property
    def key_rows(self) -> Tensor:
        return self.keys.flatten(0, 1)

    @property
    def value_rows(self) -> Tensor:
        return self.values.flatten(0, 1)

    def parts(self, config: MuSeConfig) -> Iterator[_FarField]:
        """The far field of some query clusters at a time: nothing but the queries of a cluster reads its summaries."""
        query_clusters = self.centroids.shape[1]
        elements = self.keys.shape[0] * self.blocks * self.key_clusters * (self.keys.shape[2] + self.values.shape[2])
        at_once = query_clusters if config.dipole != "none" else max(1, SUMMARY_ELEMENTS // elements)
        for begin in range(0, query_clusters, at_once):
            some = slice(begin, begin + at_once)
            segments = (
                of_segments.view(-1, query_clusters)[:, some].flatten()
                for of_segments in (self.segments.starts, self.segments.sizes)
            )
            yield dataclasses.replace(
                self, centroids=self.centroids[:, some], segments=Groups(self.segments.order, *segments)
            )

    def summaries(self, *, is_causal: bool) -> tuple[Summaries, Summaries]:
        """Of each bucket, and accumulated over what each block sees."""
        of_buckets = summaries.summarise(
            self.keys, self.values, self.centroids, self.buckets, self.blocks, self.key_clusters
        )
        return of_buckets, summaries.accumulate(of_buckets, is_causal=is_causal)

    def correction(self, seen: Summaries, config: MuSeConfig, *, is_causal: bool) -> dipole.Correction:
        key_heads, length = self.key_cluster.shape
        sizes = self.segments.sizes.view(self.blocks, key_heads, self.query_heads, -1).sum(0)
        return dipole.find_correction(
            config.dipole,
            self.keys,
            self.values,
            self.centroids,
            sizes.to(self.keys.dtype) / length,
            self.key_cluster,
            seen,
            config.block_size,
            is_causal=is_causal,
        )

    def buckets_of(self, selected: Selection) -> Tensor:
        """(G R N, picks): the numbers of the buckets each query retrieves, -1 for none."""
        head = torch.arange(self.queries.shape[0], device=self.queries.device)
        head = head // (self.queries.shape[0] // self.keys.shape[0])
        block = selected.retrieved.long()
        number = (head[:, None, None] * self.blocks + block) * self.key_clusters + selected.opened.long()[..., None]
        return torch.where(block < 0, -1, number).flatten(1)


def _largest_first(centroids: Tensor, assignment: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber the query clusters of each head by size, so that neighbours have segments of similar size."""
    sizes = torch.zeros_like(centroids[..., 0], dtype=torch.int64).scatter_add_(
        2, assignment, torch.ones_like(assignment)
    )
    order = sizes.argsort(dim=2, descending=True, stable=True)  # (G, R, Q)
    return centroids.gather(2, order[..., None].expand_as(centroids)), order.argsort(dim=2).gather(2, assignment)


def _split_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    selected: Selection | None,
    config: MuSeConfig,
    scale: float,
) -> Iterator[tuple[slice, _Heads, Selection | None]]:
    """Groups of key heads small enough for the workspace, with their query heads and their rows of the selection."""
    batch, query_heads, length, head_dim = query.shape
    key_heads, value_dim = key.shape[1], value.shape[-1]
    shared_by = query_heads // key_heads
    query_clusters = clusters.query_centroids.shape[2]

    def by_key_head(tensor: Tensor, heads: int) -> Tensor:
        return tensor.reshape(batch * key_heads, heads, *tensor.shape[2:])

    summary_elements = query_clusters * config.key_clusters * config.number_of_blocks(length) * (head_dim + value_dim)
    picks = min(config.retrieved_clusters * config.retrieved_blocks, 16)
    per_head = shared_by * (min(SUMMARY_ELEMENTS, summary_elements) + length * (4 * head_dim + picks * value_dim))
    for group in _head_groups(batch * key_heads, per_head):
        heads = _Heads(
            query=by_key_head(query, shared_by)[group],
            key=by_key_head(key, 1)[group],
            value=by_key_head(value, 1)[group],
            query_centroids=by_key_head(clusters.query_centroids, shared_by)[group],
            query_assignment=by_key_head(clusters.query_assignment, shared_by)[group],
            key_assignment=by_key_head(clusters.key_assignment, 1)[group][:, 0],
            scale=scale,
        )
        rows = None
        if selected is not None:
            rows = Selection(
                by_key_head(selected.opened, shared_by)[group].flatten(0, 2),
                by_key_head(selected.retrieved, shared_by)[group].flatten(0, 2),
            )
        yield group, heads, rows


def _head_groups(heads: int, elements_per_head: int) -> list[slice]:
    size = max(1, min(heads, WORKSPACE_ELEMENTS // elements_per_head))
    return [slice(begin, begin + size) for begin in range(0, heads, size)]


def _no_selection(heads: _Heads, config: MuSeConfig) -> Selection:
    k1, k2 = selection_shape(config, heads.query.shape[2])
    rows = heads.query_assignment.numel()
    return Selection(
        heads.query_assignment.new_full((rows, k1), -1), heads.query_assignment.new_full((rows, k1, k2), -1)
    )


def selection_shape(config: MuSeConfig, length: int) -> tuple[int, int]:
    """Clusters and blocks per cluster that a selection has room for."""
    return min(config.retrieved_clusters, config.key_clusters), min(
        config.retrieved_blocks, config.number_of_blocks(length)
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What everything but the fused operators computes in: at least float32."""
    return torch.promote_types(dtype, torch.float32)
