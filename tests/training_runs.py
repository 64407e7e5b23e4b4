"""A small training run, and what to ask of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from muse_attention.huggingface import forward
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.checkpoints.shards import whole_pieces
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.monitoring.metrics import Step, read_metrics
from muse_lab.pretraining.recipes import Recipe, override, tiny
from muse_lab.pretraining.training import train
from tests.lab.test_prepare import contents

STEPS = 8
SMALL = override(
    tiny(),
    [
        f"steps={STEPS}",
        "length=64",
        "batch=2",
        "attention=muse:Q4K4R1SP1B16,clustering=lloyd",
        "exact_tail=0.25",
        "warmup=2",
        "checkpoint_every=2",
        "probe_every=3",
    ],
)

QUICK = override(SMALL, ["attention=exact", "probe_every=0"])


def save_whole(folder: Path, step: int, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint of tensors that this process has whole."""
    checkpoints.begin(folder, step)
    checkpoints.finish(folder, step, about, checkpoints.write_shard(folder, step, 0, whole_pieces(tensors)))


def attentions_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attention of every call of a global layer, from now on."""
    called: list[str] = []
    muse, exact = forward.muse_attention, forward.sdpa_attention_forward

    def spy_on_muse(*arguments: Any, config: str, **others: Any) -> Any:
        called.append(f"muse:{config}")
        return muse(*arguments, config=config, **others)

    def spy_on_exact(*arguments: Any, **others: Any) -> Any:
        called.append("exact")
        return exact(*arguments, **others)

    monkeypatch.setattr(forward, "muse_attention", spy_on_muse)
    monkeypatch.setattr(forward, "sdpa_attention_forward", spy_on_exact)
    return called


def metrics_line(number: int, loss: float, speed: float, attention: str = "muse", **others: Any) -> dict[str, Any]:
    """A line of metrics, of 100 tokens an update."""
    return {
        "step": number,
        "loss": loss,
        "attention": attention,
        "tokens": 100 * number,
        "tokens_per_second": speed,
        **others,
    }


def losses(output: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(output)]


def learnt(output: Path) -> dict[str, torch.Tensor]:
    checkpoint = checkpoints.latest_good(output / "checkpoints", pytest.fail)
    return dict(checkpoints.read_tensors(checkpoint))


def inode_of(path: Path) -> int | None:
    """Another one where the file was replaced."""
    return path.stat().st_ino if path.exists() else None


def assert_same_run(output: Path, expected: Path) -> None:
    """Bit for bit: every loss, error and norm, the weights, and the optimiser."""
    found, other = ([{**step, "tokens_per_second": 0} for step in read_metrics(run)] for run in (output, expected))
    assert found == other
    tensors, others = learnt(output), learnt(expected)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert contents(output / "model") == contents(expected / "model")


def train_until(step: int, corpus: Corpus, recipe: Recipe, output: Path, **options: Any) -> None:
    """A run that is interrupted when this update is made, before its checkpoint."""

    def stop(done: Step) -> None:
        if done.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(corpus, recipe, output, on_step=stop, **options)
