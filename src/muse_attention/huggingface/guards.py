"""Models that do not use the attention interface of transformers are refused: they would ignore the attention."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING


def guard_models(is_registered: Callable[[str | None], bool]) -> None:
    """Make a model that does not use the attention interface refuse our names, when it is built and when it is set.

    transformers has no place to declare this. It logs a warning at most: such a model then masks nothing, attends as
    before, or looks for the name in a table of its own.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    set_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(check)
    def guarded_check(model: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if is_registered(requested_attention):
            _refuse_without_interface(type(model))
        return check(model, requested_attention, *args, **kwargs)

    @functools.wraps(set_implementation)
    def guarded_set(
        model: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        configs = _configs_to_set(model.config, attn_implementation, is_registered)
        for inner in models_of(model):
            if id(inner.config) in configs:
                _refuse_without_interface(type(inner))
        set_implementation(model, attn_implementation, *args, **kwargs)
        for inner in models_of(model):
            if id(inner.config) in configs and not is_registered(inner.config._attn_implementation):
                raise ValueError(
                    f"transformers cannot read the source of {type(inner).__name__}, and does not set its attention: "
                    "pass attn_implementation when you make the model"
                )

    PreTrainedModel.get_correct_attn_implementation = guarded_check
    PreTrainedModel.set_attn_implementation = guarded_set


def _configs_to_set(
    config: PreTrainedConfig,
    attn_implementation: str | dict[str, Any] | None,
    is_registered: Callable[[str | None], bool],
) -> set[int]:
    """The ids of the configs, of a model and its parts, that `set_attn_implementation` would give one of our names."""
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    if not isinstance(attn_implementation, dict):
        attn_implementation = dict.fromkeys(["", *parts], attn_implementation)
    ids = {id(config)} if is_registered(attn_implementation.get("")) else set()
    for part in parts:
        ids |= _configs_to_set(getattr(config, part), attn_implementation.get(part), is_registered)
    return ids


def refuse_config(config: PreTrainedConfig | None) -> None:
    """Refuse the model of a config: it asks for a mask, and its config may have been changed after it was built."""
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        model_classes = mapping.get(type(config), None)
        for model_class in model_classes if isinstance(model_classes, tuple) else (model_classes,):
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


def models_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model and all models inside it, from the outside in."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model and of all models inside it, each once."""
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [inner.config for inner in models_of(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(configs.values())
