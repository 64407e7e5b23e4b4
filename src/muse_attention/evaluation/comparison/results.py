"""The results of `muse compare`: what was measured of several training runs, as one file.

It is all that a report needs: the runs themselves may be gone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muse_attention.declared_types import check_types
from muse_attention.evaluation.attentions import check_meaning, full_name, settings_of
from muse_attention.evaluation.comparison.training_curves import TrainingCurves
from muse_attention.evaluation.means import Mean
from muse_attention.evaluation.settings import describe_machine_and_versions, differing
from muse_attention.files import replace_file
from muse_attention.pretraining.recipes import Recipe, read_recipe
from muse_attention.pretraining.schedule import EXACT
from muse_attention.recorded_names import recorded_name, with_full_names
from muse_attention.strict_json import parse_json

WAY_OUT = "choose another --output, or --overwrite it"
"""What a user of `muse compare` can do with a file that cannot be continued."""


@dataclass(frozen=True)
class Settings:
    """What all losses of a file have in common."""

    corpus: str
    """in words"""
    fingerprint: str
    """of the corpus"""
    length: int
    """tokens of a window"""
    samples: int
    windows: int
    """of the held-out split, among which the samples are"""
    device: str
    precision: str
    """of products, by autocast"""


@dataclass(frozen=True)
class Run:
    name: str
    recipe: Recipe
    parameters: int
    step: int
    """updates that the weights have seen which are compared"""
    curves: TrainingCurves

    @property
    def attention(self) -> str:
        """That it was trained with, by its full name."""
        return full_name(self.recipe.attention, self.recipe.length)

    @property
    def is_finished(self) -> bool:
        return self.step == self.recipe.steps

    @property
    def tokens(self) -> int:
        return self.step * self.recipe.tokens_per_step


@dataclass
class Cell:
    """The losses of a model under an attention, in nats."""

    run: str
    step: int
    """updates that the model has seen"""
    fingerprint: str
    """of its weights and of the samples"""
    attention: str
    sizes: list[int]
    """positions of a sample between powers of two, from position 1 on"""
    bins: list[list[float]] = field(default_factory=list)
    """of each sample: the mean loss of these positions"""

    @property
    def means(self) -> list[float]:
        """Of each sample, over all positions."""
        return [
            sum(size * loss for size, loss in zip(self.sizes, losses, strict=True)) / sum(self.sizes)
            for losses in self.bins
        ]

    @property
    def by_position(self) -> list[Mean]:
        """Of each bin, over samples."""
        return [Mean.of(losses) for losses in zip(*self.bins, strict=True)]


@dataclass
class Results:
    machine: dict[str, Any]
    settings: Settings
    commands: list[str] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)

    def find(self, run: str, step: int, attention: str) -> Cell | None:
        key = (run, step, attention)
        return next((cell for cell in self.cells if (cell.run, cell.step, cell.attention) == key), None)

    def whole(self, run: Run, attention: str, step: int | None = None) -> Cell | None:
        """The cell of a run's newest weights, or of others, if it has seen every sample."""
        cell = self.find(run.name, run.step if step is None else step, attention)
        return cell if cell is not None and len(cell.bins) == self.settings.samples else None

    def missing(self, run: str, step: int, attentions: Sequence[str]) -> list[tuple[int, str]]:
        """What is still to do: all attentions on one sample before the next."""
        cells = {name: self.find(run, step, name) for name in attentions}
        done = {name: 0 if cell is None else len(cell.bins) for name, cell in cells.items()}
        return [
            (sample, name) for sample in range(self.settings.samples) for name in attentions if done[name] <= sample
        ]

    @property
    def attentions(self) -> list[str]:
        """Those that the newest weights of some run were measured under to the end, exact attention first."""
        ordered = dict.fromkeys([EXACT, *(cell.attention for cell in self.cells)])
        return [name for name in ordered if any(self.whole(run, name) for run in self.runs.values())]

    def steps(self, run: Run) -> list[int]:
        """The weights of a run that were measured under exact attention to the end, in order."""
        steps = {cell.step for cell in self.cells if cell.run == run.name}
        return sorted(step for step in steps if self.whole(run, EXACT, step))


def start_results(settings: Settings, path: Path, *, overwrite: bool, way_out: str = WAY_OUT) -> Results:
    """Those of the file if there is one, else empty ones; a ValueError with the way out if they cannot be continued."""
    machine = describe_machine_and_versions()
    if overwrite or not path.exists():
        return Results(machine, settings)
    earlier = read_results(path, way_out=way_out)
    differences = differing(vars(earlier.settings), vars(settings)) + differing(earlier.machine, machine)
    if differences:
        raise ValueError(
            f"{path} was measured with other settings or on another machine ({', '.join(differences)} differ); "
            f"{way_out}"
        )
    return earlier


def write_results(results: Results, path: Path) -> None:
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "runs": [asdict(run) for run in results.runs.values()],
        "cells": [{**asdict(cell), "config": settings_of(cell.attention)} for cell in results.cells],
    }
    replace_file(path, json.dumps(document) + "\n")


def read_results(path: Path, *, way_out: str = WAY_OUT) -> Results:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = with_full_names(parse_json(path.read_bytes()))
        device = document["settings"]["device"]
        runs = [_run_from_json(run, device) for run in document["runs"]]
        meanings = [(cell["attention"], cell.pop("config")) for cell in document["cells"]]
        results = Results(
            machine=dict(document["machine"]),
            settings=Settings(**document["settings"]),
            commands=list(document["commands"]),
            runs={run.name: run for run in runs},
            cells=[Cell(**cell) for cell in document["cells"]],
        )
        check_types(results)
        if any(run.parameters < 1 for run in runs):
            raise ValueError("a model without parameters")
        for cell in results.cells:
            if len(cell.bins) > results.settings.samples or sum(cell.sizes) != results.settings.length:
                raise ValueError("the numbers are not those of the settings")
            if any(len(losses) != len(cell.sizes) for losses in cell.bins):
                raise ValueError("the bins are not those of a sample")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the results of muse compare; {way_out}") from error
    for attention, meaning in meanings:
        check_meaning(attention, meaning, way_out=way_out)
    return results


def _run_from_json(entry: dict[str, Any], device: str) -> Run:
    recipe = read_recipe(entry["recipe"])
    curves = TrainingCurves.from_json(entry["curves"])
    return Run(
        **{
            **entry,
            "recipe": recipe,
            "curves": curves.with_names(lambda attention: recorded_name(attention, recipe.length, device)),
        }
    )
