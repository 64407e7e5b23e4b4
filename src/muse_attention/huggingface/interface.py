"""The attention functions that transformers calls, and their registration."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muse_attention.attention import muse_attention, resolve_config
from muse_attention.config import MuSeConfig
from muse_attention.core.extras import how_to_install
from muse_attention.core.sinks import exact_attention_with_sinks, with_sinks
from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.documents.rows import EXACT, attend_to_documents, attend_to_each, config_of_document
from muse_attention.registry import get_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    from muse_attention.huggingface.masks import (
        GENERAL,
        Visible,
        guard_masks,
        is_general,
        make_mask,
        stands_for_documents,
        visible,
    )
    from muse_attention.huggingface.masks import stands_for_causal as stands_for_causal
except ImportError as error:
    raise ImportError(
        f"models of transformers need transformers 5.17 or newer: {how_to_install('huggingface')} "
        f"({' '.join(str(error).split())})"
    ) from None

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""What transformers calls, with (module, query, key, value, attention_mask, dropout, scaling, ...): the tensors are
(batch, heads, length, head_dim) after RoPE, key heads not repeated. It returns (batch, length, heads, head_dim), and no
weights."""

BY_NAME = "muse_attention."
"""Before the name of an attention it is the implementation of that attention, apart from what users register."""

_SPECIAL_NAMES = ("eager", "sdpa", "flash", "flex", "paged", "/", "|")
"""Where one of these is part of a name, transformers takes paths of its own."""
_OTHER_SOFTMAX = {
    "softcap": "caps its logits",
    "indices": "selects the keys of each query",
    "block_indices": "selects the keys of each query",
}
_WINDOWED = ("sliding_attention", "chunked_attention")
_EXACT_ONLY = ("position_bias", "cache")
"""Arguments that change the attention, and that transformers' exact attention understands."""
_SHORT = "the input, or every document in it, is no longer than one block"


class ExactAttentionWarning(UserWarning):
    """Exact attention runs where another attention was requested."""


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
    register_function(name, functools.partial(_muse_forward, settings=settings, heed_model=True), reads_masks=False)
    _said.clear()


@contextlib.contextmanager
def use_attention(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Run a model under any attention of the library, named as for `get_attention`, inside the `with` block.

    `register(config)` and `model.config.muse` have no effect inside the block.
    """
    with implementation(model, register_attention(attention)):
        yield


def register_attention(attention: str) -> str:
    """Make an attention, named as for `get_attention`, an implementation of transformers, and return its name there."""
    named = get_attention(attention)
    kind, _, settings = attention.partition(":")
    chosen = _Chosen(attention, named, functools.partial(_attend_to_each, named))
    function: AttentionFunction = functools.partial(_forward, chosen=chosen)
    if kind == "exact":
        function = exact_forward
    elif kind == "muse":
        function = functools.partial(_muse_forward, settings=settings or None, heed_model=False)
    name = f"{BY_NAME}{attention}"
    register_function(name, function, reads_masks=kind == "exact")
    return name


@contextlib.contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set a model's attention implementation inside the `with` block, and restore it at the end."""
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        for inner in _models(model):  # one with a config of its own is not always reached through the whole
            inner.set_attn_implementation(name)
        yield
    finally:
        for config, earlier in zip(configs, before, strict=True):
            config._attn_implementation_internal = earlier


def register_function(name: str, function: AttentionFunction, *, reads_masks: bool = True) -> None:
    """Make `attn_implementation=name` this function, and a ValueError for models that would not call it.

    A general mask is a ValueError too, unless the function `reads_masks`.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask)  # without one, padding would be dropped silently
    _registered.add(name)
    (_reading_masks.add if reads_masks else _reading_masks.discard)(name)
    _guard_models()
    _guard_masks()


class _Chosen(NamedTuple):
    """An attention in place of exact attention."""

    name: str
    """as it was asked for"""
    whole: Callable[..., Any]
    """of rows that are one document each, with the signature of `scaled_dot_product_attention`, and `return_lse`"""
    packed: Callable[..., tuple[Tensor, Tensor | None]]
    """of documents, as `attend_to_documents`"""
    longest_exact: Callable[[DocumentBoundaries | None, int], int] = lambda *_: 0
    """called with the documents and the length of a row: up to how many tokens they are attended to exactly"""


def exact_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Exact attention: masks, documents, caches, windows, sinks and dropout, but no softcap."""
    return _forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, chosen=None, **others)


