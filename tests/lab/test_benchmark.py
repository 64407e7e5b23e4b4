"""The benchmark: what it times, in which order, what it writes, and how it goes on after an interruption."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, backends, get_attention
from muse_attention.fidelity.gradients import measure_gradients
from muse_attention.sizes import format_size, parse_size_list
from muse_lab.benchmark import stages, suite, timing
from muse_lab.benchmark.bench_report import bench_report
from muse_lab.benchmark.captured import CapturesFile, create_workload
from muse_lab.benchmark.memory import MemoryCase, measure_extra_memory
from muse_lab.benchmark.plan import Plan
from muse_lab.benchmark.request import MATCHED_KINDS, BenchmarkRequest, Shape, at_matched_sparsity
from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings, Case
from muse_lab.benchmark.stages import STAGES, stage_of, sum_by_stage
from muse_lab.benchmark.suite import run_plan, start_results
from muse_lab.benchmark.sweeps import SWEEPS, sweep_requests
from muse_lab.benchmark.tables import caption, noise_lines
from muse_lab.benchmark.timing import Times, time_interleaved
from muse_lab.benchmark.workload import AttentionCall, Workload, sdpa
from muse_lab.records import machine
from muse_lab.records.captured_heads import Captures, Origin, save_captures
from muse_lab.records.machine import describe_machine
from muse_lab.report.markdown import as_markdown
from muse_lab.report.plots import Axis, Line, MatplotlibMissingError, line_figure

SETTINGS = BenchmarkSettings(
    device="cpu", batch=1, heads=2, key_heads=2, head_dim=8, dtype="float32", causal=True, repeats=2, memory=False
)
MUSE = "muse:QK16R1B256"
PLAN = Plan.at_lengths(SETTINGS, lengths=(512, 600), attentions=(MUSE, "exact"))


def small_workload() -> Workload:
    return create_workload(None, SETTINGS.shape(64), dtype="float32", device="cpu", is_causal=True)


def some_case(shape: Shape, attention: str = "exact") -> Case:
    times = Times((1.0,), (2.0,))
    fidelity = {"relative_squared_error": 0.0, "cosine": 1.0}
    return Case(BenchmarkRequest(attention, shape), attention, times, times, fidelity, None, None, "FlashAttention")


def measured(plan: Plan, path: Path) -> BenchmarkResults:
    """What the file has after all cases of a plan, which are what is read of it."""
    results = start_results(plan, path)
    run_plan(plan, results, path)
    assert BenchmarkResults.read(path) == results
    return results


def sweep_plan(name: str, length: int = 65536) -> Plan:
    settings = dataclasses.replace(SETTINGS, sweep=name)
    return Plan(settings, sweep_requests(settings, length))


def test_lengths_are_read_as_they_are_written() -> None:
    assert parse_size_list(["32k, 600,1K,2m"]) == (32768, 600, 1024, 2**21)
    assert parse_size_list(["32k,1m", "600", "1m"]) == (32768, 2**20, 600)
    assert parse_size_list(["1k,1024"]) == (1024,)
    assert [format_size(length) for length in (32768, 600, 2**20, 2**20 + 1024)] == ["32k", "600", "1m", "1025k"]


@pytest.mark.parametrize("text", ["", "0", "1k,", "-4", "4g", "1.5k"])
def test_what_is_not_a_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the size"):
        parse_size_list([text])


def test_attentions_without_settings_are_taken_at_matched_sparsity() -> None:
    names = [at_matched_sparsity(kind, 65536) for kind in MATCHED_KINDS]
    assert names == [f"muse:{MuSeConfig.for_length(65536)}", "block_diagonal:8k", "moba:L8kB512R1"]
    assert at_matched_sparsity("moba:L1kB64R2", 65536) == "moba:L1kB64R2"
    assert at_matched_sparsity("exact", 65536) == "exact"


@pytest.mark.parametrize("kind", MATCHED_KINDS)
def test_every_matched_name_is_the_name_of_an_attention(kind: str) -> None:
    for length in (1, 300, 4096, 100_000, 1 << 20):
        get_attention(at_matched_sparsity(kind, length))


@pytest.mark.parametrize(("names", "repeats"), [("ab", 3), ("abc", 2)])
def test_attentions_take_turns_and_the_warm_up_is_not_counted(names: str, repeats: int) -> None:
    turns: list[str] = []

    def named(name: str) -> AttentionCall:
        def attention(query: Tensor, key: Tensor, value: Tensor, **arguments: bool) -> Tensor:
            turns.append(name)
            return sdpa(query, key, value, **arguments)

        return attention

    work = small_workload()
    told: list[tuple[int, int]] = []
    every = time_interleaved(
        [named(name) for name in names], work, repeats, lambda round_number, number: told.append((round_number, number))
    )
    assert turns == [names[number] for _, number in told]
    assert [round_number for round_number, _ in told] == [turn // len(names) for turn in range(len(turns))]
    rounds = [turns[begin : begin + len(names)] for begin in range(0, len(turns), len(names))]
    assert len(rounds) == repeats + 1
    assert all(sorted(order) == list(names) for order in rounds)
    assert all(order != following for order, following in itertools.pairwise(rounds))
    for times in every:
        assert len(times.forward) == len(times.forward_backward) == repeats
        assert all(0 < part < whole for part, whole in zip(times.forward, times.forward_backward, strict=True))
        assert min(times.forward) <= times.forward_median <= max(times.forward)
    assert work.query.grad is None


def test_a_long_warm_up_counts_as_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONG_RUN_SECONDS", 0.0)
    attention = Mock(wraps=sdpa)
    (times,) = time_interleaved([attention], small_workload(), 3)
    assert attention.call_count == len(times.forward) == 3


def test_the_workload_depends_on_the_seed_alone() -> None:
    first, second = small_workload(), small_workload()
    for name in ("query", "key", "value", "grad_out"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_all_cases_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    results = start_results(PLAN, path)
    steps = PLAN.steps(results)
    finished: list[int] = []
    run_plan(PLAN, results, path, on_step=lambda description, steps: finished.append(steps))
    assert finished == list(range(steps))
    assert PLAN.steps(results) == 0
    assert [(case.shape.length, case.request.attention) for case in results.cases] == [
        (512, MUSE),
        (512, "exact"),
        (600, MUSE),
        (600, "exact"),
    ]
    muse, exact = results.cases[:2]
    assert muse.attention == "muse:Q16K16R1SP1B256,clustering=lloyd"
    assert 0 < muse.fidelity["relative_squared_error"] < 0.5
    assert 0.5 < muse.fidelity["cosine"] < 1
    assert exact.fidelity["relative_squared_error"] < 1e-9
    assert muse.extra_memory_bytes is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["cpu.json"]
    assert BenchmarkResults.read(path) == results

    document = json.loads(path.read_text())
    assert document["cases"][0]["request"] == {"attention": MUSE, "shape": dataclasses.asdict(muse.shape)}
    assert document["machine"]["torch"] == torch.__version__


def test_all_attentions_of_a_length_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the baseline that a speed-up is against is the same for all of them."""
    time_once = Mock(wraps=timing.time_once)
    monkeypatch.setattr(timing, "time_once", time_once)
    results = measured(PLAN, tmp_path / "cpu.json")
    are_sdpa = [call.args[0] is sdpa for call in time_once.call_args_list]
    turns = 3 * (SETTINGS.repeats + 1) * 2
    assert len(are_sdpa) == turns
    assert all(sum(are_sdpa[begin : begin + 3]) == 1 for begin in range(0, turns, 3))
    first, second, third, _ = results.cases
    assert first.sdpa_times == second.sdpa_times != third.sdpa_times


