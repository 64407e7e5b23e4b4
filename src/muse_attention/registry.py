"""Attention by name: one string names any attention of the library, with its settings.

- `exact`
- `muse`: `MuSeConfig.for_length` of the length it is called with
- `muse:paper`: likewise `MuSeConfig.paper`; options may follow, `muse:paper,seed=1`
- `muse:Q16K64T0.2B4k`; without a tolerance the paper's method, `muse:QK32R2B1k,clustering=streaming`; without `B`, as
  `muse:Q16K64T0.2`, the block size follows the length
- `block_diagonal:8k`
- `moba:L8kB512R1`: an own block of 8k, and one retrieved block of 512
- `flex_attention:W4k`, `flex_attention:B8k`: PyTorch's, with a sliding window or with blocks; CUDA only
- `nsa`, `nsa:B64R16`: native sparse attention of flash-linear-attention, 16 blocks of 64; CUDA only
- `flash_sparse_attn`, `flash_sparse_attn:T1`: that package, which skips tiles of small weights; CUDA only
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from muse_attention.attention import muse_attention, resolve_config
from muse_attention.baselines import (
    block_diagonal_attention,
    exact_attention,
    flash_sparse_attention,
    moba_attention,
    nsa_attention,
    sparse_flex_attention,
)
from muse_attention.config import MuSeConfig, follows_length
from muse_attention.sizes import parse_size

ATTENTIONS = ("exact", "muse", "block_diagonal", "moba", "flex_attention", "nsa", "flash_sparse_attn")

_NEXT_NAME = re.compile(rf",(?=\s*(?:{'|'.join(ATTENTIONS)})(?:[:,]|\s*$))")
_MOBA = re.compile(r"L(\d+[kKmM]?)B(\d+[kKmM]?)R(\d+)")
_FLEX = re.compile(r"([WB])(\d+[kKmM]?)")
_FLASH_SPARSE = re.compile(r"T(\d+(?:\.\d+)?)")
_NSA = re.compile(r"B(\d+[kKmM]?)R(\d+)")


class Attention(Protocol):
    """The signature of every attention of the library: that of `scaled_dot_product_attention`, and `return_lse`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        return_lse: bool = False,
    ) -> Any: ...


def get_attention(name: str) -> Attention:
    """The attention with this name, as a function; `ATTENTIONS` lists the kinds."""
    if not isinstance(name, str):
        raise ValueError(f"the name of an attention is a string, not {name!r}")
    kind, colon, settings = name.partition(":")
    if colon and not settings:
        raise ValueError(f"{name!r} names no settings; leave out the colon or add them")
    if kind not in ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; the kinds are {', '.join(ATTENTIONS)}")
    if kind == "muse":
        resolve_config(settings or None, 1)  # refuses what cannot be read
        return functools.partial(muse_attention, config=config_at(name) or settings or None)
    if kind == "exact":
        if settings:
            raise ValueError(f"{name!r}: exact attention has no settings; write 'exact'")
        return exact_attention
    if kind == "block_diagonal":
        if not settings:
            raise ValueError(f"{name!r} needs the size of its blocks; write it like 'block_diagonal:8k'")
        return functools.partial(block_diagonal_attention, block_size=parse_size(settings))
    if kind == "flex_attention":
        example = "a window like 'flex_attention:W4k', or blocks like 'flex_attention:B8k'"
        letter, size = _read(_FLEX, name, settings, example)
        pattern: Any = "window" if letter == "W" else "blocks"
        return functools.partial(sparse_flex_attention, pattern=pattern, size=parse_size(size))
    if kind == "moba":
        if not settings:
            return moba_attention
        local, block, count = map(parse_size, _read(_MOBA, name, settings, "the sizes like 'moba:L8kB512R1'"))
        if local % block:
            raise ValueError(f"{name!r}: the own block of {local} must be a multiple of the retrieved block of {block}")
        sizes: dict[str, Any] = {"local_block_size": local, "retrieval_block_size": block}
        return functools.partial(moba_attention, **sizes, retrieved_blocks=count)
    if kind == "nsa":
        if not settings:
            return nsa_attention
        block, count = map(parse_size, _read(_NSA, name, settings, "the sizes like 'nsa:B64R16'"))
        if block < 2 * count or block & (block - 1):
            raise ValueError(f"{name!r}: the block must be a power of 2, and at least twice the retrieved blocks")
        return functools.partial(nsa_attention, block_size=block, retrieved_blocks=count)
    if not settings:
        return flash_sparse_attention
    (threshold,) = _read(_FLASH_SPARSE, name, settings, "the threshold like 'flash_sparse_attn:T1'")
    return functools.partial(flash_sparse_attention, threshold=float(threshold))


def _read(pattern: re.Pattern[str], name: str, settings: str, example: str) -> tuple[str, ...]:
    """The groups of a pattern in the settings."""
    match = pattern.fullmatch(settings)
    if match is None:
        raise ValueError(f"cannot read {name!r}: write {example}")
    return match.groups()


def split_names(texts: Iterable[str]) -> list[str]:
    """The names of an option that may be repeated and hold commas, `["exact,muse:QK32R2,seed=1", "moba"]`, each once.

    A comma separates two names if a kind of attention follows; else it is inside the settings of one.
    """
    return list(dict.fromkeys(name.strip() for text in texts for name in _NEXT_NAME.split(text)))


def config_at(name: str, length: int | None = None) -> MuSeConfig | None:
    """The configuration that a name of MuSe stands for at a length; None for other attentions.

    Without a length it is also None for names whose configuration depends on the length: `muse`, `muse:paper`,
    `muse:QK32R2`.
    """
    kind, _, settings = name.partition(":")
    if kind != "muse" or (length is None and (not settings or follows_length(settings))):
        return None
    return resolve_config(settings or None, length or 1)


def full_name(name: str, length: int) -> str:
    """The name with all its settings at this length, in one spelling; a ValueError for an unknown attention."""
    get_attention(name)
    config = config_at(name, length)
    return name if config is None else f"muse:{config}"
