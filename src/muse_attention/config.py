"""`MuSeConfig`: every choice of the method in one validated, printable value."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, ClassVar, Literal, Self, get_args

from muse_attention.defaults import default_text
from muse_attention.sizes import format_size, nearest_power_of_two, parse_size

Dipole = Literal["none", "tilted", "shared", "centred"]
Clustering = Literal["auto", "streaming", "lloyd"]

AUTO_CLUSTERING: Clustering = "lloyd"
"""What `auto` stands for: parallel on a GPU, and faster than streaming on a CPU too."""

_CHOICES: dict[str, tuple[str, ...]] = {"dipole": get_args(Dipole), "clustering": get_args(Clustering)}
_SMALLEST = {
    "query_clusters": 1,
    "key_clusters": 1,
    "retrieved_clusters": 0,
    "retrieved_blocks": 1,
    "block_size": 1,
    "lloyd_iterations": 1,
    "lloyd_sample": 1,
    "seed": 0,
    "tile": 1,
}
_LARGEST_TILE = 128
_CAPS = ("cap_factor", "query_cap_factor")
_SWITCHES = ("tilt", "monopole", "differentiable_aggregation", "first_order", "second_order")
_ORDERS = ("first_order", "second_order")
_OF_PAPER = (
    "retrieved_clusters", "retrieved_blocks", "tilt", "monopole", "dipole", "clustering", "cap_factor",
    "query_cap_factor",
)  # fmt: skip
"""Fields that mean nothing with a tolerance."""
_SYMBOLS = {
    "Q": ("query_clusters",),
    "K": ("key_clusters",),
    "QK": ("query_clusters", "key_clusters"),
    "R": ("retrieved_clusters",),
    "SP": ("retrieved_blocks",),
    "T": ("tolerance",),
    "B": ("block_size",),
}
_TERM = re.compile(r"(QK|SP|Q|K|R|B)(\d{1,12}[km]?)|(T)(inf|\d{1,16}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)")
PAPER = "paper"
"""In place of the notation, it stands for `MuSeConfig.paper` of the length that a text is read for."""
_EXAMPLE = 'write it like "Q16K128T0.1B4k", "Q128K128R8SP1B8k" or "QK32R2B1k,clustering=lloyd"'


@dataclasses.dataclass(frozen=True)
class MuSeConfig:
    """All choices of MuSe attention in one frozen, validated value.

    With a tolerance it is blockwise MuSe, the method of this library, `Q16K128T0.1B4k`; without one it is the paper's,
    `Q128K128R8SP1B8k`. `str(config)` writes it so, followed by `,name=value` for every other field that is not at its
    default. `MuSeConfig.parse` reads it back. Sizes in that notation may end in `k`, which means 1024, or in `m`.

    Attributes:
        query_clusters: Q, clusters of queries: of the whole sequence in the paper's method, of the past in each
            generation with a tolerance.
        key_clusters: K, clusters of keys: of the whole sequence in the paper's method, of each block with a tolerance.
        retrieved_clusters: R, key clusters that each query opens; 0 leaves only the summaries. The paper's method.
        retrieved_blocks: SP, blocks of an opened cluster that are attended to token by token. The paper's method.
        block_size: B, tokens of a block. Attention inside a block is exact. A text without it takes
            that of `for_length`: see `named`.
        tolerance: T. The keys of a bucket are retrieved where its summary is expected to be wrong by this or more, as a
            share of the query's softmax; 0 retrieves all. None: the paper's method, which retrieves the same number of
            buckets for every query.
        caution: With a tolerance. The expected error of a summary is what its weight would gain if its logit were this
            many standard deviations higher, divided by their number; 0: its weight times one deviation, the limit for
            small ones. A larger value finds more single keys that attract a query.
        tile: With a tolerance. The number of queries of one block and cluster that retrieve together, except that none
            retrieves for an earlier one; a power of two up to 128. 1: each for itself.
        first_order: With a tolerance. Add to the values of summaries what the keys on the query's side of its centroid
            contribute, by one matrix for all the buckets that a block sees. None: True with a tolerance, False without.
        second_order: With a tolerance. Add to the mass of a summary what the spread of its keys contributes for a query
            off its centroid. None: True with a tolerance, False without.
        tilt: Weight the keys of a summary by `exp(query centroid . key)`. False: plain means, and queries are not
            clustered. The paper's method.
        monopole: Represent what was not retrieved by its summaries. False: ignore it. The paper's method.
        dipole: `none`, `tilted`, `shared` or `centred`: first-order correction of the summaries' values. It replaces
            retrieval and needs `retrieved_clusters=0`. The paper's method.
        differentiable_aggregation: False: the weights that aggregate the keys and values of a bucket into its summary
            are constants for the gradient.
        clustering: `lloyd`: `lloyd_iterations` full-batch iterations on up to `lloyd_sample` vectors for each cluster.
            `streaming`: the paper's single pass in minibatches of 64. `auto` becomes `lloyd` when the configuration is
            made, so a recorded configuration always names what ran.
        cap_factor: Largest cluster of keys inside a block, in units of the mean cluster: it bounds the cost of
            retrieval. None: no limit, as always with a tolerance.
        query_cap_factor: The same for queries, which need no limit. On a pretrained model, in which most
            queries of a head can be alike, the paper's 4 has up to twice the error of None.
        seed: Seed of the shuffle that starts the clustering: the only randomness.
        lloyd_iterations: Full-batch iterations of `clustering="lloyd"`.
        lloyd_sample: Vectors for each cluster, evenly spaced in the sequence, that `clustering="lloyd"` uses.
        search: With a tolerance. Where a summary suggests that a bucket may hold a key of this weight or more, the
            logits of its keys are computed, a seventh of the arithmetic of retrieving it, and it is retrieved if it
            does. Weights are relative to a softmax of summaries. None: no search.
        text: What `str` returns. It is written once, outside of what `torch.compile` traces.
    """

    query_clusters: int = 128
    key_clusters: int = 128
    retrieved_clusters: int = 8
    retrieved_blocks: int = 1
    block_size: int = 8192
    tolerance: float | None = None
    caution: float = 0.0
    tile: int = 64
    first_order: bool | None = None
    second_order: bool | None = None
    tilt: bool = True
    monopole: bool = True
    dipole: Dipole = "none"
    differentiable_aggregation: bool = True
    clustering: Clustering = "auto"
    cap_factor: float | None = 4.0
    query_cap_factor: float | None = None
    seed: int = 0
    lloyd_iterations: int = 4
    lloyd_sample: int = 64
    search: float | None = None
    text: ClassVar[str]  # set for each instance, but not a field: it follows from the fields

    def __post_init__(self) -> None:
        if self.clustering == "auto":
            object.__setattr__(self, "clustering", AUTO_CLUSTERING)
        for name, smallest in _SMALLEST.items():
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < smallest:
                raise ValueError(f"MuSeConfig: {name}={size!r} must be an integer of at least {smallest}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool) and not (name in _ORDERS and getattr(self, name) is None):
                raise ValueError(f"MuSeConfig: {name}={getattr(self, name)!r} must be True or False")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"MuSeConfig: {name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        for name in _CAPS:
            factor = getattr(self, name)
            if factor is None:
                continue
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                raise ValueError(f"MuSeConfig: {name}={factor!r} must be a number, or None for no cap")
            if not 1 <= factor < math.inf:
                raise ValueError(
                    f"MuSeConfig: {name}={factor!r} must be at least 1, or None for no cap: "
                    "below 1 the clusters of a block cannot hold its tokens"
                )
            object.__setattr__(self, name, float(factor))
        if (
            isinstance(self.caution, bool)
            or not isinstance(self.caution, int | float)
            or not 0 <= self.caution < math.inf
        ):
            raise ValueError(f"MuSeConfig: caution={self.caution!r} must be a number of at least 0")
        object.__setattr__(self, "caution", float(self.caution))
        if self.search is not None:
            self._check_search(self.search)
        if self.tile > _LARGEST_TILE or self.tile & (self.tile - 1):
            raise ValueError(f"MuSeConfig: tile={self.tile!r} must be a power of two of at most {_LARGEST_TILE}")
        if self.tolerance is not None:
            self._check_tolerance(self.tolerance)
        else:
            for name in _ORDERS:
                if getattr(self, name):
                    raise ValueError(f"MuSeConfig: {name}=True needs a tolerance; the paper's method does not have it")
        if self.dipole != "none" and (self.retrieved_clusters > 0 or not self.monopole):
            raise ValueError(
                f"MuSeConfig: dipole={self.dipole!r} corrects the summaries and replaces retrieval: "
                "it needs retrieved_clusters=0 and monopole=True"
            )
        object.__setattr__(self, "text", self._as_text())

    def _check_tolerance(self, tolerance: object) -> None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise ValueError(f"MuSeConfig: tolerance={tolerance!r} must be a number of at least 0, or None")
        for name in _OF_PAPER:
            if getattr(self, name) not in (_DEFAULTS[name], AUTO_CLUSTERING, None):
                raise ValueError(
                    f"MuSeConfig: {name}={getattr(self, name)!r} belongs to the paper's method; leave out "
                    f"either it or tolerance={tolerance!r}"
                )
        for name in _CAPS:
            object.__setattr__(self, name, None)
        object.__setattr__(self, "tolerance", float(tolerance))

    def _check_search(self, search: object) -> None:
        if isinstance(search, bool) or not isinstance(search, int | float) or not 0 < search < math.inf:
            raise ValueError(f"MuSeConfig: search={search!r} must be a number above 0, or None for no search")
        if self.tolerance is None:
            raise ValueError(f"MuSeConfig: search={search!r} needs a tolerance; the paper's method does not have it")
        object.__setattr__(self, "search", float(search))

    @property
    def uses_first_order(self) -> bool:
        """Whether the values of summaries follow a query off its centroid."""
        return self.tolerance is not None if self.first_order is None else self.first_order

    @property
    def uses_second_order(self) -> bool:
        """Whether the spread of a summary's keys adds to its mass."""
        return self.tolerance is not None if self.second_order is None else self.second_order

    def __str__(self) -> str:
        return self.text

    def _as_text(self) -> str:
        symbols = {symbol: names[0] for symbol, names in _SYMBOLS.items() if len(names) == 1}
        unused = ("T",) if self.tolerance is None else ("R", "SP")
        notation = "".join(
            f"T{self.tolerance}" if symbol == "T" else symbol + format_size(getattr(self, name))
            for symbol, name in symbols.items()
            if symbol not in unused
        )
        changed = [
            f"{name}={_format_option(getattr(self, name))}"
            for name, default in _DEFAULTS.items()
            if name not in symbols.values()
            and getattr(self, name) != default
            and (self.tolerance is None or name not in _OF_PAPER)
        ]
        return ",".join([notation, *changed])

    @classmethod
    def parse(cls, text: str) -> MuSeConfig:
        """Read a text such as `"Q128K128R8SP1B8k"` or `"QK32R2B1k,clustering=lloyd"`.

        Fields that the text does not name keep their defaults, save the block size: without it the text stands for
        another configuration at every length, and `named` reads it.
        """
        if not isinstance(text, str):
            raise ValueError(f"MuSeConfig.parse: text={text!r} is not a string; {_EXAMPLE}")
        if follows_length(text):
            if not _is_of_paper(text):
                _parse(text)  # raises first if the text cannot be read at all
            raise ValueError(
                f"MuSeConfig.parse: {text!r} depends on the length; use MuSeConfig.named(text, length), or name the "
                "block size, as in QK32R2B1k"
            )
        return _parse(text)

    @classmethod
    def named(cls, text: str, length: int) -> MuSeConfig:
        """Read a text for a length: any text of `parse`; `"QK32R2"`, with the block size of `for_length(length)`, or
        the paper's if that is less, but at least a token for each cluster; `"paper"` and `"paper,seed=1"`, for
        `paper(length)`.
        """
        if not follows_length(text):
            return cls.parse(text)
        _check_length("named", length)
        if _is_of_paper(text):
            return _parse(text, _scale_as_paper(length))
        read = _parse(text)  # an error names the text as it was given
        block_size = min(cls.for_length(length).block_size, _scale_as_paper(length)[1])
        return _parse(f"{text},block_size={max(block_size, read.query_clusters, read.key_clusters)}")

    @classmethod
    def for_length(cls, length: int) -> MuSeConfig:
        """The default of `muse_attention` for a length: the row of `defaults.DEFAULTS` that serves it.

        It does not depend on the device. Up to 8k tokens exact attention is faster, and the default is close to it.
        """
        _check_length("for_length", length)
        return cls.named(default_text(length), length)

    @classmethod
    def paper(cls, length: int) -> MuSeConfig:
        """The paper's method: its scaling rule, streaming clustering, and limited clusters of queries and of keys.

        The rule: 8 blocks, `QK = 128 sqrt(length / 64k)`, `R = QK / 16`, each a power of two. Halfway between two
        powers the lower one is taken, as in the paper's tables (32k has 64 clusters). Sizes stop shrinking at 16
        clusters and blocks of 256, so anything up to 256 tokens is attended to exactly.
        """
        _check_length("paper", length)
        return cls.named(PAPER, length)

    @classmethod
    def paper_sizes(cls, length: int) -> MuSeConfig:
        """The paper's scaling rule and retrieval, with the default clustering and limits of this library."""
        _check_length("paper_sizes", length)
        return cls.named(f"{PAPER},clustering=auto,query_cap_factor=none", length)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        unknown = [name for name in changes if name not in _DEFAULTS]
        if unknown:
            raise ValueError(f"MuSeConfig: unknown field {unknown[0]!r}; fields are {', '.join(_DEFAULTS)}")
        return dataclasses.replace(self, **changes)

    def number_of_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def lloyd_stride(self, length: int, clusters: int) -> int:
        """The stride at which `clustering="lloyd"` samples vectors."""
        return max(1, length // (self.lloyd_sample * clusters))

    @property
    def mean_bucket(self) -> float:
        """Mean number of keys in a bucket."""
        return self.block_size / self.key_clusters

    @property
    def largest_key_cluster(self) -> int | None:
        """The most keys of one block that one cluster may hold; None without a limit."""
        return self._largest(self.cap_factor, self.key_clusters)

    @property
    def largest_query_cluster(self) -> int | None:
        """The most queries of one block that one cluster may hold; None without a limit."""
        return self._largest(self.query_cap_factor, self.query_clusters)

    def _largest(self, factor: float | None, clusters: int) -> int | None:
        return None if factor is None else math.ceil(min(factor, clusters) * self.block_size / clusters)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MuSeConfig)}
