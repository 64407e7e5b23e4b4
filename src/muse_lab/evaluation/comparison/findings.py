"""Findings from the losses of several runs: differences to exact training, speed-ups, scaling laws."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.fits import PowerLaw
from muse_lab.pretraining.recipes import differences
from muse_lab.records.attention_names import EXACT, short_names
from muse_lab.records.means import Mean

SIZES_OF_A_LAW = 3
"""Sizes of models that a law needs: a power law goes through any two points."""
_ATTENTION_FIELDS = ("attention", "exact_start", "exact_tail", "further_attention", "further_steps")
"""Recipe fields in which runs that differ by their attention alone may differ; tokens are compared too."""


class Difference(NamedTuple):
    """The loss of a run less that of its reference, both under exact attention, on the same samples."""

    reference: str
    nats: Mean
    percent: Mean
    """of the reference's loss"""
    median: float
    """over samples, of the difference in percent of the reference's loss of the sample"""
    least: float
    """nats, of a sample"""
    most: float


def reference_of(results: ComparisonResults, run: Run) -> Run:
    """The first run of the same size that was trained with exact attention, or else the first of that size.

    Among several, runs with the same seed come first, so an exact run of another seed is a reference itself; then runs
    that begin with the same weights; then runs that saw as many tokens.
    """
    alike = [other for other in results.runs.values() if other.parameters == run.parameters]
    exact = [other for other in alike if other.attention == EXACT]
    of_seed = [other for other in exact if other.recipe.seed == run.recipe.seed]
    same_start = [other for other in of_seed if other.recipe.initial == run.recipe.initial]
    as_long = [other for other in same_start if other.tokens == run.tokens]
    return next(iter([*as_long, *same_start, *of_seed, *exact, *alike]))


def difference(results: ComparisonResults, run: Run, step: int | None = None) -> Difference | None:
    """For the newest weights, or those of a step. None for a reference, or if a loss is not measured yet."""
    reference = reference_of(results, run)
    own, other = results.whole(run, EXACT, step), results.whole(reference, EXACT)
    if reference is run or own is None or other is None:
        return None
    gaps = [mine - its for mine, its in zip(own.means, other.means, strict=True)]
    nats = Mean.of(gaps)
    one_percent = Mean.of(other.means).mean / 100
    error = None if nats.standard_error is None else nats.standard_error / one_percent
    median = statistics.median(100 * gap / its for gap, its in zip(gaps, other.means, strict=True))
    return Difference(reference.name, nats, Mean(nats.mean / one_percent, error), median, min(gaps), max(gaps))


def switching(results: ComparisonResults, run: Run, attention: str) -> Mean | None:
    """The loss of a run's model under an attention less that of the same model under exact attention."""
    own, exact = results.whole(run, attention), results.whole(run, EXACT)
    return None if own is None or exact is None else Mean.of_differences(own.means, exact.means)


def speedup(results: ComparisonResults, run: Run) -> float | None:
    """Median tokens per second over that of the exact run of the same size; None if one is unknown."""
    if results.settings.shared_gpu:
        return None
    reference = reference_of(results, run)
    own, other = (one.curves.speeds.get(one.recipe.attention) for one in (run, reference))
    if reference is run or reference.attention != EXACT or own is None or other is None:
        return None
    return own.tokens_per_second / other.tokens_per_second


def differing_fields(results: ComparisonResults, run: Run) -> list[str]:
    """Recipe fields, other than the attention, in which a run differs from its reference.

    The mesh is among them where speeds are compared: it changes nothing else.
    """
    reference = reference_of(results, run)
    names = [name for name in differences(run.recipe, reference.recipe) if name not in _ATTENTION_FIELDS]
    names += ["mesh"] if run.recipe.mesh != reference.recipe.mesh and speedup(results, run) is not None else []
    return names if run.tokens == reference.tokens else ["tokens", *names]


def handicapped(results: ComparisonResults, run: Run) -> list[Run]:
    """The run, its reference or both, if they could not use the fastest kernels.

    On a GPU a deterministic run leaves out cuDNN's attention, which computes in bfloat16 and not in float32.
    """
    return [
        one
        for one in (reference_of(results, run), run)
        if one.recipe.deterministic and one.recipe.precision == "bfloat16" and one.device != "cpu"
    ]


def describe_schedule(run: Run) -> str:
    """The rest of a run's attention schedule, in words: exact updates at its start or end, and further updates."""
    recipe = run.recipe
    shares = {"first": recipe.exact_start, "last": recipe.exact_tail} if run.attention != EXACT else {}
    parts = "".join(f", exact for the {which} {100 * share:g}%" for which, share in shares.items() if share)
    if not recipe.further_steps:
        return parts
    (name,) = short_names([recipe.attention_at(recipe.steps)]).values()
    return f"{parts}, then {name} for {recipe.further_steps:,} further updates"


def sizes(results: ComparisonResults) -> dict[str, list[tuple[float, float]]]:
    """Parameters and loss under exact attention of all runs, by training attention, the smallest first.

    A run that was continued counts where the run that it continues is not among them, as in the paper's Figure 4.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    plain = {(run.parameters, run.attention) for run in results.runs.values() if not run.recipe.further_steps}
    for run in sorted(results.runs.values(), key=lambda run: run.parameters):
        loss = results.loss(run, EXACT)
        if loss is not None and not (run.recipe.further_steps and (run.parameters, run.attention) in plain):
            points.setdefault(run.attention, []).append((run.parameters, loss.mean))
    return points


def scaling_laws(results: ComparisonResults) -> dict[str, PowerLaw]:
    """Loss in proportion to a power of the parameters, by training attention; none where the sizes are too few."""
    return {
        attention: PowerLaw.fit(points) for attention, points in sizes(results).items() if missing_sizes(points) == 0
    }


def missing_sizes(points: Sequence[tuple[float, float]]) -> int:
    """How many more sizes a scaling law needs."""
    return max(0, SIZES_OF_A_LAW - len({parameters for parameters, _ in points}))
