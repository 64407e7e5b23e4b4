"""Which stage of an attention the time of a GPU goes to, by the names of the kernels that run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from muse_lab.benchmark.workload import AttentionCall, Workload

PROFILED_RUNS = 3

OWN_BLOCK, OTHER = "own block", "other"
_FUSED_ATTENTION = ("cudnn", "flash", "fmha")
"""One of these is in the name of every kernel of a fused exact attention."""
_KERNELS = {
    "clustering": (
        "_take", "_stream", "_stream_in_chunks", "_sum_members", "_mean_of_parts", "_find_nearest", "_move_overflow",
        "_sum_squares", "_scale_to_mean", "_copy",
    ),
    "sorting": (
        "_count_clusters", "_sum_rows", "_sum_before", "_place_by_cluster", "_pack", "_count_digits", "_place_by_digit",
        "_find_starts", "_count_tiles", "_cut", "_number_buckets", "_count_pairs", "_number_pairs", "_plan_pieces",
        "_take_rows", "_take_residuals", "_square_distances",
    ),
    "summaries": ("_find_middle", "_summarise", "_accumulate", "_accumulate_backward", "_summarise_backward"),
    "selection": (
        "_select_clusters", "_select_blocks", "_find_lowest_bin", "_list_opened", "_mark_opened", "_list_marked",
        "_mark_terms", "_mark_terms_of_bits", "_fill",
    ),
    "attention to summaries": (
        "_select_and_attend", "_attend_to_summaries", "_summaries_backward_to_queries", "_backward_to_summaries",
    ),
    "retrieval": ("_attend_to_buckets", "_buckets_backward_to_queries", "_buckets_backward_to_keys"),
    "merging": ("_merge", "_find_delta", "_add_to_queries"),
}  # fmt: skip
"""The Triton kernels of each stage."""
_STAGE_OF_KERNEL = {kernel: stage for stage, kernels in _KERNELS.items() for kernel in kernels}

STAGES = (OWN_BLOCK, *_KERNELS, OTHER)
"""In the order of the method."""


def measure_stages(attention: AttentionCall, workload: Workload) -> dict[str, float] | None:
    """Milliseconds of each stage in one forward and backward pass; None where the profiler sees no kernels.

    A profiler may go on slowing launches down after its end, so that times are to be measured before.
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
    return _STAGE_OF_KERNEL.get(kernel, OTHER)


def _run(attention: AttentionCall, workload: Workload) -> None:
    workload.clear_gradients()
    workload.backward(workload.forward(attention))
    workload.clear_gradients()
    torch.cuda.synchronize(workload.device)
