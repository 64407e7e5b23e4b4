"""The pictures of docs/explanation/algorithm.md, computed from seeded data: `python -m docs_build.algorithm_pictures`.

One head of dimension 2, so that queries and keys can be drawn as they are. Everything shown is what
`muse_attention.backends.reference` computes: blockwise MuSe, and the paper's method. Pictures are narrow, so that a
phone shows them whole with letters that can be read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from matplotlib import pyplot
from matplotlib.patches import Patch
from torch import Tensor

from docs_build.style import BLUE, GREEN, GREY, ORANGE, WIDTH, save
from muse_attention import MuSeConfig, find_clusters, muse_attention
from muse_attention.backends.reference import Reference, reference_attention
from muse_attention.core.generations import Generations
from muse_attention.core.query_tiles import place_in_tiles
from muse_lab.synthetic import clustered_qkv

LENGTH, QUERY = 512, 500
BLOCKWISE, PAPER = MuSeConfig.parse("Q4K6T0.02B64,caution=0"), MuSeConfig.parse("QK6R2SP1B64")
SHOWN_BLOCK = 3
REPLACED_FROM = 224
"""In the middle of a block."""
BLOCKS_OF_GENERATIONS = 16
OWN, RETRIEVED, OF_BUCKET, OF_CLUSTER = (
    "own block: exact",
    "retrieved: exact",
    "summary of a bucket",
    "summary of a cluster",
)
COLOURS = {OWN: BLUE, RETRIEVED: ORANGE, OF_BUCKET: GREEN, OF_CLUSTER: GREY}


class Example(NamedTuple):
    """One head of a causal call: (length, 2) each, and what the reference made of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    config: MuSeConfig
    reference: Reference


def make_data(seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    tensors = clustered_qkv(1, 1, LENGTH, 2, topics=10, spread=0.3, sharpness=2.0, seed=seed)
    query, key, value = (tensor.double() for tensor in tensors)
    return query, key, value


def make_example(config: MuSeConfig) -> Example:
    query, key, value = make_data()
    reference = reference_attention(query, key, value, config, is_causal=True)
    return Example(query[0, 0], key[0, 0], value[0, 0], config, reference)


# --- Blockwise MuSe --------------------------------------------------------------------------------------------------


def draw_block_buckets(example: Example) -> None:
    """The keys of one block in their buckets, with plain means and the means that one query centroid sees."""
    config, clusters = example.config, example.reference.clusters
    begin = SHOWN_BLOCK * config.block_size
    keys = example.key[begin : begin + config.block_size]
    bucket = clusters.key_assignment[0, 0, begin : begin + config.block_size]
    row = QUERY // config.block_size
    generation = Generations(config.number_of_blocks(LENGTH), is_causal=True).of_block(row)
    centroid = clusters.query_centroids[0, 0, generation, int(clusters.query_assignment[0, 0, QUERY])]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.9))
    plain, tilted = [], []
    for number in range(config.key_clusters):
        members = keys[bucket == number]
        axes.plot(*members.T, "o", markersize=5, markeredgewidth=0, alpha=0.7)
        if len(members):
            plain.append(members.mean(0))
            tilted.append((members @ centroid).softmax(0) @ members)
    axes.scatter(*torch.stack(plain).T, marker="x", color="black", s=45, zorder=3, label="plain mean")
    axes.scatter(
        *torch.stack(tilted).T, marker="D", facecolor="white", edgecolor="black", s=38, zorder=4, label="tilted mean"
    )
    reach = 0.45 * keys.abs().max() / centroid.norm() * centroid
    axes.annotate(
        "", xy=reach.tolist(), xytext=(0, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.6, "color": GREY}
    )
    axes.text(0, -0.15, "query\ncentroid", fontsize=10, color=GREY, ha="center", va="top")
    axes.set_aspect("equal", adjustable="datalim")
    axes.axis("off")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, "block-buckets.svg")


