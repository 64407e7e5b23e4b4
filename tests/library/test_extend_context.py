"""`examples/extend_context.py`: a model trained on longer rows with MuSe, interrupted and gone on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples import extend_context

from muse_attention.core.recording import recorded_calls
from tests.models import tiny_llama, write_tokenizer

OPTIONS = ["--length", "512", "--tokens", "4k", "--batch", "2", "--lr", "3e-3", "--held-out-rows", "1"]
MUSE = ["--attention", "muse:Q4K8T0.1B128"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny_llama(max_position_embeddings=128).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(extend_context.HELD_OUT):
        (folder / f"{number:02}.txt").write_text(f"line {number} of a text, and the next\n" * 40)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["extend_context.py", *map(str, arguments)])
    extend_context.train(extend_context.parse())


def logged(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_model_learns_longer_rows_and_an_interrupted_run_goes_on(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded_calls() as calls:
        run(monkeypatch, model, texts, *OPTIONS, *MUSE, "--output", tmp_path / "whole")
    assert {str(call.config) for call in calls} == {"Q4K8T0.1B128"}
    assert {call.query.shape[2] for call in calls} == {512}
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert [measured["update"] for measured in result["held_out"]] == [0, 1, 2, 3, 4]
    assert result["held_out"][-1]["loss"]["all"] < result["held_out"][0]["loss"]["all"] - 0.1
    assert len(result["training_losses"]) == 4
    assert result["tokens_per_second"] > 0
    config = json.loads((tmp_path / "whole" / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["rope_parameters"]["rope_theta"] > 4 * 10_000
    assert "0 to 512" in capsys.readouterr().out

    whole = extend_context.learning_rate

    def interrupted(update: int, updates: int, peak: float) -> float:
        if update == 2:
            raise KeyboardInterrupt
        return whole(update, updates, peak)

    arguments = (model, texts, *OPTIONS, *MUSE, "--recompute", "--save-every", 0, "--output", tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(extend_context, "learning_rate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, *arguments)
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:  # as if it had gone on after its last checkpoint
        log.write('{"update": 3, "loss": 0.0, "seconds": 1.0}\n')
    run(monkeypatch, *arguments)
    assert "going on after update 2 of 4" in capsys.readouterr().err
    losses = [[update["loss"] for update in logged(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_other_settings_do_not_continue_a_run(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"arguments": {"seed": 1}, "model": {}, "optimizer": {}, "update": 1, "measured": []}
    torch.save(saved, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="another --seed: choose another --output"):
        run(monkeypatch, model, texts, *OPTIONS, "--attention", "exact", "--output", tmp_path)


def test_too_little_text_is_one_line(model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="fewer than a row of 513: name more texts"):
        run(monkeypatch, model, texts / "00.txt", *OPTIONS, "--output", tmp_path / "out")


def test_a_finished_run_is_not_written_over(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(SystemExit, match="has a finished run: choose another --output"):
        run(monkeypatch, model, texts, *OPTIONS, "--output", tmp_path)
