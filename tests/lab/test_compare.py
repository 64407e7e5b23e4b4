"""`muse compare`: losses of trained models under attentions, what metrics say, its files, and one line for mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from muse_lab.evaluation.comparison import matrix
from muse_lab.evaluation.comparison.comparison_report import comparison_report, headline, warnings
from muse_lab.evaluation.comparison.findings import (
    difference,
    differing_fields,
    reference_of,
    scaling_laws,
    speedup,
    switching,
)
from muse_lab.evaluation.comparison.matrix import measure
from muse_lab.evaluation.comparison.positions import positions_table
from muse_lab.evaluation.comparison.results import ComparisonResults, ComparisonSettings
from muse_lab.evaluation.comparison.runs import choose_evenly, load_weights, open_runs
from muse_lab.evaluation.loss.curves import bins_of
from muse_lab.models import load_model
from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.data.corpus import HELD_OUT, Corpus
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.recipes import override
from muse_lab.records.means import Mean
from muse_lab.report.html import as_html
from muse_lab.report.markdown import as_markdown
from muse_lab.report.plots import Axis, Line, line_figure
from tests.command_line import Outcome, assert_done, assert_refused, run_muse
from tests.compared_runs import MUSE as LEARNT
from tests.compared_runs import add_losses, change, made_up
from tests.lab.test_prepare import make
from tests.training_runs import SMALL, train_until

MUSE = "muse:Q4K4R1SP1B16,clustering=lloyd"
RECIPE = override(SMALL, ["steps=6", "checkpoint_every=2", "keep=9", "probe_every=2", "exact_tail=0"])


def settings_of(corpus: Corpus, samples: int = 2) -> ComparisonSettings:
    windows = len(Windows(corpus, 64, split=HELD_OUT))
    return ComparisonSettings("made up", corpus.fingerprint, 64, samples, windows, "cpu", "float32")


def compared(
    corpus: Corpus, path: Path, *folders: Path, attentions: Sequence[str] = ("exact",), **options: Any
) -> ComparisonResults:
    """Runs as far as they are measured in the file, and what was missing."""
    results = ComparisonResults.start(settings_of(corpus), path)
    measure(open_runs(folders, corpus), corpus, attentions, results, path, **options)
    return results


def run_command(*arguments: object) -> Outcome:
    return run_muse("compare", *arguments, "--device", "cpu")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# What is measured


@pytest.mark.long
def test_a_loss_is_that_of_the_logits_on_a_held_out_window(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    results = compared(corpus, tmp_path / "compare.json", trained / "muse", attentions=["exact", MUSE])
    model, _ = load_model(trained / "muse" / "model")
    windows = Windows(corpus, 64, split=HELD_OUT)
    for attention in ("exact", MUSE):
        model.set_attention(attention)
        cell = results.find("muse", 6, attention)
        for sample, index in enumerate((0, len(windows) // 2)):
            tokens = windows[index]
            with torch.no_grad():
                losses = cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
            assert cell.means[sample] == pytest.approx(float(losses.mean()), rel=1e-5)
            assert cell.bins[sample][3] == pytest.approx(float(losses[7:15].mean()), rel=1e-5)
        assert cell.sizes == [1, 2, 4, 8, 16, 33]
    assert results.runs["muse"].parameters == model.num_parameters()


def test_samples_are_spread_over_all_windows_of_the_held_out_split(corpus: Corpus) -> None:
    windows = Windows(corpus, 64, split=HELD_OUT)
    samples = torch.stack(windows.spaced(len(windows)))
    assert samples.shape == (len(windows), 65)
    assert torch.equal(torch.stack(windows.spaced(2)), samples[[0, len(windows) // 2]])
    held_out = [corpus.tokens(stream, 0, stream.tokens) for stream in corpus.streams("held-out")]
    assert samples[0].tolist() == held_out[0][:65].tolist()
    assert samples[-1, -1].item() in held_out[-1]


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65])
def test_bins_have_every_position_once(length: int) -> None:
    bins = bins_of(torch.arange(1, length + 1, dtype=torch.float64))
    assert [part.first for part in bins] == [1, *(part.last + 1 for part in bins[:-1])]
    assert bins[-1].last == length
    assert all(part.loss == (part.first + part.last) / 2 for part in bins)
    assert length == 1 or bins[-1].last > bins[-1].first


@pytest.mark.long
def test_an_interrupted_comparison_goes_on_to_the_same_bits(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    runs = open_runs([trained / "exact", trained / "muse"], corpus)
    settings = settings_of(corpus)

    def go_on(path: Path, on_step: Callable[[str, int], None] = lambda description, finished: None) -> None:
        results = ComparisonResults.start(settings, path)
        measure(runs, corpus, ["exact", MUSE], results, path, checkpoints=1, on_step=on_step)

    def stop_before(number: int) -> Callable[[str, int], None]:
        def stop(description: str, finished: int) -> None:
            if finished == number:
                raise KeyboardInterrupt

        return stop

    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    go_on(whole)
    for number in (1, 3, 4):
        with pytest.raises(KeyboardInterrupt):
            go_on(parted, stop_before(number))
    assert sum(len(cell.bins) for cell in ComparisonResults.read(parted).cells) == 8
    go_on(parted)
    assert parted.read_bytes() == whole.read_bytes()


def test_what_was_measured_is_not_measured_again(
    corpus: Corpus, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "compare.json"
    measured = Mock(wraps=matrix.position_losses)
    monkeypatch.setattr(matrix, "position_losses", measured)
    compared(corpus, path, trained / "exact")
    compared(corpus, path, trained / "exact", trained / "muse", attentions=["exact", MUSE])
    attentions = [call.args[2] for call in measured.call_args_list]
    assert attentions == ["exact"] * 2 + [MUSE] * 2 + ["exact", MUSE] * 2
    assert list(ComparisonResults.read(path).runs) == ["exact", "muse"]


def test_other_weights_of_the_same_name_are_refused(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    compared(corpus, path, trained / "exact")
    shutil.copytree(trained / "muse", tmp_path / "exact")
    with pytest.raises(ValueError, match=r"has losses of another run called exact; choose another --output"):
        compared(corpus, path, tmp_path / "exact")


def test_a_loss_that_is_no_number_is_refused(
    corpus: Corpus, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "position_losses", lambda *arguments: torch.full((64,), torch.nan))
    with pytest.raises(ValueError, match=r"loss of muse under exact is not a finite number; use --dtype float32"):
        compared(corpus, tmp_path / "compare.json", trained / "muse")


# Runs on disk


def test_weights_are_those_of_the_checkpoint(corpus: Corpus, trained: Path) -> None:
    (run,) = open_runs([trained / "muse"], corpus)
    assert (run.newest, run.earlier) == (6, (2, 4))
    for step in (2, 4):
        stored = load_file(trained / "muse" / "checkpoints" / f"step-{step:08}" / "rank-00000-00000.safetensors")
        model = load_weights(run, step, corpus, "cpu")
        assert not model.training
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, stored[f"weight/{name}"])
    final = load_weights(run, 6, corpus, "cpu")
    assert torch.equal(
        final.lm_head.weight, load_file(trained / "muse/model/model.safetensors")["model.embed_tokens.weight"]
    )


def test_an_unfinished_run_is_measured_at_its_newest_good_checkpoint(corpus: Corpus, copies: Path) -> None:
    shutil.rmtree(copies / "muse" / "model")
    flip_a_byte(next((copies / "muse" / "checkpoints" / "step-00000006").glob("*.safetensors")))
    refused: list[str] = []
    (run,) = open_runs([copies / "muse"], corpus, on_refused=refused.append)
    assert (run.newest, run.earlier) == (4, (2,))
    assert "step-00000006 is damaged" in refused[0]
    results = compared(corpus, copies / "compare.json", copies / "muse")
    assert warnings(results) == ["muse is not finished: its weights are those of update 4 of 6."]
    assert "its newest checkpoint, of 6 updates" in as_markdown(comparison_report(results))


def test_a_damaged_earlier_checkpoint_is_left_out_and_named(corpus: Corpus, copies: Path) -> None:
    (copies / "muse" / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    refused: list[str] = []
    results = compared(corpus, copies / "c.json", copies / "muse", checkpoints=3, on_refused=refused.append)
    assert results.steps(results.runs["muse"]) == [4, 6]
    assert [message.endswith("it is left out") for message in refused] == [True]


def test_a_run_that_has_learnt_nothing_yet_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    train_until(1, corpus, RECIPE, tmp_path / "run")
    with pytest.raises(ValueError, match="has neither a model nor a checkpoint yet; train it on with --resume"):
        open_runs([tmp_path / "run"], corpus)


@pytest.mark.parametrize(
    ("steps", "number", "chosen"),
    [([2, 4, 6, 8, 10], 3, [2, 6, 10]), ([2, 4], 3, [2, 4]), ([2, 4, 6], 1, [2]), ([2, 4], 0, []), ([], 3, [])],
)
def test_checkpoints_are_chosen_evenly(steps: list[int], number: int, chosen: list[int]) -> None:
    assert choose_evenly(steps, number) == chosen


def test_runs_of_the_same_name_are_told_apart_by_their_folders(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(trained / "muse", tmp_path / parent / "muse")
    folders = [tmp_path / "a" / "muse", tmp_path / "b" / "muse", trained / "exact"]
    assert [run.name for run in open_runs(folders, corpus)] == ["a/muse", "b/muse", "exact"]
    with pytest.raises(ValueError, match="two of the runs are called a/muse; give each once"):
        open_runs([folders[0], folders[0]], corpus)


# What metrics say


def test_curves_survive_a_file(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    results = compared(corpus, path, trained / "muse")
    read = ComparisonResults.read(path)
    assert read == results
    curves = read.runs["muse"].curves
    steps = read_metrics(trained / "muse")
    assert [point.loss for point in curves.points] == [line["loss"] for line in steps]
    assert [probe.tokens for probe in curves.probes] == [256, 512, 768]
    assert curves.probes[0].errors == {int(layer): error for layer, error in steps[1]["rse"].items()}


def test_a_torn_last_line_of_metrics_is_left_out(corpus: Corpus, copies: Path) -> None:
    path = copies / "muse" / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    (run,) = open_runs([copies / "muse"], corpus)
    assert len(run.curves.points) == 5
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl is not of this version of muse train"):
        open_runs([copies / "muse"], corpus)


# What follows


def test_differences_are_paired_and_relative_to_the_exact_run() -> None:
    results = made_up(
        muse=(LEARNT, 10, 300.0, [2.02, 4.06]),
        exact=("exact", 10, 150.0, [2.0, 4.0]),
        odd=("exact", 9, 1.0, [1.0, 1.0]),
    )
    muse, exact, odd = results.runs.values()
    assert reference_of(results, muse) is exact
    assert reference_of(results, odd) is odd
    found = difference(results, muse)
    assert found.reference == "exact"
    assert tuple(found.nats) == pytest.approx((0.04, 0.02))
    assert tuple(found.percent) == pytest.approx((0.04 / 3 * 100, 0.02 / 3 * 100))
    assert (found.median, found.least, found.most) == pytest.approx((1.25, 0.02, 0.06))  # of 1 and 1.5%
    assert difference(results, exact) is None
    assert difference(results, odd) is None
    assert speedup(results, muse) == pytest.approx(2.0)
    assert speedup(results, exact) is None
    (line,) = headline(results)
    assert "within 1.33% of exact (+1.33 ± 0.67%, median sample +1.25%), 2.00x its tokens per second" in line


def test_without_an_exact_run_the_first_is_the_reference_and_no_speed_is_compared() -> None:
    results = made_up(a=(LEARNT, 10, 300.0, [2.0, 4.0]), b=("moba:L64B8R1", 10, 600.0, [1.0, 2.0]))
    first, second = results.runs.values()
    found = difference(results, second)
    assert (found.reference, found.percent.mean) == ("a", pytest.approx(-50.0))
    assert speedup(results, second) is None
    assert difference(results, first) is None


def test_one_sample_has_no_standard_error() -> None:
    assert Mean.of([2.0]) == (2.0, None)
    assert (str(Mean.of([2.0])), Mean.of([2.0]).signed()) == ("2.0000", "+2.0000")
    assert str(Mean.of([1.0, 2.0, 3.0])) == "2.0000 ± 0.5774"


def test_switching_compares_one_model_with_itself() -> None:
    results = made_up(muse=(LEARNT, 10, 1.0, [2.0, 4.0]))
    (run,) = results.runs.values()
    assert switching(results, run, MUSE) is None
    add_losses(results, "muse", MUSE, [2.1, 4.3])
    assert tuple(switching(results, run, MUSE)) == pytest.approx((0.2, 0.1))


def test_runs_that_differ_by_more_than_their_attention_are_named() -> None:
    results = made_up(exact=("exact", 10, 1.0, [1.0, 1.0]), muse=(LEARNT, 10, 1.0, [1.0, 1.0]))
    assert differing_fields(results, results.runs["muse"]) == []
    change(results, "muse", "seed=1", "steps=512")
    results.runs["muse"] = dataclasses.replace(results.runs["muse"], step=512)
    assert differing_fields(results, results.runs["muse"]) == ["tokens", "steps", "seed"]
    assert "muse differs from exact by more than its attention: tokens, steps, seed." in warnings(results)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["exact_start=0.25", "exact_tail=0.5", "keep=9", "probe_every=0", "checkpoint_every=1"], []),
        (["mixture=niah"], ["mixture"]),
        (["weight_decay=0.5", "clip=2"], ["weight_decay", "clip"]),
        (["deterministic=false"], ["deterministic"]),
        (["mesh=2x4"], ["mesh"]),
        (["micro_batch=1", "compile=true", "seed=1"], ["micro_batch", "compile", "seed"]),
    ],
)
def test_whatever_changes_learning_or_speed_is_said(changes: list[str], named: list[str]) -> None:
    results = made_up(exact=("exact", 10, 150.0, [2.0, 4.0]), muse=(LEARNT, 10, 300.0, [2.0, 4.0]))
    change(results, "muse", *changes)
    assert differing_fields(results, results.runs["muse"]) == named
    said = [f"muse differs from exact by more than its attention: {', '.join(named)}."] if named else []
    assert warnings(results) == said
    assert headline(results)[0].endswith(", 2.00x its tokens per second")


@pytest.mark.parametrize(
    ("changes", "device", "is_said"),
    [
        (["precision=bfloat16"], "cuda", True),
        (["precision=bfloat16"], None, True),
        (["precision=bfloat16"], "cpu", False),
        (["precision=bfloat16", "deterministic=false"], "cuda", False),
        ([], "cuda", False),
    ],
)
def test_a_speedup_between_deterministic_runs_says_so(changes: list[str], device: str | None, is_said: bool) -> None:
    """Of a GPU, where they leave out cuDNN's attention, which has no float32."""
    results = made_up(exact=("exact", 10, 150.0, [2.0, 4.0]), muse=(LEARNT, 10, 300.0, [2.0, 4.0]))
    for name in results.runs:
        change(results, name, *changes)
        results.runs[name] = dataclasses.replace(results.runs[name], device=device)
    said = "Speed-ups are not those of the fastest kernels: exact and muse are deterministic, which leaves out"
    assert [line.startswith(said) for line in warnings(results)] == [True] * is_said


