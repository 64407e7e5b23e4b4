"""What attentions are called in reports: in words, and in short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from muse_attention.config import MuSeConfig
from muse_attention.registry import config_at, full_name
from muse_attention.sizes import format_size

EXACT = "exact"
_OTHERS = {
    EXACT: "exact attention",
    "block_diagonal": "block-diagonal attention, blocks of {}",
    "moba": "MoBA, own blocks of {0}, retrieved blocks of {1}, {2} for each query",
}
_FROZEN = "differentiable_aggregation=false"


def forward_name(attention: str, length: int) -> str:
    """The full name without what gradients alone depend on: attentions that compute the same share it."""
    config = config_at(attention, length)
    return full_name(attention, length) if config is None else _without_freezing(config)


def _without_freezing(config: MuSeConfig) -> str:
    return f"muse:{config.replace(differentiable_aggregation=True)}"


def in_words(attention: str) -> str:
    config = config_at(attention)
    if config is not None and not config.differentiable_aggregation:
        return f"{in_words(_without_freezing(config))}, frozen aggregation"
    if config is None:
        kind, _, settings = attention.partition(":")
        sizes = re.findall(r"\d+[km]?", settings)
        return _OTHERS[kind].format(*sizes) if kind == EXACT or (kind in _OTHERS and sizes) else attention
    if not config.tilt:
        clusters = f"{config.key_clusters} key clusters, no tilt"
    elif config.query_clusters == config.key_clusters:
        clusters = f"{config.key_clusters} query and key clusters"
    elif config.query_clusters == 1:
        clusters = f"one tilted query cluster, {config.key_clusters} key clusters"
    else:
        clusters = f"{config.query_clusters} query clusters, {config.key_clusters} key clusters"
    blocks = f"blocks of {format_size(config.block_size)}"
    if config.retrieved_clusters == 0:
        return f"{clusters}, none opened, {blocks}"
    if config.tolerance is not None:
        cautiously = f" with a caution of {config.caution:g}" if config.caution else ""
        return (
            f"{clusters}, retrieval of what is expected{cautiously} to be off by more than {config.tolerance:g}, "
            f"at most {config.retrieved_clusters} buckets per query in a head, {blocks}"
        )
    in_each = "1 block" if config.retrieved_blocks == 1 else f"{config.retrieved_blocks} blocks"
    return f"{clusters}, {config.retrieved_clusters} opened in {in_each} each, {blocks}"


def short_names(attentions: Iterable[str]) -> dict[str, str]:
    """What attentions are called in one report: MuSe by its sizes, and by settings that most of them do not have.

    That the aggregation is frozen is always told: it is another gradient.
    """
    names = list(dict.fromkeys(attentions))
    settings = {name: name.removeprefix("muse:").split(",") for name in names if name.startswith("muse:")}
    uses = Counter(part for parts in settings.values() for part in parts[1:])
    short = {
        name: ",".join([parts[0], *(part for part in parts[1:] if part == _FROZEN or 2 * uses[part] <= len(settings))])
        for name, parts in settings.items()
    }
    taken = Counter(short.values())
    return {name: short[name] if name in short and taken[short[name]] == 1 else name for name in names}
