"""What the records in benchmarks/ say of speed and of training, read for pictures and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muse_attention.config import MuSeConfig
from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.benchmark.tuning import TuningResults
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.records.attention_names import EXACT, recorded_config

RECORDS = Path(__file__).parent.parent / "benchmarks"
DEFAULT, PAPER, MOBA, BLOCK_DIAGONAL = "MuSe, default", "MuSe, the paper's sizes", "MoBA", "block-diagonal"
TO_THE_LETTER = "MuSe, the paper's method"
"""`muse:paper`: its sizes, its streaming clustering and its limit on the size of clusters."""
CAUTIOUS = "MuSe, cautious"
CAUTIOUS_SIZES = "Q8K32T0.4B4k,caution=2.0"
"""A configuration that models were trained with beside the default, from 32k to 64k tokens."""
DEFAULTS_OF_0_3 = {
    length: f"muse:{sizes},caution=2.0,clustering=lloyd,cap_factor=none"
    for length, sizes in ((16 * 1024, "Q32K32R8T0.1B2k"), (32 * 1024, "Q32K64R8T0.2B4k"))
}
"""By length: what models of the records were trained with, an earlier form of MuSe."""
SYNTHETIC, SMOLLM2, QWEN = "synthetic data", "heads of SmolLM2", "heads of Qwen 1.5B"
QWEN_SMALL, TRAINED_AT_64K = "heads of Qwen 0.5B", "heads of far64k-exact-11"
"""What was measured on."""
GPU = "NVIDIA H200"
"""That README's numbers are of."""
_NAMES = {"smollm2": "SmolLM2", "SmolLM2-135M-Instruct": "SmolLM2", "qwen05": "Qwen 0.5B", "qwen15": "Qwen 1.5B"}
"""Of models, where people write them otherwise."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Forward and backward of one attention call, and exact attention in the same run."""

    method: str
    """DEFAULT, CAUTIOUS, PAPER, TO_THE_LETTER, MOBA or BLOCK_DIAGONAL"""
    data: str
    """SYNTHETIC, SMOLLM2, QWEN, QWEN_SMALL, or `heads of` another model"""
    length: int
    seconds: float
    exact_seconds: float
    error: float
    """RSE"""
    extra_memory: int | None
    gpu: str
    date: str
    file: Path

    @property
    def speedup(self) -> float:
        return self.exact_seconds / self.seconds


def read_timings(*, heads: int = 8, key_heads: int | None = None, head_dim: int = 64) -> list[Timing]:
    """What was measured on a GPU with these sizes, by `muse bench` without a sweep and by `muse tune`, by length.

    The batch is 1. Heads have keys of their own, or share `key_heads`.
    Where the same was measured twice, the newer record counts, and on one day that of `muse bench`, whose calls follow
    each other without waiting.
    """
    timings = list(_benchmarked(heads, key_heads or heads, head_dim))
    if key_heads is None:
        timings = [*_tuned(heads, head_dim), *timings]
    newest = {
        (timing.method, timing.data, timing.length): timing
        for timing in sorted(timings, key=lambda timing: timing.date)
    }
    return sorted(newest.values(), key=lambda timing: timing.length)


def read_timings_of_qwen() -> list[Timing]:
    """The same on heads of Qwen2.5-Coder, two to a key head: heads of 64 of 0.5B, and of 128 of 1.5B."""
    of_small = [timing for timing in read_timings(key_heads=4) if timing.data == QWEN_SMALL]
    return of_small + [timing for timing in read_timings(heads=12, key_heads=6, head_dim=128) if timing.data == QWEN]


def read_comparison(record: str) -> tuple[ComparisonResults, Path]:
    """What `muse compare` wrote of runs on that GPU, and where."""
    path = RECORDS / "pretraining" / record / "compare.json"
    results = ComparisonResults.read(path)
    if results.machine["gpu"] != GPU:
        raise ValueError(f"{path}: not of an {GPU}, as README says")
    return results, path


