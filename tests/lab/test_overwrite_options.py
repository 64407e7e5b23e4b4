"""Every command that measures takes --overwrite, and says of --resume that it is not needed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from muse_lab.cli import commands

MEASURING = (("bench",), ("fidelity",), ("loss",), ("eval", "needles"), ("eval", "tasks"), ("tune",))


@pytest.mark.parametrize("command", MEASURING, ids=" ".join)
def test_resume_is_accepted_hidden_and_not_needed(command: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(commands.app, [*command, "--help"]).stdout
    assert "--overwrite" in shown
    assert "--resume" not in shown
    refused = CliRunner().invoke(commands.app, [*command, "--resume", "--device", "cpu", "--dtype", "int8"])
    assert refused.exit_code == 2
    said, why = refused.stderr.splitlines()
    assert said == "muse: --resume is no longer needed, as results are continued without it; it will be removed in 0.5"
    assert "int8" in why
