"""The entry point of `muse`. The commands are listed in `app.py`, and need the packages of the `cli` extra."""

from __future__ import annotations

import io
import os
import sys

from muse_attention.core.extras import how_to_install


def main() -> None:
    # Waiting threads yield their core: on a busy machine, spinning threads slow each other down.
    # OpenMP reads this variable once, when PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from muse_lab.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"muse: {error.name} is not installed: {how_to_install('cli')}\n")
        raise SystemExit(1) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: an unprintable name must not end a command
    app(prog_name="muse")
