"""Compile the kernels of some calls for a GPU, on a machine that has none.

Triton's interpreter does not check types, and what it runs may not compile. Run as a script: the tests' own process
interprets kernels. Nothing is launched, so what comes out is meaningless. Prints, for each call, the
name of its attention, each kernel, and the most bytes of shared memory that a program of it needs.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from muse_attention import get_attention
from muse_attention.backends.triton import limits


class _Hopper:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(dtype: str, *cases: str) -> None:
    """Each case is the name of an attention and a head dimension, like muse:QK4R2B64:64."""
    driver.set_active(_Hopper())
    run = JITFunction.run
    shared: dict[str, int] = {}

    def compile_only(self: JITFunction, *arguments: object, **options: object) -> None:
        compiled = run(self, *arguments, **{**options, "warmup": True})
        shared[self.__name__] = max(compiled.metadata.shared, shared.get(self.__name__, 0))

    JITFunction.run = compile_only
    limits.why_not = lambda *_: None
    for case in cases:
        name, _, head_dim = case.rpartition(":")
        query, key, value = (
            torch.randn(1, heads, 300, int(head_dim), dtype=getattr(torch, dtype), requires_grad=True)
            for heads in (4, 2, 2)
        )
        shared.clear()
        out = get_attention(name)(query, key, value, is_causal=True, enable_gqa=True, backend="triton")
        torch.autograd.grad(out.sum(), (query, key, value))
        sys.stdout.writelines(f"{name} {kernel} {size}\n" for kernel, size in sorted(shared.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
