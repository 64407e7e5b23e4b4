"""Time against error of many configurations on captured heads: the Pareto front, and the fastest configuration that
errs no more, and finds no fewer single keys, than the paper's sizes, or that costs no more of the model's loss.

The results are one JSON file, replaced after every configuration, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.config import MuSeConfig
from muse_attention.fidelity.error import FOUND, future_influence, position_error
from muse_attention.fidelity.error import measure as measure_fidelity
from muse_attention.fidelity.lookups import look_up
from muse_attention.registry import config_at, full_name, get_attention
from muse_lab.benchmark.timing import Times, time_interleaved
from muse_lab.benchmark.workload import Workload, sdpa
from muse_lab.records.attention_names import EXACT
from muse_lab.records.captured_heads import Captures, Origin
from muse_lab.records.means import Mean, mean_of_each
from muse_lab.records.stored_results import OnStep, StoredResults

RETRIEVAL: tuple[dict[str, float], ...] = (
    {"tolerance": 0.05},
    {"tolerance": 0.1},
    {"tolerance": 0.1, "search": 0.05},
    {"tolerance": 0.1, "search": 0.02},
    {"tolerance": 0.4, "caution": 2.0},
)
QUERY_CLUSTERS = (8, 16)
KEY_CLUSTERS = (32, 64)
BLOCKS = (32, 16, 8)
"""Numbers of blocks that the length is cut into."""
SMALLEST_BLOCK = 256
ERROR = "relative_squared_error"
"""The measure that a configuration is chosen by, beside `FOUND`, unless a cost is asked for."""


@dataclass(frozen=True, kw_only=True)
class TuningSettings(Origin):
    """Settings that all numbers of a file share."""

    length: int
    samples: int
    lookups: int
    head_dim: int
    device: str
    dtype: str
    repeats: int
    """timed runs of each pass, after one that is not counted"""
    fingerprint: str
    """of the captured numbers"""

    @classmethod
    def of(cls, captures: Captures, *, device: str, dtype: str, repeats: int) -> TuningSettings:
        if repeats < 1:
            raise ValueError(f"cannot measure a time with {repeats} repeats; use at least 1")
        return cls(
            **vars(captures.origin),
            length=captures.length,
            samples=captures.samples,
            lookups=len(captures.lookups),
            head_dim=captures.query.shape[3],
            device=device,
            dtype=dtype,
            repeats=repeats,
            fingerprint=captures.fingerprint,
        )


@dataclass(frozen=True)
class Found:
    """Attention weight on what queries must look up, and how much of it is retrieved."""

    weight: float
    """exact attention's weight on what queries look up, summed over queries and heads"""
    found: float
    """the part of it in a query's own block or in buckets that it retrieves"""
    exact: float
    """the part that is found, or on keys that are alone in their summary"""

    @property
    def share(self) -> float:
        return self.found / self.weight

    @property
    def exact_share(self) -> float:
        return self.exact / self.weight


@dataclass(frozen=True)
class Candidate:
    """One attention, measured."""

    attention: str
    """by its full name"""
    seconds: Times | None
    """None if there was too little memory"""
    fidelity: dict[str, float] = field(default_factory=dict)
    """measures of `fidelity.Fidelity` and, for several samples, those of `fidelity_columns.LEAK`, averaged over samples
    and heads"""
    lookup: Found | None = None
    cost: Mean | None = None
    """loss of the model under it minus that under exact attention, in nats; None if it was not measured"""

    @property
    def is_measured(self) -> bool:
        return self.seconds is not None

    @property
    def time(self) -> float:
        """Median seconds of forward and backward."""
        assert self.seconds is not None
        return self.seconds.forward_backward_median

    @property
    def error(self) -> float:
        return self.fidelity[ERROR]


class Goal(NamedTuple):
    """The limits that a chosen configuration meets."""

    error: float | None = None
    """largest relative squared error; None if only the cost counts"""
    found: float | None = None
    """least `found_share`; None for any"""
    cost: float | None = None
    """largest rise of the loss, in nats"""

    def is_reached(self, candidate: Candidate) -> bool:
        if self.error is None:
            return self.cost is not None and candidate.cost is not None and candidate.cost.mean <= self.cost
        return candidate.error <= self.error and (self.found is None or candidate.fidelity.get(FOUND, 0) >= self.found)

    def __str__(self) -> str:
        if self.error is None:
            return f"a cost of at most {self.cost:g} nats"
        found = "" if self.found is None else f" that finds at least {self.found:.1%} of the single keys"
        return f"an RSE of at most {self.error:.3g}{found}"


