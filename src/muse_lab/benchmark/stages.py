"""GPU time by stage of an attention, from the names of the kernels that run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from muse_attention.backends.triton.runtime import stages
from muse_lab.benchmark.workload import AttentionCall, Workload

PROFILED_RUNS = 3

OWN_BLOCK, OTHER = "own block", "other"
_FUSED_ATTENTION = ("cudnn", "flash", "fmha")
"""One of these is in the name of every kernel of a fused exact attention."""
STAGES = (OWN_BLOCK, *stages.STAGES, OTHER)
"""The stages, in the order of the method."""


def measure_stages(attention: AttentionCall, workload: Workload) -> dict[str, float] | None:
    """Milliseconds of each stage in one forward and backward pass; None where the profiler sees no kernels.

    A profiler may slow down launches even after its end, so times must be measured first.
    """
    _run(attention, workload)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_RUNS):
            _run(attention, workload)
    kernels = [
        (event.name, event.time_range.elapsed_us() / 1000 / PROFILED_RUNS)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sum_by_stage(kernels) if kernels else None


def sum_by_stage(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The time of each of `STAGES`, from names and times of kernels."""
    sums = dict.fromkeys(STAGES, 0.0)
    for name, time in kernels:
        sums[stage_of(name)] += time
    return sums


def stage_of(kernel: str) -> str:
    if any(part in kernel.lower() for part in _FUSED_ATTENTION):
        return OWN_BLOCK
    return _stages_of_kernels().get(kernel, OTHER)


@functools.cache
def _stages_of_kernels() -> dict[str, stages.Stage]:
    """The stage of each Triton kernel of the library by its name: nothing where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return {}
    importlib.import_module("muse_attention.backends.triton.backend")  # registers all kernels
    from muse_attention.backends.triton.runtime.launching import stages_of_kernels

    return stages_of_kernels()


def _run(attention: AttentionCall, workload: Workload) -> None:
    workload.clear_gradients()
    workload.backward(workload.forward(attention))
    workload.clear_gradients()
    torch.cuda.synchronize(workload.device)
