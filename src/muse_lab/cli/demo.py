"""`muse demo`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path

import typer

from muse_attention.sizes import format_size
from muse_lab.benchmark.plan import Plan
from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings
from muse_lab.benchmark.suite import run_plan, start_results
from muse_lab.benchmark.sweeps import format_heads
from muse_lab.benchmark.tables import noise_lines
from muse_lab.cli.app import (
    Device,
    Output,
    Overwrite,
    app,
    make_folder,
    phases_bar,
    progress_bar,
    run_errors,
    say,
    user_errors,
)
from muse_lab.cli.compare import ComparisonRequest, compare_runs
from muse_lab.cli.demo_report import ATTENTIONS, MEANING, call_line, call_table, demo_report
from muse_lab.cli.language_model import Place, short_warnings
from muse_lab.cli.measuring import add_command, show, write
from muse_lab.cli.train import training_progress
from muse_lab.pretraining.data.corpus import MANIFEST, Corpus, read_corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.data.prepare import CorpusSettings, prepare, recorded_settings
from muse_lab.pretraining.data.sources import standard_library
from muse_lab.pretraining.recipes import Recipe, differences, tiny
from muse_lab.records.attention_names import EXACT
from muse_lab.records.earlier_results import REMEDY, check_same, find_earlier

_MINUTES = 5
"""Duration on two idle cores."""
_LENGTH = 32 * 1024
_HEADS = {"cpu": 2, "cuda": 8}
"""On a CPU, exact attention of one head leaves a second core idle."""
_REPEATS = 3
_STEPS = 72
_CHECKPOINTS = 3
_SAMPLES = 8
_CORPUS = CorpusSettings(vocabulary=4096, buckets=Buckets(1024, 2**18), held_out=0.1, sample_bytes=2**22)
"""Small enough for minutes: a few million tokens, a tenth of the packages held out."""
_RUNS = ("exact", "muse")
_PARTS = 5


@app.command()
def demo(
    device: Device = None,
    output: Output = Path("out/demo"),
    overwrite: Overwrite = False,
) -> None:
    """See what MuSe is for: one long attention call, exact, by MuSe and by MoBA; then a tiny model trained both ways.

    Takes about five minutes on two idle CPU cores. Finished parts are kept: after an interruption, run
    it again.
    """
    with user_errors():
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_lab.pretraining.interruptions.failures import TrainingError

        place = Place.choose(device, "float32")
        make_folder(output)
    typer.echo("MuSe approximates softmax attention while a model is trained on long sequences.")
    typer.echo(f"This takes about {_MINUTES} minutes on two idle CPU cores, and longer on a busy machine.")
    command = ["muse", "demo", "--device", place.device]
    again = shlex.join([*command, "--output", str(output)])
    try:
        with run_errors(lambda: f"what is finished is kept; continue with: {again}"), user_errors(), short_warnings():
            call = _attend(output / "attention.json", place, shlex.join(command), overwrite)
            corpus = _prepare(output / "corpus", overwrite)
            for number, name in enumerate(_RUNS, start=3):
                _train(corpus, demo_recipe(name), output / name, place, number, overwrite)
            _compare(output, call, place, shlex.join(command), overwrite)
    except TrainingError as error:
        say(str(error))
        raise typer.Exit(1) from None


def demo_recipe(name: str) -> Recipe:
    """The recipe tiny, shortened, keeping all checkpoints, with exact attention throughout or with MuSe."""
    recipe = dataclasses.replace(tiny(), steps=_STEPS, checkpoint_every=_STEPS // _CHECKPOINTS, keep=_CHECKPOINTS)
    return dataclasses.replace(recipe, attention=EXACT) if name == "exact" else recipe


def _attend(path: Path, place: Place, command: str, overwrite: bool) -> BenchmarkResults:
    """What MuSe is for: one causal call on a long sequence."""
    heads = _HEADS[place.device]
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
    plan = Plan.at_lengths(settings, [_LENGTH], list(ATTENTIONS))
    results = start_results(plan, path, overwrite=overwrite, remedy=REMEDY)
    tokens = f"{format_size(_LENGTH)} tokens, {format_heads(heads, heads)}"
    part = f"one causal attention call on {tokens}, forward and backward"
    if not _is_done(1, part, path, is_done=not plan.missing(results)):
        add_command(results, command)
        with progress_bar(plan.steps(results)) as on_step:
            run_plan(plan, results, path, on_step=on_step)
    table = call_table(results)
    show(table, "", table.titles[1:], MEANING)
    typer.echo(call_line(results))
    for line in noise_lines(results):
        say(line)
    return results


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

    from muse_lab.pretraining.parallel import World
    from muse_lab.pretraining.run.folder import MODEL, RUN, run_corpus, run_recipe, with_full_name
    from muse_lab.pretraining.training import train

    part = f"training on {recipe.steps * recipe.tokens_per_step:,} tokens with {recipe.attention}"
    is_done = (output / MODEL).exists() and not overwrite
    if is_done:
        before, recipe = run_recipe(output), with_full_name(recipe)
        names = differences(before, recipe)
        check_same(
            output / RUN,
            {"corpus": run_corpus(output), **{name: getattr(before, name) for name in names}},
            {"corpus": corpus.fingerprint, **{name: getattr(recipe, name) for name in names}},
        )
    if _is_done(number, part, output, is_done=is_done):
        return
    with training_progress(recipe) as on_step:
        train(
            corpus,
            recipe,
            output,
            overwrite=overwrite,
            world=World(torch.device(place.device)),
            on_step=on_step,
            on_refused=say,
            on_note=say,
        )


def _compare(output: Path, call: BenchmarkResults, place: Place, command: str, overwrite: bool) -> None:
    typer.echo(f"{_PARTS} of {_PARTS}: comparing the two on {_SAMPLES} held-out windows, under both attentions")
    request = ComparisonRequest(
        corpus=output / "corpus",
        samples=_SAMPLES,
        device=place.device,
        dtype=place.dtype,
        output=output / "compare",
        overwrite=overwrite,
    )
    results = compare_runs([output / name for name in _RUNS], request, lambda names: command)
    report = demo_report(call, results, request.path.with_suffix(".html").relative_to(output).as_posix())
    path = output / "demo.html"
    write(report, path)
    for line in report.verdict:
        typer.echo(line)
    typer.echo(f"the report: {path}")


def _is_done(number: int, part: str, place: Path, *, is_done: bool) -> bool:
    """Print the part that begins, or that its files are there already. Returns `is_done`."""
    typer.echo(f"{number} of {_PARTS}: {part}" + (f": {place} is there already" if is_done else ""))
    return is_done