def law(parameters: int) -> list[float]:
    return [9 * parameters**-0.17] * 2


def test_scaling_laws_need_three_sizes() -> None:
    results = made_up(
        a=("exact", 10**8, 1.0, law(10**8)),
        b=("exact", 10**7, 1.0, law(10**7)),
        c=("exact", 10**9, 1.0, law(10**9)),
        d=(LEARNT, 10**7, 1.0, [1.0, 2.0]),
        e=(LEARNT, 10**8, 1.0, [1.0, 2.0]),
    )
    (found,) = scaling_laws(results).values()
    assert (found.exponent, found.factor) == (pytest.approx(-0.17), pytest.approx(9))
    report = as_markdown(comparison_report(results))
    assert "| exact | 10.0M, 100.0M, 1,000.0M | -0.170 | 1.0000 |" in report
    assert "muse:Q8K8R2SP1B128,clustering=lloyd: 2 sizes of model, 1 fewer than a power law needs." in report


def test_losses_by_position_are_less_those_of_a_reference_that_is_measured() -> None:
    results = made_up(exact=("exact", 10, 1.0, [1.0, 3.0]), muse=(LEARNT, 10, 1.0, [2.0, 2.5]))
    table = positions_table(results)
    assert table.titles == ["positions", "exact", "muse less exact"]
    assert table.rows == [("1", "1.5000", "+0.2500"), ("2", "2.5000", "+0.2500")]
    results.cells[0].bins.pop()
    table = positions_table(results)
    assert table.titles == ["positions", "muse"]
    assert table.rows == [("1", "1.7500"), ("2", "2.7500")]


