"""Declaration of kernels, and their launches."""

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

from muse_attention.backends.triton.runtime.chips import current_chip
from muse_attention.backends.triton.runtime.stages import Stage

ALIGNMENT = 16
"""Bytes. Triton compiles another kernel for pointers, and integers, that are not multiples of it."""
_OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""What a launch tells the compiler besides the arguments of the kernel."""


class Launch(NamedTuple):
    kernel: Kernel
    grid: tuple[int, ...]
    """three numbers"""
    arguments: tuple[Any, ...]
    """tensors, numbers and compile-time constants, in the order of the kernel's parameters"""
    options: dict[str, int]
    """`num_warps`, `num_stages`, `maxnreg`"""

    def now(self) -> CompiledKernel | None:
        """Launch it. Returns the compiled kernel; None under Triton's interpreter."""
        compiled = self.kernel.function[self.grid](*self.arguments, **self.options)
        return compiled if isinstance(compiled, CompiledKernel) else None


class Kernel:
    """A kernel of a stage, launched as `kernel[grid](keys_ptr=keys, length=length, D=64, num_warps=4)`."""

    def __init__(self, function: Callable[..., None], stage: Stage, do_not_specialize: Sequence[str]) -> None:
        self.function = triton.jit(function, do_not_specialize=list(do_not_specialize))
        self.stage = stage
        self._parameters = tuple(inspect.signature(function).parameters)
        self.__name__, self.__module__, self.__doc__ = function.__name__, function.__module__, function.__doc__
        if _kernels.get(self.__name__, self).__module__ != self.__module__:
            raise ValueError(f"there are two kernels {self.__name__}, which a profiler could not tell apart")
        _kernels[self.__name__] = self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], **arguments: Any) -> None:
        launch = Launch(self, grid, *self._in_order(arguments))
        if any(isinstance(argument, Tensor) and argument.is_meta for argument in launch.arguments):
            _here.notes.append(launch)
        else:
            launch.now()

    def _in_order(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, int]]:
        """The arguments in the order of the kernel's parameters, and the options."""
        options = {name: arguments[name] for name in _OPTIONS if name in arguments}
        wrong = (arguments.keys() - options.keys()) ^ set(self._parameters)
        if wrong:
            raise TypeError(f"{self.__name__} lacks these arguments, or has no such parameters: {sorted(wrong)}")
        if "maxnreg" in options and not current_chip().has_shared_operands:
            del options["maxnreg"]
        return tuple(arguments[name] for name in self._parameters), options


def kernel(*, stage: Stage, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Like `triton.jit`, for kernels that are launched; functions that they call use `triton.jit`."""
    return functools.partial(Kernel, stage=stage, do_not_specialize=do_not_specialize)


def arguments_of(tables: object, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a structure as arguments of kernels."""
    return {f"{prefix}{name}_ptr": table for name, table in vars(tables).items()}


def stages_of_kernels() -> dict[str, Stage]:
    """The stage of each imported kernel, by the kernel's name."""
    return {name: kernel.stage for name, kernel in _kernels.items()}


_kernels: dict[str, Kernel] = {}
_here = threading.local()


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """A list of the launches that this thread makes within the context on tensors without memory (device `meta`)."""
    _here.notes = []
    try:
        yield _here.notes
    finally:
        del _here.notes
