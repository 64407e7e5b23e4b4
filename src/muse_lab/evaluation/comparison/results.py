"""The results of `muse compare`: measurements of several training runs, as one file.

A report needs nothing else: the runs themselves may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.pretraining.recipes import Recipe
from muse_lab.records.attention_names import EXACT, without_freezing
from muse_lab.records.dataclass_json import entries
from muse_lab.records.earlier_results import REMEDY
from muse_lab.records.means import Mean
from muse_lab.records.stored_results import StoredResults


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings that all losses of a file share."""

    corpus: str
    """in words"""
    fingerprint: str
    """of the corpus"""
    length: int
    """tokens of a window; 0 where there are no samples"""
    samples: int
    """0 where nothing is measured, and runs are compared by what they recorded"""
    windows: int
    """of the held-out split, from which samples are taken"""
    device: str
    precision: str
    """of products, by autocast"""
    shared_gpu: bool = False
    """whether runs were trained while other programs used their GPU, so that speeds mean nothing"""


@dataclass(frozen=True)
class Run:
    name: str
    recipe: Recipe
    parameters: int
    step: int
    """updates that the compared weights have seen"""
    curves: TrainingCurves
    device: str
    """cpu or cuda, where it was trained"""
    hardware: str | None = None
    """the name of that GPU or CPU, or several one after another, if they were recorded"""

    @property
    def attention(self) -> str:
        """The full name of the attention that it was trained with."""
        return self.recipe.attention

    @property
    def tested_attention(self) -> str:
        """The attention by which its losses are measured: without settings that change only gradients."""
        return without_freezing(self.recipe.attention)

    @property
    def is_finished(self) -> bool:
        return self.step == self.recipe.updates

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
    """the mean loss of these positions, for each sample"""

    @property
    def means(self) -> list[float]:
        """The mean loss of each sample, over all positions."""
        return [
            sum(size * loss for size, loss in zip(self.sizes, losses, strict=True)) / sum(self.sizes)
            for losses in self.bins
        ]

    @property
    def by_position(self) -> list[Mean]:
        """The mean loss of each bin, over samples."""
        return [Mean.of(losses) for losses in zip(*self.bins, strict=True)]


@dataclass
class ComparisonResults(StoredResults):
    command = "muse compare"
    remedy = REMEDY
    is_finite = True

    settings: ComparisonSettings
    runs: dict[str, Run] = field(default_factory=dict, metadata=entries("name"))
    cells: list[Cell] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        return [cell.attention for cell in self.cells]

    def check(self) -> None:
        if any(run.parameters < 1 for run in self.runs.values()):
            raise ValueError("a model without parameters")
        for cell in self.cells:
            if len(cell.bins) > self.settings.samples or sum(cell.sizes) != self.settings.length:
                raise ValueError("the numbers are not those of the settings")
            if any(len(losses) != len(cell.sizes) for losses in cell.bins):
                raise ValueError("the bins are not those of a sample")

    def conditions(self) -> dict[str, Any]:
        """Without what changes no loss: whether a GPU was shared and, if nothing is measured, device and precision."""
        without = {"shared_gpu"} if self.settings.samples else {"shared_gpu", "device", "precision"}
        return {name: value for name, value in super().conditions().items() if name not in without}

    def find(self, run: str, step: int, attention: str) -> Cell | None:
        key = (run, step, attention)
        return next((cell for cell in self.cells if (cell.run, cell.step, cell.attention) == key), None)

    def whole(self, run: Run, attention: str, step: int | None = None) -> Cell | None:
        """The cell of a run's newest weights, or of others, if it has seen every sample."""
        cell = self.find(run.name, run.step if step is None else step, attention)
        return cell if cell is not None and len(cell.bins) == self.settings.samples else None

    def loss(self, run: Run, attention: str, step: int | None = None) -> Mean | None:
        """The mean loss of these weights over samples, if every sample is measured."""
        cell = self.whole(run, attention, step)
        return None if cell is None else Mean.of(cell.means)

    def missing(self, run: str, step: int, attentions: Sequence[str]) -> list[tuple[int, str]]:
        """(sample, attention) still to measure: all attentions on one sample before the next."""
        cells = {name: self.find(run, step, name) for name in attentions}
        done = {name: 0 if cell is None else len(cell.bins) for name, cell in cells.items()}
        return [
            (sample, name) for sample in range(self.settings.samples) for name in attentions if done[name] <= sample
        ]

    @property
    def attentions(self) -> list[str]:
        """Attentions under which the newest weights of a run have seen every sample, exact attention first."""
        ordered = dict.fromkeys([EXACT, *(cell.attention for cell in self.cells)])
        return [name for name in ordered if any(self.whole(run, name) for run in self.runs.values())]

    def steps(self, run: Run) -> list[int]:
        """The weights of a run that were measured under exact attention to the end, in order."""
        steps = {cell.step for cell in self.cells if cell.run == run.name}
        return sorted(step for step in steps if self.whole(run, EXACT, step))
