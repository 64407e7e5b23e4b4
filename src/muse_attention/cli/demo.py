"""`muse demo`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.cli.app import Device, app, make_folder, phases_bar, run_errors, say, user_errors
from muse_attention.cli.compare import RESULTS, Request, compare_runs, show_comparison
from muse_attention.cli.compare_reports import write_comparison_reports
from muse_attention.cli.language_model import Place, short_warnings
from muse_attention.cli.train import training_progress
from muse_attention.pretraining.data.corpus import MANIFEST, Corpus, read_corpus
from muse_attention.pretraining.data.documents import Buckets
from muse_attention.pretraining.data.prepare import Settings, prepare
from muse_attention.pretraining.data.sources import standard_library
from muse_attention.pretraining.recipes import Recipe, tiny
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size

_STEPS = 192
_SAMPLES = 16
_CORPUS = Settings(vocabulary=4096, buckets=Buckets(1024, 2**18), held_out=0.1, sample_bytes=2**22)
"""Small enough for minutes: a few million tokens, a tenth of the packages held out."""
_RUNS = ("exact", "muse")


@app.command()
def demo(
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder of all of it.")] = Path("out/demo"),
) -> None:
    """Pretrain a tiny model with exact attention and with MuSe on the same tokens, and compare the two.

    What is done already is not done again: after an interruption, run it again.
    """
    with user_errors():
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_attention.pretraining.training import TrainingError

        place = Place.choose(device, "float32")
        make_folder(output)
    again = shlex.join(["muse", "demo", "--device", place.device, "--output", str(output)])
    try:
        with run_errors(lambda: f"what is finished is kept; continue with: {again}"), user_errors(), short_warnings():
            corpus = _prepare(output / "corpus")
            for number, name in enumerate(_RUNS, start=2):
                _train(corpus, demo_recipe(name), output / name, place, number)
            _compare(output, place)
    except TrainingError as error:
        say(str(error))
        raise typer.Exit(1) from None


def demo_recipe(name: str) -> Recipe:
    """The recipe tiny, shortened, with all its checkpoints, and with exact attention throughout or MuSe's."""
    recipe = dataclasses.replace(tiny(), steps=_STEPS, keep=_STEPS)
    return dataclasses.replace(recipe, attention=EXACT) if name == "exact" else recipe


def _prepare(folder: Path) -> Corpus:
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    if _is_done(1, f"preparing {version}", folder, folder / MANIFEST):
        return read_corpus(folder)
    with phases_bar() as on_step:
        return prepare(standard_library(), folder, _CORPUS, source=version, on_step=on_step)


def _train(corpus: Corpus, recipe: Recipe, output: Path, place: Place, number: int) -> None:
    import torch

    from muse_attention.pretraining.parallel import World
    from muse_attention.pretraining.run_folder import MODEL
    from muse_attention.pretraining.training import train

    what = f"training on {recipe.steps * recipe.tokens_per_step:,} tokens with {recipe.attention}"
    if not _is_done(number, what, output, output / MODEL):
        with training_progress(recipe) as on_step:
            world = World(torch.device(place.device))
            train(corpus, recipe, output, resume=True, world=world, on_step=on_step, on_refused=say, on_note=say)


def _compare(output: Path, place: Place) -> None:
    typer.echo(f"{_count(len(_RUNS) + 2)}: comparing the two on {_SAMPLES} held-out windows, under both attentions")
    request = Request([output / name for name in _RUNS], output / "corpus", place, samples=_SAMPLES)
    folder = output / "compare"
    command = f"muse demo --device {place.device}"
    results = compare_runs(request, folder, command=command, way_out=f"remove the folder {folder} to measure it anew")
    show_comparison(results)
    run = results.runs["muse"]
    typer.echo(
        f"That is {run.tokens / run.parameters:.1f} tokens for each parameter, where the paper has 20, in sequences "
        f"of {format_size(run.recipe.length)}, for which MuSe is not meant: it says how the two begin to learn."
    )
    path = folder / RESULTS
    write_comparison_reports(results, path)
    typer.echo(f"the report: {path.with_suffix('.html')}")


def _is_done(number: int, what: str, folder: Path, sign: Path) -> bool:
    """Whether a part is there already; a line says what begins."""
    is_done = sign.exists()
    typer.echo(f"{_count(number)}: {what}" + (f": {folder} is there already" if is_done else ""))
    return is_done


def _count(number: int) -> str:
    return f"{number} of {len(_RUNS) + 2}"
