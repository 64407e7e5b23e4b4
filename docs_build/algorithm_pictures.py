"""The pictures of docs/explanation/algorithm.md, computed from seeded data: `python -m docs_build.algorithm_pictures`.

One head of dimension 2, so that queries and keys can be drawn as they are. Everything shown is what
`muse_attention.backends.reference` computes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from matplotlib import pyplot
from matplotlib.patches import Patch
from torch import Tensor

from docs_build.style import BLUE, GREEN, GREY, ORANGE, save
from muse_attention import MuSeConfig
from muse_attention.backends.reference import Reference, reference_attention
from muse_lab.synthetic import clustered_qkv

LENGTH, QUERY = 512, 488
CONFIG = MuSeConfig.parse("QK6R2SP1B64")
OWN, RETRIEVED, OF_BLOCK, OF_CLUSTER = (
    "own block: exact",
    "retrieved: exact",
    "summary of a bucket",
    "summary of a cluster",
)
COLOURS = {OWN: BLUE, RETRIEVED: ORANGE, OF_BLOCK: GREEN, OF_CLUSTER: GREY}


class Example(NamedTuple):
    """One head of a causal call: (length, 2) each, and what the reference made of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    reference: Reference


def make_example() -> Example:
    tensors = clustered_qkv(1, 1, LENGTH, 2, topics=10, spread=0.3, sharpness=2.0, seed=4)
    query, key, value = (tensor.double() for tensor in tensors)
    reference = reference_attention(query, key, value, CONFIG, is_causal=True)
    return Example(query[0, 0], key[0, 0], value[0, 0], reference)


def draw_clusters(example: Example) -> None:
    """Queries and keys, each with its own clustering."""
    clusters = example.reference.clusters
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.8))
    scaled = example.query / math.sqrt(2)
    sides = (
        (left, "queries", scaled, clusters.query_assignment, clusters.query_centroids),
        (right, "keys", example.key, clusters.key_assignment, clusters.key_centroids),
    )
    for axes, name, vectors, assignment, centroids in sides:
        for cluster in range(centroids.shape[2]):
            axes.plot(*vectors[assignment[0, 0] == cluster].T, "o", markersize=2.8, markeredgewidth=0, alpha=0.7)
        axes.scatter(*centroids[0, 0].T, marker="X", color="black", s=70, zorder=3, label="centroids")
        axes.set_title(f"{len(vectors)} {name}, {centroids.shape[2]} clusters", fontsize=11)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
    right.legend(frameon=False, loc="best")
    save(figure, "clusters.svg")


def draw_buckets(example: Example) -> None:
    """Keys by position and cluster: a cell is a bucket, its colour what it is for one query."""
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    size, own_block = CONFIG.block_size, QUERY // CONFIG.block_size
    opened, retrieved = _selected(example)
    for cluster in range(CONFIG.key_clusters):
        if not opened[cluster]:
            _shade(axes, 0, own_block * size, cluster, COLOURS[OF_CLUSTER])
        for block in range(own_block) if opened[cluster] else ():
            _shade(axes, block * size, size, cluster, COLOURS[RETRIEVED if retrieved[block, cluster] else OF_BLOCK])
        _shade(axes, own_block * size, QUERY - own_block * size, cluster, COLOURS[OWN])
    clusters = example.reference.clusters.key_assignment[0, 0]
    jitter = (torch.arange(LENGTH) * 0.618 % 1 - 0.5) * 0.6
    axes.scatter(torch.arange(LENGTH), clusters + jitter, s=3, color="black")
    axes.axvline(QUERY, color="black", linewidth=1.2)
    axes.text(QUERY + 3, CONFIG.key_clusters - 0.35, "query", fontsize=10)
    axes.set_xticks(range(0, LENGTH + 1, size))
    axes.set_yticks(range(CONFIG.key_clusters), [f"{cluster + 1}" for cluster in range(CONFIG.key_clusters)])
    axes.set_xlim(0, LENGTH)
    axes.set_ylim(-0.5, CONFIG.key_clusters - 0.1)
    axes.set_xlabel(f"position; a block has {size} tokens")
    axes.set_ylabel("key cluster")
    handles = [Patch(color=colour, alpha=0.45, label=kind) for kind, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=4, frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, "buckets.svg")


def draw_softmax(example: Example) -> None:
    """How the weight of one query is divided among its terms, and what exact attention gives the same keys."""
    reference = example.reference
    blocks = CONFIG.number_of_blocks(LENGTH)
    parts = [LENGTH, LENGTH, CONFIG.key_clusters, blocks * CONFIG.key_clusters]
    own, retrieved, clusters, buckets = (part.sum() for part in reference.weights[0, 0, QUERY].split(parts))
    approximate = {OWN: own, RETRIEVED: retrieved, OF_BLOCK: buckets, OF_CLUSTER: clusters}
    exact = _exact_weights(example)
    figure, axes = pyplot.subplots(figsize=(8, 1.9))
    for row, (name, weights) in enumerate((("MuSe", approximate), ("exact", exact))):
        left = 0.0
        for kind, weight in weights.items():
            axes.barh(row, float(weight), left=left, color=COLOURS[kind], alpha=0.8, height=0.6)
            if weight > 0.05:
                axes.text(
                    left + float(weight) / 2, row, f"{float(weight):.2f}", ha="center", va="center", color="white"
                )
            left += float(weight)
        axes.text(-0.01, row, name, ha="right", va="center")
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("share of the softmax of one query")
    handles = [Patch(color=colour, alpha=0.8, label=kind) for kind, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=4, frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, "one-softmax.svg")


def _selected(example: Example) -> tuple[Tensor, Tensor]:
    """Of the one query: clusters that it opens, (clusters,) bool, and buckets that it retrieves, (blocks, clusters)."""
    selection = example.reference.selection
    cluster, block = selection.opened[0, 0, QUERY].long(), selection.retrieved[0, 0, QUERY, :, 0].long()
    opened = torch.zeros(CONFIG.key_clusters, dtype=torch.bool)
    opened[cluster[cluster >= 0]] = True
    retrieved = torch.zeros(CONFIG.number_of_blocks(LENGTH), CONFIG.key_clusters, dtype=torch.bool)
    retrieved[block[block >= 0], cluster[block >= 0]] = True
    return opened, retrieved


def _exact_weights(example: Example) -> dict[str, Tensor]:
    """Exact attention's weight on the keys behind each kind of term."""
    logits = example.key @ example.query[QUERY] / math.sqrt(2)
    weights = torch.where(torch.arange(LENGTH) <= QUERY, logits, -math.inf).softmax(-1)
    block = torch.arange(LENGTH) // CONFIG.block_size
    cluster = example.reference.clusters.key_assignment[0, 0].long()
    opened, retrieved = _selected(example)
    opened, retrieved = opened[cluster], retrieved[block, cluster]
    own = block == QUERY // CONFIG.block_size
    return {
        OWN: weights[own].sum(),
        RETRIEVED: weights[~own & retrieved].sum(),
        OF_BLOCK: weights[~own & opened & ~retrieved].sum(),
        OF_CLUSTER: weights[~own & ~opened].sum(),
    }


def _shade(axes: pyplot.Axes, start: int, width: int, cluster: int, colour: str) -> None:
    axes.add_patch(
        pyplot.Rectangle((start, cluster - 0.5), width, 1, facecolor=colour, edgecolor="white", alpha=0.45, linewidth=1)
    )


if __name__ == "__main__":
    shown = make_example()
    draw_clusters(shown)
    draw_buckets(shown)
    draw_softmax(shown)
    print("wrote docs/images/clusters.svg, buckets.svg and one-softmax.svg")
