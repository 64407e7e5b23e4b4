"""Kernels: how one is declared, and what a launch of one is."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNMENT = 16
"""Triton compiles another kernel for pointers that are no multiples of so many bytes, and for such integers."""


class Launch(NamedTuple):
    kernel: Kernel
    grid: tuple[int, ...]
    """three numbers"""
    arguments: tuple[Any, ...]
    """tensors and numbers"""
    constants: dict[str, Any]

    def now(self) -> CompiledKernel | None:
        """What was launched, as Triton compiled it; Triton's interpreter compiles nothing."""
        compiled = self.kernel.function[self.grid](*self.arguments, **self.constants)
        return compiled if isinstance(compiled, CompiledKernel) else None


class Kernel:
    """A kernel with its arguments first, and its compile-time constants last, by name."""

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self.function = triton.jit(function, do_not_specialize=list(do_not_specialize))
        parameters = inspect.signature(function).parameters.values()
        self.constants = [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launch = Launch(self, grid, arguments, constants)
        if any(isinstance(argument, Tensor) and argument.is_meta for argument in arguments):
            _here.notes.append(launch)
        else:
            launch.now()


def kernel(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """As `triton.jit`, for what is launched; functions that kernels call are `triton.jit`."""
    return functools.partial(Kernel, do_not_specialize=do_not_specialize)


_here = threading.local()


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """The list of the launches that this thread makes meanwhile on tensors without memory (of the device `meta`)."""
    _here.notes = []
    try:
        yield _here.notes
    finally:
        del _here.notes