GROUPED = dataclasses.replace(SETTINGS, heads=4, key_heads=2)


def test_keys_can_have_fewer_heads(tmp_path: Path) -> None:
    attentions = ("exact", MUSE, "block_diagonal:128", "moba:L128B16R1")
    plan = Plan.at_lengths(dataclasses.replace(GROUPED, repeats=1), (512,), attentions)
    path = tmp_path / "cpu.json"
    results = measured(plan, path)
    exact, *others = results.cases
    assert exact.fidelity["relative_squared_error"] < 1e-9
    assert all(case.fidelity["relative_squared_error"] > 1e-4 for case in others)
    assert {case.shape for case in results.cases} == {Shape(512, heads=4, key_heads=2, head_dim=8, batch=1)}
    report = markdown_report(results)
    assert "batch 1, 4:2 heads of 8, float32" in report
    assert "| exact | 512, 4:2 heads |" in report
    with pytest.raises(ValueError, match="key_heads was 2, now 4"):
        start_results(Plan.at_lengths(dataclasses.replace(plan.settings, key_heads=4), (512,), attentions), path)


def test_grouped_heads_share_their_keys() -> None:
    work = Plan.at_lengths(GROUPED, (64,), ("exact",)).workload(GROUPED.shape(64))
    assert [tensor.shape[1] for tensor in (work.query, work.key, work.value, work.grad_out)] == [4, 2, 2, 4]
    repeated = Workload.of(
        work.query,
        *(tensor.repeat_interleave(2, dim=1) for tensor in (work.key, work.value)),
        is_causal=True,
    )
    assert torch.allclose(work.forward(sdpa), repeated.forward(sdpa), atol=1e-6)


