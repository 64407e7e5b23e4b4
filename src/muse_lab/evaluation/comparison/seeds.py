"""Runs that differ by their seed alone, taken together: how much of a difference is more than chance."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from muse_lab.evaluation.comparison.findings import Difference, describe_schedule, difference, reference_of, speedup
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.pretraining.recipes import FREE, Recipe
from muse_lab.records.attention_names import EXACT, short_names
from muse_lab.records.means import Mean
from muse_lab.report.tree import Table, number, shown, text

ABOUT = (
    "Runs that differ by their seed alone: other initial weights, and another order of the samples. ± is the standard "
    "error over seeds, of one number for each: its mean over all held-out samples."
)
_PAIRED = "Loss under exact attention less that of exact training with the same seed, the mean over seeds."
_MEDIAN = "The median over samples of that difference in percent, then the mean over seeds."


@dataclass(frozen=True)
class Seeds:
    """All runs of one recipe, which differ by their seed."""

    attention: str
    """by its full name"""
    runs: tuple[Run, ...]

    def named(self, names: Mapping[str, str]) -> str:
        """The attention and schedule of the runs, by the names of a report."""
        return f"{names[self.attention]}{describe_schedule(self.runs[0])}"

    def loss(self, results: ComparisonResults, attention: str) -> Mean | None:
        losses = [results.loss(run, attention) for run in self.runs]
        return _mean([loss and loss.mean for loss in losses])

    def spread(self, results: ComparisonResults) -> float | None:
        """The standard deviation over seeds, under exact attention."""
        losses = [loss.mean for run in self.runs if (loss := results.loss(run, EXACT))]
        return statistics.stdev(losses) if len(losses) > 1 else None

    def difference(self, results: ComparisonResults, *, is_percent: bool = False) -> Mean | None:
        """Mean loss less that of exact training with the same seeds; None if a seed has no such run, or is one."""
        return _mean(self.differences(results, is_percent=is_percent))

    def differences(self, results: ComparisonResults, *, is_percent: bool = False) -> list[float | None]:
        """The difference of each seed; None if it has no run of exact training, or one is not measured."""
        gaps = [gap and (gap.percent if is_percent else gap.nats) for gap in self._pairs(results)]
        return [gap and gap.mean for gap in gaps]

    def median_difference(self, results: ComparisonResults) -> Mean | None:
        """The mean over seeds of `median_differences`."""
        return _mean(self.median_differences(results))

    def median_differences(self, results: ComparisonResults) -> list[float | None]:
        """For each seed the median over samples, in percent."""
        return [gap and gap.median for gap in self._pairs(results)]

    def _pairs(self, results: ComparisonResults) -> list[Difference | None]:
        gaps = []
        for run in self.runs:
            reference = reference_of(results, run)
            begin_alike = run.recipe.seed == reference.recipe.seed and run.recipe.initial == reference.recipe.initial
            is_pair = reference.attention == EXACT and begin_alike
            gaps.append(difference(results, run) if is_pair else None)
        return gaps

    def speedup(self, results: ComparisonResults) -> float | None:
        """The median over seeds."""
        ratios = [ratio for run in self.runs if (ratio := speedup(results, run)) is not None]
        return statistics.median(ratios) if len(ratios) == len(self.runs) else None


def seeds_of(results: ComparisonResults) -> list[Seeds]:
    """Empty if every recipe has one seed. Of several runs with the same seed, the first counts."""
    groups: dict[tuple[Recipe, int], dict[int, Run]] = {}
    for run in results.runs.values():
        groups.setdefault((_without_seed(run.recipe), run.parameters), {}).setdefault(run.recipe.seed, run)
    by_seed = [tuple(runs[seed] for seed in sorted(runs)) for runs in groups.values()]
    seeds = [Seeds(runs[0].attention, runs) for runs in by_seed]
    return seeds if any(len(group.runs) > 1 for group in seeds) else []


def seeds_table(results: ComparisonResults) -> Table:
    groups = seeds_of(results)
    names = short_names([group.attention for group in groups])

    speed = (
        number("speed-up", "Speed-up of training, the median over seeds."),
        lambda group: _times(group.speedup(results)),
    )
    return Table.of(
        groups,
        (text("trained with"), lambda group: group.named(names)),
        (number("parameters"), lambda group: f"{group.runs[0].parameters / 1e6:,.1f}M"),
        (text("seeds"), lambda group: ", ".join(str(run.recipe.seed) for run in group.runs)),
        (number("loss, tested: exact"), lambda group: group.loss(results, EXACT)),
        (number("tested: as trained"), lambda group: group.loss(results, group.runs[0].tested_attention)),
        (number("spread of seeds"), lambda group: shown(group.spread(results), ".4f")),
        (number("less exact training", _PAIRED), lambda group: (gap := group.difference(results)) and gap.signed()),
        (
            number("percent", _PAIRED),
            lambda group: (gap := group.difference(results, is_percent=True)) and in_percent(gap),
        ),
        (number("median sample", _MEDIAN), lambda group: (gap := group.median_difference(results)) and in_percent(gap)),
        *([] if results.settings.shared_gpu else [speed]),
    )


def seeds_differences(results: ComparisonResults) -> Iterable[tuple[Seeds, Mean]]:
    """Differences in percent, for every recipe with several seeds that is compared with exact training."""
    for group in seeds_of(results):
        gap = group.difference(results, is_percent=True)
        if len(group.runs) > 1 and gap is not None:
            yield group, gap


def seeds_headline(results: ComparisonResults) -> list[str]:
    """Each of these differences, in words."""
    lines = []
    for group, gap in seeds_differences(results):
        median = group.median_difference(results)
        assert median is not None
        ratio = group.speedup(results)
        speed = "" if ratio is None else f", {_times(ratio)} its tokens per second"
        lines.append(
            f"{group.attention}{describe_schedule(group.runs[0])}, {len(group.runs)} seeds: held-out loss under "
            f"exact attention {in_percent(gap)} against exact training with the same seeds, median sample "
            f"{in_percent(median)}{speed}"
        )
    return lines


def in_percent(gap: Mean) -> str:
    return f"{gap.shown('+.2f')}%"


def _without_seed(recipe: Recipe) -> Recipe:
    """The recipe without its seed and without the name of the model it begins with: each seed may have its own."""
    initial = recipe.initial and "another model"
    return dataclasses.replace(recipe, seed=0, initial=initial, **{name: getattr(Recipe, name) for name in FREE})


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    return Mean.of(known) if len(known) == len(values) else None


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}x"