def _muse_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    settings: str | None,
    heed_model: bool,
    **others: Any,
) -> tuple[Tensor, None]:
    if heed_model:
        own = getattr(getattr(module, "config", None), "muse", None)
        if own is not None and not isinstance(own, str):
            raise ValueError(f"model.config.muse={own!r} must be a string like 'QK32R2SP1B1k'")
        settings = settings if own is None else own
    chosen = _Chosen(
        "muse",
        functools.partial(muse_attention, config=settings),
        functools.partial(_attend_to_documents, settings),
        functools.partial(_longest_exact, settings),
    )
    return _forward(module, query, key, value, attention_mask, dropout, chosen=chosen, **others)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    chosen: _Chosen | None,
    **others: Any,
) -> tuple[Tensor, None]:
    _refuse_other_softmax(module, others)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # The compiler leaves packed documents out of its graphs: which kernels run depends on their lengths.
    attend = _attend_uncompiled if stands_for_documents(attention_mask) else _attend
    return attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, chosen, others), None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
    chosen: _Chosen | None,
    others: dict[str, Any],
) -> Tensor:
    """(batch, length, heads, head_dim)"""
    has_window = not attends_to_everything(module, others)
    seen = visible(module, query, key, attention_mask, is_causal, others, has_window=has_window)
    sinks: Tensor | None = others.get("s_aux")
    reason = None if chosen is None else _why_exact(module, query, key, seen, dropout, chosen, others)
    if chosen is not None and reason is not None:
        _say_once(chosen.name, reason)
    length = query.shape[2]  # a static cache has room for more keys, which no query sees yet
    if seen.documents is not None and (reason is None or reason == _SHORT) and not _is_exact_only(dropout, others):
        attend = functools.partial(_attend_to_documents, EXACT) if chosen is None else chosen.packed
        rows = (_as_rows(tensor[:, :, :length]) for tensor in (query, key, value))
        scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
        out, lse = attend(*rows, seen.documents, seen.is_causal, scale, return_lse=sinks is not None)
        out = out.unflatten(0, (query.shape[0], length)).transpose(1, 2)
        if sinks is not None and lse is not None:
            out = with_sinks(out, lse.unflatten(1, (query.shape[0], length)).transpose(0, 1), sinks)
    elif chosen is None or reason is not None:
        return _attend_exactly(module, query, key, value, seen, dropout, scaling, others)
    else:
        key, value = key[:, :, :length], value[:, :, :length]
        settings: dict[str, Any] = {"is_causal": seen.is_causal, "scale": scaling, "enable_gqa": True}
        if sinks is None:
            out = chosen.whole(query, key, value, **settings)
        else:
            out, lse = chosen.whole(query, key, value, **settings, return_lse=True)
            out = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous()


_attend_uncompiled = _disable_dynamo(_attend)


def _longest_exact(settings: str | None, documents: DocumentBoundaries | None, length: int) -> int:
    config = resolve_config(settings, length) if documents is None else config_of_document(settings, length)
    return config.block_size


def _as_rows(tensor: Tensor) -> Tensor:
    """(batch, heads, length, dim) as (tokens, heads, dim)"""
    return tensor.transpose(1, 2).flatten(0, 1)


