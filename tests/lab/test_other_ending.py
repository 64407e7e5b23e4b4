"""`muse loss --other-ending`: losses before a position, when the text after it is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from muse_lab.evaluation.loss.curves import bins_of
from muse_lab.evaluation.loss.endings import changes, measure_endings, replaced
from muse_lab.evaluation.loss.positions import Ending, Losses, LossResults, measure, position_losses
from muse_lab.evaluation.settings import TextSettings
from tests.command_line import assert_done_quietly, assert_refused, run_muse
from tests.models import tiny_llama, token_ids

CAUSAL, PAPER = "muse:Q4K4T0.1B32", "muse:Q4K4R1SP1B32,clustering=lloyd"
ALL, BOTH = ("exact", CAUSAL, PAPER), ("exact", PAPER)
POSITION = 96


def settings(samples: int) -> TextSettings:
    return TextSettings("tiny", "letters", 128, samples, "cpu", "float32")


def measured(path: Path, model: Any, tokens: Tensor, attentions: tuple[str, ...], **options: Mock) -> LossResults:
    results = LossResults.start(settings(len(tokens)), path)
    measure(model, tokens, attentions, results, path)
    measure_endings(model, tokens, attentions, POSITION, results, path, **options)
    return LossResults.read(path)


def test_only_clusters_of_the_whole_sequence_let_a_loss_change(tmp_path: Path) -> None:
    results = measured(tmp_path / "loss.json", tiny_llama(), token_ids(128, batch=2), ALL)
    assert replaced(results) == {POSITION: list(ALL)}
    for name in ("exact", CAUSAL):
        for ending in results.losses[name].endings[POSITION]:
            assert ending.losses == ending.other_losses, f"{name} is causal to the bit"
            assert ending.errors == ending.other_errors
        assert all(change.rise == change.unexplained == (0, 0) for change in changes(results, name, POSITION))
    assert [changes(results, name, POSITION)[0].error > 1e-3 for name in ALL] == [False, True, True]
    whole, *parts = changes(results, PAPER, POSITION)
    assert [part.positions for part in parts][-3:] == [(16, 31), (32, 63), (64, 95)]
    assert whole.positions == (1, 95)
    assert whole.loss == pytest.approx(
        sum((part.positions[1] - part.positions[0] + 1) * part.loss for part in parts) / 95
    )
    assert all(abs(part.rise.mean) < 1e-9 for part in parts[:-2]), "the first block is exact"
    assert all(abs(part.rise.mean) > 1e-5 and part.error != part.other_error for part in parts[-2:])


def test_a_sample_ends_like_the_next_one_and_the_last_like_the_first(tmp_path: Path) -> None:
    model, tokens = tiny_llama(), token_ids(128, batch=3)
    endings = measured(tmp_path / "loss.json", model, tokens, BOTH).losses[PAPER].endings[POSITION]
    for sample, following in enumerate((1, 2, 0)):
        other = torch.cat([tokens[sample, :POSITION], tokens[following, POSITION:]])
        expected = bins_of(position_losses(model, other, PAPER)[: POSITION - 1])
        assert endings[sample].other_losses == [part.loss for part in expected]


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    model, tokens = tiny_llama(), token_ids(128, batch=2)
    measured(whole, model, tokens, BOTH)
    with pytest.raises(KeyboardInterrupt):
        measured(parted, model, tokens, BOTH, on_step=Mock(side_effect=[None, None, None, KeyboardInterrupt]))
    part = LossResults.read(parted)
    assert part.missing(BOTH, POSITION) == [(1, PAPER)]
    assert replaced(part) == {POSITION: ["exact"]}
    measured(parted, model, tokens, BOTH)
    assert parted.read_bytes() == whole.read_bytes()


def test_the_error_explains_its_part_of_a_rise() -> None:
    """Two samples whose gap to exact attention is 0.2, and whose error rises by a half and by a quarter."""
    exact, muse = Losses([2.0] * 2, [4.0] * 127), Losses([2.2] * 2, [4.4] * 127)
    exact.endings[4] = [Ending([2.0, 2.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0])] * 2
    muse.endings[4] = [Ending([2.0, 2.2], [2.0, 2.4], [0.0, 0.4], [0.0, error]) for error in (0.6, 0.5)]
    results = LossResults({}, settings(2), [], {"exact": exact, "m": muse})
    first, second = changes(results, "m", 4)[1:]
    assert first.rise == first.unexplained == (0, 0)
    assert second.rise == pytest.approx((0.2, 0))
    assert second.unexplained == pytest.approx((0.125, 0.025))
    assert (second.error, second.other_error) == pytest.approx((0.4, 0.55))


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> list[object]:
    names = [word for name in BOTH for word in ("--attention", name)]
    text = folder.parent / "text.txt"
    arguments = [folder, "--text", text, "--length", "128", "--samples", "2", *names, "--device", "cpu"]
    return ["loss", *arguments, "--output", tmp_path / "out"]


def test_the_command_adds_endings_to_earlier_results(asked: list[object], tmp_path: Path) -> None:
    assert "another text" not in assert_done_quietly(run_muse(*asked))
    path = tmp_path / "out" / "tiny.json"
    document = json.loads(path.read_text())
    for entry in document["losses"]:
        del entry["endings"]  # as in files of version 0.3.0
    path.write_text(json.dumps(document))
    for share in ("0.5", "0.75"):
        out = assert_done_quietly(run_muse(*asked, "--other-ending", share))
    for found in (out, (tmp_path / "out" / "tiny.md").read_text()):
        for position in ("64", "96"):
            expected = f"another text after position {position}, the loss before it is the same under exact and "
            assert expected in " ".join(found.split())
    results = LossResults.read(path)
    assert replaced(results) == {64: [*BOTH], 96: [*BOTH]}
    assert [command.count("--other-ending") for command in results.commands] == [0, 1, 1]
    document = json.loads(path.read_text())
    document["losses"][0]["endings"][0]["samples"][0]["errors"].pop()
    path.write_text(json.dumps(document))
    assert_refused(run_muse(*asked), "does not hold the results of muse loss")


@pytest.mark.parametrize("share", ["0", "1", "-0.5", "1.5", "0.01", "nan", "inf"])
def test_what_has_no_other_ending_is_refused(asked: list[object], tmp_path: Path, share: str) -> None:
    refused = "leaves no text before or after it; choose a share such as 0.5"
    assert_refused(run_muse(*asked, "--other-ending", share), f"--other-ending {float(share):g} {refused}")
    assert_refused(run_muse(*asked, "--other-ending", "0.5", "--samples", "1"), "use at least 2 samples")
    assert not (tmp_path / "out").exists()