def test_a_partial_comparison_is_reported_as_far_as_it_goes() -> None:
    results = made_up(exact=("exact", 10, 1.0, [1.0, 1.0]), muse=(LEARNT, 10, 1.0, [2.0]))
    report = as_markdown(comparison_report(results))
    assert "| exact | exact | 1.0000 ± 0.0000 |  |  |" in report
    assert "| muse | Q8K8R2SP1B128 |  |  |  |" in report
    assert headline(results) == []
    assert positions_table(results).rows == [("1", "0.5000"), ("2", "1.5000")]
    page = as_html(comparison_report(results))
    assert "<img" not in page


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document["runs"][0].update(parameters=0),
        lambda document: document["runs"][0]["recipe"].update(peak_rate=1e38),
        lambda document: document["runs"][0]["curves"].update(points=[["a", 1, 2]]),
        lambda document: document["runs"][0]["curves"].update(seconds=math.nan),
        lambda document: document["cells"][0]["bins"][0].pop(),
    ],
)
def test_results_of_other_types_are_refused(spoil: Callable[[Any], object], tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    made_up(exact=("exact", 10, 1.0, [1.0, 1.0])).write(path)
    ComparisonResults.read(path)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"does not hold the results of muse compare$"):
        ComparisonResults.read(path)


HOSTILE = "=1+1|`<b>x</b>`\n## y $z$"


