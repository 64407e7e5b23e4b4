"""`muse train`."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muse_attention.benchmark.workload import check_device
from muse_attention.cli.app import Device, app, default_device, make_folder, phases_bar, run_errors, say, user_errors
from muse_attention.cli.language_model import short_warnings
from muse_attention.pretraining.data.corpus import read_corpus
from muse_attention.pretraining.recipes import RECIPES, Recipe, get_recipe, override

if TYPE_CHECKING:
    from muse_attention.pretraining.metrics import Step

_SECONDS_BETWEEN_LINES = 30.0
_SMOOTHING = 0.9
_LESS_MEMORY = ("micro_batch=1", "recompute=true")


@app.command()
def train(
    corpus: Annotated[Path, typer.Argument(help="Folder that muse prepare wrote.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other values of the recipe's fields.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(RECIPES)}.", show_default="tiny, or that of the run that is resumed"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of checkpoints, metrics and the model.")] = Path("out/train"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in the folder; with --recipe, start it if there is none."),
    ] = False,
    train_mixture: Annotated[
        str | None,
        typer.Option(help="niah: a share of needle documents; the same as mixture=niah.", show_default="none"),
    ] = None,
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard too.")] = False,
) -> None:
    """Pretrain a language model with any attention in its global layers.

    On several GPUs: torchrun --nproc-per-node 2 -m muse_attention.cli train ...
    """
    with user_errors():
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_attention.pretraining.parallel import has_launcher, open_world
        from muse_attention.pretraining.run_folder import (
            CHECKPOINTS,
            describe_last_good,
            has_learnt,
            has_run,
            run_recipe,
        )
        from muse_attention.pretraining.training import TrainingError
        from muse_attention.pretraining.training import train as train_model

        place = device or default_device()
        check_device(place)
        wanted = [*(changes or []), *([] if train_mixture is None else [f"mixture={train_mixture}"])]
        if resume and recipe is None:
            if not has_run(output):
                raise ValueError(f"there is no run in {output} to go on with; name a --recipe to start one")
            chosen = override(run_recipe(output), wanted)
        else:
            chosen = override(get_recipe(recipe or "tiny"), wanted)
        data = read_corpus(corpus)
        make_folder(output)
    program = "torchrun ... -m muse_attention.cli" if has_launcher() else "muse"
    options = ["--output", str(output), *(["--device", device] if device else []), *["--tensorboard"] * tensorboard]
    command = f"{program} train {shlex.join([str(corpus), *options])} --resume"

    def how_to_continue() -> str:
        if not has_run(output):
            return "nothing is written yet: start again"
        return f"{describe_last_good(output / CHECKPOINTS)}; continue with: {command}"

    def how_to_save_memory() -> str:
        less = " ".join(change for change in _LESS_MEMORY if override(chosen, [change]) != chosen)
        if not less or not has_run(output):
            return how_to_continue()
        if has_learnt(output):
            return f"{how_to_continue()}, or try {less} in another output"
        return f"there is no checkpoint yet; try {less}: {command} {less}"

    try:
        with (
            run_errors(how_to_continue, how_to_save_memory),
            user_errors(),
            short_warnings(),
            open_world(place) as world,
        ):
            quiet = contextlib.nullcontext(lambda step: None)
            with training_progress(chosen) if world.is_first else quiet as on_step:
                model = train_model(
                    data,
                    chosen,
                    output,
                    resume=resume,
                    world=world,
                    tensorboard=tensorboard,
                    on_step=on_step,
                    on_refused=say,
                    on_note=say,
                )
            if world.is_first:
                typer.echo(f"wrote {model}")
    except TrainingError as error:
        say(str(error))
        raise typer.Exit(1) from None


@contextlib.contextmanager
def training_progress(recipe: Recipe) -> Iterator[Callable[[Step], None]]:
    """A line with the loss, the speed and the time left: moving on a terminal, else one now and then on stdout."""
    speed, error, answers, said = 0.0, None, None, time.monotonic()
    with phases_bar() as on_phase:

        def on_step(step: Step) -> None:
            nonlocal speed, error, answers, said
            kept = _SMOOTHING if speed else 0.0
            speed = kept * speed + (1 - kept) * step.tokens_per_second
            error = error if step.mean_rse is None else step.mean_rse
            answers = answers if step.answers_loss is None else step.answers_loss
            left = (recipe.steps - step.step) * recipe.tokens_per_step / speed
            line = f"loss {step.loss:.4f}, {speed:,.0f} tokens/s, ETA {datetime.timedelta(seconds=round(left))}"
            if error is not None:
                line += f", RSE {error:.2g}"
            if answers is not None:
                line += f", answers {answers:.3f}"
            on_phase(line, step.step, recipe.steps)
            if step.step == recipe.steps or time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                typer.echo(f"step {step.step} of {recipe.steps}: {line}")

        yield on_step
