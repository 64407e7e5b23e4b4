"""Peak memory of one forward and backward pass beyond its inputs; on a CPU, of one head, batch 1.

The inputs and the gradient of the output exist before; the output, the gradients of the inputs and everything in
between count. On CUDA the allocator keeps the peak. On a CPU it is the operating system's peak of a process that does
nothing else: `python -m muse_lab.benchmark.memory` is that process, and Linux is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from muse_attention.registry import get_attention
from muse_lab.benchmark.captured import CapturesFile, create_workload
from muse_lab.benchmark.request import Shape, at_matched_sparsity
from muse_lab.benchmark.workload import SDPA, AttentionCall, Workload, sdpa

_SHORT_LENGTH = 1024
_KEEP_NOTHING = {"MIMALLOC_PURGE_DELAY": "0"}
"""Memory that was freed but is still held for reuse would hide an equal amount of what comes next. On ARM, PyTorch's
allocator is mimalloc, which is told by its environment; glibc's is told by a call."""


@dataclass(frozen=True)
class MemoryCase:
    attention: str
    """`sdpa`, or a name of `get_attention`"""
    length: int
    head_dim: int
    dtype: str
    device: str
    is_causal: bool
    seed: int = 0
    captures: str | None = None
    """the file of `CapturesFile`; None: synthetic data"""
    repeat_captures: bool = False


def measure_extra_memory(case: MemoryCase) -> int | None:
    """Bytes on a CPU, or None where it cannot be measured."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    package_root = str(Path(__file__).parents[2])
    search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    finished = subprocess.run(
        [sys.executable, "-m", "muse_lab.benchmark.memory", json.dumps(asdict(case))],
        env={**os.environ, **_KEEP_NOTHING, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode < 0:  # killed by the system, usually for lack of memory
        return None
    if finished.returncode > 0:
        raise RuntimeError(f"measuring the memory of {case.attention} failed:\n{finished.stderr}")
    extra: int | None = json.loads(finished.stdout)
    return extra


def extra_memory_on_cuda(attention: AttentionCall, workload: Workload) -> int:
    """Bytes, for an attention that has run on this workload before."""
    workload.clear_gradients()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _run(attention, workload)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    workload.clear_gradients()
    return peak - before


def _measure_in_this_process(case: MemoryCase) -> int | None:
    _run_short(case)
    attention, workload = _attention(case.attention), _workload(case, case.length)
    _return_free_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak, VmHWM, to what is resident now
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    _run(attention, workload)
    return max(0, _status_bytes("VmHWM") - before)


def _attention(name: str) -> AttentionCall:
    return sdpa if name == SDPA else get_attention(name)


def _workload(case: MemoryCase, length: int) -> Workload:
    captures = None if case.captures is None else CapturesFile(Path(case.captures), case.repeat_captures)
    shape = Shape(length, heads=1, key_heads=1, head_dim=case.head_dim, batch=1)
    place = {"dtype": case.dtype, "device": case.device}
    return create_workload(captures, shape, **place, is_causal=case.is_causal, seed=case.seed)


def _run_short(case: MemoryCase) -> None:
    """Run the same kind of attention on a few short blocks, so that libraries' one-time allocations are not counted."""
    kind, _, _ = case.attention.partition(":")
    length = min(case.length, _SHORT_LENGTH)
    _run(_attention(at_matched_sparsity(kind, length)), _workload(case, length))


def _run(attention: AttentionCall, workload: Workload) -> None:
    workload.backward(workload.forward(attention))


def _return_free_memory() -> None:
    """Return the memory that glibc holds for reuse."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == field:
            return int(amount.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    json.dump(_measure_in_this_process(MemoryCase(**json.loads(sys.argv[1]))), sys.stdout)
