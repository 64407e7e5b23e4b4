"""What a benchmark found, and its JSON file: `machine`, `settings`, `commands`, and one entry of `cases` at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muse_lab.benchmark.captured import CapturedData
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.timing import Times
from muse_lab.records.stored_results import StoredResults, as_json, called


@dataclass(frozen=True)
class BenchmarkSettings:
    """What all cases of a file have in common, save what the sweep varies."""

    device: str
    batch: int
    heads: int
    key_heads: int
    """of the keys and values; fewer than heads: grouped queries"""
    head_dim: int
    dtype: str
    causal: bool
    repeats: int
    memory: bool
    seed: int = 0
    sweep: str | None = None
    """its name in `SWEEPS`, where the cases are those of a sweep"""
    captures: CapturedData | None = None
    """the captured heads that all is measured on; None: synthetic data"""

    def shape(self, length: int) -> Shape:
        return Shape(length, self.heads, self.key_heads, self.head_dim, self.batch)


@dataclass(frozen=True)
class Case:
    """One attention on one shape, and the baseline, whose runs took turns with those of all attentions."""

    request: BenchmarkRequest
    attention: str
    """the name with the settings it had at this length: `moba:L4kB256R1`"""
    times: Times = field(metadata=called("seconds"))
    sdpa_times: Times = field(metadata=called("sdpa_seconds"))
    fidelity: dict[str, float]
    """measures of `fidelity.Fidelity`, against exact attention in the same dtype, averaged over heads, those of its
    retrieval included; earlier files have the first four, an attention that retrieves nothing lacks the last, and
    one without an lse lacks its gap"""
    extra_memory_bytes: int | None
    sdpa_extra_memory_bytes: int | None
    stage_milliseconds: dict[str, float] | None = None
    """of one forward and backward pass, by `STAGES`, where they were measured"""
    sdpa_backend: str | None = None
    """the operator of PyTorch that the baseline ran through; None in earlier files"""

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def spread(self) -> float | None:
        """That of the times, or of the baseline's if it is larger; None of one repeat."""
        known = [spread for spread in (self.times.spread, self.sdpa_times.spread) if spread is not None]
        return max(known, default=None)

    @property
    def speedup_forward(self) -> float:
        return self.sdpa_times.forward_median / self.times.forward_median

    @property
    def speedup_forward_backward(self) -> float:
        return self.sdpa_times.forward_backward_median / self.times.forward_backward_median


@dataclass
class BenchmarkResults(StoredResults):
    """In the file, a case has its request and shape beside its numbers, and medians and ratios for other programs."""

    command = "a benchmark"
    packages = ()
    indent = 2

    settings: BenchmarkSettings
    cases: list[Case] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        return [case.attention for case in self.cases]

    @classmethod
    def modernised(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Keys had as many heads as queries in earlier files, and all cases the shape of the settings."""
        settings = {"key_heads": document["settings"]["heads"], **document["settings"]}
        shape = {name: settings[name] for name in ("heads", "head_dim", "batch")}
        entries = [shape | {"key_heads": entry.get("heads", settings["heads"])} | entry for entry in document["cases"]]
        for entry in entries:
            entry["request"] = (entry["requested"], [entry[name] for name in Shape._fields])
        return {**document, "settings": settings, "cases": entries}

    def as_document(self) -> dict[str, Any]:
        return {**as_json(self), "cases": [_entry(case) for case in self.cases]}


def _entry(case: Case) -> dict[str, Any]:
    about = {"requested": case.request.attention, "attention": case.attention, **case.shape._asdict()}
    ratios = {name: getattr(case, name) for name in ("speedup_forward", "speedup_forward_backward")}
    numbers = as_json(case)
    for name, times in (("seconds", case.times), ("sdpa_seconds", case.sdpa_times)):
        medians = {median: getattr(times, median) for median in ("forward_median", "forward_backward_median")}
        numbers[name] = medians | numbers[name]
    optional = {name: numbers.pop(name) for name in ("sdpa_backend", "stage_milliseconds")}
    del numbers["request"], numbers["attention"]
    return {**about, **ratios, **numbers, **{name: value for name, value in optional.items() if value is not None}}
