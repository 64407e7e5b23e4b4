"""The report of models that were trained several times: how many needles each kind of training finds, over trainings.

One training of each kind is a folder, as for one seed; models of the same name in several folders are trained alike.
The prompt is read with exact attention, with which they are deployed.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muse_lab.evaluation.needles import panels
from muse_lab.evaluation.needles.models_report import Models
from muse_lab.evaluation.needles.needle_report import TASK, format_difference
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.evaluation.needles.statistics import Asked, Group, by_depth, difference, groups, is_exact, share
from muse_lab.pretraining.needles.samples import BUCKETS, depth_of
from muse_lab.records.attention_names import EXACT
from muse_lab.records.machine import machine_lines
from muse_lab.records.means import Mean, Share
from muse_lab.report.tree import Figure, Note, Provenance, Report, Section, Table, number, shown, text

Trainings = Mapping[str, Models]
"""Models by name, for each folder. Others are compared with the first model, which is the same in all folders."""

_SURE = 2
"""Standard errors above which a difference counts."""
_ABOUT = (
    "A column for each training, a row for each model. ± of one training is the standard error over samples of the "
    "paired difference; ± of a mean is the standard error over trainings, of one number for each. A model that is "
    "missing in a training has no mean but that of its differences, which are over the others."
)
_OF_DEPTHS = (
    f"Depths of all trainings at which the difference is more than {_SURE} of its standard errors over samples. "
    "Without a true difference, chance gives at most about one depth in 44, on either side."
)


@dataclass(frozen=True)
class _Length:
    """The groups that all models were asked at one length."""

    title: str
    groups: list[Group]
    asked: Mapping[tuple[str, str], Asked]
    """by training and model"""
    models: list[str]
    """the first is what others are compared with"""

    @property
    def trainings(self) -> list[str]:
        return list(dict.fromkeys(training for training, _ in self.asked))

    @property
    def everywhere(self) -> list[str]:
        """The models that all trainings have: their means are over the same trainings."""
        return [model for model in self.models if len(self._by_training(model)) == len(self.trainings)]

    def found(self, model: str) -> dict[str, Share]:
        """The share of needles that a model finds, by training."""
        shares = {name: share(one.answers(self.groups), is_exact) for name, one in self._by_training(model).items()}
        return {name: found for name, found in shares.items() if found is not None}

    def differences(self, model: str, bucket: int | None = None) -> dict[str, Mean]:
        """Differences to the first model, by training that has both; at one depth if a bucket is given."""
        own, first = self._by_training(model), self._by_training(self.models[0])
        gaps = {
            name: difference(own[name], first[name], self.groups, is_exact, bucket=bucket)
            for name in own
            if name in first
        }
        return {name: gap for name, gap in gaps.items() if gap is not None}

    def by_depth(self, model: str, bucket: int) -> float | None:
        """Mean exact match over trainings."""
        shares = [by_depth(one.answers(self.groups), is_exact)[bucket] for one in self._by_training(model).values()]
        values = [one.value for one in shares if one is not None]
        return statistics.fmean(values) if values else None

    def _by_training(self, model: str) -> dict[str, Asked]:
        return {training: one for (training, name), one in self.asked.items() if name == model}


def is_answered(results: NeedleResults) -> bool:
    """Whether the model answered something with exact attention."""
    return bool(Asked(results, EXACT).answers(groups(results)))


def needles_over_trainings(trainings: Trainings) -> Report:
    """The report of models that have each answered something."""
    trainings = {name: trainings[name] for name in sorted(trainings, key=_with_numbers_in_order)}
    lengths = list(_lengths(trainings))
    labelled = {f"{training}/{name}": one for training, models in trainings.items() for name, one in models.items()}
    results = labelled.values()
    haystacks = dict.fromkeys(haystack for _, haystack in (one.settings.facts for one in results))
    machines = dict.fromkeys("; ".join(machine_lines(one.machine)) for one in results)
    return Report(
        f"Needles over {len(trainings)} trainings: {', '.join(lengths[0].models)}",
        verdict=[
            *(line for length in lengths for line in _in_words(length)),
            *panels.failed_in_words(labelled),
        ],
        sections=[
            section
            for length in lengths
            for section in (
                Section(f"Exact match, {length.title}", _ABOUT, found_table(length), Note(TASK)),
                Section(f"Less {length.models[0]}, {length.title}", difference_table(length)),
                Section(f"By depth, {length.title}", depth_curves(length, lengths), depth_table(length)),
            )
        ],
        provenance=Provenance([*haystacks, *machines], [command for one in results for command in one.commands]),
    )


def found_table(length: _Length) -> Table:
    rows = []
    for model in length.models:
        found = length.found(model)
        if found:
            mean = Mean.of([one.value for one in found.values()]).shown(".1f", scale=100)
            rows.append(
                (
                    model,
                    *(shown(found.get(name)) for name in length.trainings),
                    f"{mean}%" if model in length.everywhere else "",
                )
            )
    return Table([text("model"), *map(number, length.trainings), number("mean")], rows)


def difference_table(length: _Length) -> Table:
    """Differences to the first model, in percentage points."""
    rows = []
    for model in length.models[1:]:
        gaps = length.differences(model)
        if gaps:
            behind, ahead, depths = _sure_depths(length, model)
            rows.append(
                (
                    model,
                    *(format_difference(gaps.get(name)) for name in length.trainings),
                    format_difference(Mean.of([gap.mean for gap in gaps.values()])),
                    f"{behind} of {depths}",
                    f"{ahead} of {depths}",
                )
            )
    columns = [text("model"), *map(number, length.trainings), number("mean")]
    return Table([*columns, number("depths behind", _OF_DEPTHS), number("depths ahead", _OF_DEPTHS)], rows)


def depth_table(length: _Length) -> Table:
    """Exact match and differences by depth, means over trainings."""
    first, *others = length.models
    rows = []
    for bucket in range(BUCKETS):
        gaps = ([gap.mean for gap in length.differences(model, bucket).values()] for model in others)
        rows.append(
            (
                f"{depth_of(bucket):.2f}",
                *(shown(length.by_depth(model, bucket), ".1%") for model in length.everywhere),
                *(format_difference(Mean.of(model_gaps)) if model_gaps else "" for model_gaps in gaps),
            )
        )
    columns = [number("depth"), *map(number, length.everywhere)]
    return Table([*columns, *(number(f"{other} less {first}") for other in others)], rows)


def depth_curves(length: _Length, lengths: list[_Length]) -> Figure:
    curves = {
        model: [
            (depth_of(bucket), at) for bucket in range(BUCKETS) if (at := length.by_depth(model, bucket)) is not None
        ]
        for model in length.everywhere
    }
    return panels.depth_figure(lengths.index(length) + 1, f"{length.title}, means over trainings", curves)


def _lengths(trainings: Trainings) -> Iterator[_Length]:
    asked = {
        (training, model): Asked(results, EXACT)
        for training, models in trainings.items()
        for model, results in models.items()
    }
    _, first = next(iter(asked))
    for panel in panels.panels_of(asked):
        title, together = panel.together
        others = sorted({model for _, model in panel.columns} - {first})
        yield _Length(title, together, panel.columns, [first, *others])


def _with_numbers_in_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts seed-5 before seed-11."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"([0-9]+)", name)]


def _in_words(length: _Length) -> Iterator[str]:
    first, *others = length.models
    for model in others:
        gaps = [gap.mean for gap in length.differences(model).values()]
        if gaps:
            behind, _, depths = _sure_depths(length, model)
            yield (
                f"{length.title}: {model} less {first} {format_difference(Mean.of(gaps))} percentage points over "
                f"{len(gaps)} trainings ({100 * min(gaps):+.1f} to {100 * max(gaps):+.1f}); behind by more than "
                f"{_SURE} standard errors at {behind} of {depths} depths"
            )


def _sure_depths(length: _Length, model: str) -> tuple[int, int, int]:
    """Numbers of depths in all trainings: surely behind the first model, surely ahead of it, and all."""
    gaps = [gap for bucket in range(BUCKETS) for gap in length.differences(model, bucket).values()]
    sure = [gap.mean for gap in gaps if gap.standard_error is not None and abs(gap.mean) > _SURE * gap.standard_error]
    return sum(gap < 0 for gap in sure), sum(gap > 0 for gap in sure), len(gaps)
