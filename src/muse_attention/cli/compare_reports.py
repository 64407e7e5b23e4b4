"""The files that `muse compare` writes for people, from its results alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer

from muse_attention.cli.app import draw_picture
from muse_attention.evaluation.comparison.findings import ScalingLaw, scaling_laws, sizes
from muse_attention.evaluation.comparison.report import (
    ANSWERS,
    ERRORS,
    POSITIONS,
    SCALING,
    TRAINING,
    answers_curves,
    as_csv,
    html_report,
    losses_by_position,
    markdown_report,
)
from muse_attention.evaluation.comparison.results import Results, Run
from muse_attention.files import replace_file
from muse_attention.plots import (
    MEAN,
    Curve,
    plot_answers,
    plot_error_in_training,
    plot_loss_by_position,
    plot_scaling,
    plot_training,
)

_POINTS_OF_A_LAW = 50


def write_comparison_reports(results: Results, path: Path) -> None:
    if not results.attentions:
        raise ValueError("no model has seen all samples yet; run the comparison again, and it goes on")
    title = f"Training runs compared: {', '.join(results.runs)}"
    files = {path.with_suffix(".md"): markdown_report(results, title=title), path.with_suffix(".csv"): as_csv(results)}
    for file, content in files.items():
        replace_file(file, content)
    pictures = {
        name: picture
        for name, draw in _drawings(results).items()
        if draw_picture(picture := path.with_name(f"{path.stem}-{name}.png"), draw)
    }
    page = path.with_suffix(".html")
    drawn = {name: picture.read_bytes() for name, picture in pictures.items()}
    replace_file(page, html_report(results, title=title, pictures=drawn))
    typer.echo(f"wrote {', '.join(map(str, [path, *files, *pictures.values(), page]))}")


def _drawings(results: Results) -> dict[str, Callable[[Path], None]]:
    """Of what there is."""
    runs = results.runs.values()
    found: dict[str, Callable[[Path], None]] = {}
    if any(run.curves.points for run in runs):
        by_tokens = {run.name: [(point.tokens / 1e6, point.loss) for point in run.curves.points] for run in runs}
        by_seconds = {run.name: [(point.seconds, point.loss) for point in run.curves.points] for run in runs}
        found[TRAINING] = functools.partial(plot_training, by_tokens, by_seconds)
    if panels := {run.name: curves for run in runs if (curves := _position_curves(results, run))}:
        found[POSITIONS] = functools.partial(plot_loss_by_position, panels)
    if panels := {run.name: curves for run in runs if (curves := _error_curves(run))}:
        found[ERRORS] = functools.partial(plot_error_in_training, panels)
    if curves := {
        f"{run.name}, {attention}": curve for run in runs for attention, curve in answers_curves(run).items()
    }:
        found[ANSWERS] = functools.partial(plot_answers, curves)
    if laws := scaling_laws(results):
        lines = {name: _line(law) for name, law in laws.items()}
        found[SCALING] = functools.partial(plot_scaling, sizes(results), lines)
    return found


def _position_curves(results: Results, run: Run) -> dict[str, Curve]:
    """By what the model had learnt from."""
    return {f"{step:,} updates": losses_by_position(results, run, step) for step in results.steps(run)}


def _error_curves(run: Run) -> dict[str, Curve]:
    """By layer, and their mean."""
    probes = run.curves.probes
    if not probes:
        return {}
    curves: dict[str, Curve] = {
        f"layer {layer}": [(probe.tokens / 1e6, probe.errors[layer]) for probe in probes] for layer in probes[0].errors
    }
    return curves | {MEAN: [(probe.tokens / 1e6, probe.mean) for probe in probes]}


def _line(found: ScalingLaw) -> Curve:
    smallest, largest = found.points[0][0], found.points[-1][0]
    return [(float(size), found.law(float(size))) for size in np.geomspace(smallest, largest, _POINTS_OF_A_LAW)]