def read_speeds(record: str) -> dict[str, float]:
    """Tokens per second of two training runs that had a GPU to themselves, by their attention, exact and DEFAULT."""
    path = RECORDS / "pretraining" / record / "compare.json"
    results = ComparisonResults.read(path)
    if results.settings.shared_gpu or {run.device for run in results.runs.values()} != {"cuda"}:
        raise ValueError(f"{path}: not of runs that had a GPU to themselves")
    speeds = {}
    for run in results.runs.values():
        is_default = classify(run.attention, run.recipe.length) == DEFAULT
        speeds[DEFAULT if is_default else run.attention] = run.curves.speeds[run.attention].tokens_per_second
    if speeds.keys() != {EXACT, DEFAULT}:
        raise ValueError(f"{path}: not of exact attention and the present default")
    return speeds


def classify(attention: str, length: int) -> str | None:
    """Which method a recorded name is at a length; None for every other configuration."""
    kind = attention.partition(":")[0]
    if kind in ("moba", "block_diagonal"):
        return MOBA if kind == "moba" else BLOCK_DIAGONAL
    if kind != "muse":
        return None
    config = recorded_config(attention)
    if config is None:
        return None
    if config == MuSeConfig.for_length(length):
        return DEFAULT
    if config == MuSeConfig.paper(length):
        return TO_THE_LETTER
    if config == MuSeConfig.parse(CAUTIOUS_SIZES):
        return CAUTIOUS
    return PAPER if _sizes(config) == _sizes(MuSeConfig.paper_sizes(length)) else None


def _sizes(config: MuSeConfig) -> tuple[Any, ...]:
    """What makes a configuration have the paper's sizes with our clustering, whatever limits its clusters."""
    names = ("query_clusters", "key_clusters", "retrieved_clusters", "retrieved_blocks", "block_size", "tolerance")
    return (*(getattr(config, name) for name in names), config.clustering)


def _benchmarked(heads: int, key_heads: int, head_dim: int) -> Iterator[Timing]:
    for path in sorted(RECORDS.glob("speed/cuda*.json")):
        results = BenchmarkResults.read(path)
        if results.settings.sweep is not None or results.settings.batch != 1:
            continue
        captures, seen = results.settings.captures, set()
        for case in results.cases:
            shape, method = case.shape, classify(case.attention, case.shape.length)
            if method is None or (shape.heads, shape.key_heads, shape.head_dim) != (heads, key_heads, head_dim):
                continue
            if (method, shape.length) in seen:  # a record may have the default by name, too
                continue
            seen.add((method, shape.length))
            yield Timing(
                method=method,
                data=SYNTHETIC if captures is None else _heads_of(captures.model),
                length=shape.length,
                seconds=case.times.forward_backward_median,
                exact_seconds=case.sdpa_times.forward_backward_median,
                error=case.fidelity["relative_squared_error"],
                extra_memory=case.extra_memory_bytes,
                gpu=results.machine["gpu"],
                date=results.machine["date"],
                file=path,
            )


def _tuned(heads: int, head_dim: int) -> Iterator[Timing]:
    for path in sorted(RECORDS.glob("error-control/tune-*.json")):
        results = TuningResults.read(path)
        settings, exact = results.settings, results.exact
        if (len(settings.heads), settings.head_dim, settings.samples) != (heads, head_dim, 1):
            continue
        if settings.device != "cuda" or exact is None:
            continue
        for candidate in results.measured:
            method = classify(candidate.attention, settings.length)
            if method is None:
                continue
            yield Timing(
                method=method,
                data=_heads_of(settings.model),
                length=settings.length,
                seconds=candidate.time,
                exact_seconds=exact.forward_backward_median,
                error=candidate.error,
                extra_memory=None,
                gpu=results.machine["gpu"],
                date=results.machine["date"],
                file=path,
            )


def _heads_of(described: str) -> str:
    model = described.split(" ")[0]
    return f"heads of {_NAMES.get(model, model)}"
