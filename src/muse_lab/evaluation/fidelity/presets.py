"""Lists of attentions that answer one question each: the paper's tables of this kind, at the length at hand, and ours.

The paper's base configuration at 64k is `Q128K128R8SP1B8k`; here it is `MuSeConfig.paper_sizes`, and what a table
varies is varied around that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from muse_attention.config import MuSeConfig
from muse_attention.registry import full_name
from muse_attention.sizes import format_size
from muse_lab.evaluation.fidelity.layers import FidelityRequest
from muse_lab.evaluation.fidelity.paper import TABLES, PaperTable

RETRIEVED_PART = 16
"""One in this many clusters is retrieved, unless a table varies that."""
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
    """what the table shows, in words"""
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    paper: tuple[PaperTable, ...] = ()
    """the paper's tables of the same kind"""

    @property
    def requests(self) -> list[FidelityRequest]:
        return [row.request for row in self.rows]


def find_presets(names: list[str], length: int) -> list[Preset]:
    """The presets with these names at a length; all of them for `all`."""
    if "all" in names:
        names = list(PRESETS)
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; use all, or any of {', '.join(PRESETS)}")
    base = _Base(MuSeConfig.paper_sizes(length), length)
    presets = [PRESETS[name](base) for name in dict.fromkeys(names)]
    return [preset for preset in presets if preset.rows]


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

    @property
    def words(self) -> dict[str, object]:
        """The values that a question may name."""
        retrieved, block = self.config.retrieved_clusters, format_size(self.eighth)
        pairs_of = self.clusters_of_8_pairs
        return {"clusters": self.clusters, "pairs_of": pairs_of, "retrieved": retrieved, "eighth": block}

    @property
    def clusters_of_8_pairs(self) -> int:
        """128, as in the paper, even where the base has fewer, of which 8 pairs would be a large part."""
        return max(128, self.clusters)

    @property
    def eighth(self) -> int:
        """A block of about an eighth of the length, in sixteen equal parts, whatever the base has."""
        return max(RETRIEVED_PART, self.length // 128 * RETRIEVED_PART)

    def row(self, *labels: object, **changes: object) -> Row:
        """The base with these changes. `joint` changes both cluster counts, and retrieval with them."""
        if "joint" in changes:
            joint = int(str(changes.pop("joint")))
            changes = {"query_clusters": joint, "key_clusters": joint, "retrieved_clusters": _part(joint)} | changes
        return self.named(f"muse:{self.config.replace(**changes)}", *labels)

    def named(self, attention: str, *labels: object) -> Row:
        """A row of an attention by its name."""
        return Row(tuple(map(str, labels)), FidelityRequest(full_name(attention, self.length), self.length))

    def tilted_and_not(self, count: int, *labels: object, **changes: object) -> list[Row]:
        return [
            self.row(*labels, "tilt", joint=count, **changes),
            self.row(*labels, NO_TILT, joint=count, tilt=False, **changes),
        ]


def _part(clusters: int) -> int:
    return max(1, clusters // RETRIEVED_PART)


PRESETS: dict[str, Callable[[_Base], Preset]] = {}

_Rows = Callable[[_Base], Iterable[Row]]


def _preset(*columns: str, paper: tuple[str, ...] = ()) -> Callable[[_Rows], _Rows]:
    """Make a preset, beside tables of the paper by number, of a function that gives the rows for a base.

    The docstring of the function is the title and the question, which may name the `words` of the base.
    """
    tables = tuple(TABLES[number] for number in paper)

    def add(rows: _Rows) -> _Rows:
        name = rows.__name__.strip("_").replace("_", "-")
        title, _, question = (rows.__doc__ or "").partition("\n")

        def make(base: _Base) -> Preset:
            asked = " ".join(question.split()).format(**base.words)
            return Preset(name, title, asked, columns, tuple(rows(base)), tables)

        PRESETS[name] = make
        return rows

    return add


@_preset("attention", paper=("Table 1",))
def _methods(base: _Base) -> Iterable[Row]:
    """MuSe, MoBA and block-diagonal attention at equal sparsity

    All three attend exactly to the same own block; MoBA retrieves one block of as many keys as MuSe retrieves.
    """
    config, block = base.config, format_size(base.config.block_size)
    # As many keys are retrieved by MoBA as by MuSe, on average.
    retrieved = config.retrieved_clusters * config.retrieved_blocks * config.block_size // config.key_clusters
    yield base.row("MuSe")
    yield base.named(f"moba:L{block}B{format_size(retrieved)}R1", "MoBA")
    yield base.named(f"block_diagonal:{block}", "block-diagonal")


@_preset("clusters", "retrieved", "summaries", paper=("Table 2", "Table 29", "Table 15"))
def _joint(base: _Base) -> Iterable[Row]:
    """Clusters of queries and keys together, with and without the tilt

    Retrieval grows with the clusters (one in 16). Without the tilt all queries see the same summaries.
    """
    for count in base.counts:
        yield from base.tilted_and_not(count, count, _part(count))


@_preset("query clusters", paper=("Table 13",))
def _query_clusters(base: _Base) -> Iterable[Row]:
    """Clusters of queries alone

    {clusters} clusters of keys. One cluster of queries still tilts summaries by the mean query; without the tilt
    they are plain means (the paper's Q = 1).
    """
    for step in range((4 * base.clusters).bit_length()):
        yield base.row(4 * base.clusters >> step, query_clusters=4 * base.clusters >> step)
    yield base.row(NO_TILT, tilt=False)


@_preset("key clusters", "retrieved", paper=("Table 14",))
def _key_clusters(base: _Base) -> Iterable[Row]:
    """Clusters of keys alone

    {clusters} clusters of queries; one in 16 clusters of keys is retrieved.
    """
    for count in base.counts:
        yield base.row(count, _part(count), key_clusters=count, retrieved_clusters=_part(count))


@_preset("clusters", "summaries", paper=("Table 16", "Table 3"))
def _monopole(base: _Base) -> Iterable[Row]:
    """Summaries alone: nothing is retrieved

    What the summaries of the far field are worth by themselves.
    """
    for count in base.counts:
        yield from base.tilted_and_not(count, count, retrieved_clusters=0)


@_preset("clusters", "retrieved", "summaries", paper=("Table 19", "Table 3"))
def _retrieval_only(base: _Base) -> Iterable[Row]:
    """Retrieval alone: summaries choose, but are not attended to

    Whether the tilt helps by choosing better, or by approximating better.
    """
    for count in (base.clusters, 4 * base.clusters):
        yield from base.tilted_and_not(count, count, _part(count), monopole=False)


@_preset("clusters", "keys of opened clusters", "keys retrieved", paper=("Table 17", "Table 22"))
def _fixed_retrieval(base: _Base) -> Iterable[Row]:
    """More clusters, as many retrieved

    {retrieved} clusters are opened at any count, so that more clusters retrieve fewer keys. The paper's keys per query
    are all keys of the opened clusters, R N / QK; one block of each is retrieved, about R B / QK keys.
    """
    retrieved = base.config.retrieved_clusters
    for count in base.counts:
        keys = retrieved * base.length // count, retrieved * base.config.block_size // count
        yield base.row(count, *keys, joint=count, retrieved_clusters=retrieved)


@_preset("retrieved", paper=("Table 18",))
def _retrieval_count(base: _Base) -> Iterable[Row]:
    """Retrieved clusters

    {clusters} clusters of queries and of keys, one block of each retrieved cluster.
    """
    for count in (0, *(1 << step for step in range(base.clusters.bit_length() - 1))):
        yield base.row(count, retrieved_clusters=count)


@_preset("block", "blocks retrieved", paper=("Table 20",))
def _block_size(base: _Base) -> Iterable[Row]:
    """Block size, with retrieval over an equal span

    Smaller blocks leave more to be approximated; retrieved blocks times their size is constant. Half as many clusters
    are opened as in other tables.
    """
    for blocks in (1, 2, 4, 8):
        size = 2 * base.config.block_size // blocks
        if size >= base.clusters:
            retrieved = {"retrieved_clusters": max(1, base.config.retrieved_clusters // 2), "retrieved_blocks": blocks}
            yield base.row(format_size(size), blocks, block_size=size, **retrieved)


@_preset("clusters retrieved", "blocks of each", paper=("Table 21",))
def _clusters_or_blocks(base: _Base) -> Iterable[Row]:
    """Retrieving more clusters, or more blocks of each

    {pairs_of} clusters of queries and of keys; always 8 pairs of cluster and block.
    """
    for blocks in (1, 2, 4, 8):
        retrieved = {"retrieved_clusters": 8 // blocks, "retrieved_blocks": blocks}
        yield base.row(8 // blocks, blocks, joint=base.clusters_of_8_pairs, **retrieved)


@_preset("clusters", "added", paper=("Appendix B",))
def _dipole(base: _Base) -> Iterable[Row]:
    """Dipoles against retrieval

    What is added to the summaries: a first-order correction of their values, or retrieval.
    """
    for count in (base.clusters, 4 * base.clusters):
        yield base.row(count, "nothing", joint=count, retrieved_clusters=0)
        for kind in ("shared", "centred", "tilted"):
            yield base.row(count, f"{kind} dipole", joint=count, retrieved_clusters=0, dipole=kind)
        yield base.row(count, f"{_part(count)} retrieved", joint=count)


@_preset("length", "clusters", "block", paper=("Table 27",))
def _length(base: _Base) -> Iterable[Row]:
    """Length, with the sizes that go with it

    The paper's sizes for each length, on the beginning of each sample. Where clusters cannot grow by the square
    root of two they stay, so compare every other line.
    """
    lengths = [base.length >> step for step in range(base.length.bit_length()) if base.length >> step >= 2048]
    for length in reversed(lengths):
        config = MuSeConfig.paper_sizes(length)
        sizes = (length, config.key_clusters, format_size(config.block_size))
        yield _Base(config, length).row(format_size(length), *sizes[1:])


@_preset("family", "clusters", "rule")
def _error_control(base: _Base) -> Iterable[Row]:
    """Retrieval by expected error, against the paper's rule and MoBA

    Blocks of {eighth}. The paper's rule retrieves R buckets for every query, a sixteenth of a block if all buckets
    had the mean size; MoBA as many keys, twice and four times as many; a tolerance T retrieves what is expected to
    be wrong by that or more, for 64 queries together.
    """
    block, part = base.eighth, base.eighth // RETRIEVED_PART
    for clusters in (32, 64, 128):
        retrieved = f"R{clusters // RETRIEVED_PART}"
        yield base.named(f"muse:QK{clusters}{retrieved}B{block}", "paper", f"Q{clusters}K{clusters}", retrieved)
    for count in (1, 2, 4):
        moba = f"moba:L{format_size(block)}B{format_size(part)}R{count}"
        yield base.named(moba, "MoBA", "", f"{count} x {part} keys")
    for sizes in ("Q16K32", "Q16K64", "Q16K128", "Q8K128", "Q32K128", "Q16K256"):
        for rule in ("T0.4", "T0.2", "T0.1", "T0.05"):
            yield base.named(f"muse:{sizes}{rule}B{block}", f"tolerance, {sizes}", sizes, rule)
