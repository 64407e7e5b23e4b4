"""Training runs on disk: their recipes and metrics, and the weights that they have kept.

The newest weights are those of the finished model, or of the newest checkpoint that is whole. Checkpoints are verified
before anything is read from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.models import load_model
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.initial_model import make_config
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.metrics import FILE, read_metrics
from muse_lab.pretraining.optimiser import restore_weights
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.folder import (
    CHECKPOINTS,
    MODEL,
    find_checkpoint,
    open_checkpoint,
    run_corpus,
    run_device,
    run_hardware,
    run_recipe,
)


@dataclass(frozen=True)
class StoredRun:
    folder: Path
    name: str
    recipe: Recipe
    curves: TrainingCurves
    newest: int
    """updates that its newest weights have seen"""
    is_finished: bool
    """whether its newest weights are those of the model, and not of a checkpoint"""
    earlier: tuple[int, ...]
    """updates that its checkpoints before that have seen"""
    device: str
    """that it was trained on"""
    hardware: str | None
    """the name of that GPU or CPU, or several one after another, if they were recorded"""


def open_runs(
    folders: Sequence[Path],
    corpus: Corpus,
    *,
    needs_weights: bool = True,
    on_refused: Callable[[str], None] = lambda message: None,
) -> list[StoredRun]:
    """The run in each folder; raises ValueError if it is not of this corpus, or lacks weights that are needed.

    Where no weights are needed, `newest` is the last update that was recorded. `on_refused` is told of each broken
    checkpoint of an unfinished run, and of broken lines of metrics.
    """
    return [
        _open_run(folder, name, corpus, needs_weights, on_refused)
        for folder, name in zip(folders, _names([folder.expanduser().resolve() for folder in folders]), strict=True)
    ]


def load_weights(run: StoredRun, step: int, corpus: Corpus, device: str) -> PreTrainedModel:
    """The model after so many updates, in float32, in evaluation mode; raises ValueError if it is damaged."""
    if run.is_finished and step == run.newest:
        model, _ = load_model(run.folder / MODEL, device=device)
        return model
    checkpoint = open_checkpoint(run.folder, step, run.recipe, corpus)
    with torch.random.fork_rng(devices=[]):
        trained: PreTrainedModel = DecoderForCausalLM(make_config(corpus, run.recipe)).eval()
    restore_weights(trained, checkpoint)
    return trained.to(device)


def choose_evenly(steps: Sequence[int], number: int) -> list[int]:
    """At most `number` steps, evenly from the first to the last; only the first for 1."""
    if number >= len(steps):
        return list(steps)
    if number <= 1:
        return list(steps[:number])
    return [steps[round(index * (len(steps) - 1) / (number - 1))] for index in range(number)]


def _open_run(
    folder: Path, name: str, corpus: Corpus, needs_weights: bool, on_refused: Callable[[str], None]
) -> StoredRun:
    recipe = run_recipe(folder)
    if run_corpus(folder) != corpus.fingerprint:
        raise ValueError(
            f"the run in {folder} is of another corpus than {corpus.folder}; give its corpus with --corpus"
        )
    steps = read_metrics(folder, on_refused)
    curves = _curves_of(steps, folder)
    place: dict[str, Any] = {"device": run_device(folder), "hardware": run_hardware(folder)}
    if not needs_weights:
        if not steps:
            raise ValueError(
                f"{folder / FILE} has no update; leave the run out, or give --samples to compare its weights"
            )
        newest = steps[-1]["step"]
        return StoredRun(folder, name, recipe, curves, newest, is_finished=False, earlier=(), **place)
    newest, is_finished = recipe.updates, (folder / MODEL).is_dir()
    if not is_finished:
        checkpoint = find_checkpoint(folder, recipe, corpus, on_refused)
        if checkpoint is None:
            raise ValueError(f"the run in {folder} has neither a model nor a checkpoint yet; train it on with --resume")
        newest = checkpoint.step
    earlier = tuple(step for step in checkpoints.steps_in(folder / CHECKPOINTS) if step < newest)
    return StoredRun(folder, name, recipe, curves, newest, is_finished, earlier, **place)


def _curves_of(steps: Sequence[Mapping[str, Any]], folder: Path) -> TrainingCurves:
    try:
        return TrainingCurves.of(steps)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{folder / FILE} is not of this version of muse train; move it away") from None


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, with the one before it where that does not tell them apart."""
    last = [_as_text(folder) for folder in folders]
    names = [
        name if last.count(name) == 1 else f"{_as_text(folder.parent)}/{name}"
        for folder, name in zip(folders, last, strict=True)
    ]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two of the runs are called {name}; give each once, and rename one of two")
    return names


def _as_text(folder: Path) -> str:
    """The folder's name; bytes that are not text, which a report cannot hold, are written like \\udcff."""
    return folder.name.encode("utf-8", "backslashreplace").decode()
