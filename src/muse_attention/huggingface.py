"""`attn_implementation="muse"` for the models of transformers that use its attention interface, Llama among them.

    from muse_attention import huggingface
    huggingface.register("QK32R2SP1B1k")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="muse")

`model.set_attn_implementation("muse")` does the same to a loaded model. `model.config.muse = "QK64R4B2k"` gives a
model a configuration of its own, which `save_pretrained` keeps; in a model made of several it belongs in the config of
the one that attends. Without it, and without `register(config)`, it is `MuSeConfig.for_length` of each input.

MuSe attends where a whole sequence attends to itself: training, and prefill. Everything else is attended to exactly, by
transformers' own function, and an `ExactAttentionWarning` says so once for each reason: decoding with a KV cache,
inputs of one block, padded batches, packed documents that a mask separates, layers with a sliding window, attention
dropout.

A ValueError refuses what neither can do: models that do not use the attention interface (Bloom, GPT-J), attention that
is not a softmax over all keys (a softcap, sinks, selected keys), and packed documents that would see each other, as
they would in transformers with a KV cache or an `attention_mask` of ones. With `use_cache=False` and without
`attention_mask`, transformers separates them.

Under `torch.compile` of a whole model a padding mask cannot be looked at: leave it out where nothing is padded. Packed
`position_ids` are an error there: compile the layers, not the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from muse_attention.attention import muse_attention, resolve_config
from muse_attention.by_name import get_attention
from muse_attention.config import MuSeConfig
from muse_attention.extras import how_to_install
from muse_attention.packing import refuse_packed_documents

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedConfig,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
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
    "s_aux": "has attention sinks",
    "indices": "selects the keys of each query",
    "block_indices": "selects the keys of each query",
}
_WINDOWED = ("sliding_attention", "chunked_attention")
_EXACT_ONLY = ("position_bias", "cache")
"""Arguments that change the attention, and that transformers' exact attention understands."""


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
    register_function(name, functools.partial(_muse_forward, settings=settings, heed_model=True))
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
    function: AttentionFunction = functools.partial(_forward, attention=named, asked_for=attention)
    if kind == "exact":
        function = exact_forward
    elif kind == "muse":
        function = functools.partial(_muse_forward, settings=settings or None, heed_model=False)
    name = f"{BY_NAME}{attention}"
    register_function(name, function)
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


def register_function(name: str, function: AttentionFunction) -> None:
    """Make `attn_implementation=name` this function, and a ValueError for models that would not call it."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask)  # without one, padding would be dropped silently
    _registered.add(name)
    _guard_models()
    _guard_masks()


def exact_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' own exact attention: masks, caches, windows and dropout, but no softcap and no sinks."""
    _refuse_other_softmax(module, others)
    if stands_for_causal(attention_mask):
        attention_mask, others["is_causal"] = None, True
    refuse_packed_documents(query.shape[0], query.shape[2], attention_mask, others)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)


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
    config = resolve_config(settings, query.shape[2])
    return _forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout,
        attention=functools.partial(muse_attention, config=settings),
        asked_for="muse",
        block_size=config.block_size,
        **others,
    )


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
    attention: Callable[..., Tensor],
    asked_for: str,
    block_size: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    _refuse_other_softmax(module, others)
    if stands_for_causal(attention_mask):
        attention_mask, is_causal = None, True
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    refuse_packed_documents(query.shape[0], query.shape[2], attention_mask, others)
    reason = _why_exact(module, query, key, attention_mask, dropout, is_causal, block_size, others)
    if reason is not None:
        _say_once(asked_for, reason)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **others
        )
    length = query.shape[2]  # a static cache has room for more keys, which no query sees yet
    out = attention(
        query, key[:, :, :length], value[:, :, :length], is_causal=is_causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse_other_softmax(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """transformers' SDPA would leave them out silently."""
    for argument, what in _OTHER_SOFTMAX.items():
        if others.get(argument) is not None:
            raise ValueError(f"{type(module).__name__} {what}: only attn_implementation='eager' does that; use it")


def _why_exact(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    block_size: int,
    others: dict[str, Any],
) -> str | None:
    """Why this call is not one sequence that attends to all of itself, or to all of its past; None if it is."""
    if not attends_to_everything(module, others):
        return "a layer with a sliding window or chunks keeps them"
    queries, keys = query.shape[2], key.shape[2]
    if queries == 1:
        return "decoding attends to a KV cache"
    if attention_mask is not None or any(others.get(argument) is not None for argument in _EXACT_ONLY):
        return "the batch is padded or packed, continues a KV cache, or has a mask of its own"
    if queries != keys and not (is_causal and queries < keys):
        return "queries attend to another sequence"
    if dropout > 0:
        return "the model trains with attention dropout (attention_dropout=0 in its config switches it off)"
    if queries <= block_size:
        return "the input is no longer than one block"
    return None


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


def stands_for_causal(attention_mask: Tensor | None) -> bool:
    """Whether it is what a registered attention gets in place of a plain causal mask: it has no keys."""
    return attention_mask is not None and attention_mask.shape[-1] == 0


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """transformers' mask for SDPA, (batch, 1, queries, keys), or none where the call is plainly causal or full.

    None says that nothing is masked. A causal mask that would be None for SDPA has no keys instead: only the attention
    functions of this file know what it stands for, and a layer that reads it itself fails rather than masks nothing.

    Under `torch.compile` transformers makes a mask always: it cannot see whether anything is padded or packed. Here
    there is none if no padding mask was given, and the compiled graph checks that nothing was packed.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:  # a model that is compiled was built, and refused then
        _refuse_config(others.get("config"))
    causal = torch.empty(batch_size, 1, q_length, 0, dtype=torch.bool, device=device)
    if compiling and attention_mask is None and local_size is None and not use_vmap:
        if allow_is_bidirectional_skip:
            return None
        if q_length == kv_length and (allow_is_causal_skip or mask_function is not causal_mask_function):
            if not allow_is_causal_skip:
                _assert_one_sequence(mask_function, batch_size, q_length, device)
            return causal
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **others,
    )
    # One query sees every key, whoever reads the mask.
    return causal if mask is None and allow_is_causal_skip and q_length > 1 else mask


def _assert_one_sequence(
    mask_function: Callable[..., Tensor], batch_size: int, length: int, device: torch.device | str
) -> None:
    """Every token sees the first one, and none sees the next: true of a causal mask, false of packed or blockwise."""
    batch = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    position = torch.arange(length, device=device)[None]
    sees_first = mask_function(batch, head, position, torch.zeros_like(position))
    sees_next = mask_function(batch, head, position[:, :-1], position[:, 1:])
    torch._assert_async(
        sees_first.all() & ~sees_next.any(),
        "packed position_ids in a compiled model: compile its layers instead, or pass a 4D attention_mask",
    )


_registered: set[str] = set()
"""The names behind which there is a function of this library."""


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
    """Refuse packed documents also in models that pass their `position_ids` to the makers of masks alone."""
    prepare = masking_utils._preprocess_mask_arguments

    @functools.wraps(prepare)
    def guarded_prepare(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_padding = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        is_cached = attention_mask is None and past_key_values is not None
        if config._attn_implementation in _registered and (is_padding or is_cached):
            batch, queries = inputs_embeds.shape[:2]
            padding = attention_mask[:, None, None].bool() if is_padding else None
            refuse_packed_documents(batch, queries, padding, {"position_ids": position_ids})
        return prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs)

    masking_utils._preprocess_mask_arguments = guarded_prepare


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
