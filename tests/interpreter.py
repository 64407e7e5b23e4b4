"""Triton's interpreter with less to do: a third less time for the tests that run kernels in it."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any


def hasten_interpreter() -> None:
    """Leave out what it does again and again: the results are the same.

    At every call of a device function it looks through the whole language for builtins to replace, though the launch of
    the kernel has replaced them. And it makes the table of dtypes for each dtype it looks up.
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
