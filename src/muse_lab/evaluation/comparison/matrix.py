"""Measuring the loss of trained models under one attention after another, on the held-out split of their corpus.

Each model is loaded once. The results are one file, replaced after every sample of every attention, so that a
comparison that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from muse_lab.evaluation.comparison.results import Cell, ComparisonResults, Run
from muse_lab.evaluation.comparison.runs import StoredRun, choose_evenly, load_weights
from muse_lab.evaluation.loss.curves import bins_of
from muse_lab.evaluation.loss.positions import position_losses
from muse_lab.evaluation.settings import take_fingerprint
from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.checkpoints.manifest import CheckpointError
from muse_lab.pretraining.data.corpus import HELD_OUT, Corpus
from muse_lab.pretraining.initial_model import make_empty_model
from muse_lab.pretraining.recipes import differences
from muse_lab.records.attention_names import EXACT, without_freezing
from muse_lab.records.stored_results import OnStep, rounded

_DIGITS = 8
"""of the stored losses"""


def weights_to_measure(run: StoredRun, checkpoints: int) -> list[int]:
    """The steps of the newest weights, and of at most so many earlier checkpoints."""
    return [run.newest, *choose_evenly(run.earlier, checkpoints)]


def attentions_of(run: StoredRun, step: int, attentions: Sequence[str]) -> Sequence[str]:
    """Attentions to measure weights under: all for the newest; exact attention and the run's own for earlier ones."""
    if step == run.newest:
        return attentions
    own = without_freezing(run.recipe.attention)
    return [name for name in attentions if name in (EXACT, own)]


def measure(
    runs: Sequence[StoredRun],
    corpus: Corpus,
    attentions: Sequence[str],
    results: ComparisonResults,
    path: Path,
    *,
    checkpoints: int = 0,
    on_step: OnStep = lambda description, finished: None,
    on_refused: Callable[[str], None] = lambda message: None,
) -> None:
    """Fill `results` with what is missing of `attentions`, by full names, of the newest weights of each run.

    Args:
        checkpoints: largest number of earlier ones of each run, measured under exact attention and the run's own
        on_refused: told why a checkpoint is left out
    """
    settings = results.settings
    samples = torch.stack(Windows(corpus, settings.length, split=HELD_OUT).spaced(settings.samples))
    finished = 0
    for run in runs:
        for step in weights_to_measure(run, checkpoints):
            on_step(f"{run.name}: reading the weights of step {step}", finished)
            try:
                model = load_weights(run, step, corpus, settings.device)
            except CheckpointError as error:
                if step == run.newest:
                    raise
                on_refused(f"{error}; it is left out")
                continue
            fingerprint = take_fingerprint(model, samples)
            _check_same_weights(results, run.name, step, fingerprint, path)
            if step == run.newest:
                results.runs[run.name] = _as_run(run, model.num_parameters(), step)
                results.write(path)
            for sample, attention in results.missing(run.name, step, attentions_of(run, step, attentions)):
                on_step(f"{run.name}, step {step}: {attention}, sample {sample + 1} of {len(samples)}", finished)
                with torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bfloat16"):
                    losses = position_losses(model, samples[sample][:-1], attention, samples[sample][1:])
                if not math.isfinite(float(losses.sum())):
                    raise ValueError(
                        f"the loss of {run.name} under {attention} is not a finite number; use --dtype float32"
                    )
                _add(results, run.name, step, fingerprint, attention, losses)
                results.write(path)
                finished += 1


def take_records(runs: Sequence[StoredRun], corpus: Corpus, results: ComparisonResults, path: Path) -> None:
    """Fill `results` with what runs recorded in training; raises ValueError if it has another run of the same name."""
    for run in runs:
        earlier = results.runs.get(run.name)
        if earlier is not None and differences(earlier.recipe, run.recipe):
            raise ValueError(f"{path} has another run called {run.name}; {results.remedy}")
        parameters = make_empty_model(corpus, run.recipe).num_parameters()
        results.runs[run.name] = _as_run(run, parameters, run.newest)
    results.write(path)


def _as_run(run: StoredRun, parameters: int, step: int) -> Run:
    return Run(run.name, run.recipe, parameters, step, run.curves, run.device, run.hardware)


def _add(results: ComparisonResults, run: str, step: int, fingerprint: str, attention: str, losses: Tensor) -> None:
    bins = bins_of(losses)
    cell = results.find(run, step, attention)
    if cell is None:
        cell = Cell(run, step, fingerprint, attention, [part.last - part.first + 1 for part in bins])
        results.cells.append(cell)
    cell.bins.append(rounded(torch.tensor([part.loss for part in bins], dtype=torch.float64), _DIGITS))


def _check_same_weights(results: ComparisonResults, run: str, step: int, fingerprint: str, path: Path) -> None:
    for cell in results.cells:
        if (cell.run, cell.step) == (run, step) and cell.fingerprint != fingerprint:
            raise ValueError(f"{path} has losses of another run called {run}; {results.remedy}")