"""The default of every field. (A table, because `torch.compile` cannot list the fields of a class.)"""


def follows_length(text: str) -> bool:
    """Whether a text stands for another configuration at another length: `paper`, or no block size is named."""
    notation, *options = text.split(",")
    if "=" in notation:
        notation, options = "", [notation, *options]
    names = [option.partition("=")[0].strip() for option in options]
    return _is_of_paper(text) or not ("B" in notation or "block_size" in names)


def _is_of_paper(text: str) -> bool:
    return text.partition(",")[0].strip() == PAPER


def _check_length(method: str, length: object) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"MuSeConfig.{method}: length={length!r} must be a positive integer")


def _scale_as_paper(length: int) -> tuple[int, int]:
    """Clusters and block size of `MuSeConfig.paper`."""
    clusters = 16
    while 8 * clusters * clusters < length:  # the power of two nearest to 128 sqrt(length / 64k)
        clusters *= 2
    return clusters, nearest_power_of_two(length, 8, smallest=256)


def _parse(text: str, paper_scale: tuple[int, int] | None = None) -> Any:
    return _parse_cached(text, paper_scale)


# What `torch.compiler.assume_constant_result` does, without importing the compiler: `torch.compile` need not trace a
# pure function of a text.
_parse._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _parse_cached(text: str, paper_scale: tuple[int, int] | None) -> MuSeConfig:
    """The defaults, or the paper's method at this scale, with the changes that a text names."""
    changes = _read_changes(text)
    if paper_scale is None:
        if changes.get("tolerance") is not None and "retrieved_clusters" in changes:
            raise ValueError(
                f"cannot read the MuSe configuration {text!r}: a tolerance replaces the budget R; leave R out"
            )
        if "retrieved_clusters" not in changes and changes.get("tolerance") is None:
            opened = MuSeConfig.retrieved_clusters
            changes["retrieved_clusters"] = min(opened, changes.get("key_clusters", opened))
        return MuSeConfig(**changes)
    clusters, block_size = paper_scale
    paper = MuSeConfig(
        query_clusters=clusters,
        key_clusters=clusters,
        retrieved_clusters=clusters // 16,
        block_size=block_size,
        clustering="streaming",
        cap_factor=4.0,
        query_cap_factor=4.0,
    )
    return paper.replace(**changes)


