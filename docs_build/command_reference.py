"""Every command of `muse` with its options, as typer describes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from muse_lab.cli.app import app

__all__ = ["app", "describe_commands"]
ROOT = Path(__file__).parent.parent


def describe_commands() -> str:
    """The page of the documentation, in Markdown."""
    # typer loads a copy of the module that it is given, and finds `app` there. A copy of cli/app.py has no commands.
    command = [sys.executable, "-m", "typer", __name__, "utils", "docs"]
    done = subprocess.run(
        [*command, "--name", "muse", "--title", "Commands"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return done.stdout