def draw_what_a_query_sees(example: Example) -> None:
    """Blocks by position, buckets of each as cells: what each is for one query."""
    config = example.config
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.0))
    size, own_block = config.block_size, QUERY // config.block_size
    retrieved = _retrieved_buckets(example)
    for block in range(own_block):
        for bucket in range(config.key_clusters):
            kind = RETRIEVED if retrieved[block, bucket] else OF_BUCKET
            _shade(axes, block * size + 2, size - 4, bucket, COLOURS[kind])
    axes.add_patch(
        pyplot.Rectangle(
            (own_block * size + 2, -0.5), QUERY - own_block * size, config.key_clusters, facecolor=BLUE, alpha=0.45
        )
    )
    at = torch.arange(LENGTH)
    bucket = example.reference.clusters.key_assignment[0, 0].double()
    # Buckets of the own block play no part: its keys are anywhere.
    bucket = torch.where(at // size == own_block, at * 0.618 % 1 * (config.key_clusters - 1), bucket)
    jitter = (at * 0.618 % 1 - 0.5) * 0.6
    axes.scatter(at[: QUERY + 1], (bucket + jitter)[: QUERY + 1], s=3, color="black")
    _mark_query(axes, config)
    _label_blocks(axes, config, "bucket")
    _legend(axes, (OWN, RETRIEVED, OF_BUCKET))
    save(figure, "what-a-query-sees.svg")


def draw_generations() -> None:
    """Which past the query centroids of each generation come from, and which blocks they serve."""
    generations = Generations(BLOCKS_OF_GENERATIONS, is_causal=True)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 2.4))
    for generation in range(generations.number):
        for block in range(generations.past(generation)):
            _shade(axes, block, 1, generation, BLUE)
        for block in _served(generations, generation):
            _shade(axes, block, 1, generation, ORANGE)
    axes.set_xlim(0, generations.blocks)
    axes.set_ylim(generations.number - 0.5, -0.5)
    axes.set_xticks([block + 0.5 for block in range(generations.blocks)], range(generations.blocks), fontsize=9)
    axes.set_yticks(range(generations.number))
    axes.tick_params(length=0)
    axes.set_xlabel("block")
    axes.set_ylabel("generation")
    handles = [Patch(color=BLUE, alpha=0.45, label="found from"), Patch(color=ORANGE, alpha=0.45, label="serves")]
    axes.legend(handles=handles, ncols=2, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, "generations.svg")


def draw_softmax(example: Example) -> None:
    """How the weight of one query is divided among its terms, and what exact attention gives the same keys."""
    config = example.config
    buckets = config.number_of_blocks(LENGTH) * config.key_clusters
    parts = (part.sum() for part in example.reference.weights[0, 0, QUERY].split([LENGTH, LENGTH, buckets]))
    approximate = dict(zip((OWN, RETRIEVED, OF_BUCKET), parts, strict=True))
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.7))
    for row, (name, weights) in enumerate((("exact", _exact_weights(example)), ("MuSe", approximate))):
        left = 0.0
        for kind, weight in weights.items():
            axes.barh(row, float(weight), left=left, color=COLOURS[kind], alpha=0.8, height=0.6)
            if weight > 0.05:
                middle = left + float(weight) / 2
                axes.text(middle, row, f"{float(weight):.2f}".lstrip("0"), ha="center", va="center", color="white")
            left += float(weight)
        axes.text(-0.01, row, name, ha="right", va="center")
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("share of the softmax of one query")
    _legend(axes, (OWN, RETRIEVED, OF_BUCKET), alpha=0.8)
    save(figure, "one-softmax.svg")


