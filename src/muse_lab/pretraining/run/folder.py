"""The folder of a training run: its files, the checks on them, and the lock on it.

    run.json         recipe and corpus, written first
    checkpoints/     see the package `checkpoints`
    metrics.jsonl    see monitoring/metrics.py
    failures.json    see interruptions/failures.py; only of a run that failed
    stacks.txt       see interruptions/watchdog.py; only of a run that stood still
    model/           written last: the model, as transformers reads it, with its tokenizer

A folder with `run.json` alone has no checkpoint yet, and may be used for another run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import muse_attention
from muse_attention.registry import full_name
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.checkpoints.manifest import CheckpointError
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.initial_model import make_empty_model
from muse_lab.pretraining.interruptions.failures import FILE as FAILURES
from muse_lab.pretraining.monitoring.boards import TENSORBOARD, WANDB, WANDB_ID
from muse_lab.pretraining.monitoring.metrics import FILE
from muse_lab.pretraining.needles import writer
from muse_lab.pretraining.optimiser import expected_tensors
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import Recipe, differences, read_recipe
from muse_lab.pretraining.run.state import RunState, read_state
from muse_lab.records.files import alone_in, errors_naming, remove_folder, replace_file
from muse_lab.records.machine import device_name
from muse_lab.records.untrusted import read_json

RUN, CHECKPOINTS, MODEL = "run.json", "checkpoints", "model"
_FOLDERS = (MODEL, CHECKPOINTS, TENSORBOARD, WANDB)


@contextlib.contextmanager
def claimed(output: Path, world: World, *, overwrite: bool = False) -> Iterator[None]:
    """Lock a folder, made if it is missing, against other runs. If the first rank cannot lock it, every rank raises.

    Args:
        overwrite: remove the run that is in the folder
    """
    with contextlib.ExitStack() as held:

        def claim() -> None:
            held.enter_context(alone_in(output))
            if overwrite:
                _remove_run(output)
            _check_no_links(output)

        world.let_first(claim, f"work in {output}")
        yield


def _remove_run(output: Path) -> None:
    """Remove the files that a run writes, if there is a run."""
    if not has_run(output):
        return
    _read_run(output)  # raises for a file of something else, which is left alone
    for folder in _FOLDERS:
        remove_folder(output / folder)
    with errors_naming(output):
        for path in [*(output / name for name in (FILE, FAILURES, WANDB_ID)), *output.glob("stacks*.txt")]:
            path.unlink(missing_ok=True)
        (output / RUN).unlink()


def _check_no_links(output: Path) -> None:
    """Raise ValueError for links, so that nothing outside of the folder is written or removed."""
    for path in (output / name for name in _FOLDERS):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and is not followed; put the folder in its place, or link {output}")


def stacks_name(world: World) -> str:
    """The file for the stacks of a rank that stands still."""
    return "stacks.txt" if world.ranks == 1 else f"stacks-{world.rank}.txt"


def has_run(output: Path) -> bool:
    return (output / RUN).exists()


def has_learnt(output: Path) -> bool:
    """Whether a folder has checkpoints or a model, which another run must not overwrite."""
    return bool(checkpoints.steps_in(output / CHECKPOINTS)) or (output / MODEL).exists()


def run_recipe(output: Path) -> Recipe:
    """The recipe of the run in a folder."""
    return _recipe_of(_read_run(output), output / RUN)


def run_corpus(output: Path) -> str:
    """The fingerprint of the corpus that the run in a folder learns from."""
    return str(_read_run(output).get("corpus"))


def run_device(output: Path) -> str:
    """The device on which the run in a folder trains, cpu or cuda."""
    return str(_read_run(output).get("device"))


def run_hardware(output: Path) -> str | None:
    """The names of the GPUs or CPUs that it was trained on, one after another; None if one was not recorded."""
    return _read_run(output).get("hardware")


def write_run(output: Path, about: dict[str, Any]) -> None:
    replace_file(output / RUN, json.dumps(about, indent=2) + "\n")


def with_full_name(recipe: Recipe) -> Recipe:
    """The recipe with full names of its attentions, so that `run.json` says what ran."""
    name = full_name(recipe.attention, recipe.length)
    further = recipe.further_attention and full_name(recipe.further_attention, recipe.length)
    return dataclasses.replace(recipe, attention=name, further_attention=further)


def find_checkpoint(
    output: Path,
    recipe: Recipe,
    corpus: Corpus,
    on_refused: Callable[[str], None],
    *,
    falls_back: bool = False,
    world: World | None = None,
) -> checkpoints.Checkpoint | None:
    """The checkpoint from which the run in a folder continues; None to start from the beginning.

    Args:
        on_refused: told why checkpoints are not good
        falls_back: leave out the newest good one, if there is another
        world: ranks that share the work of verifying. Collective: every rank must call it.
    """
    if has_run(output):
        document = _read_run(output)
        if has_learnt(output):
            _check_same(document, output / RUN, recipe, corpus)
    check = functools.partial(_check_is_of, recipe=recipe, corpus=corpus)
    find = functools.partial(checkpoints.latest_good, output / CHECKPOINTS, on_refused, check, world=world)
    newest = find()
    if newest is None or not falls_back or newest.step == min(checkpoints.steps_in(output / CHECKPOINTS)):
        return newest
    try:
        return find(before=newest.step)
    except CheckpointError:  # none before it is whole
        return newest


def state_of(checkpoint: checkpoints.Checkpoint | None) -> RunState:
    """The state of a run that continues from a checkpoint, or begins; raises ValueError if it cannot be read."""
    return RunState() if checkpoint is None else read_state(checkpoint.about.get("state", {}))


def open_checkpoint(output: Path, step: int, recipe: Recipe, corpus: Corpus) -> checkpoints.Checkpoint:
    """The checkpoint of a step of the run in a folder; raises CheckpointError if it is not good."""
    checkpoint = checkpoints.verify(output / CHECKPOINTS, step)
    _check_is_of(checkpoint, recipe, corpus)
    return checkpoint


def describe_run(
    recipe: Recipe,
    corpus: Corpus,
    initial: str | None,
    checkpoint: checkpoints.Checkpoint | None,
    device: torch.device,
) -> dict[str, Any]:
    """The record in `run.json` and every checkpoint of a run that begins with some weights, or with a checkpoint."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "corpus": corpus.fingerprint,
        "initial": initial if checkpoint is None else checkpoint.about.get("initial"),
        "needles": None if recipe.mixture == "none" else writer.VERSION,
        "muse_attention": muse_attention.__version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "hardware": _trained_on(recipe, checkpoint, device),
    }


