"""The command line, as tests call it."""

from __future__ import annotations

from typer.testing import CliRunner

from muse_lab.cli import commands

Outcome = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def run_muse(*arguments: object) -> Outcome:
    result = CliRunner().invoke(commands.app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def assert_refused(outcome: Outcome, message: str, code: int = 2) -> None:
    """By one line that has the message."""
    assert outcome[:2] == (code, "")
    assert len(outcome[2].splitlines()) == 1
    assert message in outcome[2]
