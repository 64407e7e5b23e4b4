"""Names of attentions in files from before recorded names were full, and what they meant there.

Such a name says nothing of its clustering: the kernels took `lloyd` for `auto`, everything else `streaming`. `muse`
alone was the paper's scaling rule, and a text without a block size had blocks of 8k. A full name (`by_name.full_name`)
is never changed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muse_attention.config import PAPER, MuSeConfig, follows_length

DEVICES = ("cpu", "cuda")
"""The devices whose meanings differ."""
_BLOCK_SIZE_THEN = "block_size=8192"
"""Where none was named."""


def recorded_name(attention: str, length: int | None, device: str) -> str:
    """The full name of what a recorded name meant on a device; `muse` alone stays where there is no length."""
    kind, _, settings = attention.partition(":")
    if kind != "muse" or "clustering=streaming" in settings or "clustering=lloyd" in settings:
        return attention
    if settings and not settings.startswith(PAPER):
        config = MuSeConfig.parse(f"{settings},{_BLOCK_SIZE_THEN}" if follows_length(settings) else settings)
    elif not settings and length is not None:
        config = MuSeConfig.paper_sizes(length)
    else:
        return attention
    return f"muse:{config.replace(clustering=_clustering_then(config, device))}"


def may_mean(recorded: str, attention: str, length: int) -> bool:
    """Whether a recorded name is that of an attention, on one device or another."""
    return attention in (recorded, *(recorded_name(recorded, length, device) for device in DEVICES))


def with_full_names(document: Any) -> Any:
    """A results file as it was read, every attention in it by its full name, on the device of its settings.

    What was `requested` as the attention is renamed with it, but for a name that follows the length.
    Settings that stand beside a name tell whether the file is from before. Where there are none, the names do.
    """
    settings = document["settings"]
    clusterings = set(_clusterings(document))
    if clusterings and "auto" not in clusterings:
        return document
    return _with_full_names(document, settings.get("length"), settings["device"])


def _clusterings(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for item in part:
            yield from _clusterings(item)
    elif isinstance(part, dict):
        config = part.get("config")
        if isinstance(config, dict) and "clustering" in config:
            yield config["clustering"]
        for value in part.values():
            yield from _clusterings(value)


def _with_full_names(part: Any, length: Any, device: str) -> Any:
    if isinstance(part, list):
        return [_with_full_names(item, length, device) for item in part]
    if not isinstance(part, dict):
        return part
    length = part.get("length") or length
    found = {key: _with_full_names(value, length, device) for key, value in part.items()}
    attention, config = part.get("attention"), part.get("config")
    if isinstance(attention, str):
        found["attention"] = recorded_name(attention, length, device)
        if found["attention"] != attention and "requested" in part:
            found["requested"] = recorded_name(part["requested"], None, device)
        if isinstance(config, dict) and config.get("clustering") == "auto":
            _, _, settings = found["attention"].partition(":")
            found["config"] = {**config, "clustering": MuSeConfig.parse(settings).clustering}
    return found


def _clustering_then(config: MuSeConfig, device: str) -> str:
    has_kernels = config.dipole == "none" and not config.needs_spread
    return "lloyd" if device.startswith("cuda") and has_kernels else "streaming"