def draw_what_never_changes() -> None:
    """What another ending of the sequence changes: every part is computed twice and compared bit by bit."""
    query, key, value = make_data()
    changed = [
        torch.cat((tensor[:, :, :REPLACED_FROM], other[:, :, REPLACED_FROM:]), 2)
        for tensor, other in zip((query, key, value), make_data(seed=5), strict=True)
    ]
    both = (query, key, value), changed
    before, after = (find_clusters(*tensors[:2], config=BLOCKWISE, is_causal=True) for tensors in both)
    generations = Generations(BLOCKWISE.number_of_blocks(LENGTH), is_causal=True)
    size = BLOCKWISE.block_size
    blocks = [(block * size, size) for block in range(generations.seen_blocks)]
    served = [_served(generations, generation) for generation in range(generations.number)]
    rows = {
        "tokens": _runs(_differs(key, changed[1])),
        "clusters of keys": (blocks, _differs(before.key_centroids, after.key_centroids)),
        "clusters of queries": (
            [(part[0] * size, len(part) * size) for part in served],
            _differs(before.query_centroids, after.query_centroids),
        ),
    }
    for name, config in (("outputs", BLOCKWISE), ("outputs of the\npaper's method", PAPER)):
        one, other = (muse_attention(*tensors, is_causal=True, config=config) for tensors in both)
        rows[name] = _runs(_differs(one, other))
    figure, axes = pyplot.subplots(figsize=(0.8 * WIDTH, 2.7))
    for row, (places, differs) in enumerate(rows.values()):
        for (start, width), is_changed in zip(places, differs.tolist(), strict=True):
            colour = ORANGE if is_changed else BLUE
            axes.barh(row, width, left=start, height=0.7, facecolor=colour, edgecolor="white", alpha=0.45)
    axes.axvline(REPLACED_FROM, color="black", linewidth=1.2)
    axes.set_xlim(0, LENGTH)
    axes.set_xticks(range(0, LENGTH + 1, 2 * size))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"position; a block has {size} tokens")
    handles = [Patch(color=BLUE, alpha=0.45, label="the same bits"), Patch(color=ORANGE, alpha=0.45, label="changed")]
    axes.legend(handles=handles, ncols=2, frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.3, 1.0))
    save(figure, "what-never-changes.svg")


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """(parts,) bool, of (1, 1, parts, ...)"""
    return (one != other).flatten(3).any(-1)[0, 0]


def _runs(differs: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """Begin and length of each run of equal tokens, and what it is."""
    values, lengths = differs.unique_consecutive(return_counts=True)
    begins = lengths.cumsum(0) - lengths
    return list(zip(begins.tolist(), lengths.tolist(), strict=True)), values


def _served(generations: Generations, generation: int) -> list[int]:
    return [block for block in range(1, generations.blocks) if generations.of_block(block) == generation]


def _retrieved_buckets(example: Example) -> Tensor:
    """(blocks, buckets of one) bool: what the one query attends to key by key."""
    config, reference = example.config, example.reference
    tile, row = place_in_tiles(reference.clusters.query_assignment, config)
    block = QUERY // config.block_size
    first = reference.selection.retrieved[0, 0, block, tile[0, 0, QUERY]]  # of the tile that wants each bucket
    return (first <= row[0, 0, QUERY]).view(-1, config.key_clusters)[:block]


def _exact_weights(example: Example) -> dict[str, Tensor]:
    """Exact attention's weight on the keys behind each kind of term."""
    logits = example.key @ example.query[QUERY] / math.sqrt(2)
    weights = torch.where(torch.arange(LENGTH) <= QUERY, logits, -math.inf).softmax(-1)
    own_block = QUERY // example.config.block_size
    begin = own_block * example.config.block_size
    block = torch.arange(begin) // example.config.block_size
    bucket = example.reference.clusters.key_assignment[0, 0, :begin].long()
    retrieved = _retrieved_buckets(example)[block, bucket]
    far = weights[:begin]
    return {OWN: weights[begin:].sum(), RETRIEVED: far[retrieved].sum(), OF_BUCKET: far[~retrieved].sum()}


# --- The paper's method ----------------------------------------------------------------------------------------------


def draw_clusters(example: Example) -> None:
    """Queries and keys, each with its own clustering."""
    clusters = example.reference.clusters
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, 2.9))
    scaled = example.query / math.sqrt(2)
    sides = (
        (left, "queries", scaled, clusters.query_assignment, clusters.query_centroids),
        (right, "keys", example.key, clusters.key_assignment, clusters.key_centroids),
    )
    for axes, name, vectors, assignment, centroids in sides:
        for cluster in range(centroids.shape[2]):
            axes.plot(*vectors[assignment[0, 0] == cluster].T, "o", markersize=2.5, markeredgewidth=0, alpha=0.7)
        axes.scatter(*centroids[0, 0].T, marker="X", color="black", s=50, zorder=3)
        axes.set_title(f"{len(vectors)} {name}, {centroids.shape[2]} clusters", fontsize=11)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
    save(figure, "clusters.svg")


