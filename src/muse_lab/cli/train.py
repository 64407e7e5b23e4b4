"""`muse train`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_attention.sizes import format_size
from muse_lab.cli.app import (
    SECONDS_BEFORE_FIRST_LINE,
    SECONDS_BETWEEN_LINES,
    Device,
    app,
    busy,
    make_folder,
    nonempty_path,
    phases_bar,
    run_errors,
    say,
    user_errors,
)
from muse_lab.cli.language_model import Place, short_warnings
from muse_lab.cli.options import flag, option, with_option_groups
from muse_lab.pretraining.data.corpus import Corpus, read_corpus
from muse_lab.pretraining.monitoring.metrics import Step
from muse_lab.pretraining.recipes import GOES_ON_FROM, RECIPES, Recipe, field_meanings, get_recipe, override

_SMOOTHING = 0.9
_LESS_MEMORY = ("micro_batch=1", "recompute=true")
_CPU_FLOPS = 5e10
"""Approximate speed of a CPU, for a warning before a run that is too large for one."""
_LONG_ON_CPU = datetime.timedelta(hours=1)


def _field(name: str, *flags: str) -> Any:
    """An option that changes a field of the recipe."""
    meaning = field_meanings()[name]
    return option(f"{meaning[0].upper()}{meaning[1:]}.", "that of the recipe", *flags)


_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_SECONDS = (86400, 3600, 60, 1)
_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention", "steps", "length", "batch", "micro_batch"), ()),
    "peak_rate": ("--learning-rate", "--peak-rate"),
    "warmup": (),
    "precision": ("--precision", "--dtype"),
    **dict.fromkeys(("seed", "initial"), ()),
    "mixture": ("--mixture", "--train-mixture"),
}
"""Fields of a recipe that have an option, and its names if they differ from the field's."""
_FIELDS: Any = dataclasses.make_dataclass(
    "Fields", [(name, Annotated[str | None, _field(name, *flags)], None) for name, flags in _OPTIONS.items()]
)()


@app.command(
    epilog=f"The fields of a recipe, for KEY=VALUE: {', '.join(field_meanings())}. "
    "`muse recipes` lists what they mean and their values in each recipe."
)
@with_option_groups
def train(
    corpus: Annotated[Path, typer.Argument(help="Corpus directory of `muse prepare`.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe fields, such as clip=0.5."),
    ] = None,
    recipe: Annotated[str | None, option(f"{', '.join(RECIPES)}.", "that of the run in the folder, or tiny")] = None,
    fields: Any = _FIELDS,
    output: Annotated[
        Path, typer.Option(help="Output directory for checkpoints, metrics and the model.", parser=nonempty_path)
    ] = Path("out/train"),
    continue_from: Annotated[
        Path | None,
        option(
            "Directory of a finished run to train further, in another --output, with attention= and tokens= or steps=; "
            "weights, optimiser and place in the data are kept, at the final learning rate.",
            "none",
        ),
    ] = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Overwrite the run in the output directory; by default it is resumed.")
    ] = False,
    resume: Annotated[
        bool, flag("--resume", "Fail if the output directory has no run to resume, unless --recipe is given.")
    ] = False,
    device: Device = None,
    tensorboard: Annotated[bool, flag("--tensorboard", "Also log metrics to TensorBoard.")] = False,
    wandb: Annotated[
        bool, flag("--wandb", "Also log metrics to Weights & Biases; WANDB_MODE=offline needs no network.")
    ] = False,
    time_limit: Annotated[
        str | None, option("Write a checkpoint and stop after this time, such as 3h or 1h30m; exit code 124.", "none")
    ] = None,
) -> None:
    """Pretrain a language model with any attention in its global layers.

    A run that was stopped continues when the same command is run again; another run in its folder is refused. SIGTERM
    and Ctrl-C stop it with a checkpoint, a second signal stops it at once.

    On several GPUs: torchrun --nproc-per-node 8 -m muse_lab.cli train ... mesh=2x4
    """
    options = vars(fields)
    with user_errors(), busy(f"importing transformers, and reading the corpus {corpus}"):
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_lab.pretraining.interruptions.failures import TrainingError
        from muse_lab.pretraining.interruptions.stopping import Stopping, stop_on_signals
        from muse_lab.pretraining.parallel import has_launcher, open_world
        from muse_lab.pretraining.run.continuing import further_recipe, open_last
        from muse_lab.pretraining.run.folder import CHECKPOINTS, describe_last_good, has_learnt, has_run, run_recipe
        from muse_lab.pretraining.training import train as train_model

        if resume and overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it; leave one out")
        stopping = Stopping(parse_duration(time_limit) if time_limit else None)
        place = Place.choose(device, None).device
        wanted = [*(changes or []), *(f"{name}={text}" for name, text in options.items() if text is not None)]
        for change in changes or []:
            key = change.partition("=")[0]
            if options.get(key) is not None:
                raise ValueError(f"{key} is given twice, as {change} and as an option: {options[key]}; leave one out")
        if resume and recipe is None and continue_from is None and not has_run(output):
            raise ValueError(f"there is no run in {output} to resume; name a --recipe to start one")
        if continue_from is not None:
            _check_continues(continue_from, output, recipe, resume=resume)
            chosen = further_recipe(continue_from, wanted)
        else:
            continues = recipe is None and has_run(output) and not overwrite
            base = run_recipe(output) if continues else get_recipe(recipe or "tiny")
            chosen = override(base, _with_short_warmup(base, wanted))
            if recipe in GOES_ON_FROM and not chosen.initial and chosen.peak_rate == base.peak_rate:
                say(
                    f"{recipe} has the rate of a run that starts from a model of the recipe {GOES_ON_FROM[recipe]}; "
                    "give that model with --initial, or another --peak-rate"
                )
        data = read_corpus(corpus)
        if continue_from is not None and overwrite:
            open_last(continue_from, data)  # before anything is removed
        if place == "cpu":
            _warn_of_long_run(chosen, data, chosen.updates if continue_from is None else chosen.further_steps)
        make_folder(output)
    program = "torchrun ... -m muse_lab.cli" if has_launcher() else "muse"
    words = ["--output", str(output), *(["--device", device] if device else []), *["--tensorboard"] * tensorboard]
    words += [*["--wandb"] * wandb, *(["--time-limit", time_limit] if time_limit else [])]
    command = f"{program} train {shlex.join([str(corpus), *words])} --resume"

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
            stop_on_signals(stopping, say),
            open_world(place) as world,
        ):
            with training_progress(chosen) as on_step:
                model = train_model(
                    data,
                    chosen,
                    output,
                    overwrite=overwrite,
                    continue_from=continue_from,
                    world=world,
                    tensorboard=tensorboard,
                    wandb=wandb,
                    stopping=stopping,
                    on_step=on_step,
                    on_refused=say,
                    on_note=say,
                )
            if world.is_first:
                typer.echo(f"wrote {model}")
    except TrainingError as error:
        say(str(error))
        raise typer.Exit(1) from None


