"""Options: lists by commas or repetition, groups that are declared once, and the command that is spelled of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from muse_lab.cli.measuring import spell
from muse_lab.cli.options import Words, attentions, listed, with_option_groups
from tests.command_line import run_muse


@dataclass(frozen=True, kw_only=True)
class Group:
    output: Annotated[Path, typer.Option(help="Folder.")]
    device: Annotated[str | None, typer.Option(help="Device.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False


GROUP = Group(output=Path("out/some"))
FOUND: dict[str, Any] = {}
app = typer.Typer()


@app.command()
@with_option_groups
def some(
    context: typer.Context,
    model: Annotated[str, typer.Argument()] = "tiny",
    length: Annotated[Words, listed("Lengths.", "1k")] = None,
    attention: Annotated[Words, attentions("Attention", "muse")] = None,
    causal: Annotated[bool, typer.Option(help="Causal.")] = True,
    group: Group = GROUP,
) -> None:
    """Some command."""
    FOUND.update(length=length, attention=attention, group=group)
    FOUND["again"] = spell(context, {"device": group.device or "cpu"})
    FOUND["recorded"] = spell(context, {}, is_recorded=True)


def run(*arguments: str) -> dict[str, Any]:
    FOUND.clear()
    finished = CliRunner().invoke(app, arguments)
    assert finished.exit_code == 0, finished.output
    return FOUND


def test_lists_have_commas_and_may_be_repeated() -> None:
    found = run("--length", "2k,4k", "--length", "4k", "--length", "8k")
    assert found["length"] == ["2k", "4k", "8k"]
    assert found["attention"] is None
    found = run("--attention", "exact,muse:QK4R1B32,seed=1,moba")
    assert found["attention"] == ["exact", "muse:QK4R1B32,seed=1", "moba"]


def test_a_group_has_an_option_for_every_field() -> None:
    assert run()["group"] == GROUP
    assert run("--device", "cuda", "--overwrite")["group"] == Group(output=GROUP.output, device="cuda", overwrite=True)
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["--help"]).output
    assert "out/some" in shown
    assert "Comma-separated or repeated." in " ".join(shown.split())


def test_a_command_is_spelled_with_what_was_settled_and_without_folders_in_records() -> None:
    found = run("/home/me/model-7", "--length", "2k,4k", "--no-causal", "--output", "/home/me/out", "--overwrite")
    asked = "--length 2k --length 4k --no-causal"
    assert found["again"].endswith(f"/home/me/model-7 {asked} --output /home/me/out --device cpu")
    assert found["recorded"].endswith(f" model-7 {asked}")
    assert "/home" not in found["recorded"]


MODEL_COMMANDS = (("fidelity",), ("loss",), ("tune",), ("eval", "needles"))


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_a_model_of_the_hub_is_downloaded_on_request_alone(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    arguments = [*command, "org/llama-9", "--device", "cpu", "--output", str(tmp_path)]
    code, out, err = run_muse(*arguments)
    assert (code, out, asked) == (2, "", [])
    assert "add --download" in err.splitlines()[-1]
    _, _, err = run_muse(*arguments, "--download")
    assert err.splitlines()[-1] == "muse: cannot download org/llama-9: no network"
    assert asked == ["org/llama-9"]
