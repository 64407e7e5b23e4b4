"""Lists of attentions that answer one question each: the paper's tables of this kind, at the length at hand, and ours.

The paper's base configuration at 64k is `Q128K128R8SP1B8k`; here it is `MuSeConfig.paper_sizes`, and what a table
varies is varied around that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from muse_attention.config import Clustering, MuSeConfig
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.fidelity import paper
from muse_attention.evaluation.fidelity.layers import FidelityRequest
from muse_attention.evaluation.fidelity.paper import PaperTable
from muse_attention.sizes import format_size

RETRIEVED_PART = 16
"""One in so many clusters is retrieved, unless a table is about that."""
NO_TILT = "no tilt"
ERROR_CONTROL = "error-control"


class Row(NamedTuple):
    labels: tuple[str, ...]
    request: FidelityRequest


@dataclass(frozen=True)
class Preset:
    name: str
    title: str
    question: str
    """what the table is to show, in words"""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    paper: tuple[PaperTable, ...] = ()
    """the paper's tables of the same kind"""

    @property
    def requests(self) -> list[FidelityRequest]:
        return [row.request for row in self.rows]


def find_presets(names: list[str], length: int, clustering: Clustering = "auto") -> list[Preset]:
    """The presets with these names at a length; all of them for `all`."""
    if "all" in names:
        names = list(PRESETS)
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; use all or some of {', '.join(PRESETS)}")
    base = _Base(MuSeConfig.paper_sizes(length).replace(clustering=clustering), length)
    found = [PRESETS[name](base) for name in dict.fromkeys(names)]
    return [preset for preset in found if preset.rows]


@dataclass(frozen=True)
class _Base:
    config: MuSeConfig
    length: int

    @property
    def clusters(self) -> int:
        return self.config.key_clusters

    @property
    def counts(self) -> list[int]:
        """Powers of two from 16 clusters to four times the base."""
        counts = [16]
        while counts[-1] < 4 * self.clusters:
            counts.append(2 * counts[-1])
        return counts

    def row(self, *labels: object, **changes: object) -> Row:
        """The base with these changes. `joint` changes both cluster counts, and retrieval with them."""
        if "joint" in changes:
            joint = int(str(changes.pop("joint")))
            changes = {"query_clusters": joint, "key_clusters": joint, "retrieved_clusters": _part(joint)} | changes
        config = self.config.replace(**changes)
        return Row(tuple(map(str, labels)), FidelityRequest(f"muse:{config}", self.length))

    def tilted_and_not(self, count: int, *labels: object, **changes: object) -> list[Row]:
        return [
            self.row(*labels, "tilt", joint=count, **changes),
            self.row(*labels, NO_TILT, joint=count, tilt=False, **changes),
        ]


