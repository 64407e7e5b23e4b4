"""The command line, as tests call it."""

from __future__ import annotations

from typer.testing import CliRunner

from muse_lab.cli.app import app

Outcome = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def run_muse(*arguments: object) -> Outcome:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def assert_done(outcome: Outcome) -> str:
    """What a command printed that came to its end."""
    assert outcome[0] == 0, outcome[2]
    return outcome[1]


def assert_done_quietly(outcome: Outcome) -> str:
    """The same, without a line on stderr."""
    assert outcome[::2] == (0, "")
    return outcome[1]


def assert_refused(outcome: Outcome, message: str, code: int = 2) -> None:
    """By one line that has the message."""
    assert outcome[:2] == (code, "")
    assert len(outcome[2].splitlines()) == 1
    assert message in outcome[2]