@dataclass
class TuningResults(StoredResults):
    command = "muse tune"

    settings: TuningSettings
    error: float | None = None
    """the largest that a configuration may have; None for that of the paper's sizes"""
    cost: float | None = None
    """the largest that a configuration may have, in place of an error; None if it is chosen by error"""
    exact: Times | None = None
    tuned: list[Candidate] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        return [candidate.attention for candidate in self.tuned]

    def check(self) -> None:
        for candidate in self.tuned:
            if candidate.is_measured and ERROR not in candidate.fidelity:
                raise ValueError("a time without an error")
            if candidate.lookup is not None and not candidate.lookup.weight > 0:
                raise ValueError("nothing was looked up")
        for seconds in (self.exact, *(candidate.seconds for candidate in self.tuned)):
            if seconds is not None and (not seconds.forward_backward or min(seconds.forward_backward) <= 0):
                raise ValueError("no time")

    @property
    def measured(self) -> list[Candidate]:
        return [candidate for candidate in self.tuned if candidate.is_measured]

    @property
    def faster(self) -> list[Candidate]:
        """What is faster than exact attention, from the fastest on, without the paper's method: later tokens leak into
        its loss."""
        limit = 0.0 if self.exact is None else self.exact.forward_backward_median
        faster = (one for one in self.measured if one.time < limit and not _leaks_into_loss(one.attention))
        return sorted(faster, key=lambda one: one.time)

    @property
    def goal(self) -> Goal | None:
        """What was asked for, or what the paper's sizes reach; None if these were not measured."""
        if self.cost is not None:
            return Goal(cost=self.cost)
        if self.error is not None:
            return Goal(self.error)
        name = paper_sizes(self.settings.length)
        paper = next((candidate for candidate in self.measured if candidate.attention == name), None)
        return None if paper is None else Goal(paper.error, paper.fidelity.get(FOUND))

    @property
    def chosen(self) -> Candidate | None:
        """The fastest that reaches the goal; None if there is none."""
        goal = self.goal
        reached = [candidate for candidate in self.measured if goal is not None and goal.is_reached(candidate)]
        return min(reached, key=lambda candidate: candidate.time, default=None)

    def missing(self, attentions: Sequence[str]) -> list[str]:
        done = {candidate.attention for candidate in self.tuned}
        return [attention for attention in attentions if attention not in done]


Clock = Callable[[str], Times]
"""The time of an attention by name, on the captured heads."""


