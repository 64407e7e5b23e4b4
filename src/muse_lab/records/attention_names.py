"""Names of attentions in reports: in words, and short ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from muse_attention.config import MuSeConfig
from muse_attention.registry import config_at
from muse_attention.sizes import format_size, parse_size

EXACT = "exact"
_BASELINES = {
    EXACT: "exact attention",
    "block_diagonal": "block-diagonal attention, blocks of {}",
    "moba": "MoBA, own blocks of {0}, retrieved blocks of {1}, {2} for each query",
}
_FROZEN = "differentiable_aggregation=false"
_ALWAYS_NAMED = (_FROZEN, "caution=", "search=")
_BLOCK = re.compile(r"B(\d+[km]?)$")


def recorded_config(attention: str) -> MuSeConfig | None:
    """`config_at` for a name in a record; None also for a name that only an earlier version can read."""
    try:
        return config_at(attention)
    except ValueError:
        return None


def block_size_of(attention: str) -> int | None:
    """Tokens per block of MuSe, from a name in a record of any version; None for other attentions."""
    notation = attention.removeprefix("muse:").partition(",")[0]
    if attention.startswith("muse:") and (size := _BLOCK.search(notation)):
        return parse_size(size[1])
    config = recorded_config(attention)
    return None if config is None else config.block_size


def without_freezing(attention: str) -> str:
    """A full name without the setting that changes gradients only: attentions with equal outputs share it."""
    return attention.replace(f",{_FROZEN}", "")


def in_words(attention: str) -> str:
    try:
        config = config_at(attention)
    except ValueError:
        return "an earlier form of MuSe"
    if config is not None and not config.differentiable_aggregation:
        return f"{in_words(without_freezing(attention))}, frozen aggregation"
    if config is None:
        kind, _, settings = attention.partition(":")
        sizes = re.findall(r"\d+[km]?", settings)
        return _BASELINES[kind].format(*sizes) if kind == EXACT or (kind in _BASELINES and sizes) else attention
    blocks = f"blocks of {format_size(config.block_size)}"
    if config.tolerance is not None:
        caution = "" if config.caution == MuSeConfig.caution else f" with a caution of {config.caution:g}"
        search = "" if config.search is None else f" and of buckets that hold a key of weight {config.search:g}"
        tiles = "" if config.tile == MuSeConfig.tile else f" in tiles of {config.tile} queries"
        return (
            f"{config.query_clusters} query clusters, {config.key_clusters} key clusters of each block, "
            f"retrieval{tiles} of what is expected{caution} to be off by {config.tolerance:g} or more{search}, "
            f"{blocks}"
        )
    if not config.tilt:
        clusters = f"{config.key_clusters} key clusters, no tilt"
    elif config.query_clusters == config.key_clusters:
        clusters = f"{config.key_clusters} query and key clusters"
    elif config.query_clusters == 1:
        clusters = f"one tilted query cluster, {config.key_clusters} key clusters"
    else:
        clusters = f"{config.query_clusters} query clusters, {config.key_clusters} key clusters"
    if config.retrieved_clusters == 0:
        return f"{clusters}, none opened, {blocks}"
    in_each = "1 block" if config.retrieved_blocks == 1 else f"{config.retrieved_blocks} blocks"
    return f"{clusters}, {config.retrieved_clusters} opened in {in_each} each, {blocks}"


def short_names(attentions: Iterable[str]) -> dict[str, str]:
    """Short names of the attentions in one report: MuSe by its sizes, and by settings that at most half of the
    attentions have, among those with a tolerance and among those without.

    Frozen aggregation is always named, because it changes the gradient, and so are caution and search, because the same
    tolerance means something else with them.
    """
    names = list(dict.fromkeys(attentions))
    settings = {name: name.removeprefix("muse:").split(",") for name in names if name.startswith("muse:")}
    uses = Counter((_has_tolerance(parts), part) for parts in settings.values() for part in parts)
    totals = Counter(map(_has_tolerance, settings.values()))

    def is_named(part: str, *, has_tolerance: bool) -> bool:
        return part.startswith(_ALWAYS_NAMED) or 2 * uses[has_tolerance, part] <= totals[has_tolerance]

    short = {
        name: ",".join([parts[0], *(part for part in parts[1:] if is_named(part, has_tolerance=_has_tolerance(parts)))])
        for name, parts in settings.items()
    }
    taken = Counter(short.values())
    return {name: short[name] if name in short and taken[short[name]] == 1 else name for name in names}


def _has_tolerance(settings: list[str]) -> bool:
    return "T" in settings[0]
