"""Compile the kernels of one call for a GPU, on a machine that has none.

Triton's interpreter does not check types, and what it runs may not compile. Run as a script: the tests' own process
interprets kernels. Nothing is launched, so what comes out is meaningless.
"""

from __future__ import annotations

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from muse_attention import backends, muse_attention


class _Hopper:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(dtype: str, config: str) -> None:
    driver.set_active(_Hopper())
    run, compiled = JITFunction.run, set()

    def compile_only(self: JITFunction, *arguments: object, **options: object) -> None:
        compiled.add(self.__name__)
        run(self, *arguments, **{**options, "warmup": True})

    JITFunction.run = compile_only
    backends._why_not_triton = lambda *_: None
    query, key, value = (
        torch.randn(1, heads, 300, 64, dtype=getattr(torch, dtype), requires_grad=True) for heads in (4, 2, 2)
    )
    out = muse_attention(query, key, value, is_causal=True, enable_gqa=True, config=config, backend="triton")
    torch.autograd.grad(out.sum(), (query, key, value))
    sys.stdout.write(" ".join(sorted(compiled)))


if __name__ == "__main__":
    main(*sys.argv[1:])