def test_the_name_of_a_run_is_text_in_every_report() -> None:
    runs: dict[str, Any] = {
        "exact": ("exact", 10, 1.0, [1.0, 1.0]),
        HOSTILE: (LEARNT, 10, 2.0, [2.0, 2.0]),
    }
    results = made_up(**runs)
    change(results, HOSTILE, f"initial={HOSTILE}")
    report = as_markdown(comparison_report(results))
    assert "## y" not in [line[:4] for line in report.splitlines()]
    assert not re.search(r"(?<!\\)[`<|]x|(?<!\\)<b>|(?<!\\)\$z", report)
    assert "| =1+1\\|\\`\\<b\\>x\\</b\\>\\` ## y \\$z\\$ |" in report
    assert "- =" not in report


def test_the_name_of_a_run_is_text_in_pictures() -> None:
    curve = [(1.0, 2.0), (2.0, 1.0)]
    lines = [Line(name, curve, "#000000") for name in (r"$\frac$", "$_$", "$$", "a$b")]
    assert line_figure("", "", lines, Axis("x"), Axis("y")).draw().startswith(b"\x89PNG")


def test_a_folder_whose_name_is_no_text_can_be_reported(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    shutil.copytree(trained / "exact", folder)
    (run,) = open_runs([folder], corpus)
    assert run.name == r"run-\udcff"


# The command


@pytest.mark.long
def test_the_command_writes_reports_that_need_no_run(corpus: Corpus, copies: Path, tmp_path: Path) -> None:
    output = tmp_path / "compare"
    asked = (copies / "exact", copies / "muse", "--corpus", corpus.folder, "--output", output, "--samples", 3)
    out = assert_done(run_command(*asked, "--checkpoints", 1))
    names = {"json", "md", "html"}
    pictures = {"training", "training-seconds", "positions", "positions-1", "positions-2", "errors-2"}
    expected = {f"compare.{name}" for name in names} | {f"compare-{name}.png" for name in pictures}
    assert {file.name for file in output.iterdir()} == expected
    assert "muse, trained with muse:Q4K4R1SP1B16,clustering=lloyd: held-out loss under exact attention within" in out
    results = ComparisonResults.read(output / "compare.json")
    measured = {"exact": [(6, "exact"), (6, MUSE), (2, "exact")]}
    measured["muse"] = [*measured["exact"], (2, MUSE)]  # a run's own attention at its checkpoints too
    assert [(cell.run, cell.step, cell.attention) for cell in results.cells] == [
        (run, *cell) for run, cells in measured.items() for cell in cells
    ]
    page = (output / "compare.html").read_text()
    for heading in ("Training attention against test attention", "Loss by position", "Scaling law"):
        assert heading in page
    assert page.count("<img") == len(pictures)
    written = (output / "compare.json").read_text() + page
    assert str(tmp_path) not in written
    assert str(corpus.folder.parent) not in written
    assert {run.device for run in ComparisonResults.read(output / "compare.json").runs.values()} == {"cpu"}

    shutil.rmtree(copies)
    for name in expected - {"compare.json"}:
        (output / name).unlink()
    assert_done(run_muse("report", output))
    assert {file.name for file in output.iterdir()} == {*expected, "index.html"}
    assert (output / "compare.html").read_text() == page
    contents = (output / "index.html").read_text()
    assert '<a href="compare.html">compare</a>' in contents
    assert "Training runs" in contents
    assert "Needles" not in contents


def test_a_run_that_has_lost_its_metrics_is_compared_all_the_same(corpus: Corpus, copies: Path, tmp_path: Path) -> None:
    (copies / "muse" / "metrics.jsonl").unlink()
    asked = (copies / "muse", "--corpus", corpus.folder, "--output", tmp_path / "out", "--samples", 1)
    assert_done(run_command(*asked, "--checkpoints", 0))
    assert not (tmp_path / "out" / "compare-training.png").exists()
    assert "| run | attention of the update |" in (tmp_path / "out" / "compare.md").read_text()


@pytest.mark.long
def test_one_run_and_an_attention_of_ones_own_choice(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    code, out, err = run_command(
        *(trained / "muse", "--corpus", corpus.folder, "--output", tmp_path, "--samples", 999),
        *("--checkpoints", 0, "--attention", "block_diagonal:16"),
    )
    assert code == 0, err
    windows = len(Windows(corpus, 64, split=HELD_OUT))
    assert err == f"muse: the held-out split has {windows} windows of 64: all of them are used\n"
    results = ComparisonResults.read(tmp_path / "compare.json")
    assert [cell.attention for cell in results.cells] == ["exact", "block_diagonal:16"]
    assert results.settings.samples == windows
    assert "block_diagonal:16" in out


def test_mistakes_are_one_line(corpus: Corpus, trained: Path, tmp_path: Path) -> None:
    asked = (trained / "exact", "--corpus", corpus.folder, "--output", tmp_path / "out")
    assert_refused(run_command(*asked, "--precision", "float16"), "must be one of float32, bfloat16")
    assert_refused(run_command(*asked, "--samples", -1), "--samples and --checkpoints must be at least 0")
    for option in (("--attention", "exact"), ("--length", "32")):
        assert_refused(run_command(*asked, "--samples", 0, *option), "--samples 0 measures nothing")
    assert_refused(run_command(*asked, "--length", "1k"), "the runs were trained on 64 tokens; --length 1024 is more")
    assert_refused(run_command(*asked, "--attention", "nonsense"), "nonsense")
    assert_refused(run_command(tmp_path, *asked[1:]), "there is no run in")
    assert_refused(run_command("nowhere", "--corpus", tmp_path), "there is no run in nowhere")
    assert_refused(run_command(trained / "exact", "--corpus", tmp_path), "there is no corpus in")
    other = make(tmp_path / "other", found={"a": {"a.py": "x = 1\n" * 400}, "b": {"a.py": "y = 2\n" * 400}})
    assert_refused(
        run_command(trained / "exact", "--corpus", other.folder),
        "is of another corpus than",
    )
    assert not (tmp_path / "out").exists()


def test_runs_of_two_lengths_need_a_choice(corpus: Corpus, copies: Path, tmp_path: Path) -> None:
    path = copies / "muse" / "run.json"
    document = json.loads(path.read_text())
    document["recipe"]["length"] = 32
    path.write_text(json.dumps(document))
    asked = (copies / "exact", copies / "muse", "--corpus", corpus.folder, "--output", tmp_path / "out")
    assert_refused(run_command(*asked), "trained on 32 and 64 tokens; choose one with --length")


def test_ctrl_c_says_how_to_go_on(
    corpus: Corpus, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (trained / "exact", "--corpus", corpus.folder, "--output", tmp_path, "--samples", 2, "--checkpoints", 0)
    original = matrix.position_losses
    monkeypatch.setattr(matrix, "position_losses", Mock(wraps=original, side_effect=[DEFAULT, KeyboardInterrupt]))
    code, _, err = run_command(*asked)
    assert code == 130
    assert "interrupted; what is finished is in" in err
    command = err.partition("continue with: muse ")[2].split()
    assert len(ComparisonResults.read(tmp_path / "compare.json").cells[0].bins) == 1
    monkeypatch.setattr(matrix, "position_losses", original)
    assert_done(run_muse(*command))
    assert len(ComparisonResults.read(tmp_path / "compare.json").cells[0].bins) == 2
