"""A rank of a training run, in a process that is forked from one which has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import muse_attention.cli.train
import muse_attention.pretraining.training  # noqa: F401 - imported once, for all ranks
from muse_attention.cli import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def run_command(arguments: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
    """`muse` with some arguments; what it says on stderr goes to a file."""
    os.environ.update(environment)
    sys.argv = ["muse", *arguments]
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 1)
    main()
