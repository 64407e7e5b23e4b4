"""`muse demo`."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.benchmark.plan import Plan
from muse_attention.benchmark.results import BenchmarkSettings, Case
from muse_attention.benchmark.suite import run_plan, start_results
from muse_attention.benchmark.sweeps import format_heads
from muse_attention.benchmark.tables import format_error, format_ratio, format_seconds, format_spread, noise_lines
from muse_attention.cli.app import (
    Device,
    Overwrite,
    app,
    console,
    make_folder,
    new_table,
    nonempty_path,
    phases_bar,
    progress_bar,
    run_errors,
    say,
    user_errors,
)
from muse_attention.cli.compare import ComparisonRequest, compare_runs
from muse_attention.cli.language_model import Place, short_warnings
from muse_attention.cli.train import training_progress
from muse_attention.earlier_results import WAY_OUT, check_same, find_earlier
from muse_attention.evaluation.comparison.results import ComparisonResults
from muse_attention.pretraining.data.corpus import MANIFEST, Corpus, read_corpus
from muse_attention.pretraining.data.documents import Buckets
from muse_attention.pretraining.data.prepare import CorpusSettings, prepare, recorded_settings
from muse_attention.pretraining.data.sources import standard_library
from muse_attention.pretraining.metrics import read_metrics
from muse_attention.pretraining.recipes import Recipe, differences, tiny
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size

_LENGTH = 32 * 1024
_ATTENTIONS = {"muse": "MuSe, default", "moba": "MoBA"}
_REPEATS = 3
_STEPS = 192
_SAMPLES = 16
_CORPUS = CorpusSettings(vocabulary=4096, buckets=Buckets(1024, 2**18), held_out=0.1, sample_bytes=2**22)
"""Small enough for minutes: a few million tokens, a tenth of the packages held out."""
_RUNS = ("exact", "muse")
_PARTS = 5


@app.command()
def demo(
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder of all of it.", parser=nonempty_path)] = Path("out/demo"),
    overwrite: Overwrite = False,
) -> None:
    """See what MuSe is for: one long attention call, exact, by MuSe and by MoBA; then a tiny model trained both ways.

    Takes minutes. What is done already is not done again: after an interruption, run it again.
    """
    with user_errors():
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_attention.pretraining.failures import TrainingError

        place = Place.choose(device, "float32")
        make_folder(output)
    again = shlex.join(["muse", "demo", "--device", place.device, "--output", str(output)])
    try:
        with run_errors(lambda: f"what is finished is kept; continue with: {again}"), user_errors(), short_warnings():
            _attend(output / "attention.json", place, overwrite)
            corpus = _prepare(output / "corpus", overwrite)
            for number, name in enumerate(_RUNS, start=3):
                _train(corpus, demo_recipe(name), output / name, place, number, overwrite)
            _compare(output, place, overwrite)
    except TrainingError as error:
        say(str(error))
        raise typer.Exit(1) from None


def demo_recipe(name: str) -> Recipe:
    """The recipe tiny, shortened, with all its checkpoints, and with exact attention throughout or MuSe's."""
    recipe = dataclasses.replace(tiny(), steps=_STEPS, keep=_STEPS)
    return dataclasses.replace(recipe, attention=EXACT) if name == "exact" else recipe


def _attend(path: Path, place: Place, overwrite: bool) -> None:
    """What MuSe is for: one causal call on a long sequence."""
    heads = 8 if place.device == "cuda" else 1
    settings = BenchmarkSettings(
        device=place.device,
        batch=1,
        heads=heads,
        key_heads=heads,
        head_dim=64,
        dtype="bfloat16" if place.device == "cuda" else "float32",
        causal=True,
        repeats=_REPEATS,
        memory=False,
    )
    plan = Plan.at_lengths(settings, [_LENGTH], list(_ATTENTIONS))
    results = start_results(plan, path, overwrite=overwrite, way_out=WAY_OUT)
    typer.echo("MuSe approximates softmax attention while a model is trained on long sequences.")
    tokens = f"{format_size(_LENGTH)} tokens, {format_heads(heads, heads)}"
    what = f"one causal attention call on {tokens}, forward and backward"
    if not _is_done(1, what, path, is_done=not plan.missing(results)):
        with progress_bar(plan.steps(results)) as on_step:
            run_plan(plan, results, path, on_step=on_step)
    cases = {case.request.attention: case for case in results.cases}
    _show_attentions(cases)
    for line in noise_lines(results):
        say(line)


