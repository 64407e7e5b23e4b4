"""Every command of `muse` with its options, as typer describes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def describe_commands() -> str:
    """The page of the documentation, in Markdown."""
    command = [sys.executable, "-m", "typer", "muse_lab.cli.commands", "utils", "docs"]
    done = subprocess.run(
        [*command, "--name", "muse", "--title", "Commands"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "TERM": "dumb"},
    )
    return done.stdout
