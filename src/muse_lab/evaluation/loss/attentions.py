"""Which attentions a model's loss is measured under, unless others are named."""

from __future__ import annotations

from muse_attention.config import MuSeConfig


def figure_attentions(length: int) -> tuple[str, ...]:
    """Those of the paper's Llama figure, around `MuSeConfig.paper_sizes`.

    Exact attention; MuSe with half, all, twice and four times the clusters, a sixteenth of them opened; one query
    cluster, tilted; and no tilt.
    """
    base = MuSeConfig.paper_sizes(length)
    clusters = base.key_clusters
    configs = [
        base.replace(query_clusters=number, key_clusters=number, retrieved_clusters=max(1, number // 16))
        for number in (clusters // 2, clusters, 2 * clusters, 4 * clusters)
    ]
    configs += [base.replace(query_clusters=1), base.replace(tilt=False)]
    return ("exact", *(f"muse:{config}" for config in configs))
