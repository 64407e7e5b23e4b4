"""Every kernel of a call, compiled for GPUs that need not be there: `python -m docs_build.compiled_kernels`.

For each architecture and head dimension: the registers and the shared memory of every kernel, forward and backward, and
whether the chip has as much. Exits with 1 if a kernel does not compile or does not fit. Compiled is not run: nothing
here says that a kernel is right or fast.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from muse_attention import muse_attention
from muse_attention.backends.triton import limits
from muse_attention.backends.triton.runtime import schedule
from muse_attention.core import local
from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB that one program may have."""
ARCHITECTURES = [name for name in SHARED_MEMORY if name != "sm_86"]
"""Without sm_86, which has what sm_89 has."""
CONFIGURATION = "Q16K64T0.1B2k,search=0.05"
"""As many clusters as any default has."""
LENGTH = 5000


@dataclass(frozen=True)
class Compiled:
    kernel: str
    shared_memory: int = 0
    """bytes"""
    registers: int | None = None
    """of a thread; None where no assembler says"""
    spilled: int = 0
    """bytes of a thread that do not fit into registers"""
    failure: str | None = None
    """why it does not compile"""

    def why_not(self, architecture: str) -> str | None:
        """What keeps the kernel from such a chip; None if nothing does."""
        most = SHARED_MEMORY[architecture]
        if self.failure is not None:
            return f"{self.kernel} does NOT compile: {self.failure}"
        if self.shared_memory > most * 1024:
            return f"{self.kernel} does NOT fit: {self.shared_memory / 1024:.0f} KiB of {most} KiB of shared memory"
        return None

    def __str__(self) -> str:
        if self.failure is not None:
            return "fails"
        registers = "" if self.registers is None else f"{self.registers} / "
        return f"{registers}{self.shared_memory / 1024:.0f}" + (f" +{self.spilled}" if self.spilled else "")


class _Driver:
    """What Triton and launches ask of a driver: the target."""

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


def compile_kernels(
    architecture: str, head_dim: int, config: str = CONFIGURATION, dtype: torch.dtype = torch.bfloat16
) -> list[Compiled]:
    """Of one call, forward and backward: launches are compiled and not made.

    Of a kernel that is compiled more than once, the one with most shared memory.
    """
    found: dict[str, Compiled] = {}
    launch = JITFunction.run

    def compile_only(function: Any, *arguments: Any, **options: Any) -> None:
        name, said = function.__name__, io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                compiled = launch(function, *arguments, **{**options, "warmup": True})
        except Exception as error:  # whatever the compiler raises is a finding
            found[name] = Compiled(name, failure=f"{type(error).__name__}: {error}".partition("\n")[0])
            return
        before = found.get(name)
        if before is None or (before.failure is None and before.shared_memory < compiled.metadata.shared):
            found[name] = Compiled(name, compiled.metadata.shared, *_registers(compiled, said.getvalue()))

    inputs = [torch.randn(1, heads, LENGTH, head_dim, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(driver, "_active", _Driver(architecture)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(schedule, "_schedules", {}),  # (Those of another chip have other settings.)
        mock.patch.object(limits, "why_not", return_value=None),
        mock.patch.object(local, "attend", _own_block),
        mock.patch.object(local, "attend_backward", _own_block_backward),
        knobs.nvidia.scope(),
        knobs.cache.scope(),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = folder  # (What comes from a cache is not assembled.)
        out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=config, backend="triton")
        torch.autograd.grad(out.sum(), inputs)
    return sorted(found.values(), key=lambda kernel: kernel.kernel)


def _own_block(call: Call) -> Partial:
    """Attention inside of blocks, which operators of PyTorch compute: nothing of it is compiled here."""
    shape = (*call.query.shape[:3], call.value.shape[3])
    return Partial(call.query.new_zeros(shape), call.query.new_zeros(shape[:3], dtype=compute_dtype(call.query.dtype)))


def _own_block_backward(call: Call, *_: object) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(tensor) for tensor in (call.query, call.key, call.value))


def _registers(compiled: Any, said: str) -> tuple[int | None, int]:
    """Registers of a thread, and bytes that are spilled: as NVIDIA's assembler says, or as AMD's assembly does."""
    if "amdgcn" in compiled.asm:
        used = re.search(r"\.vgpr_count:\s+(\d+)", compiled.asm["amdgcn"])
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])
        return (int(used[1]) if used else None), (4 * int(spilled[1]) if spilled else 0)
    used, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return (int(used[1]) if used else None), (int(spilled[1]) if spilled else 0)


def table(columns: dict[str, list[Compiled]]) -> Iterator[str]:
    """Markdown: a kernel a row, an architecture a column."""
    yield "| kernel | " + " | ".join(columns) + " |"
    yield "| --- | " + " | ".join("---:" for _ in columns) + " |"
    for row in zip(*columns.values(), strict=True):
        yield f"| `{row[0].kernel}` | " + " | ".join(map(str, row)) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a kernel does not compile or does not fit."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--gpu", default=",".join(ARCHITECTURES), help=f"any of {', '.join(SHARED_MEMORY)}")
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--config", default=CONFIGURATION, help=f"{CONFIGURATION} if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    chosen = parser.parse_args(arguments)
    architectures = chosen.gpu.split(",")
    unknown = [name for name in architectures if name not in SHARED_MEMORY]
    if unknown:
        parser.error(f"--gpu {unknown[0]}: choose among {', '.join(SHARED_MEMORY)}")
    begin, failed = time.perf_counter(), 0
    for head_dim in map(int, chosen.head_dim.split(",")):
        columns = {}
        for architecture in architectures:
            begin_of_column = time.perf_counter()
            kernels = compile_kernels(architecture, head_dim, chosen.config, getattr(torch, chosen.dtype))
            columns[architecture] = kernels
            obstacles = [kernel.why_not(architecture) for kernel in kernels]
            wrong = [obstacle for obstacle in obstacles if obstacle is not None]
            failed += len(wrong)
            _tell(
                f"{architecture}, heads of {head_dim}: {len(kernels)} kernels in "
                f"{time.perf_counter() - begin_of_column:.0f} s; "
                f"most shared memory {max(kernel.shared_memory for kernel in kernels) / 1024:.0f} of "
                f"{SHARED_MEMORY[architecture]} KiB, most spilled {max(kernel.spilled for kernel in kernels)} B",
                *wrong,
            )
        print(f"\nHeads of {head_dim}: registers of a thread / KiB of shared memory, + bytes of a thread spilled\n")
        print("\n".join(table(columns)), flush=True)
    verdict = f"{failed} do NOT compile or fit" if failed else "all compile and fit"
    _tell(f"{verdict}; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