def draw_buckets(example: Example) -> None:
    """Keys by position and cluster: a cell is a bucket, its colour what it is for one query."""
    config = example.config
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.0))
    size, own_block = config.block_size, QUERY // config.block_size
    opened, retrieved = _selected(example)
    for cluster in range(config.key_clusters):
        if not opened[cluster]:
            _shade(axes, 0, own_block * size, cluster, COLOURS[OF_CLUSTER])
        for block in range(own_block) if opened[cluster] else ():
            _shade(axes, block * size, size, cluster, COLOURS[RETRIEVED if retrieved[block, cluster] else OF_BUCKET])
        _shade(axes, own_block * size, QUERY - own_block * size, cluster, COLOURS[OWN])
    clusters = example.reference.clusters.key_assignment[0, 0]
    jitter = (torch.arange(LENGTH) * 0.618 % 1 - 0.5) * 0.6
    axes.scatter(torch.arange(LENGTH), clusters + jitter, s=3, color="black")
    _mark_query(axes, config)
    _label_blocks(axes, config, "key cluster")
    _legend(axes, tuple(COLOURS))
    save(figure, "buckets.svg")


def _selected(example: Example) -> tuple[Tensor, Tensor]:
    """Of the one query: clusters that it opens, (clusters,) bool, and buckets that it retrieves, (blocks, clusters)."""
    config, selection = example.config, example.reference.selection
    cluster, block = selection.opened[0, 0, QUERY].long(), selection.retrieved[0, 0, QUERY, :, 0].long()
    opened = torch.zeros(config.key_clusters, dtype=torch.bool)
    opened[cluster[cluster >= 0]] = True
    retrieved = torch.zeros(config.number_of_blocks(LENGTH), config.key_clusters, dtype=torch.bool)
    retrieved[block[block >= 0], cluster[block >= 0]] = True
    return opened, retrieved


# --- Both ------------------------------------------------------------------------------------------------------------


def _shade(axes: pyplot.Axes, start: int, width: int, row: int, colour: str) -> None:
    axes.add_patch(
        pyplot.Rectangle((start, row - 0.5), width, 1, facecolor=colour, edgecolor="white", alpha=0.45, linewidth=1)
    )


def _mark_query(axes: pyplot.Axes, config: MuSeConfig) -> None:
    axes.axvline(QUERY, color="black", linewidth=1.2)
    axes.text(QUERY, config.key_clusters - 0.4, "query", fontsize=10, ha="right")


def _label_blocks(axes: pyplot.Axes, config: MuSeConfig, rows: str) -> None:
    axes.set_xticks(range(0, LENGTH + 1, 2 * config.block_size))
    axes.set_yticks(range(config.key_clusters), range(1, config.key_clusters + 1))
    axes.set_xlim(0, LENGTH)
    axes.set_ylim(-0.5, config.key_clusters)
    axes.set_xlabel(f"position; a block has {config.block_size} tokens")
    axes.set_ylabel(rows)


def _legend(axes: pyplot.Axes, kinds: tuple[str, ...], alpha: float = 0.45) -> None:
    handles = [Patch(color=COLOURS[kind], alpha=alpha, label=kind) for kind in kinds]
    axes.legend(handles=handles, ncols=2, frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.45, 1.0))


if __name__ == "__main__":
    blockwise, of_paper = make_example(BLOCKWISE), make_example(PAPER)
    draw_block_buckets(blockwise)
    draw_what_a_query_sees(blockwise)
    draw_generations()
    draw_softmax(blockwise)
    draw_what_never_changes()
    draw_clusters(of_paper)
    draw_buckets(of_paper)
    print("wrote docs/images: block-buckets, what-a-query-sees, generations, one-softmax, what-never-changes,")
    print("clusters and buckets")
