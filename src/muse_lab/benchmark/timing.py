"""Times of attentions that take turns, so that a slow moment of the machine affects all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from muse_lab.benchmark.workload import AttentionCall, Workload

LONG_RUN_SECONDS = 5.0
"""In a run this long, start-up costs are small beside the run itself."""
NOISY = 0.1
"""A spread above this means that other work ran on the machine, and that ratios of times are uncertain."""


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat. The forward pass is recorded by autograd, and is part of `forward_backward`."""

    forward: tuple[float, ...]
    forward_backward: tuple[float, ...]

    @property
    def forward_median(self) -> float:
        return statistics.median(self.forward)

    @property
    def forward_backward_median(self) -> float:
        return statistics.median(self.forward_backward)

    @property
    def spread(self) -> float | None:
        """Distance between the quartiles of `forward_backward`, as a share of the median; None for one repeat."""
        if len(self.forward_backward) < 2:
            return None
        lower, middle, upper = statistics.quantiles(self.forward_backward, n=4, method="inclusive")
        return (upper - lower) / middle


def time_interleaved(
    attentions: Sequence[AttentionCall],
    workload: Workload,
    repeats: int,
    on_turn: Callable[[int, int], None] = lambda round_number, attention: None,
) -> list[Times]:
    """`Times` of each attention, run in turn for `repeats` + 1 rounds: A B C, C A B, ...

    No round has the order of the one before, and every run of a benchmark has the same orders: a GPU was up to
    4% slower just after exact attention, and no attention is to follow another one every time.

    `on_turn` is told the number of the round, and that of the attention whose turn it is. Round 0 is a warm-up and is
    not counted. On a CPU, an attention that takes more than `LONG_RUN_SECONDS` has its warm-up counted as its first
    repeat, and sits out the last round.
    """
    runs: list[list[tuple[float, float]]] = [[] for _ in attentions]
    shuffler, order = random.Random(0), list(range(len(attentions)))
    for round_number in range(repeats + 1):
        before = order
        while order == before and len(order) > 1:
            order = shuffler.sample(before, len(before))
        for number in order:
            on_turn(round_number, number)
            if len(runs[number]) == repeats:
                continue
            seconds = time_once(attentions[number], workload)
            if round_number > 0 or (workload.device.type == "cpu" and seconds[1] > LONG_RUN_SECONDS):
                runs[number].append(seconds)
    return [
        Times(tuple(forward for forward, _ in finished), tuple(total for _, total in finished)) for finished in runs
    ]


def time_once(attention: AttentionCall, workload: Workload) -> tuple[float, float]:
    """Seconds of the forward pass, and of forward and backward together."""
    workload.clear_gradients()
    seconds = _cuda_seconds if workload.device.type == "cuda" else _cpu_seconds
    measured = seconds(attention, workload)
    workload.clear_gradients()
    return measured


def _cpu_seconds(attention: AttentionCall, workload: Workload) -> tuple[float, float]:
    begin = time.perf_counter()
    out = workload.forward(attention)
    middle = time.perf_counter()
    workload.backward(out)
    end = time.perf_counter()
    return middle - begin, end - begin


def _cuda_seconds(attention: AttentionCall, workload: Workload) -> tuple[float, float]:
    """As in training, the host is ahead of the GPU: a run that is not timed is still going on when the timed one is
    issued. Otherwise the GPU would wait for the first launches of every run."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    workload.backward(workload.forward(attention))
    workload.clear_gradients()
    begin.record()
    out = workload.forward(attention)
    middle.record()
    workload.backward(out)
    end.record()
    torch.cuda.synchronize(workload.device)
    return begin.elapsed_time(middle) / 1000, begin.elapsed_time(end) / 1000