def candidates(length: int, *, added: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    """The full names to measure: the paper's method, the default, and a grid; or `only` these."""
    if only:
        return _each_once([*only, *added], length)
    blocks = [max(SMALLEST_BLOCK, length // number) for number in BLOCKS]
    if blocks[0] >= length:
        raise ValueError(
            f"{length} tokens fit in one block of {SMALLEST_BLOCK}, which is exact attention; choose a longer --length"
        )
    grid = [
        MuSeConfig(query_clusters=queries, key_clusters=keys, block_size=block, **retrieval)
        for block, queries, keys, retrieval in itertools.product(
            dict.fromkeys(blocks), QUERY_CLUSTERS, KEY_CLUSTERS, RETRIEVAL
        )
        if block < length
    ]
    configs = [MuSeConfig.paper(length), MuSeConfig.paper_sizes(length), MuSeConfig.for_length(length), *grid]
    return _each_once([*(f"muse:{config}" for config in configs), *added], length)


def paper_sizes(length: int) -> str:
    """The full name of the configuration that a choice is compared with."""
    return f"muse:{MuSeConfig.paper_sizes(length)}"


def _each_once(attentions: Sequence[str], length: int) -> list[str]:
    names = [full_name(attention, length) for attention in attentions]
    return [name for name in dict.fromkeys(names) if name != EXACT]


def _leaks_into_loss(attention: str) -> bool:
    config = config_at(attention)
    return config is not None and config.tolerance is None


def front(measured: Sequence[Candidate]) -> list[Candidate]:
    """The Pareto front of time and error, from the fastest on: no other is both as fast and more accurate."""
    best: list[Candidate] = []
    for candidate in sorted(measured, key=lambda candidate: (candidate.time, candidate.error)):
        if not best or candidate.error < best[-1].error:
            best.append(candidate)
    return best


def clock_on(captures: Captures, repeats: int) -> Clock:
    """Times of forward and backward, as `muse bench` has them, over all samples and heads together."""
    workload = Workload.of(captures.query, captures.key, captures.value, is_causal=True)

    def clock(attention: str) -> Times:
        function = sdpa if attention == EXACT else get_attention(attention)
        (times,) = time_interleaved([function], workload, repeats)
        return times

    return clock


def measure(
    captures: Captures,
    attentions: Sequence[str],
    results: TuningResults,
    path: Path,
    clock: Clock,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with the time of exact attention, and with what is missing of `attentions`, by their full names.

    The file is written after each. An attention that runs out of memory is kept without numbers.
    """
    steps = itertools.count()
    if results.exact is None:
        on_step(f"measuring {EXACT}", next(steps))
        results.exact = clock(EXACT)
        results.write(path)
    exact: list[tuple[Tensor, Tensor]] = []
    for attention in results.missing(attentions):
        on_step(f"measuring {attention}", next(steps))
        exact = exact or _exact_outputs(captures)
        results.tuned.append(_measure_one(captures, attention, exact, clock))
        results.write(path)


def measure_costs(
    results: TuningResults,
    limit: float,
    path: Path,
    cost_of: Callable[[str], Mean],
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill in the costs of what is faster than exact attention, from the fastest on, until one is within the limit.

    The file is written after each. `cost_of` is called with full names.
    """
    for finished, candidate in enumerate(results.faster):
        cost = candidate.cost
        if cost is None:
            on_step(f"measuring the loss under {candidate.attention}", finished)
            cost = cost_of(candidate.attention)
            results.tuned[results.tuned.index(candidate)] = replace(candidate, cost=cost)
            results.write(path)
        if cost.mean <= limit:
            return


def _measure_one(captures: Captures, attention: str, exact: list[tuple[Tensor, Tensor]], clock: Clock) -> Candidate:
    try:
        seconds = clock(attention)
        fidelity = [
            measure_fidelity(get_attention(attention), *sample, exact=exact_sample, is_causal=True).pooled()
            for sample, exact_sample in zip(_samples(captures), exact, strict=True)
        ]
        if captures.samples > 1:
            fidelity = [
                pooled | leak for pooled, leak in zip(fidelity, _leaks(captures, attention, exact), strict=True)
            ]
        return Candidate(attention, seconds, mean_of_each(fidelity), _look_up(captures, attention))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Candidate(attention, None)


def _leaks(captures: Captures, attention: str, exact: list[tuple[Tensor, Tensor]]) -> list[dict[str, float]]:
    """The leak of each sample when its second half is replaced by the next one's, and the error of its first half."""
    samples, half, function = _samples(captures), captures.length // 2, get_attention(attention)
    leaks = []
    for sample, next_sample, (exact_out, _) in zip(samples, [*samples[1:], samples[0]], exact, strict=True):
        leak = future_influence(function, *sample, half, replacement=next_sample)
        with torch.no_grad():
            out = function(*sample, is_causal=True)
        error = float(position_error(out[:, :, :half], exact_out[:, :, :half]).mean())
        leaks.append({"future_influence": leak, "first_half_error": error})
    return leaks


def _exact_outputs(captures: Captures) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        outputs: list[Any] = [
            exact_attention(*sample, is_causal=True, return_lse=True) for sample in _samples(captures)
        ]
    return outputs


def _samples(captures: Captures) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each sample, (1, heads, length, head_dim)."""
    return list(zip(captures.query.split(1), captures.key.split(1), captures.value.split(1), strict=True))


def _look_up(captures: Captures, attention: str) -> Found | None:
    """The weight on lookups; None for attentions without a selection, and for captures without lookups."""
    if config_at(attention) is None:
        return None
    weight, found, exact = 0.0, 0.0, 0.0
    for number, sample in enumerate(_samples(captures)):
        places = [(lookup.position, lookup.needle) for lookup in captures.lookups if lookup.sample == number]
        for one in look_up(get_attention(attention), *sample, places) if places else ():
            weight += float(one.weight.sum())
            found += float(one.found.sum())
            exact += float(one.exact.sum())
    return Found(weight, found, exact) if weight else None
