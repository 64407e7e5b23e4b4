"""Attentions of the library as named implementations for models of transformers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from muse_attention.attention import resolve_config
from muse_attention.config import MuSeConfig
from muse_attention.huggingface.fallbacks import warn_again
from muse_attention.huggingface.forward import AttentionFunction, exact_forward, muse_forward, named_forward
from muse_attention.huggingface.guards import configs_of, guard_models, models_of, refuse_config
from muse_attention.huggingface.masks import guard_masks, make_mask

BY_NAME = "muse_attention."
"""Prefix of implementations that are named after an attention, apart from those that users register."""
_SPECIAL_NAMES = ("eager", "sdpa", "flash", "flex", "paged", "/", "|")
"""transformers treats names that contain one of these differently."""
_registered: dict[str | None, dict[str, Any]] = {}
"""Names of functions of this library, and whether each `reads_masks` and serves `chunks`, as `make_mask` asks."""


def register(config: MuSeConfig | str | None = None, *, name: str = "muse") -> None:
    """Register MuSe attention as `attn_implementation=name`. Each warning may then appear once more.

    Args:
        config: for models that have no `config.muse`; None is `MuSeConfig.for_length` of each input,
            `"paper"` its `MuSeConfig.paper`
        name: several registrations can exist, each under its own name
    """
    if not isinstance(name, str) or not name or any(special in name.lower() for special in _SPECIAL_NAMES):
        raise ValueError(
            f"name={name!r} means something else to transformers; choose one without {', '.join(_SPECIAL_NAMES)}"
        )
    resolved = resolve_config(config, 1)  # refuses what cannot be read
    settings = str(resolved) if isinstance(config, MuSeConfig) else config
    register_function(name, functools.partial(muse_forward, settings=settings, heed_model=True), reads_masks=False)
    warn_again()


@contextlib.contextmanager
def use_attention(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Run a model under any attention of the library, named as for `get_attention`, inside the `with` block.

    `register(config)` and `model.config.muse` have no effect inside the block.
    """
    with implementation(model, register_attention(attention)):
        yield


def register_attention(attention: str) -> str:
    """Make an attention, named as for `get_attention`, an implementation of transformers, and return its name there."""
    name = f"{BY_NAME}{attention}"
    function = named_forward(attention)
    register_function(name, function, reads_masks=function is exact_forward)
    return name


@contextlib.contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set a model's attention implementation inside the `with` block, and restore it at the end."""
    configs = configs_of(model)
    before = [config._attn_implementation for config in configs]
    try:
        for inner in models_of(model):  # one with a config of its own is not always reached through the whole
            inner.set_attn_implementation(name)
        yield
    finally:
        for config, earlier in zip(configs, before, strict=True):
            config._attn_implementation_internal = earlier


def register_function(
    name: str, function: AttentionFunction, *, reads_masks: bool = True, chunks: bool = False
) -> None:
    """Make `attn_implementation=name` this function, and a ValueError for models that would not call it.

    A general mask is a ValueError too, unless the function `reads_masks`. One that serves `chunks` gets what stands for
    the mask of queries that continue a KV cache.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask)  # without one, padding would be dropped silently
    _registered[name] = {"reads_masks": reads_masks, "chunks": chunks}
    _guard()


def _mask(**arguments: Any) -> Tensor | None:
    """`make_mask`, for models that use the attention interface."""
    if not torch.compiler.is_compiling():  # a model that is compiled was built, and refused then
        refuse_config(arguments.get("config"))
    name = getattr(arguments.get("config"), "_attn_implementation", None)
    return make_mask(**arguments, **_registered.get(name, {}))


@functools.cache
def _guard() -> None:
    def is_registered(name: str | None) -> bool:  # (torch 2.11 does not compile `_registered.__contains__`)
        return name in _registered

    guard_models(is_registered)
    guard_masks(is_registered, lambda name: _registered[name]["reads_masks"])