def _attend_to_documents(
    settings: MuSeConfig | str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentBoundaries,
    is_causal: bool,
    scale: float,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    return attend_to_documents(
        query, key, value, documents, settings, is_causal=is_causal, scale=scale, return_lse=return_lse
    )


def _attend_to_each(
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentBoundaries,
    is_causal: bool,
    scale: float,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
        if return_lse:
            out, lse = attention(*tensors, **settings, return_lse=True)
            return out, lse
        return attention(*tensors, **settings), None

    return attend_to_each(query, key, value, documents, attend, return_lse=return_lse)


def _attend_exactly(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visible,
    dropout: float,
    scaling: float | None,
    others: dict[str, Any],
) -> Tensor:
    """By transformers' own function, which knows no sinks."""
    mask = seen.as_mask(query.shape[0], query.device)
    if mask is not None and mask.shape[-1] < key.shape[2] and seen.documents is not None:
        key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
    if others.get("s_aux") is None:
        found: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=seen.is_causal, **others
        )[0]
        return found
    is_causal = seen.is_causal and query.shape[2] > 1
    out = exact_attention_with_sinks(
        query, key, value, others["s_aux"], mask, is_causal=is_causal, scale=scaling, dropout=dropout
    )
    return out.transpose(1, 2).contiguous()


def _refuse_other_softmax(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """transformers' SDPA would leave them out silently."""
    found = [what for argument, what in _OTHER_SOFTMAX.items() if others.get(argument) is not None]
    if getattr(module, "compressor", None) is not None:  # of DeepSeek V4: their mask is no boolean one
        found.append("adds keys of its own")
    if found:
        raise ValueError(f"{type(module).__name__} {found[0]}: only attn_implementation='eager' does that; use it")


def _why_exact(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    seen: Visible,
    dropout: float,
    chosen: _Chosen,
    others: dict[str, Any],
) -> str | None:
    """Why these are not documents that attend to all of themselves, or to all of their past; None if they are."""
    if not attends_to_everything(module, others):
        return "a layer with a sliding window or chunks keeps them"
    queries, keys = query.shape[2], key.shape[2]
    if queries == 1:
        return "decoding attends to a KV cache"
    if seen.mask is not None and is_general(seen.mask):
        raise ValueError(f"{type(module).__name__}: {GENERAL}")
    if any(others.get(argument) is not None for argument in _EXACT_ONLY):
        return "a layer adds a bias to its logits, or reads a paged KV cache"
    if seen.mask is not None:
        return "the batch continues a KV cache, has padding inside a document, or is padded in a compiled model"
    if queries != keys and not (seen.is_causal and queries < keys):
        return "queries attend to another sequence"
    if dropout > 0:
        return "the model trains with attention dropout (attention_dropout=0 in its config switches it off)"
    longest = queries if seen.documents is None else seen.documents.longest
    if longest <= chosen.longest_exact(seen.documents, longest):
        return _SHORT
    return None


def _is_exact_only(dropout: float, others: dict[str, Any]) -> bool:
    return dropout > 0 or any(others.get(argument) is not None for argument in _EXACT_ONLY)


def attends_to_everything(module: torch.nn.Module, others: dict[str, Any]) -> bool:
    """Whether the layer has no window. In a short input a window shows in no mask, so the layer itself is asked."""
    own = getattr(module, "sliding_window", None)  # the same in all layers of some models, which pass it in some
    if others.get("sliding_window", own) is not None:
        return False
    kind = getattr(module, "layer_type", None)
    if isinstance(kind, str):  # a compiled layer that asks for its index serves no other layer
        return kind not in _WINDOWED
    types = getattr(getattr(module, "config", None), "layer_types", None) or []
    index = getattr(module, "layer_idx", None)
    return index is None or index >= len(types) or types[index] not in _WINDOWED


def _mask(**arguments: Any) -> Tensor | None:
    """`make_mask`, for models that use the attention interface."""
    if not torch.compiler.is_compiling():  # a model that is compiled was built, and refused then
        _refuse_config(arguments.get("config"))
    name = getattr(arguments.get("config"), "_attn_implementation", None)
    return make_mask(**arguments, reads_masks=name in _reading_masks)


_registered: set[str] = set()
"""The names behind which there is a function of this library."""
_reading_masks: set[str] = set()
"""Those among them whose function takes any mask."""


@functools.cache
def _guard_models() -> None:
    """Make a model that does not use the attention interface refuse our names, when it is built and when it is set.

    transformers has no place to declare this. It logs a warning at most: such a model then masks nothing, attends as
    before, or looks for the name in a table of its own.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    set_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(check)
    def guarded_check(model: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in _registered:
            _refuse_without_interface(type(model))
        return check(model, requested_attention, *args, **kwargs)

    @functools.wraps(set_implementation)
    def guarded_set(
        model: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        configs = _configs_to_set(model.config, attn_implementation)
        for inner in _models(model):
            if id(inner.config) in configs:
                _refuse_without_interface(type(inner))
        set_implementation(model, attn_implementation, *args, **kwargs)
        for inner in _models(model):
            if id(inner.config) in configs and inner.config._attn_implementation not in _registered:
                raise ValueError(
                    f"transformers cannot read the source of {type(inner).__name__}, and does not set its attention: "
                    "pass attn_implementation when you make the model"
                )

    PreTrainedModel.get_correct_attn_implementation = guarded_check
    PreTrainedModel.set_attn_implementation = guarded_set


@functools.cache
def _guard_masks() -> None:
    guard_masks(lambda name: name in _registered, lambda name: name in _reading_masks)


def _configs_to_set(config: PreTrainedConfig, attn_implementation: str | dict[str, Any] | None) -> set[int]:
    """The ids of the configs, of a model and its parts, that `set_attn_implementation` would give one of our names."""
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    if not isinstance(attn_implementation, dict):
        attn_implementation = dict.fromkeys(["", *parts], attn_implementation)
    found = {id(config)} if attn_implementation.get("") in _registered else set()
    return found.union(*(_configs_to_set(getattr(config, part), attn_implementation.get(part)) for part in parts))


def _refuse_config(config: PreTrainedConfig | None) -> None:
    """Refuse the model of a config: it asks for a mask, and its config may have been changed after it was built."""
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        found = mapping.get(type(config), None)
        for model_class in found if isinstance(found, tuple) else (found,):
            if model_class is not None:
                _refuse_without_interface(model_class)


def _refuse_without_interface(model_class: type[PreTrainedModel]) -> None:
    if not _uses_interface(model_class):
        raise ValueError(
            f"{model_class.__name__} does not use the attention interface of transformers, and would ignore the "
            "attention asked for: set attn_implementation='eager', or use a model that does"
        )


def _uses_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether its layers call the attention function that their config names. Without source, as in a notebook: yes."""
    module = sys.modules[model_class.__module__]
    if not model_class._can_set_attn_implementation():
        try:
            inspect.getsource(module)
        except (OSError, TypeError):
            return True
        return False
    own_tables = [value for value in vars(module).values() if isinstance(value, dict) and "eager" in value]
    return not own_tables


def _models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model and all models inside it, from the outside in."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of all models inside it, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [inner.config for inner in _models(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


_said: set[tuple[str, str]] = set()


def _say_once(asked_for: str, reason: str) -> None:
    if (asked_for, reason) not in _said:
        _said.add((asked_for, reason))
        warnings.warn(f"{asked_for}: exact attention runs where {reason}", ExactAttentionWarning, stacklevel=2)


_say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in config.py: said when it is compiled
