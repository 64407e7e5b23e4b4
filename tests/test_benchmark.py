"""The benchmark: what it times, in which order, what it writes, and how it goes on after an interruption."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muse_attention import get_attention
from muse_attention.benchmark import timing
from muse_attention.benchmark.machine import describe_machine
from muse_attention.benchmark.matched import MATCHED_KINDS, at_matched_sparsity
from muse_attention.benchmark.memory import MemoryCase, measure_extra_memory
from muse_attention.benchmark.results import Results, Settings, read_results, write_results
from muse_attention.benchmark.suite import Plan, run_plan, start_results
from muse_attention.benchmark.tables import markdown_report
from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import AttentionCall, Workload, sdpa
from muse_attention.plots import MatplotlibMissingError, plot_speedup
from muse_attention.sizes import format_size, parse_sizes

SETTINGS = Settings(device="cpu", batch=1, heads=2, head_dim=8, dtype="float32", causal=True, repeats=2, memory=False)
PLAN = Plan(SETTINGS, lengths=(512, 600), attentions=("muse", "exact"))


def small_workload() -> Workload:
    return Workload.create(batch=1, heads=2, length=64, head_dim=8, dtype=torch.float32, device="cpu", is_causal=True)


def test_lengths_are_read_as_they_are_written() -> None:
    assert parse_sizes("32k, 600,1K") == (32768, 600, 1024)
    assert parse_sizes("1k,1024") == (1024,)
    assert [format_size(length) for length in (32768, 600)] == ["32k", "600"]


@pytest.mark.parametrize("text", ["", "0", "1k,", "-4", "4m", "1.5k"])
def test_what_is_not_a_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the size"):
        parse_sizes(text)


def test_attentions_without_settings_are_taken_at_matched_sparsity() -> None:
    names = [at_matched_sparsity(kind, 65536) for kind in MATCHED_KINDS]
    assert names == ["muse:Q128K128R8SP1B8k", "block_diagonal:8k", "moba:L8kB512R1"]
    assert at_matched_sparsity("moba:L1kB64R2", 65536) == "moba:L1kB64R2"
    assert at_matched_sparsity("exact", 65536) == "exact"


@pytest.mark.parametrize("kind", MATCHED_KINDS)
def test_every_matched_name_is_the_name_of_an_attention(kind: str) -> None:
    for length in (1, 300, 4096, 100_000, 1 << 20):
        get_attention(at_matched_sparsity(kind, length))


def test_attentions_take_turns_and_the_warm_up_is_not_counted() -> None:
    turns: list[str] = []
    rounds: list[int] = []

    def named(name: str) -> AttentionCall:
        def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
            turns.append(name)
            return sdpa(query, key, value, is_causal=is_causal)

        return attention

    work = small_workload()
    first, second = time_interleaved([named("a"), named("b")], work, 2, rounds.append)
    assert turns == ["a", "b"] * 3
    assert rounds == [0, 1, 2]
    for times in (first, second):
        assert len(times.forward) == len(times.forward_backward) == 2
        assert all(0 < part < whole for part, whole in zip(times.forward, times.forward_backward, strict=True))
        assert min(times.forward) <= times.forward_median <= max(times.forward)
    assert work.query.grad is None


def test_a_long_warm_up_counts_as_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONG_RUN_SECONDS", 0.0)
    calls = 0

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        nonlocal calls
        calls += 1
        return sdpa(query, key, value, is_causal=is_causal)

    (times,) = time_interleaved([attention], small_workload(), 3)
    assert calls == len(times.forward) == 3


def test_the_workload_depends_on_the_seed_alone() -> None:
    first, second = small_workload(), small_workload()
    for name in ("query", "key", "value", "grad_out"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_all_cases_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    results = start_results(PLAN, path, resume=False)
    finished: list[int] = []
    run_plan(PLAN, results, path, on_step=lambda description, steps: finished.append(steps))
    assert finished == list(range(4 * PLAN.steps_per_case))
    assert [(case.length, case.requested) for case in results.cases] == [
        (512, "muse"),
        (512, "exact"),
        (600, "muse"),
        (600, "exact"),
    ]
    muse, exact = results.cases[:2]
    assert muse.attention == "muse:Q16K16R1SP1B256"
    assert 0 < muse.fidelity["relative_squared_error"] < 0.5
    assert 0.5 < muse.fidelity["cosine"] < 1
    assert exact.fidelity["relative_squared_error"] < 1e-9
    assert muse.extra_memory_bytes is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["cpu.json"]
    assert read_results(path) == results

    document = json.loads(path.read_text())
    entry = document["cases"][0]
    assert entry["speedup_forward"] == pytest.approx(
        entry["sdpa_seconds"]["forward_median"] / entry["seconds"]["forward_median"]
    )
    assert document["machine"]["torch"] == torch.__version__


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"

    def interrupt(description: str, steps: int) -> None:
        if steps > PLAN.steps_per_case:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(PLAN, start_results(PLAN, path, resume=False), path, on_step=interrupt)
    (kept,) = read_results(path).cases

    results = start_results(PLAN, path, resume=True)
    assert PLAN.missing(results) == [(512, "exact"), (600, "muse"), (600, "exact")]
    run_plan(PLAN, results, path)
    assert PLAN.missing(read_results(path)) == []
    assert read_results(path).cases[0] == kept


def test_other_settings_or_another_machine_cannot_continue(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    write_results(Results(describe_machine(), SETTINGS), path)
    other = Plan(dataclasses.replace(SETTINGS, heads=3), PLAN.lengths, PLAN.attentions)
    with pytest.raises(ValueError, match=r"heads differ.*another --name"):
        start_results(other, path, resume=True)
    assert start_results(other, path, resume=False).cases == []

    write_results(Results(describe_machine() | {"torch": "1.0"}, SETTINGS), path)
    with pytest.raises(ValueError, match="torch differ"):
        start_results(PLAN, path, resume=True)


@pytest.mark.parametrize("text", ["", "[]", '{"machine": {}}', '{"cases": 3'])
def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="does not hold the results"):
        start_results(PLAN, path, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "abacus"}, "unknown device"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"heads": 0}, "heads is 0"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(dataclasses.replace(SETTINGS, **changes), (512,), ("muse",))


def test_the_report_names_machine_versions_command_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    plan = Plan(SETTINGS, lengths=(512,), attentions=MATCHED_KINDS)
    results = start_results(plan, path, resume=False)
    results.commands.append("muse bench --lengths 512")
    run_plan(plan, results, path)
    report = markdown_report(results, title="Benchmark: cpu")
    for expected in (
        f"torch {torch.__version__}",
        str(results.machine["cpu"]),
        "muse bench --lengths 512",
        "| `muse:Q16K16R1SP1B256` |",
        "| `block_diagonal:256` |",
        "| `moba:L256B16R1` |",
        "without the inputs, with the output and the gradients",
    ):
        assert expected in report
    assert str(tmp_path) not in report
    rows = [line for line in report.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert len({row.count("|") for row in rows}) == 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak memory of Linux")
def test_extra_memory_counts_output_and_gradients_but_not_inputs() -> None:
    case = MemoryCase("sdpa", length=8192, head_dim=64, dtype="float32", device="cpu", is_causal=True)
    extra = measure_extra_memory(case)
    one_tensor = 8192 * 64 * 4
    assert extra is not None
    assert 3.5 * one_tensor < extra < 12 * one_tensor


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MatplotlibMissingError, match=r"pip install .muse-attention\[cli\]."):
        plot_speedup({"forward": {"muse": [(512, 1.0)]}}, tmp_path / "speedup.png")


def test_the_picture_of_speedups_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"muse": [(512, 0.9), (1024, 1.4)], "muse:QK32R2B1k": [(1024, 1.1)]}
    plot_speedup({"forward": curves, "forward + backward": curves}, tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
