"""`examples/long_context_sft.py`: TRL's SFTTrainer fine-tunes a model with MuSe, on packed samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

from tests.markdown_pages import ROOT
from tests.models import VOCABULARY, tiny_llama, write_tokenizer
from tests.patience import PATIENCE

EXAMPLE = ROOT / "examples" / "long_context_sft.py"
LENGTHS = (300, 150, 60, 500, 12, 400, 90)
"""Of samples: longer than a block of 128 tokens, and shorter, in rows of 512."""
OPTIONS = ["--length", "512", "--attention", "muse:Q4K8T0.1B128", "--rows", "1", "--lr", "3e-3", "--warmup", "0"]
RECORDED = """
import runpy, sys
from muse_attention.core.recording import recorded_calls
sys.argv = sys.argv[1:]
with recorded_calls() as calls:
    runpy.run_path(sys.argv[0], run_name="__main__")
print("configurations:", {str(call.config) for call in calls}, "longest:", max(call.query.shape[2] for call in calls))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny_llama(max_position_embeddings=512).float().save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", eos_token=" ")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts of letters that repeat, so that a loss can fall."""
    letters = [chr(33 + index) for index in range(VOCABULARY - 1)]
    lines = [
        json.dumps({"text": "".join(letters[(number + at) % 7] for at in range(length - 1))})
        for number, length in enumerate(LENGTHS)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path / "data.jsonl"


def run(code: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *code, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)


@pytest.mark.long
def test_a_model_is_fine_tuned_and_saved(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    finished = run(["-c", RECORDED], data, "--model", model, *OPTIONS, "--steps", "6", "--output", output)
    assert finished.returncode == 0, finished.stderr
    losses = losses_in(finished)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert "configurations: {'Q4K8T0.1B128'} longest: 500" in finished.stdout
    assert (output / "model.safetensors").exists()
    assert (output / "tokenizer.json").exists()


@pytest.mark.long
def test_the_same_command_goes_on_from_the_last_checkpoint(model: Path, data: Path, tmp_path: Path) -> None:
    command = [data, "--model", model, *OPTIONS, "--steps", "4", "--save-every", "2", "--output", tmp_path / "out"]
    whole = run([], *command)
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")  # as if it had been stopped at the third update
    again = run([], *command)
    assert again.returncode == 0, again.stderr
    assert len(losses_in(whole)) == 4
    assert losses_in(again) == losses_in(whole)[2:]


def losses_in(finished: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(line.split("'")[0]) for line in finished.stdout.split("'loss': '")[1:]]


def trainer_of(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    from examples import long_context_sft

    words = ["long_context_sft.py", data, "--model", model, *OPTIONS, *options, "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    return long_context_sft.make_trainer(long_context_sft.parse())


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")  # of short ones alone
def test_the_loss_of_a_pack_is_that_of_its_documents(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every row as TRL packs it."""
    trainer = trainer_of(model, data, tmp_path, monkeypatch)
    network = trainer.model.double().eval()
    assert network.config._attn_implementation == "muse"
    rows = [trainer.data_collator([row]) for row in trainer.train_dataset]
    assert sorted(_lengths(row) for row in rows) != [[length] for length in sorted(LENGTHS)]  # some share a row
    assert sorted(length for row in rows for length in _lengths(row)) == sorted(LENGTHS)
    mixed = 0
    for row in rows:
        ids, lengths = row["input_ids"], _lengths(row)
        alone = sum(_loss(network, part, part) for part in ids.split(lengths, 1))
        told = {name: row[name] for name in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k")}
        assert float(_loss(network, ids, row["labels"], **told) / alone - 1) == pytest.approx(0, abs=1e-12)
        only = {"position_ids": row["position_ids"]}
        assert float(_loss(network, ids, row["labels"], **only) / alone - 1) == pytest.approx(0, abs=1e-12)
        mixed += len(lengths) > 1 and abs(float(_loss(network, ids, row["labels"]) / alone - 1)) > 1e-6
    assert mixed  # a loss that ignores the documents is another one


def _lengths(row: dict[str, Any]) -> list[int]:
    return row["cu_seq_lens_q"].diff().tolist()


def _loss(network: Any, ids: torch.Tensor, labels: torch.Tensor, **told: Any) -> torch.Tensor:
    """Of all targets together."""
    with torch.no_grad():
        logits = network(ids, use_cache=False, **told).logits
    targets = labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum", ignore_index=-100)


def test_a_length_that_the_model_was_not_made_for_is_one_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="was made for 512 tokens: pass --length 512"):
        trainer_of(model, data, tmp_path, monkeypatch, "--length", "1k")


def test_without_trl_it_says_what_to_install() -> None:
    code = (
        "import importlib.util, runpy, sys; importlib.util.find_spec = lambda name: None; runpy.run_path(sys.argv[1])"
    )
    finished = run(["-S", "-c", code])
    assert finished.returncode == 1
    assert finished.stderr.strip() == "SFTTrainer needs TRL: pip install trl"