def parse_duration(text: str) -> int:
    """Seconds of `45s`, `90m`, `3h`, `1h30m` or `2d`; raises ValueError for anything else, and for 0."""
    match = _DURATION.fullmatch(text.strip())
    seconds = sum(int(count or 0) * unit for count, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0
    if seconds < 1:
        raise ValueError(f"cannot read the duration {text.strip()!r}: write it like 45s, 90m, 3h or 1h30m")
    return seconds


def _check_continues(run: Path, output: Path, recipe: str | None, *, resume: bool) -> None:
    if recipe is not None or resume:
        unwanted = "--recipe" if recipe is not None else "--resume"
        raise ValueError(f"--continue-from takes the recipe of {run}, and resumes by itself; leave {unwanted} out")
    if run.expanduser().resolve() == output.expanduser().resolve():
        raise ValueError(f"--continue-from {run} leaves that run as it is; choose another --output")


def _with_short_warmup(recipe: Recipe, changes: list[str]) -> list[str]:
    """Fewer steps than the recipe's warm-up shorten it, unless the user sets both."""
    keys = {change.partition("=")[0] for change in changes}
    steps = override(recipe, [*changes, "warmup=0"]).steps if "steps" in keys and "warmup" not in keys else None
    if steps is None or steps >= recipe.warmup:
        return changes
    say(f"the warm-up is shortened from {recipe.warmup:,} updates to {steps:,}; --warmup sets another")
    return [*changes, f"warmup={steps}"]


def _warn_of_long_run(recipe: Recipe, corpus: Corpus, updates: int) -> None:
    from muse_lab.pretraining.initial_model import make_empty_model

    parameters = sum(parameter.numel() for parameter in make_empty_model(corpus, recipe).parameters())
    operations = 6.0 * parameters * recipe.tokens_per_step * updates
    expected = datetime.timedelta(seconds=operations / _CPU_FLOPS)
    if expected > _LONG_ON_CPU:
        days = f"{expected.days:,} days" if expected.days > 1 else f"{expected / datetime.timedelta(hours=1):.0f} hours"
        say(
            f"about {days} on a CPU, attention not counted: {parameters / 1e6:,.0f}M parameters, {updates:,} "
            f"updates of {format_size(recipe.tokens_per_step)} tokens; use a GPU, or --recipe tiny"
        )


@contextlib.contextmanager
def training_progress(recipe: Recipe) -> Iterator[Callable[[Step], None]]:
    """Show the loss, the speed and the time left: a moving line on a terminal, else a line now and then on stdout."""
    speed, error, answers, held_out = 0.0, None, None, None
    next_line = time.monotonic() + SECONDS_BEFORE_FIRST_LINE
    with phases_bar(says_lines=False) as on_phase:
        on_phase("preparing the first update", 0, None)

        def on_step(step: Step) -> None:
            nonlocal speed, error, answers, held_out, next_line
            kept = _SMOOTHING if speed else 0.0
            speed = kept * speed + (1 - kept) * step.tokens_per_second
            error = error if step.mean_rse is None else step.mean_rse
            answers = answers if step.answers_loss is None else step.answers_loss
            held_out = step.evaluation.get("held_out_loss", held_out)
            left = (recipe.updates - step.step) * recipe.tokens_per_step / speed
            line = f"loss {step.loss:.4f}, {speed:,.0f} tokens/s"
            if error is not None:
                line += f", RSE {error:.2g}"
            if answers is not None:
                line += f", answers {answers:.3f}"
            if held_out is not None:
                line += f", held-out {held_out:.4f}"
            on_phase(line, step.step, recipe.updates)
            if step.step == recipe.updates or time.monotonic() > next_line:
                next_line = time.monotonic() + SECONDS_BETWEEN_LINES
                typer.echo(
                    f"step {step.step} of {recipe.updates}: {line}, ETA {datetime.timedelta(seconds=round(left))}"
                )

        yield on_step
