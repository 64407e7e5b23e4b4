"""The pages of `muse report` that compare models on the same needles: within a folder, and over several folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from muse_lab.cli.app import say
from muse_lab.cli.measuring import write
from muse_lab.evaluation.needles.models_report import Models, have_same_questions, needle_comparison, reference_first
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.evaluation.needles.trainings_report import is_answered, needles_over_trainings
from muse_lab.report.tree import Report

Item = TypeVar("Item")

COMPARED = "needles-compared"
"""Name of the files that compare the models in a folder."""
OVER_TRAININGS = "needles-over-trainings"
"""Name of the files that compare models over several folders, one for each training."""


def write_needle_comparisons(folders: Mapping[Path, Mapping[str, NeedleResults]]) -> dict[Path, str]:
    """Write the pages that compare models. Returns the pages with their headlines.

    Models in one folder that were asked the same questions share a page. So do sibling folders, each a training of the
    same models, if their models were asked the same questions.
    """
    pages: dict[Path, str] = {}
    trainings: dict[Path, list[tuple[str, Models]]] = {}
    for folder, results in folders.items():
        comparable = [
            reference_first(group) for group in _grouped(results.items(), have_same_questions) if len(group) > 1
        ]
        if not comparable or _is_taken(COMPARED, folder, results):
            continue
        compared = {name for group in comparable for name in group}
        for name in (name for name in results if name not in compared):
            say(f"{folder / name}.json is compared with none: no other model in the folder was asked the same")
        pages |= _write_numbered([needle_comparison(models) for models in comparable], folder / COMPARED)
        trainings.setdefault(folder.parent, []).extend((folder.name, models) for models in comparable)
    for parent, siblings in trainings.items():
        alike = _grouped(_answered(siblings), _are_alike)
        repeated = [group for group in alike if len(group) > 1]
        if not repeated or _is_taken(OVER_TRAININGS, parent, folders.get(parent, {})):
            continue
        for training in (training for group in alike if len(group) == 1 for training in group):
            say(f"{parent / training} is in no comparison over folders: no other has such models, asked the same")
        pages |= _write_numbered([*map(needles_over_trainings, repeated)], parent / OVER_TRAININGS)
    return pages


def _is_taken(page: str, folder: Path, results: Mapping[str, NeedleResults]) -> bool:
    """Whether a model has the name of a page, which would overwrite its report."""
    if page in results:
        say(f"{folder / page}.json has the name of a comparison; rename it, and the models are compared")
    return page in results


def _grouped(items: Iterable[tuple[str, Item]], are_alike: Callable[[Item, Item], bool]) -> list[dict[str, Item]]:
    """Groups of items that are each like the first of their group."""
    groups: list[dict[str, Item]] = []
    for name, item in items:
        group = next((group for group in groups if are_alike(next(iter(group.values())), item)), None)
        if group is None:
            groups.append({name: item})
        else:
            group[name] = item
    return groups


def _answered(trainings: Iterable[tuple[str, Models]]) -> Iterator[tuple[str, Models]]:
    """The models of each training that answered something, if there are several."""
    for training, models in trainings:
        answered = {name: results for name, results in models.items() if is_answered(results)}
        if len(answered) > 1:
            yield training, answered


def _are_alike(models: Models, others: Models) -> bool:
    """Whether their references have the same name and shape, and were asked the same questions."""
    (name, results), (other, other_results) = next(iter(models.items())), next(iter(others.items()))
    is_same_shape = results.settings.shape == other_results.settings.shape
    return name == other and is_same_shape and have_same_questions(results, other_results)


def _write_numbered(reports: Sequence[Report], first: Path) -> dict[Path, str]:
    """Write reports of one kind under numbered names. Returns the pages with their headlines."""
    pages: dict[Path, str] = {}
    for place, report in enumerate(reports, start=1):
        path = first if place == 1 else first.with_name(f"{first.name}-{place}")
        write(report, path)
        pages[path.with_suffix(".html")] = report.headline
    return pages
