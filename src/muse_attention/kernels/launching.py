"""Launching a kernel without asking Triton again what it found out about the same call before.

`fn[grid](...)` of Triton binds and classifies every argument in every call, which takes longer than many kernels run.
Here a call is recognised by what its code depends on: dtypes, the alignment of pointers, specialised integers and
constants. The first such call goes through Triton, the others straight to the compiled kernel it returned. Hooks and
profilers see all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNMENT = 16
"""Triton compiles another kernel for pointers that are no multiples of so many bytes, and for such integers."""


class Kernel:
    """A kernel with its arguments first, and its compile-time constants last, by name."""

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self._function = triton.jit(function, do_not_specialize=list(do_not_specialize))
        parameters = inspect.signature(function).parameters.values()
        self._constants = [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]
        arguments = [parameter.name for parameter in parameters if parameter.name not in self._constants]
        self._is_specialised = [name not in do_not_specialize for name in arguments]
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, list[Any]]] = {}
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = (
            arguments[0].device,
            tuple(map(_what_code_depends_on, arguments, self._is_specialised)),
            tuple(constants.items()),
        )
        if key in self._compiled:
            compiled, values = self._compiled[key]
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
            return
        compiled = self._function[grid](*arguments, **constants)
        # (Triton's interpreter returns nothing.)
        if isinstance(compiled, CompiledKernel):
            self._compiled[key] = compiled, [constants[name] for name in self._constants]


def kernel(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """As `triton.jit`, for what is launched; functions that kernels call are `triton.jit`."""
    return functools.partial(Kernel, do_not_specialize=do_not_specialize)


def _what_code_depends_on(argument: Tensor | int | float, is_specialised: bool) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, float):
        return float
    fits = -(1 << 31) <= argument < 1 << 31
    return (fits, argument == 1, argument % ALIGNMENT == 0) if is_specialised else fits
