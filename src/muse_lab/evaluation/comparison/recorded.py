"""Comparing runs by what they recorded while they trained: no weights are read, and no loss is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.runs import StoredRun
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.initial_model import make_empty_model
from muse_lab.pretraining.recipes import differences


def take_records(runs: Sequence[StoredRun], corpus: Corpus, results: ComparisonResults, path: Path) -> None:
    """Fill `results` with these runs; a ValueError if it has another of the same name."""
    for run in runs:
        earlier = results.runs.get(run.name)
        if earlier is not None and differences(earlier.recipe, run.recipe):
            raise ValueError(f"{path} has another run called {run.name}; {results.way_out}")
        parameters = make_empty_model(corpus, run.recipe).num_parameters()
        results.runs[run.name] = Run(run.name, run.recipe, parameters, run.newest, run.curves, run.device)
    results.write(path)