def _read_changes(text: str) -> dict[str, Any]:
    """The fields that a text names, with their values."""
    notation, *options = (part.strip() for part in text.split(","))
    if "=" in notation:
        notation, options = "", [notation, *options]
    elif not notation:
        raise ValueError(f"cannot read the MuSe configuration {text!r}: {_EXAMPLE}")
    changes: dict[str, Any] = {}

    def change(name: str, setting: Any) -> None:
        if name in changes:
            raise ValueError(f"cannot read the MuSe configuration {text!r}: {name} is given twice")
        changes[name] = setting

    position = len(PAPER) if _is_of_paper(text) else 0
    while position < len(notation):
        term = _TERM.match(notation, position)
        if term is None:
            raise ValueError(f"cannot read {notation[position:]!r} in the MuSe configuration {text!r}: {_EXAMPLE}")
        symbol, size, _, tolerance = term.groups()
        if symbol is None:
            change("tolerance", float(tolerance))
        else:
            for name in _SYMBOLS[symbol]:
                change(name, 0 if size.strip("0") in ("", "k", "m") else parse_size(size))
        position = term.end()
    for option in options:
        name, equals, setting = (part.strip() for part in option.partition("="))
        if not equals or name not in _DEFAULTS:
            raise ValueError(
                f"cannot read {option!r} in the MuSe configuration {text!r}: "
                f"options are name=value with a name from {', '.join(_DEFAULTS)}"
            )
        change(name, _read_option(name, setting, text))
    return changes


def _read_option(name: str, setting: str, text: str) -> Any:
    if name in _CHOICES:
        return setting
    if name in _SWITCHES and setting.lower() in ("true", "false"):
        return setting.lower() == "true"
    numbers = (*_CAPS, "tolerance", "caution", "search")
    if name in (*_CAPS, "tolerance", "search", *_ORDERS) and setting.lower() == "none":
        return None
    try:
        return float(setting) if name in numbers else int(setting)
    except ValueError:
        kind = "true or false" if name in _SWITCHES else "a number" if name in numbers else "an integer"
        raise ValueError(f"{name}={setting!r} in the MuSe configuration {text!r} must be {kind}") from None


def _format_option(setting: Any) -> str:
    return str(setting).lower() if setting is None or isinstance(setting, bool) else str(setting)
