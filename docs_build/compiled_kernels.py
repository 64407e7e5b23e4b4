"""Every kernel of a call, compiled for GPUs that need not be there: `python -m docs_build.compiled_kernels`.

For each architecture and head dimension: the registers and the shared memory of every kernel of blockwise MuSe, forward
and backward, and whether the chip has as much. Compiled is not run: nothing here says that a kernel is right or fast.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from muse_attention import muse_attention
from muse_attention.backends.triton import limits

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB that one program may have."""
CONFIGURATION = "Q8K32T0.1B2k"
LENGTH = 5000


@dataclass(frozen=True)
class Compiled:
    kernel: str
    shared_memory: int
    """bytes"""
    registers: int | None
    """of a thread; None where no assembler says"""
    spilled: int
    """bytes of a thread that do not fit into registers"""


class _Chip:
    """What Triton asks of a driver in order to compile: the target."""

    def __init__(self, architecture: str) -> None:
        self.number = list(SHARED_MEMORY).index(architecture)  # (Triton remembers targets by device.)
        is_cuda = architecture.startswith("sm_")
        name: Any = int(architecture.removeprefix("sm_")) if is_cuda else architecture
        self.target = GPUTarget("cuda" if is_cuda else "hip", name, 32 if is_cuda else 64)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_kernels(architecture: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Compiled]:
    """Of one call, forward and backward: launches are compiled and not made."""
    found: dict[str, Compiled] = {}
    chip, launch = _Chip(architecture), JITFunction.run

    def compile_only(function: Any, *arguments: Any, **options: Any) -> None:
        if chip.target.backend == "hip":
            options.pop("maxnreg", None)  # as where PyTorch is for such chips
        compiled = launch(function, *arguments, **{**options, "warmup": True})
        registers, spilled = _assemble(compiled, architecture, options.get("maxnreg"))
        found[function.__name__] = Compiled(function.__name__, compiled.metadata.shared, registers, spilled)

    inputs = [torch.randn(1, heads, LENGTH, head_dim, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]
    with (
        mock.patch.object(driver, "_active", chip),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(limits, "why_not", return_value=None),
    ):
        out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIGURATION, backend="triton")
        torch.autograd.grad(out.sum(), inputs)
    return sorted(found.values(), key=lambda kernel: kernel.kernel)


def _assemble(compiled: Any, architecture: str, most: int | None) -> tuple[int | None, int]:
    """Registers of a thread, and bytes of them that are spilled."""
    if "ptx" not in compiled.asm:
        return None, 0
    # The one that Triton takes for this architecture.
    assembler = compiler.get_ptxas(int(architecture.removeprefix("sm_"))).path
    target = re.search(r"\.target (\w+)", compiled.asm["ptx"])
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [assembler, "-v", "--gpu-name", target[1], file.name, "-o", os.devnull]
        command += [] if most is None else [f"--maxrregcount={most}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stderr
    used, stored = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return (int(used[1]) if used else None), (int(stored[1]) if stored else 0)


def rows_of_table(architectures: list[str], head_dim: int) -> Iterator[str]:
    """Markdown: a kernel a row, an architecture a column."""
    columns = []
    for architecture in architectures:
        begin = time.perf_counter()
        kernels = compile_kernels(architecture, head_dim)
        seconds = time.perf_counter() - begin
        most = max(kernel.shared_memory for kernel in kernels) / 1024
        fits = "fits" if most <= SHARED_MEMORY[architecture] else "does NOT fit"
        print(
            f"{architecture}, heads of {head_dim}: {len(kernels)} kernels in {seconds:.0f} s; the largest has "
            f"{most:.0f} KiB of shared memory and {fits}",
            file=sys.stderr,
        )
        columns.append({kernel.kernel: kernel for kernel in kernels})
    yield "| kernel | " + " | ".join(architectures) + " |"
    yield "| --- | " + " | ".join("---:" for _ in architectures) + " |"
    for name in columns[0]:
        yield f"| `{name}` | " + " | ".join(_describe(column[name]) for column in columns) + " |"


def _describe(kernel: Compiled) -> str:
    registers = "" if kernel.registers is None else f"{kernel.registers} registers, "
    spilled = f", {kernel.spilled} B spilled" if kernel.spilled else ""
    return f"{registers}{kernel.shared_memory / 1024:.0f} KiB{spilled}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--gpu", default=",".join(SHARED_MEMORY), help=f"any of {', '.join(SHARED_MEMORY)}")
    parser.add_argument("--head-dim", default="64,128")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.gpu.split(",") if name not in SHARED_MEMORY]
    if unknown:
        parser.error(f"--gpu {unknown[0]}: choose among {', '.join(SHARED_MEMORY)}")
    for dim in map(int, chosen.head_dim.split(",")):
        print(f"\nHeads of {dim}:\n")
        print("\n".join(rows_of_table(chosen.gpu.split(","), dim)))
