"""What a benchmark found, and its JSON file: `machine`, `settings`, `commands`, and one entry of `cases` at a time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muse_attention.benchmark.captured import CapturedData
from muse_attention.benchmark.request import BenchmarkRequest, Shape
from muse_attention.benchmark.timing import Times
from muse_attention.files import replace_file
from muse_attention.recorded_names import with_full_names
from muse_attention.strict_json import parse_json


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
    times: Times
    sdpa_times: Times
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
class BenchmarkResults:
    machine: dict[str, Any]
    settings: BenchmarkSettings
    commands: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)


def write_results(results: BenchmarkResults, path: Path) -> None:
    """Replace the file in one step, so that it is whole at any moment."""
    entries = [_case_to_json(case) for case in results.cases]
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "cases": entries,
    }
    replace_file(path, json.dumps(document, indent=2) + "\n")


def read_results(path: Path) -> BenchmarkResults:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = with_full_names(parse_json(path.read_bytes(), finite=False))
        settings = _settings_from_json(document["settings"])
        return BenchmarkResults(
            machine=document["machine"],
            settings=settings,
            commands=list(document["commands"]),
            cases=[_case_from_json(entry, settings) for entry in document["cases"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the results of a benchmark") from error


def _case_to_json(case: Case) -> dict[str, Any]:
    entry = {
        "requested": case.request.attention,
        "attention": case.attention,
        **case.shape._asdict(),
        "speedup_forward": case.speedup_forward,
        "speedup_forward_backward": case.speedup_forward_backward,
        "seconds": _times_to_json(case.times),
        "sdpa_seconds": _times_to_json(case.sdpa_times),
        "fidelity": case.fidelity,
        "extra_memory_bytes": case.extra_memory_bytes,
        "sdpa_extra_memory_bytes": case.sdpa_extra_memory_bytes,
    }
    if case.sdpa_backend is not None:
        entry["sdpa_backend"] = case.sdpa_backend
    if case.stage_milliseconds is not None:
        entry["stage_milliseconds"] = case.stage_milliseconds
    return entry


def _settings_from_json(entry: dict[str, Any]) -> BenchmarkSettings:
    """In files from before keys had a number of heads of their own it was that of the queries."""
    captures = entry.get("captures")
    return BenchmarkSettings(
        **{"key_heads": entry["heads"], **entry, "captures": None if captures is None else CapturedData(**captures)}
    )


def _case_from_json(entry: dict[str, Any], settings: BenchmarkSettings) -> Case:
    """What a case of an earlier file does not say of its shape was the same for all."""
    heads = entry.get("heads", settings.heads)
    shape = Shape(
        length=entry["length"],
        heads=heads,
        key_heads=entry.get("key_heads", heads),
        head_dim=entry.get("head_dim", settings.head_dim),
        batch=entry.get("batch", settings.batch),
    )
    return Case(
        request=BenchmarkRequest(entry["requested"], shape),
        attention=entry["attention"],
        times=_times_from_json(entry["seconds"]),
        sdpa_times=_times_from_json(entry["sdpa_seconds"]),
        fidelity=entry["fidelity"],
        extra_memory_bytes=entry["extra_memory_bytes"],
        sdpa_extra_memory_bytes=entry["sdpa_extra_memory_bytes"],
        stage_milliseconds=entry.get("stage_milliseconds"),
        sdpa_backend=entry.get("sdpa_backend"),
    )


def _times_to_json(times: Times) -> dict[str, Any]:
    return {
        "forward_median": times.forward_median,
        "forward_backward_median": times.forward_backward_median,
        "forward": list(times.forward),
        "forward_backward": list(times.forward_backward),
    }


def _times_from_json(entry: dict[str, Any]) -> Times:
    return Times(tuple(entry["forward"]), tuple(entry["forward_backward"]))