def _trained_on(recipe: Recipe, checkpoint: checkpoints.Checkpoint | None, device: torch.device) -> str | None:
    """The hardware of all updates, as `A, then B` if it changed; None if that of a part was not recorded."""
    now = device_name(device)
    if checkpoint is None:
        return now
    before: str | None = checkpoint.about.get("hardware")
    if before is None or now is None:
        return None
    is_same = checkpoint.step == recipe.updates or before.split(", then ")[-1] == now
    return before if is_same else f"{before}, then {now}"


def describe_changes(checkpoint: checkpoints.Checkpoint, about: dict[str, Any], device: torch.device) -> str | None:
    """What differs between the process that wrote a checkpoint and this one, and can change bits, in words."""
    names = {"torch": "PyTorch", "muse_attention": "muse-attention"}
    if device.type == "cpu":
        names["threads"] = "threads"  # sums are split among them
    before = checkpoint.about
    changed = [
        f"{words} {before[name]!r}, now {about[name]!r}"
        for name, words in names.items()
        if name in before and before[name] != about[name]
    ]
    if not changed:
        return None
    return f"checkpoint {checkpoint.folder} was written with {'; '.join(changed)}: the last bits of the run may differ"


def describe_last_good(folder: Path) -> str:
    """The newest checkpoint that is whole, in words."""
    try:
        checkpoint = checkpoints.latest_good(folder, lambda message: None)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"the checkpoints in {folder} cannot be read: {error.strerror}"
    return "there is no checkpoint yet" if checkpoint is None else f"the last good checkpoint is {checkpoint.folder}"


def _read_run(output: Path) -> dict[str, Any]:
    path = output / RUN
    try:
        document = read_json(path)
    except OSError as error:
        raise ValueError(f"there is no run in {output}: {path}: {error.strerror}") from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        resumed = f", or move {RUN} away and resume with the recipe that the run had" if has_learnt(output) else ""
        raise ValueError(f"{path} is not of muse train; choose another output{resumed}")
    return document


def _recipe_of(document: dict[str, Any], where: Path) -> Recipe:
    try:
        return read_recipe(document["recipe"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{where} is of another version of muse train; choose another output") from None


def _check_is_of(checkpoint: checkpoints.Checkpoint, recipe: Recipe, corpus: Corpus) -> None:
    """Raise ValueError for a checkpoint of another run, CheckpointError for one that this run cannot have written."""
    about, folder = checkpoint.about, checkpoint.folder
    try:
        _recipe_of(about, folder)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {error}") from None
    _check_same(about, folder, recipe, corpus)
    if not 1 <= checkpoint.step <= recipe.updates:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: the run has {recipe.updates} steps, and none is {checkpoint.step}"
        )
    if not isinstance(about.get("initial"), str | None):
        raise CheckpointError(f"checkpoint {folder} is damaged: it names no initial weights")
    try:
        if state_of(checkpoint).skipped >= checkpoint.step:
            raise ValueError
    except ValueError:
        raise CheckpointError(f"checkpoint {folder} is damaged: it has no state of a run") from None
    checkpoints.check_tensors(checkpoint, expected_tensors(make_empty_model(corpus, recipe)))


def _check_same(document: dict[str, Any], where: Path, recipe: Recipe, corpus: Corpus) -> None:
    """Raise ValueError unless a record by `describe_run` is of this recipe and corpus."""
    before = _recipe_of(document, where)
    for name in differences(before, recipe):
        raise ValueError(
            f"{where} has {name}={getattr(before, name)}, not {getattr(recipe, name)}: it would not be the same run; "
            "leave it as it was, choose another output, or overwrite the run"
        )
    if document.get("corpus") != corpus.fingerprint:
        raise ValueError(
            f"{where} is of another corpus than {corpus.folder}; give that one, choose another output, or overwrite "
            "the run"
        )
    if document.get("needles") not in (None, writer.VERSION):
        raise ValueError(f"{where} was trained on needles of an earlier version; choose another output")
