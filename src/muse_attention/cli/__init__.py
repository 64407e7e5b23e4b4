"""The entry point of `muse`. The commands are in `commands.py`, and need the packages of the `cli` extra."""

from __future__ import annotations

import io
import sys


def main() -> None:
    try:
        from muse_attention.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f'muse: {error.name} is not installed: pip install "muse-attention[cli]"\n')
        raise SystemExit(1) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name that it cannot show ends no command
    app(prog_name="muse")
