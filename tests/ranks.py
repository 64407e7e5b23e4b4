"""A rank of a training run, in a process that is forked from one which has imported everything already."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import muse_attention.cli.train
import muse_attention.pretraining.training  # noqa: F401 - imported once, for all ranks
from muse_attention.cli import main
from muse_attention.pretraining.model.decoder import DecoderForCausalLM

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], errors: Path, poisoned: tuple[int, int] | None = None
) -> None:
    """`muse` with some arguments; what it says on stderr goes to a file.

    `poisoned` is a rank, and the number of its backward pass whose loss is not finite.
    """
    os.environ.update(environment)
    if poisoned is not None and poisoned[0] == int(environment["RANK"]):
        _poison(poisoned[1])
    sys.argv = ["muse", *arguments]
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 1)
    main()


def _poison(number: int) -> None:
    forward = DecoderForCausalLM.forward
    calls = 0

    def spoilt(*arguments: Any, **others: Any) -> Any:
        nonlocal calls
        out = forward(*arguments, **others)
        if out.loss is not None and torch.is_grad_enabled():
            calls += 1
            out.loss = out.loss * (math.nan if calls == number else 1.0)
        return out

    DecoderForCausalLM.forward = spoilt