def _show_attentions(cases: dict[str, Case]) -> None:
    muse, moba = (cases[name] for name in _ATTENTIONS)
    table = new_table("", "forward +\nbackward", "spread", "speed-up", "RSE")
    table.add_row(
        "exact",
        format_seconds(muse.sdpa_times.forward_backward_median),
        format_spread(muse.sdpa_times.spread),
        "",
        "",
    )
    for name, label in _ATTENTIONS.items():
        case = cases[name]
        table.add_row(
            label,
            format_seconds(case.times.forward_backward_median),
            format_spread(case.times.spread),
            format_ratio(case.speedup_forward_backward),
            format_error(_error(case)),
        )
    console.print(table)
    typer.echo(
        "RSE: the squared error of the output, relative to the squared output of exact attention, on synthetic queries "
        "and keys that form clusters."
    )
    typer.echo(
        f"MuSe took {1 / muse.speedup_forward_backward:.0%} of the time of exact attention, with an error of "
        f"{_error(muse):.1%}; MoBA took {1 / moba.speedup_forward_backward:.0%}, with an error of {_error(moba):.1%}."
    )


def _error(case: Case) -> float:
    return case.fidelity["relative_squared_error"]


def _prepare(folder: Path, overwrite: bool) -> Corpus:
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    earlier = find_earlier(
        folder / MANIFEST,
        lambda path: read_corpus(path.parent),
        lambda corpus: {"source": corpus.manifest.source, **corpus.manifest.settings},
        {"source": version, **recorded_settings(_CORPUS)},
        overwrite=overwrite,
    )
    if _is_done(2, f"preparing {version}", folder, is_done=earlier is not None) and earlier is not None:
        return earlier
    with phases_bar() as on_step:
        return prepare(standard_library(), folder, _CORPUS, source=version, on_step=on_step)


def _train(corpus: Corpus, recipe: Recipe, output: Path, place: Place, number: int, overwrite: bool) -> None:
    import torch

    from muse_attention.pretraining.parallel import World
    from muse_attention.pretraining.run_folder import MODEL, RUN, run_corpus, run_recipe
    from muse_attention.pretraining.training import train

    what = f"training on {recipe.steps * recipe.tokens_per_step:,} tokens with {recipe.attention}"
    is_done = (output / MODEL).exists() and not overwrite
    if is_done:
        before = run_recipe(output)
        names = differences(before, recipe)
        check_same(
            output / RUN,
            {"corpus": run_corpus(output), **{name: getattr(before, name) for name in names}},
            {"corpus": corpus.fingerprint, **{name: getattr(recipe, name) for name in names}},
        )
    if _is_done(number, what, output, is_done=is_done):
        return
    with training_progress(recipe) as on_step:
        train(
            corpus,
            recipe,
            output,
            resume=True,
            overwrite=overwrite,
            world=World(torch.device(place.device)),
            on_step=on_step,
            on_refused=say,
            on_note=say,
        )


def _compare(output: Path, place: Place, overwrite: bool) -> None:
    typer.echo(f"{_count(_PARTS)}: comparing the two on {_SAMPLES} held-out windows, under both attentions")
    request = ComparisonRequest(
        corpus=output / "corpus",
        samples=_SAMPLES,
        device=place.device,
        dtype=place.dtype,
        output=output / "compare",
        overwrite=overwrite,
    )
    results = compare_runs(
        [output / name for name in _RUNS], request, lambda names: f"muse demo --device {place.device}"
    )
    for line in _conclusions(results, output):
        typer.echo(line)
    typer.echo(f"the report: {request.path.with_suffix('.html')}")


def _conclusions(results: ComparisonResults, output: Path) -> list[str]:
    """What the two runs show, and what they do not, in words."""
    exact, muse = (results.runs[name] for name in _RUNS)
    losses = [statistics.fmean(cell.means) for run in (exact, muse) if (cell := results.whole(run, EXACT)) is not None]
    speeds = [statistics.median(line["tokens_per_second"] for line in read_metrics(output / name)) for name in _RUNS]
    length = format_size(muse.recipe.length)
    return [
        f"What this shows: a model learns through MuSe. On {muse.tokens:,} tokens it reached a held-out loss of "
        f"{losses[1]:.3f} under exact attention; with exact attention throughout it reached {losses[0]:.3f}.",
        f"What it does not show: speed. The model reads {length} tokens at a time, and there MuSe trains at "
        f"{format_ratio(speeds[1] / speeds[0])} the speed of exact attention: MuSe is for sequences like those of part "
        f"1. Nor the end of training: this is {muse.tokens / muse.parameters:.1f} tokens for each parameter, the "
        "paper has 20, and one seed.",
    ]


def _is_done(number: int, what: str, place: Path, *, is_done: bool) -> bool:
    """Say what begins, or that it is there already."""
    typer.echo(f"{_count(number)}: {what}" + (f": {place} is there already" if is_done else ""))
    return is_done


def _count(number: int) -> str:
    return f"{number} of {_PARTS}"