def markdown_report(results: BenchmarkResults, file_name: str = "t") -> str:
    return as_markdown(bench_report(results, file_name)).replace("\\", "")


def captures_file(folder: Path, length: int = 300, samples: int = 3, repeat: bool = False) -> CapturesFile:
    """Four heads of 8."""
    torch.manual_seed(length)
    tensors = [torch.randn(samples, 4, length, 8) for _ in range(3)]
    path = folder / f"heads-{length}.safetensors"
    save_captures(Captures(*tensors, Origin("a model", "a text", tuple("abcd"))), path)
    return CapturesFile(path, repeat)


def captured_plan(file: CapturesFile, *lengths: int, **changes: Any) -> Plan:
    settings = dataclasses.replace(SETTINGS, repeats=1, captures=file.data, **changes)
    return Plan.at_lengths(settings, lengths, (MUSE, "exact"), file)


@pytest.mark.long
def test_captured_heads_are_measured_on(tmp_path: Path) -> None:
    file = captures_file(tmp_path, repeat=True)
    plan = captured_plan(file, 400, memory=True)
    results = measured(plan, tmp_path / "cpu.json")
    assert [case.fidelity["relative_squared_error"] < 1e-9 for case in results.cases] == [False, True]
    expected = file.captures.with_heads(2).with_length(400, repeat=True)
    work = plan.workload(SETTINGS.shape(400))
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(work, name), getattr(expected, name)[:1])
    report = markdown_report(results)
    assert "queries, keys and values of a model, a text, laid end to end where they are shorter" in report
    assert "synthetic" not in report


def test_captured_groups_share_their_keys(tmp_path: Path) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 256, 8) for heads in (6, 2, 2))
    save_captures(
        Captures(query, key, value, Origin("a model", "a text", tuple("abcdef"))), tmp_path / "groups.safetensors"
    )
    file = CapturesFile(tmp_path / "groups.safetensors")
    plan = captured_plan(file, 256, heads=4, key_heads=2)
    work = plan.workload(plan.requests[0].shape)
    assert torch.equal(work.query, query[:, [0, 1, 3, 4]])
    assert torch.equal(work.key, key)
    assert work.arguments["enable_gqa"]
    plan = captured_plan(file, 256, heads=6, key_heads=6)
    own = plan.workload(plan.requests[0].shape)
    assert torch.equal(own.key, key.repeat_interleave(3, dim=1))