def _part(clusters: int) -> int:
    return max(1, clusters // RETRIEVED_PART)


def _methods(base: _Base) -> Preset:
    config = base.config
    # As many keys are retrieved by MoBA as by MuSe, on average.
    retrieved = config.retrieved_clusters * config.retrieved_blocks * config.block_size // config.key_clusters
    moba = f"moba:L{format_size(config.block_size)}B{format_size(retrieved)}R1"
    return Preset(
        "methods",
        "MuSe, MoBA and block-diagonal attention at equal sparsity",
        "All three attend exactly to the same own block; MoBA retrieves one block of as many keys as MuSe retrieves.",
        ("attention",),
        (
            base.row("MuSe"),
            Row(("MoBA",), FidelityRequest(moba, base.length)),
            Row(("block-diagonal",), FidelityRequest(f"block_diagonal:{format_size(config.block_size)}", base.length)),
        ),
        (paper.METHODS,),
    )


def _joint(base: _Base) -> Preset:
    rows = [row for count in base.counts for row in base.tilted_and_not(count, count, _part(count))]
    return Preset(
        "joint",
        "Clusters of queries and keys together, with and without the tilt",
        "Retrieval grows with the clusters (one in 16). Without the tilt all queries see the same summaries.",
        ("clusters", "retrieved", "summaries"),
        tuple(rows),
        (paper.JOINT_1B, paper.JOINT_1B_NO_TILT, paper.JOINT_96M),
    )


def _query_clusters(base: _Base) -> Preset:
    counts = [4 * base.clusters >> step for step in range((4 * base.clusters).bit_length())]
    rows = [base.row(count, query_clusters=count) for count in counts]
    return Preset(
        "query-clusters",
        "Clusters of queries alone",
        f"{base.clusters} clusters of keys. One cluster of queries still tilts summaries by the mean query; without "
        "the tilt they are plain means (the paper's Q = 1).",
        ("query clusters",),
        (*rows, base.row(NO_TILT, tilt=False)),
        (paper.QUERY_CLUSTERS,),
    )


def _key_clusters(base: _Base) -> Preset:
    rows = [base.row(count, _part(count), key_clusters=count, retrieved_clusters=_part(count)) for count in base.counts]
    return Preset(
        "key-clusters",
        "Clusters of keys alone",
        f"{base.clusters} clusters of queries; one in 16 clusters of keys is retrieved.",
        ("key clusters", "retrieved"),
        tuple(rows),
        (paper.KEY_CLUSTERS,),
    )


def _monopole(base: _Base) -> Preset:
    rows = [row for count in base.counts for row in base.tilted_and_not(count, count, retrieved_clusters=0)]
    return Preset(
        "monopole",
        "Summaries alone: nothing is retrieved",
        "What the summaries of the far field are worth by themselves.",
        ("clusters", "summaries"),
        tuple(rows),
        (paper.MONOPOLE_96M, paper.DECOMPOSITION),
    )


def _retrieval_only(base: _Base) -> Preset:
    counts = dict.fromkeys((base.clusters, 4 * base.clusters))
    rows = [row for count in counts for row in base.tilted_and_not(count, count, _part(count), monopole=False)]
    return Preset(
        "retrieval-only",
        "Retrieval alone: summaries choose, but are not attended to",
        "Whether the tilt helps by choosing better, or by approximating better.",
        ("clusters", "retrieved", "summaries"),
        tuple(rows),
        (paper.RETRIEVAL_ONLY, paper.DECOMPOSITION),
    )


def _fixed_retrieval(base: _Base) -> Preset:
    retrieved = base.config.retrieved_clusters
    rows = [
        base.row(count, retrieved * base.config.block_size // count, joint=count, retrieved_clusters=retrieved)
        for count in base.counts
    ]
    return Preset(
        "fixed-retrieval",
        "More clusters, as many retrieved",
        f"{retrieved} clusters are retrieved at any count, so that more clusters retrieve fewer keys.",
        ("clusters", "keys retrieved"),
        tuple(rows),
        (paper.FIXED_RETRIEVAL_96M, paper.FIXED_RETRIEVAL_1B),
    )


def _retrieval_count(base: _Base) -> Preset:
    counts = [0, *(1 << step for step in range(base.clusters.bit_length() - 1))]
    return Preset(
        "retrieval-count",
        "Retrieved clusters",
        f"{base.clusters} clusters of queries and of keys, one block of each retrieved cluster.",
        ("retrieved",),
        tuple(base.row(count, retrieved_clusters=count) for count in counts),
        (paper.RETRIEVAL_COUNT,),
    )


def _block_size(base: _Base) -> Preset:
    rows = [
        base.row(format_size(size), blocks, block_size=size, retrieved_blocks=blocks)
        for blocks, size in ((1 << step, 2 * base.config.block_size >> step) for step in range(4))
        if size >= base.clusters
    ]
    return Preset(
        "block-size",
        "Block size, with retrieval over an equal span",
        "Smaller blocks leave more to be approximated; retrieved blocks times their size is constant.",
        ("block", "blocks retrieved"),
        tuple(rows),
        (paper.BLOCK_SIZE,),
    )


def _clusters_or_blocks(base: _Base) -> Preset:
    count, budget = 4 * base.clusters, 8
    rows = [
        base.row(budget // blocks, blocks, joint=count, retrieved_clusters=budget // blocks, retrieved_blocks=blocks)
        for blocks in (1, 2, 4, 8)
    ]
    return Preset(
        "clusters-or-blocks",
        "Retrieving more clusters, or more blocks of each",
        f"{count} clusters of queries and of keys; always {budget} pairs of cluster and block.",
        ("clusters retrieved", "blocks of each"),
        tuple(rows),
        (paper.CLUSTERS_OR_BLOCKS,),
    )


def _dipole(base: _Base) -> Preset:
    rows = []
    for count in dict.fromkeys((base.clusters, 4 * base.clusters)):
        rows.append(base.row(count, "nothing", joint=count, retrieved_clusters=0))
        rows += [
            base.row(count, f"{kind} dipole", joint=count, retrieved_clusters=0, dipole=kind)
            for kind in ("shared", "centred", "tilted")
        ]
        rows.append(base.row(count, f"{_part(count)} retrieved", joint=count))
    return Preset(
        "dipole",
        "Dipoles against retrieval",
        "What is added to the summaries: a first-order correction of their values, or retrieval.",
        ("clusters", "added"),
        tuple(rows),
        (paper.DIPOLE,),
    )


def _length(base: _Base) -> Preset:
    rows = []
    length = base.length
    while length >= 2048:
        config = MuSeConfig.paper_sizes(length).replace(clustering=base.config.clustering)
        labels = (format_size(length), str(config.key_clusters), format_size(config.block_size))
        rows.append(Row(labels, FidelityRequest(f"muse:{config}", length)))
        length //= 2
    return Preset(
        "length",
        "Length, with the sizes that go with it",
        "The paper's sizes for each length, on the beginning of each sample. Where clusters cannot grow by the "
        "square root of two they stay, so compare every other line.",
        ("length", "clusters", "block"),
        tuple(reversed(rows)),
        (paper.LENGTH,),
    )


def _clustering(base: _Base) -> Preset:
    rows = [base.row("streaming, one pass", clustering="streaming")]
    for sample, words in ((64, "64 vectors a cluster"), (base.length, "all vectors")):
        rows += [
            base.row(f"Lloyd on {words}, {number} iterations", clustering="lloyd", lloyd_iterations=number,
                     lloyd_sample=sample)
            for number in (1, 2, 4, 8)
        ]  # fmt: skip
    return Preset(
        "clustering",
        "How centroids are found",
        "Streaming K-means of the paper, and Lloyd's iterations from the same start. The default is Lloyd, with 4 "
        "iterations on 64 vectors a cluster.",
        ("centroids",),
        tuple(rows),
    )


def _caps(base: _Base) -> Preset:
    rows = [
        base.row(count, of_queries or "none", of_keys or "none", joint=count, query_cap_factor=of_queries,
                 cap_factor=of_keys)
        for count in (base.clusters, 2 * base.clusters)
        for of_queries, of_keys in ((4, 4), (None, 4), (None, None))
    ]  # fmt: skip
    return Preset(
        "caps",
        "Limits on the size of a cluster",
        "In units of the mean size in a block. Overflow goes to another cluster, whose centroid it is far from. The "
        "paper caps both at 4; the default here caps keys alone.",
        ("clusters", "cap of queries", "cap of keys"),
        tuple(rows),
    )


def _error_control(base: _Base) -> Preset:
    """In blocks of an eighth of the length, whatever the base has."""
    block = max(16, base.length // 8)
    rows = [
        _named_row("paper", f"Q{clusters}K{clusters}", f"R{clusters // 16}", base.length,
                   f"muse:QK{clusters}R{clusters // 16}B{block}")
        for clusters in (32, 64, 128)
    ]  # fmt: skip
    part = block // RETRIEVED_PART
    rows += [
        _named_row("MoBA", "", f"{count} x {part} keys", base.length,
                   f"moba:L{format_size(block)}B{format_size(part)}R{count}")
        for count in (1, 2, 4)
    ]  # fmt: skip
    for clusters in ("Q32K32", "Q64K64", "Q128K128", "Q32K128", "Q16K256", "Q32K256"):
        rows += [
            _named_row(f"tolerance, {clusters}", clusters, f"T{tolerance} R{budget}", base.length,
                       f"muse:{clusters}R{budget}T{tolerance}B{block}")
            for tolerance, budget in (("0.03", 8), ("0.01", 8), ("0.003", 16))
        ]  # fmt: skip
    return Preset(
        ERROR_CONTROL,
        "Retrieval by expected error, against the paper's rule and MoBA",
        f"Blocks of {format_size(block)}. The paper's rule retrieves R buckets for every query, {part} keys if all "
        "buckets had the mean size; MoBA as many keys, twice and four times as many; a tolerance T retrieves what is "
        "expected to be wrong by more, R buckets per query of a head at most.",
        ("family", "clusters", "rule"),
        tuple(rows),
    )


def _named_row(family: str, clusters: str, rule: str, length: int, attention: str) -> Row:
    return Row((family, clusters, rule), FidelityRequest(full_name(attention, length), length))


PRESETS: dict[str, Callable[[_Base], Preset]] = {
    "methods": _methods,
    "joint": _joint,
    "query-clusters": _query_clusters,
    "key-clusters": _key_clusters,
    "monopole": _monopole,
    "retrieval-only": _retrieval_only,
    "fixed-retrieval": _fixed_retrieval,
    "retrieval-count": _retrieval_count,
    "block-size": _block_size,
    "clusters-or-blocks": _clusters_or_blocks,
    "dipole": _dipole,
    "length": _length,
    "clustering": _clustering,
    "caps": _caps,
    ERROR_CONTROL: _error_control,
}
