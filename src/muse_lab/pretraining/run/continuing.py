"""Continuing a finished run: further updates with its weights, its moments and its place in the data.

    muse train out/corpus --continue-from out/muse attention=exact tokens=26M --output out/muse-26M

The recipe of the new run is that of the finished one with `further_steps`: updates after its schedule, at the final
learning rate. The paper fine-tunes in this way, and does not say at which rate: the cosine has ended there, and as both
moments of AdamW are kept, nothing has to warm up again. The folder of the new run begins with the last checkpoint and
the metrics of the finished one, which is left as it is. A run whose recipe has the same `further_steps` from the
start is bitwise equal.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path

from muse_attention.registry import full_name
from muse_attention.sizes import parse_size
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.monitoring.metrics import FILE, LARGEST_METRICS
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import FREE, Recipe, override
from muse_lab.pretraining.run.folder import CHECKPOINTS, MODEL, has_learnt, open_checkpoint, run_recipe
from muse_lab.records.files import errors_naming, replace_file
from muse_lab.records.untrusted import read_regular

_ATTENTION, _TOKENS, _STEPS = "attention", "tokens", "steps"
_MILLIONS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([MB])")
_UNITS = {"M": 10**6, "B": 10**9}


def further_recipe(run: Path, changes: Iterable[str]) -> Recipe:
    """The recipe of a finished run with further updates; raises ValueError if it cannot be continued like this.

    Args:
        changes: `attention=`, `tokens=` or `steps=`, and fields that do not change what is learned, as `key=value`
    """
    before = run_recipe(run)
    _check_finished(run, before)
    asked: dict[str, str] = {}
    free: list[str] = []
    for change in changes:
        key, _, text = change.partition("=")
        if key not in (_ATTENTION, _TOKENS, _STEPS, *FREE):
            raise ValueError(
                f"--continue-from keeps the recipe of {run}: {change} cannot be changed; "
                f"{_ATTENTION}, {_TOKENS}, {_STEPS}, {', '.join(FREE)} can"
            )
        if key in asked:
            raise ValueError(f"{key} is given twice, as {asked[key]} and as {text}; leave one out")
        if key in FREE:
            free.append(change)
        else:
            asked[key] = text
    last = before.attention_at(before.updates - 1)
    wanted = full_name(asked[_ATTENTION], before.length) if _ATTENTION in asked else last
    if before.further_steps and wanted != last:
        raise ValueError(
            f"the run in {run} was already continued with {last}; continue the run that it came from with {wanted}"
        )
    steps = before.further_steps + _further_steps(asked, before)
    return override(dataclasses.replace(before, further_steps=steps, further_attention=wanted), free)


def begin_with_finished(run: Path, output: Path, recipe: Recipe, corpus: Corpus, world: World) -> None:
    """Put the last checkpoint and the metrics of a finished run into the folder of the run that continues it.

    Does nothing if that folder has a checkpoint already. Collective: every rank must call it.
    """

    def copy_state() -> None:
        if has_learnt(output):
            return
        finished = open_last(run, corpus)
        metrics = run / FILE
        if metrics.exists():  # first: a folder that has a checkpoint has all lines before it
            with errors_naming(metrics):
                replace_file(output / FILE, read_regular(metrics, LARGEST_METRICS))
        about = {**finished.about, "recipe": dataclasses.asdict(recipe)}
        checkpoints.copy_checkpoint(finished, output / CHECKPOINTS, about)

    world.let_first(copy_state, f"begin with the run in {run}")


def open_last(run: Path, corpus: Corpus) -> checkpoints.Checkpoint:
    """The last checkpoint of a finished run; raises ValueError unless it is whole, and of this corpus."""
    recipe = run_recipe(run)
    return open_checkpoint(run, recipe.updates, recipe, corpus)


def _check_finished(run: Path, recipe: Recipe) -> None:
    steps = checkpoints.steps_in(run / CHECKPOINTS)
    if not (run / MODEL).is_dir():
        done = f"{max(steps):,}" if steps else "none"
        raise ValueError(
            f"the run in {run} is not finished: {done} of {recipe.updates:,} updates are in its checkpoints; resume it "
            "first"
        )
    if recipe.updates not in steps:
        raise ValueError(
            f"the run in {run} has no checkpoint of its last update, where the optimiser's state is; begin with its "
            f"weights alone: initial={run / MODEL}"
        )


def _further_steps(asked: dict[str, str], recipe: Recipe) -> int:
    if (_TOKENS in asked) == (_STEPS in asked):
        raise ValueError("--continue-from needs either tokens=, like tokens=26M, or steps=, like steps=200")
    if not recipe.final_rate:
        raise ValueError("the learning rate of the run ended at 0 (final_rate=0): further updates would learn nothing")
    if _STEPS in asked:
        return override(recipe, [f"steps={asked[_STEPS]}", "warmup=0"]).steps
    return math.ceil(_parse_tokens(asked[_TOKENS]) / recipe.tokens_per_step)


def _parse_tokens(text: str) -> int:
    """`26M` and `1.5B` are millions and billions, as the paper counts tokens; else a size, like `512k`."""
    if match := _MILLIONS.fullmatch(text):
        tokens = round(float(match[1]) * _UNITS[match[2]])
        if tokens:
            return tokens
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"tokens={text} must be a number of tokens, like 26M, 1.5B or 131072") from None