def test_results_on_other_captures_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    start_results(captured_plan(captures_file(tmp_path), 256), path).write(path)
    start_results(captured_plan(captures_file(tmp_path), 256), path)
    others = (
        captured_plan(captures_file(tmp_path, 310), 256),
        captured_plan(captures_file(tmp_path, repeat=True), 256),
    )
    for other in (*others, Plan.at_lengths(dataclasses.replace(SETTINGS, repeats=1), (256,), ("exact",))):
        with pytest.raises(ValueError, match="captures was a model, a text"):
            start_results(other, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5, "key_heads": 5}, "4 heads were captured, not 5; choose fewer --heads, or a multiple of all"),
        ({"heads": 4}, "4 groups of 1 heads were captured, not 2 of 2; choose other --heads and --key-heads"),
        ({"head_dim": 16}, "have dimension 8, not 16"),
        ({"batch": 4}, "have 3 of 4 samples of 256 tokens; choose a smaller --batch or --length"),
    ],
)
def test_captures_of_another_shape_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        captured_plan(captures_file(tmp_path), 256, **changes)
    with pytest.raises(ValueError, match=r"300 tokens, less than 400; .* with --repeat-captures"):
        captured_plan(captures_file(tmp_path), 256, 400)


def test_the_report_says_which_operator_the_baseline_ran_through() -> None:
    def cases(*backends: str) -> list[Case]:
        shapes = [SETTINGS.shape(length) for length in (512, 600, 700)]
        return [
            dataclasses.replace(some_case(shape), sdpa_backend=backend)
            for shape, backend in zip(shapes, backends, strict=False)
        ]

    def said(*backends: str) -> str:
        return caption(BenchmarkResults({}, SETTINGS, cases=cases(*backends)))

    assert "SDPA ran through cuDNN. " in said("cuDNN", "cuDNN")
    assert "SDPA ran through cuDNN at 512, 700; FlashAttention at 600. " in said("cuDNN", "FlashAttention", "cuDNN")
    assert small_workload().sdpa_backend == "FlashAttention"


def test_the_spread_is_between_the_quartiles() -> None:
    assert Times((1.0,) * 4, (1.0, 3.0, 2.0, 10.0)).spread == pytest.approx((4.75 - 1.75) / 2.5)
    assert Times((1.0,), (2.0,)).spread is None
    steady, shaky = Times((1.0, 1.0), (2.0, 2.0)), Times((1.0, 1.0), (2.0, 4.0))
    case = dataclasses.replace(some_case(SETTINGS.shape(512)), times=steady, sdpa_times=shaky)
    assert case.spread == shaky.spread
    quiet = dataclasses.replace(some_case(SETTINGS.shape(600)), times=steady, sdpa_times=steady)
    (line,) = noise_lines(BenchmarkResults({}, SETTINGS, [], [case, quiet]))
    assert "too noisy: times at 512 have a spread of up to 33%, above the bound of 10%" in line
    assert line in markdown_report(BenchmarkResults(describe_machine(), SETTINGS, [], [case])).replace("\\", "")
    assert noise_lines(BenchmarkResults({}, SETTINGS, [], [quiet])) == []


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"

    def interrupt(description: str, steps: int) -> None:
        if description == "exact at 512: fidelity":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(PLAN, start_results(PLAN, path), path, on_step=interrupt)
    (kept,) = BenchmarkResults.read(path).cases

    results = start_results(PLAN, path)
    assert PLAN.missing(results) == [
        BenchmarkRequest("exact", SETTINGS.shape(512)),
        BenchmarkRequest(MUSE, SETTINGS.shape(600)),
        BenchmarkRequest("exact", SETTINGS.shape(600)),
    ]
    run_plan(PLAN, results, path)
    assert PLAN.missing(BenchmarkResults.read(path)) == []
    assert BenchmarkResults.read(path).cases[0] == kept


