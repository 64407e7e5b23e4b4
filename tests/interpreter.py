"""Triton's interpreter with less to do: a third less time for the tests that run kernels in it."""

from __future__ import annotations

import functools
from typing import Any


def hasten_interpreter() -> None:
    """Leave out what it does again and again: the results are the same.

    At every call of a device function it looks through the whole language for builtins to replace, and those that the
    kernel's launch has replaced are no builtins any more. And it makes the table of dtypes for each dtype it looks up.
    """
    from triton.runtime import interpreter

    names_of: dict[Any, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin
    replace_all = interpreter._patch_builtin

    def replace_once(package: Any, builder: Any, *scope: Any) -> None:
        if package not in names_of:
            names_of[package] = [name for name in dir(package) if is_builtin(getattr(package, name))]
        names = names_of[package]
        if names and is_builtin(getattr(package, names[0])):
            replace_all(package, builder, *scope)

    look_up = interpreter._get_np_dtype
    look_up_once = functools.cache(look_up)

    def dtype_of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, interpreter.tl.block_type) else kind
        return look_up(element) if isinstance(element, interpreter.tl.pointer_type) else look_up_once(element)

    interpreter._patch_builtin = replace_once
    interpreter._get_np_dtype = dtype_of