def test_the_report_names_machine_versions_command_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    plan = Plan.at_lengths(SETTINGS, lengths=(512,), attentions=MATCHED_KINDS)
    results = start_results(plan, path)
    results.commands.append("muse bench --lengths 512")
    run_plan(plan, results, path)
    report = markdown_report(results)
    for expected in (
        f"torch {torch.__version__}",
        str(results.machine["cpu"]),
        "muse bench --lengths 512",
        f"| muse:{MuSeConfig.for_length(512)} |",
        "| block_diagonal:256 |",
        "| moba:L256B16R1 |",
        "without the inputs, with the output and the gradients",
    ):
        assert expected in report
    assert str(tmp_path) not in report
    (times, retrieved, gradients) = (
        table for section in bench_report(results, "cpu").sections for table in section.tables
    )
    assert len(times.rows) == len(retrieved.rows) == len(gradients.rows) == 3


def test_the_machine_with_a_gpu_is_described_by_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Abacus 3000")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(machine, "_first_line_of", lambda *command: "580.1" if command[0] == "nvidia-smi" else None)
    monkeypatch.setitem(sys.modules, "triton", None)
    described = describe_machine()
    expected = {"gpu": "Abacus 3000", "gpu_memory_gib": 1, "driver": "580.1", "cuda": "13.0", "cudnn": 91900}
    assert described | expected | {"triton": None, "torch": torch.__version__} == described


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "own block"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", "own block"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "own block"),
        ("_take_starts", "clustering"),
        ("_take_rows", "sorting"),
        ("_summarise_backward", "summaries"),
        ("_mark_terms", "selection"),
        ("_summaries_backward_to_queries", "attention to summaries"),
        ("_buckets_backward_to_queries", "retrieval"),
        ("_add_to_queries", "merging"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
        ("Memset (Device)", "other"),
    ],
)
def test_the_name_of_a_kernel_tells_its_stage(kernel: str, stage: str) -> None:
    assert stage_of(kernel) == stage


def test_every_kernel_of_the_library_is_known() -> None:
    sources = [path.read_text() for path in (Path(backends.__file__).parent / "triton").glob("*.py")]
    launched = {name for text in sources for name in re.findall(r"@kernel\([^@]*?\)\ndef (_[a-z_]+)\(", text)}
    assert len(launched) > 30
    assert sorted(name for name in launched if stage_of(name) == "other") == []


def test_without_triton_only_fused_attention_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results are read there may be no Triton: reports still have the stages in their order."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    stages._stages_of_kernels.cache_clear()
    try:
        assert [stage_of("_merge"), stage_of("flash_fwd")] == ["other", "own block"]
    finally:
        stages._stages_of_kernels.cache_clear()


def test_times_of_kernels_are_summed_by_stage() -> None:
    sums = sum_by_stage([("_merge", 1.0), ("_find_delta", 2.0), ("flash_fwd", 4.0), ("copy", 8.0), ("_merge", 16.0)])
    assert list(sums) == list(STAGES)
    assert {stage: time for stage, time in sums.items() if time} == {"own block": 4, "merging": 19, "other": 8}


def test_stages_are_measured_after_all_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU: a plan for CUDA whose stages are made up, on data of the CPU."""
    made = Mock(side_effect=lambda shape: small_workload())
    monkeypatch.setattr(Plan, "workload", made)
    monkeypatch.setattr(suite, "measure_stages", lambda attention, workload: sum_by_stage([("flash", 3), ("_cut", 1)]))
    path = tmp_path / "cuda.json"
    plan = Plan.at_lengths(dataclasses.replace(SETTINGS, device="cuda"), (512, 600), ("muse", "exact"))
    results = start_results(plan, path)
    assert plan.steps(results) == 4 * (1 + SETTINGS.repeats + 1) + 4
    steps: list[str] = []
    run_plan(plan, results, path, on_step=lambda description, finished: steps.append(description.split(": ")[1]))
    assert steps[-4:] == ["stages"] * 4
    assert "stages" not in steps[:-4]
    assert [call.args[0].length for call in made.call_args_list] == [512, 600, 512], "600 is still there for its stages"
    assert plan.steps(results) == 0
    assert BenchmarkResults.read(path) == results
    section = markdown_report(results).partition("## Share of each stage")[2].partition("## Names")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert "| exact | 512 | 3.00 ms (75%) | - | 1.00 ms (25%) |" in rows[3]
    assert rows[3].endswith("| 4.00 ms |")


@pytest.mark.parametrize(
    ("name", "configs"),
    [
        ("retrieved", [f"Q128K128R{retrieved}SP1B8k" for retrieved in (1, 2, 4, 8, 16)]),
        ("clusters-and-retrieved", [f"Q{n}K{n}R{n // 16}SP1B8k" for n in (16, 32, 64, 128, 256, 512)]),
        ("block-size-of-span", [f"Q128K128R4SP{16 // n}B{n}k" for n in (2, 4, 8, 16)]),
        ("monopole-clusters", [f"Q{n}K{n}R0SP1B16k" for n in (64, 128, 256)]),
        ("block-size", [f"Q128K128R8SP1B{size}" for size in ("2k", "4k", "8k", "16k")]),
    ],
)
def test_a_sweep_of_the_method_changes_one_choice(name: str, configs: list[str]) -> None:
    plan = sweep_plan(name)
    assert plan.attentions == tuple(f"muse:{config},clustering=lloyd" for config in configs)
    assert {request.shape for request in plan.requests} == {SETTINGS.shape(65536)}


@pytest.mark.parametrize(
    ("name", "config"), [("monopole-length", "Q128K128R0SP1B8k"), ("monopole-length-16k", "Q64K64R0SP1B16k")]
)
def test_a_sweep_over_lengths_keeps_the_number_of_tokens(name: str, config: str) -> None:
    plan = sweep_plan(name)
    assert plan.attentions == (f"muse:{config},clustering=lloyd",)
    assert [(request.shape.length, request.shape.batch) for request in plan.requests] == [
        (32768, 4),
        (65536, 2),
        (131072, 1),
    ]
    results = BenchmarkResults(
        describe_machine(), plan.settings, [], [some_case(request.shape) for request in plan.requests]
    )
    report = markdown_report(results)
    assert "causal attention, the batch that the table says, 2 heads of 8" in report
    assert "| exact | 32k, batch 4 |" in report
    with pytest.raises(ValueError, match="has batches of its own; leave out --batch"):
        sweep_requests(dataclasses.replace(SETTINGS, sweep=name, batch=2), 65536)


def test_a_sweep_of_the_inputs_changes_their_shape() -> None:
    dims, heads = sweep_plan("head-dim"), sweep_plan("heads")
    assert dims.attentions == heads.attentions == ("muse:Q128K128R8SP1B8k,clustering=lloyd",)
    assert [request.shape for request in dims.requests] == [Shape(65536, 2, 2, dim, 1) for dim in (64, 128)]
    assert [request.shape for request in heads.requests] == [
        Shape(65536, count, count, 8, 1) for count in (2, 4, 8, 16)
    ]


@pytest.mark.parametrize("name", SWEEPS)
def test_the_values_of_a_sweep_can_be_told_from_its_cases(name: str) -> None:
    sweep = SWEEPS[name]
    assert [sweep.value_of(request) for request in sweep_plan(name).requests] == list(sweep.values)


def test_a_sweep_of_the_default_has_that_of_the_length() -> None:
    for length in (16384, 65536):
        assert sweep_plan("heads-of-default", length).attentions == (f"muse:{MuSeConfig.for_length(length)}",)


def test_a_sweep_leaves_out_what_would_be_exact() -> None:
    assert sweep_plan("block-size", 8192).attentions == tuple(
        f"muse:Q128K128R8SP1B{size},clustering=lloyd" for size in ("2k", "4k")
    )


def test_a_sweep_over_heads_has_keys_for_each() -> None:
    with pytest.raises(ValueError, match="as many key heads as heads; leave out --key-heads"):
        sweep_requests(dataclasses.replace(GROUPED, sweep="heads"), 65536)


def test_the_report_of_a_sweep_over_the_inputs_says_the_shape_of_each_case() -> None:
    settings = dataclasses.replace(SETTINGS, sweep="heads")
    results = BenchmarkResults(
        describe_machine(), settings, cases=[some_case(Shape(65536, heads, heads, 8, 1)) for heads in (2, 4)]
    )
    report = markdown_report(results)
    assert "as many heads as the table says of 8" in report
    assert "| exact | 64k, heads 2 |" in report
    assert "| exact | 64k, heads 4 |" in report


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak memory of Linux")
def test_extra_memory_counts_output_and_gradients_but_not_inputs() -> None:
    case = MemoryCase("sdpa", length=8192, head_dim=64, dtype="float32", device="cpu", is_causal=True)
    extra = measure_extra_memory(case)
    one_tensor = 8192 * 64 * 4
    assert 3.5 * one_tensor < extra < 12 * one_tensor


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MatplotlibMissingError, match=r"pip install .muse-attention\[cli\]."):
        line_figure("", "", [Line("muse", [(512, 1.0)], "#000000")], Axis("length"), Axis("speed-up")).draw()


def test_what_was_retrieved_is_shown(tmp_path: Path) -> None:
    attentions = ("muse:Q8K8R2SP1B128", "muse:Q8K8T0.1B128", "moba:L128B16R1", "exact")
    plan = Plan.at_lengths(dataclasses.replace(SETTINGS, repeats=1), lengths=(512,), attentions=attentions)
    results = measured(plan, tmp_path / "cpu.json")
    paper, tolerant, moba, exact = results.cases
    assert paper.fidelity["pairs_per_query"] == pytest.approx(2 * 3 / 4)
    assert 0 < tolerant.fidelity["found_share"] <= 1
    assert moba.fidelity["keys_per_query"] == pytest.approx(16 * 3 / 4)
    assert "pairs_per_query" not in exact.fidelity
    report = markdown_report(results)
    header = next(line for line in report.splitlines() if "| keys" in line)
    assert header.startswith("| attention | length | RSE 99% | RSE 99.9% |")
    assert header.endswith("| pairs | keys | retrieving | found |")
    (line,) = [line for line in report.splitlines() if "moba:L128B16R1" in line and "| 12.0 |" in line]
    assert f"| 0.75 | 12.0 | 75.0% | {100 * moba.fidelity['found_share']:.1f}% |" in line


def test_the_error_of_gradients_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    attentions = ("exact", "muse:Q8K8T0.1B128")
    plan = Plan.at_lengths(dataclasses.replace(SETTINGS, repeats=1, key_heads=1), lengths=(512,), attentions=attentions)
    results = measured(plan, tmp_path / "cpu.json")
    exact, muse = results.cases
    workload = plan.workload(muse.shape)
    errors = measure_gradients(get_attention(attentions[1]), *workload.tensors, **workload.arguments).pooled()
    assert {name: muse.fidelity[name] for name in errors} == pytest.approx(errors)
    assert all(exact.fidelity[name] == 0 < error < 1 for name, error in errors.items())
    report = markdown_report(results)
    assert "| attention | length | dq RSE | dk RSE | dv RSE |" in report
    assert "| exact | 512, 2:1 heads | 0 | 0 | 0 |" in report
    earlier = dataclasses.replace(results, cases=[some_case(SETTINGS.shape(512))])
    assert "dq RSE" not in markdown_report(earlier)


def test_the_report_says_how_many_queries_looked_for_single_keys() -> None:
    fidelity = {"relative_squared_error": 0.1, "cosine": 1.0, "found_share": 0.9}
    cases = [
        dataclasses.replace(some_case(SETTINGS.shape(length)), fidelity=fidelity | of_queries)
        for length, of_queries in ((65536, {}), (524288, {"found_queries": 8192.0}))
    ]
    report = markdown_report(BenchmarkResults(describe_machine(), SETTINGS, [], cases))
    assert "Found is measured on evenly spaced queries of each head: 8,192 at 512k." in report


def test_reports_of_earlier_results_have_no_table_of_what_was_retrieved() -> None:
    results = BenchmarkResults(describe_machine(), SETTINGS, [], [some_case(SETTINGS.shape(512))])
    assert "retrieved" not in markdown_report(results)
