"""`muse tune`: captured heads, the grid, the front, results and the command, on a tiny random model."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, call

import pytest
import torch

from muse_attention import MuSeConfig, defaults, exact_attention
from muse_attention.defaults import Default
from muse_lab.benchmark.timing import Times
from muse_lab.benchmark.tuning import (
    Candidate,
    Found,
    TuningResults,
    TuningSettings,
    candidates,
    front,
    measure,
    measure_costs,
)
from muse_lab.benchmark.tuning_report import table_of, tuning_report, verdict
from muse_lab.records.captured_heads import (
    Captures,
    LookupAt,
    Origin,
    capture_heads,
    load_captures,
    save_captures,
    spread,
)
from muse_lab.records.eight_bits import restore, round_to_eight_bits
from muse_lab.records.machine import describe_machine
from muse_lab.records.means import Mean
from muse_lab.report.html import as_html
from muse_lab.report.markdown import as_markdown
from tests.command_line import assert_done, assert_done_quietly, assert_refused, run_muse
from tests.models import capture, tiny_llama, token_ids
from tests.needle_models import needle_tokenizer, write_needle_model, write_texts

COARSE = "muse:Q4K4R1SP1B32,clustering=lloyd"
FINE = "muse:Q4K8T0.02B32"
run = functools.partial(run_muse, "tune")


def some_captures(length: int = 128, samples: int = 2, lookups: tuple[LookupAt, ...] = ()) -> Captures:
    query, key, value = (torch.randn(samples, 3, length, 8) for _ in range(3))
    heads = tuple(f"layer {index}, head 0" for index in range(3))
    return Captures(query, key, value, Origin("a model", "a text", heads), lookups)


def settings(captures: Captures) -> TuningSettings:
    return TuningSettings.of(captures, device="cpu", dtype="float32", repeats=1)


def candidate(time: float, error: float, name: str = "muse:QK4") -> Candidate:
    return Candidate(name, Times((time / 2,), (time,)), {"relative_squared_error": error})


def one_second(attention: str) -> Times:
    return Times((0.5,), (1.0,))


# Captures


def test_captured_heads_are_those_of_the_layers_they_are_spread_over() -> None:
    model, ids = tiny_llama(), token_ids(40, batch=2)
    found = capture_heads(model, ids, 2, model_name="tiny", text="random")
    assert found.origin.heads == ("layer 0, head 2", "layer 1, head 2")
    for index, layer in enumerate(capture(model, ids)):
        expected = exact_attention(
            layer.query, layer.key, layer.value, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        alone = exact_attention(found.query, found.key, found.value, is_causal=True)
        torch.testing.assert_close(alone[:, index], expected[:, 2])


def test_groups_of_heads_keep_the_keys_they_share(tmp_path: Path) -> None:
    model, ids = tiny_llama(), token_ids(40, batch=2)
    found = capture_heads(model, ids, 3, model_name="tiny", text="random", grouped=True)
    assert found.origin.heads == tuple(f"layer {layer}, head {head}" for layer in (0, 1) for head in (2, 3))
    assert (found.query.shape[1], found.key.shape[1], found.value.shape[1]) == (4, 2, 2)
    together = exact_attention(found.query, found.key, found.value, is_causal=True, enable_gqa=True)
    for index, layer in enumerate(capture(model, ids)):
        expected = exact_attention(
            layer.query, layer.key, layer.value, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        torch.testing.assert_close(together[:, 2 * index : 2 * index + 2], expected[:, 2:])

    save_captures(found, tmp_path / "groups.safetensors")
    loaded = load_captures(tmp_path / "groups.safetensors")
    alone = loaded.with_heads(4)
    assert alone.key.shape == alone.query.shape
    torch.testing.assert_close(exact_attention(alone.query, alone.key, alone.value, is_causal=True), together)
    one = loaded.with_heads(2, key_heads=1)
    torch.testing.assert_close(
        exact_attention(one.query, one.key, one.value, is_causal=True, enable_gqa=True), together[:, 2:]
    )
    with pytest.raises(ValueError, match="2 groups of 2 heads were captured, not 1 of 4; choose other --heads"):
        loaded.with_heads(4, key_heads=1)
    for number in (0, -4):
        with pytest.raises(ValueError, match=f"cannot measure {number} heads; use at least 1"):
            loaded.with_heads(number)


@pytest.mark.parametrize(("available", "number", "expected"), [(8, 2, [2, 6]), (3, 9, [0, 1, 2]), (270, 1, [135])])
def test_heads_are_spread(available: int, number: int, expected: list[int]) -> None:
    assert spread(available, number) == expected


def test_captures_survive_a_file(tmp_path: Path) -> None:
    saved = some_captures(lookups=(LookupAt(1, 60, (3, 4)),))
    path = tmp_path / "captures.safetensors"
    save_captures(saved, path)
    loaded = load_captures(path)
    assert (loaded.origin, loaded.lookups, loaded.fingerprint) == (saved.origin, saved.lookups, saved.fingerprint)
    assert torch.equal(loaded.query, saved.query)


def test_compact_captures_are_small_and_nearly_the_same(tmp_path: Path) -> None:
    model, ids = tiny_llama(), token_ids(400, batch=2)
    captured = capture_heads(model, ids, 4, model_name="tiny", text="random", grouped=True)
    path, again = tmp_path / "captures.safetensors", tmp_path / "again.safetensors"
    for file in (path, again):
        save_captures(captured, file, compact=True)
    save_captures(captured, tmp_path / "whole.safetensors")
    loaded = load_captures(path)
    assert (loaded.origin, loaded.group_size, loaded.query.dtype) == (captured.origin, 2, torch.float32)
    assert loaded.fingerprint == load_captures(again).fingerprint
    assert path.stat().st_size < (tmp_path / "whole.safetensors").stat().st_size / 2
    expected, found = (
        exact_attention(heads.query, heads.key, heads.value, is_causal=True, enable_gqa=True)
        for heads in (captured, loaded)
    )
    assert (found - expected).square().sum() < 3e-4 * expected.square().sum()


def test_rounding_is_by_half_a_scale() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(2, 3, 50, 8) * torch.tensor([1000.0, 1, 1, 1, 1e-3, 0, 1, 1])
    tensor[0, 0, 7] = 0
    rounded = round_to_eight_bits(tensor)
    assert (rounded.numbers.dtype, rounded.rows.shape) == (torch.int8, (2, 3, 50, 1))
    restored = restore(rounded)
    assert ((restored - tensor).abs() <= 0.51 * rounded.rows * rounded.channels).all()
    assert torch.equal(restored == 0, (rounded.numbers == 0) | (tensor == 0))
    assert ((restored - tensor).square().sum((0, 1, 2)) <= 1e-4 * tensor.square().sum((0, 1, 2))).all()
    tensor[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        round_to_eight_bits(tensor)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_captures(tmp_path / "none.pt")
    for name, fault in (("other.safetensors", "does not hold captures; write"), ("other.pt", r"torch\.save .*; write")):
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(ValueError, match=f"{fault} them with muse tune --save-captures FILE"):
            load_captures(tmp_path / name)
    for lookup in (LookupAt(5, 60, (3,)), LookupAt(0, 60, (61,)), LookupAt(0, 600, (3,)), LookupAt(0, 60, ())):
        save_captures(some_captures(lookups=(lookup,)), tmp_path / "lookups.safetensors")
        with pytest.raises(ValueError, match="does not hold captures"):
            load_captures(tmp_path / "lookups.safetensors")


def test_shorter_captures_are_laid_end_to_end_where_that_is_asked_for() -> None:
    found = some_captures(lookups=(LookupAt(1, 100, (90, 91)),))
    with pytest.raises(ValueError, match=r"have 128 tokens, less than 300; .* --repeat-captures"):
        found.with_length(300)
    long = found.with_length(300, repeat=True)
    assert long.query.shape == (1, 3, 300, 8)
    assert torch.equal(long.key[0], torch.cat([found.key[0], found.key[1], found.key[0]], 1)[:, :300])
    assert long.lookups == (LookupAt(0, 228, (218, 219)),)
    assert long.origin.laid == "3 captures of 128 tokens laid end to end, 2 of them different"
    assert found.with_length(100).query.shape == (2, 3, 100, 8)
    assert found.with_length(100).lookups == ()


# The grid and the front


def test_the_grid_is_around_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "DEFAULTS", (Default(None, "QK16T0.5B4k"),))
    names = candidates(65536, added=["moba:L8kB512R1", "exact", "muse"])
    of_the_length = (MuSeConfig.paper(65536), MuSeConfig.paper_sizes(65536), MuSeConfig.for_length(65536))
    assert names[:3] == [f"muse:{config}" for config in of_the_length]
    assert len(names) == len(set(names)) == 3 + 60 + 1
    assert {"muse:Q16K64T0.05B2k", "muse:Q8K32T0.1B8k,search=0.05", "muse:Q8K32T0.4B8k,caution=2.0"} < set(names)
    assert names[-1] == "moba:L8kB512R1"
    blocks = {MuSeConfig.parse(name.removeprefix("muse:")).block_size for name in candidates(4096)[3:]}
    assert blocks == {256, 512}
    assert candidates(65536, only=["muse:paper"]) == [f"muse:{MuSeConfig.paper(65536)}"]
    with pytest.raises(ValueError, match="fit in one block"):
        candidates(256)


def test_the_front_has_what_nothing_beats() -> None:
    found = [candidate(*point) for point in ((3, 0.1), (1, 0.5), (2, 0.2), (2.5, 0.3), (4, 0.1), (5, 0.01), (1, 0.6))]
    assert [(one.time, one.error) for one in front(found)] == [(1, 0.5), (2, 0.2), (3, 0.1), (5, 0.01)]
    assert front([]) == []


def test_the_fastest_that_is_as_good_as_the_papers_sizes_is_chosen() -> None:
    """A configuration may err no more than these, and must find as many single keys."""

    def finding(time: float, error: float, found: float, name: str) -> Candidate:
        one = candidate(time, error, name)
        return dataclasses.replace(one, fidelity=one.fidelity | {"found_share": found})

    sizes = f"muse:{MuSeConfig.paper_sizes(128)}"
    tuned = [
        finding(1, 0.3, 0.9, "errs more"),
        finding(2, 0.1, 0.4, "finds less"),
        finding(3, 0.2, 0.5, "fastest"),
        finding(4, 0.1, 0.9, "slower"),
        finding(5, 0.2, 0.5, sizes),
    ]
    results = TuningResults({}, settings(some_captures()), exact=Times((2.0,), (4.0,)), tuned=tuned)
    assert results.chosen is tuned[2]
    assert "an RSE of at most 0.2 that finds at least 50.0% of the single keys is fastest" in verdict(results)[0]
    assert dataclasses.replace(results, error=0.1).chosen is tuned[1]
    assert dataclasses.replace(results, error=0.01).chosen is None
    alone = dataclasses.replace(results, tuned=tuned[:2])
    assert alone.chosen is None
    assert "The paper's sizes were not measured; the lowest RSE is 0.1, of finds less" in verdict(alone)[0]


COSTS = {"slow": Mean(0.001, 0.0002), "fastest": Mean(0.03, None), "fast": Mean(0.002, 0.0003), "slower": Mean(0, 0)}


def before_costs() -> TuningResults:
    """Four configurations, of which exact attention is faster than one."""
    tuned = [
        candidate(time, error, name)
        for time, error, name in ((3, 0.2, "slow"), (1, 0.3, "fastest"), (2, 0.4, "fast"), (5, 0.1, "slower"))
    ]
    return TuningResults(describe_machine(), settings(some_captures()), exact=Times((2.0,), (4.0,)), tuned=tuned)


@pytest.mark.parametrize(
    ("limit", "asked", "chosen"),
    [
        (0.05, ["fastest"], "fastest"),
        (0.002, ["fastest", "fast"], "fast"),
        (0.0015, ["fastest", "fast", "slow"], "slow"),
        (0, ["fastest", "fast", "slow"], None),
    ],
)
def test_costs_are_measured_from_the_fastest_on_until_one_is_small(
    limit: float, asked: list[str], chosen: str | None, tmp_path: Path
) -> None:
    results, cost_of = dataclasses.replace(before_costs(), cost=limit), Mock(side_effect=COSTS.__getitem__)
    measure_costs(results, limit, tmp_path / "tune.json", cost_of)
    assert cost_of.mock_calls == [call(name) for name in asked]
    assert (results.chosen and results.chosen.attention) == chosen
    assert TuningResults.read(tmp_path / "tune.json") == results


def test_costs_go_on_where_they_were_interrupted_and_serve_another_limit(tmp_path: Path) -> None:
    path, interrupted = tmp_path / "tune.json", Mock(side_effect=[COSTS["fastest"], KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        measure_costs(before_costs(), 0.0015, path, interrupted)
    results, cost_of = TuningResults.read(path), Mock(side_effect=COSTS.__getitem__)
    for limit in (0.0015, 0.002, 0.05):
        measure_costs(results, limit, path, cost_of)
    assert cost_of.mock_calls == [call("fast"), call("slow")]
    assert [one.cost for one in results.tuned] == [COSTS["slow"], COSTS["fastest"], COSTS["fast"], None]


def test_reports_say_what_was_chosen_by_cost(tmp_path: Path) -> None:
    results = dataclasses.replace(before_costs(), cost=0.002)
    (line,) = verdict(results)
    assert line == "Nothing measured so far has a cost of at most 0.002 nats"
    assert "cost" not in table_of(results, results.tuned).titles
    measure_costs(results, 0.002, tmp_path / "tune.json", COSTS.__getitem__)
    (line,) = verdict(results)
    assert "The fastest with a cost of at most 0.002 nats is fast: +0.0020 ± 0.0003 nats, RSE 0.4, 2000 ms" in line
    assert table_of(results, results.faster).column("cost") == ["+0.0300", "+0.0020 ± 0.0003", ""]
    assert "minus that under exact attention, in nats" in as_html(tuning_report(results, "t"))
    results.cost = 0.0001
    measure_costs(results, 0.0001, tmp_path / "tune.json", COSTS.__getitem__)
    first, second = verdict(results)
    assert first == (
        "Nothing faster than exact attention has a cost of at most 0.0001 nats; "
        "the lowest is +0.0010 ± 0.0002, of slow, in 3000 ms"
    )
    assert second == "Exact attention takes 4000 ms: use that"


# TuningResults


def test_time_error_and_lookups_are_measured(tmp_path: Path) -> None:
    found = some_captures(lookups=(LookupAt(0, 120, (3, 4)), LookupAt(1, 120, (119,))))
    results = TuningResults({}, settings(found))
    measure(found, [COARSE, FINE, "block_diagonal:32"], results, tmp_path / "tune.json", one_second)
    coarse, fine, local = results.tuned
    assert 0 < fine.error < coarse.error < local.error
    assert fine.fidelity["error_p99"] > fine.error
    assert 0 < coarse.lookup.share <= fine.lookup.share <= fine.lookup.exact_share <= 1
    assert local.lookup is None
    assert TuningResults.read(tmp_path / "tune.json") == results


def test_the_leak_is_what_the_second_half_of_another_text_changes(tmp_path: Path) -> None:
    """Beside the error of the same queries: 0 where both texts end alike, and unknown of one text alone."""
    found, causal = some_captures(), "block_diagonal:32"
    results = TuningResults(describe_machine(), settings(found))
    measure(found, [COARSE, causal], results, tmp_path / "tune.json", one_second)
    coarse, local = (one.fidelity for one in results.tuned)
    assert 0 < coarse["future_influence"] < 4 * coarse["first_half_error"]
    assert (local["future_influence"], local["first_half_error"] > 0) == (0, True)
    table = table_of(results, results.tuned)
    assert table.column("leak") == [f"{coarse['future_influence']:.3g}", "0"]

    for name in ("query", "key", "value"):
        getattr(found, name)[:, :, 64:] = getattr(found, name)[:1, :, 64:]
    alone = dataclasses.replace(found, query=found.query[:1], key=found.key[:1], value=found.value[:1])
    for captures, leak in ((found, 0), (alone, None)):
        results = TuningResults({}, settings(captures))
        measure(captures, [COARSE], results, tmp_path / "tune.json", one_second)
        assert results.tuned[0].fidelity.get("future_influence") == leak


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    found, path = some_captures(), tmp_path / "tune.json"
    clock = Mock(wraps=one_second, side_effect=[DEFAULT, DEFAULT, KeyboardInterrupt, DEFAULT])
    with pytest.raises(KeyboardInterrupt):
        measure(found, [COARSE, FINE], TuningResults({}, settings(found)), path, clock)
    results = TuningResults.read(path)
    measure(found, [COARSE, FINE], results, path, clock)
    assert clock.mock_calls == [call("exact"), call(COARSE), call(FINE), call(FINE)]
    assert [one.attention for one in results.tuned] == [COARSE, FINE]


def test_results_from_before_there_were_costs_are_read(tmp_path: Path) -> None:
    path, results = tmp_path / "tune.json", before_costs()
    results.write(path)
    document = json.loads(path.read_text())
    for part in (document, *document["tuned"]):
        del part["cost"]
    path.write_text(json.dumps(document))
    assert TuningResults.read(path) == results


def test_too_little_memory_for_one_is_no_end(tmp_path: Path) -> None:
    def clock(attention: str) -> Times:
        if attention == COARSE:
            raise torch.OutOfMemoryError
        return one_second(attention)

    found, path = some_captures(), tmp_path / "tune.json"
    results = TuningResults(describe_machine(), settings(found))
    measure(found, [COARSE, FINE], results, path, clock)
    assert [one.attention for one in results.measured] == [FINE]
    assert TuningResults.read(path) == results
    assert f"Too little memory for: {COARSE}." in as_html(tuning_report(results, "t"))


def test_the_verdict_names_what_to_take() -> None:
    found = some_captures()
    paper = f"muse:{MuSeConfig.paper(128)}"
    tuned = [candidate(2.0, 0.004, FINE), candidate(1.0, 0.02, COARSE), candidate(3.0, 0.008, paper)]
    results = TuningResults({"cpu": "c"}, settings(found), error=0.005, exact=Times((2.0,), (4.0,)), tuned=tuned)
    first, second = verdict(results)
    assert f"at most 0.005 is {FINE}: RSE 0.004, 2000 ms, 2.00x as fast as exact" in first
    assert "The paper's method has RSE 0.008 in 3000 ms" in second
    faster = dataclasses.replace(results, exact=Times((0.5,), (1.0,)))
    assert "Exact attention is faster here, 1000 ms: use that" in verdict(faster)[1]
    (line,) = verdict(dataclasses.replace(results, error=0.001))
    assert "Nothing measured has an RSE of at most 0.001; the lowest RSE is 0.004" in line
    assert "Nothing has been measured" in verdict(dataclasses.replace(results, tuned=[]))[0]


def test_reports_have_every_configuration() -> None:
    tuned = [
        candidate(2.0, 0.004, FINE),
        dataclasses.replace(candidate(3.0, 0.02, COARSE), lookup=Found(2.0, 1.0, 1.5)),
    ]
    found = some_captures().with_length(200, repeat=True)
    results = TuningResults(describe_machine(), settings(found), error=0.005, exact=Times((2.0,), (4.0,)), tuned=tuned)
    for report in (as_markdown(tuning_report(results, "t")), as_html(tuning_report(results, "t"))):
        for expected in ("laid end to end", "50.0%", "75.0%", "2000", "2.00x", "layer 2, head 0"):
            assert expected in report


# The command


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> list[object]:
    text = folder.parent / "long.txt"
    arguments = [folder, "--text", text, "--length", "128", "--heads", "2", "--repeats", "1"]
    return [*arguments, "--only", COARSE, "--only", FINE, "--device", "cpu", "--output", tmp_path / "out"]


def test_the_command_measures_and_names_the_fastest(asked: list[object], tmp_path: Path) -> None:
    out = assert_done_quietly(run(*asked, "--error", "1"))
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["tiny.html", "tiny.json", "tiny.md", "tiny.png"]
    assert "The fastest with an RSE of at most 1 is muse:Q4K" in out
    document = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert document["commands"] == [
        f"muse tune tiny --text long.txt --length 128 --error 1.0 --heads 2 --samples 1 --only {COARSE} --only {FINE} "
        "--repeats 1 --device cpu --dtype float32 --name tiny"
    ]
    assert document["settings"]["heads"] == ["layer 0, head 2", "layer 1, head 2"]
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()
    assert run_muse("report", tmp_path / "out")[0] == 0
    assert "Time against error" in (tmp_path / "out" / "index.html").read_text()


def test_the_command_goes_on_where_it_was_interrupted(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(captures: Any, attentions: Any, *others: Any, **options: Any) -> None:
        measure(captures, attentions[:1], *others, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as before:
        before.setattr("muse_lab.cli.tune.measure", interrupted)
        code, _, err = run(*asked)
    assert code == 130
    (line,) = err.splitlines()
    assert "interrupted; what is finished is in" in line
    assert line.endswith(f"--output {tmp_path / 'out'}")
    assert [one.attention for one in TuningResults.read(tmp_path / "out" / "tiny.json").tuned] == [COARSE]
    assert run(*asked)[0] == 0
    names = [one.attention for one in TuningResults.read(tmp_path / "out" / "tiny.json").tuned]
    assert names == [COARSE, FINE, f"muse:{MuSeConfig.paper_sizes(128)}"]


def test_the_command_chooses_by_the_loss_of_the_model(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's method leaks, so it does not count; what retrieves nothing costs too much; the next retrieves all."""
    nothing, everything, path = "muse:Q4K2TinfB8", "muse:Q4K8T0.0B32", tmp_path / "out" / "tiny.json"
    seconds = {COARSE: 1.0, nothing: 1.5, everything: 2.0, FINE: 3.0, "exact": 4.0}
    monkeypatch.setattr("muse_lab.cli.tune.clock_on", lambda *given: lambda name: Times((0.1,), (seconds[name],)))
    again = [*asked, "--only", f"{nothing},{everything}", "--samples", "2"]
    out = assert_done_quietly(run(*again, "--cost", "1e-4"))
    assert f"The fastest with a cost of at most 0.0001 nats is {everything}: " in out
    costs = {one.attention: one.cost for one in TuningResults.read(path).tuned}
    assert list(costs) == [COARSE, FINE, nothing, everything]
    assert (abs(costs[everything].mean) < 1e-5, costs[FINE], costs[COARSE]) == (True, None, None)
    losses = run_muse("loss", *asked[:5], "--samples", "2", "--attention", nothing, *asked[-4:], "--name", "loss")
    assert costs[nothing].signed() in assert_done(losses)
    monkeypatch.setattr("muse_lab.cli.tune.cost_on", lambda *given: None)
    out = assert_done_quietly(run(*again, "--cost", "1"))
    assert f"The fastest with a cost of at most 1 nats is {nothing}: " in out
    assert TuningResults.read(path).cost == 1


def test_captures_are_measured_without_the_model(asked: list[object], folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "heads.safetensors"
    other = tmp_path / "other.json"
    other.write_text("{}")
    saving = ["--save-captures", file, "--output", tmp_path, "--name", "other"]
    code, out, err = run(folder, "--text", folder.parent / "long.txt", "--length", "64", *saving)
    assert (code, err) == (0, ""), "nothing is measured, so results that cannot be continued are in nobody's way"
    assert f"muse tune --captures '{file}'" in out
    assert other.read_text() == "{}"
    common = ["--captures", file, "--only", COARSE, "--repeats", "1", "--device", "cpu", "--output", tmp_path / "out"]
    assert_refused(run(*common, "--length", "128"), "--repeat-captures")
    out = assert_done_quietly(run(*common, "--length", "128", "--repeat-captures", "--heads", "3"))
    results = TuningResults.read(tmp_path / "out" / "heads.json")
    assert results.settings.laid == "2 captures of 64 tokens laid end to end, 1 of them different"
    assert (results.settings.length, len(results.settings.heads)) == (128, 3)


def test_saved_groups_are_benchmarked_as_groups(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "groups.safetensors"
    saving = ["--length", "64", "--heads", "4", "--groups", "--compact", "--save-captures", file, "--output", tmp_path]
    assert run(folder, "--text", folder.parent / "long.txt", *saving)[::2] == (0, "")
    arguments = ["bench", "--captures", file, "--length", "64", "--attention", "exact", "--repeats", "1", "--no-memory"]
    arguments += ["--device", "cpu", "--output", tmp_path]
    assert_done_quietly(run_muse(*arguments))
    (case,) = json.loads((tmp_path / "cpu-groups.json").read_text())["cases"]
    assert (case["request"]["shape"]["heads"], case["request"]["shape"]["key_heads"]) == (4, 2)
    assert case["fidelity"]["relative_squared_error"] < 1e-9


def test_beyond_the_context_captures_are_laid_end_to_end(folder: Path, tmp_path: Path) -> None:
    arguments = [folder, "--text", folder.parent / "long.txt", "--length", "2k", "--heads", "1", "--repeats", "1"]
    arguments += ["--only", "muse:QK4R1B512", "--device", "cpu", "--output", tmp_path / "out"]
    assert_refused(run(*arguments), "context is 1024 tokens, less than 2048")
    assert run(*arguments, "--repeat-captures")[0] == 0
    assert "2 captures of 1024 tokens" in TuningResults.read(tmp_path / "out" / "tiny.json").settings.laid


@pytest.mark.long
def test_needles_are_looked_up(tmp_path: Path) -> None:
    folder, texts = tmp_path / "model", tmp_path / "texts"
    folder.mkdir()
    write_needle_model(folder, needle_tokenizer())
    write_texts(texts)
    arguments = [folder, "--text", texts, "--length", "1k", "--heads", "2", "--samples", "2", "--repeats", "1"]
    out = assert_done_quietly(run(*arguments, "--needles", "--only", COARSE, "--output", tmp_path, "--name", "needles"))
    assert "lookup" in out
    results = TuningResults.read(tmp_path / "needles.json")
    assert results.settings.lookups == 2
    assert 0 <= results.tuned[0].lookup.share <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "muse:QQ"], "cannot read 'QQ'"),
        (["--error", "-1"], "--error -1.0 must be a number of at least 0"),
        (["--cost", "-1"], "--cost -1.0 must be a finite number of at least 0"),
        (["--cost", "nan"], "--cost nan must be a finite number of at least 0"),
        (["--cost", "inf"], "--cost inf must be a finite number of at least 0"),
        (["--cost", "1", "--error", "0"], "--cost and --error exclude each other: choose"),
        (["--cost", "1", "--needles"], "--cost and --needles exclude each other: the loss"),
        (["--cost", "1", "--captures", "none.pt"], "--cost and --captures exclude each other: the loss"),
        (["--cost", "1", "--save-captures", "x"], "--cost and --save-captures exclude each other: nothing"),
        (["--cost", "1", "--repeat-captures"], "--cost and --repeat-captures exclude each other: the loss"),
        (["--heads", "0"], "cannot measure 0 heads"),
        (["--repeats", "0"], "cannot measure a time with 0 repeats"),
        (["--captures", "none.pt"], "there is no file 'none.pt' of captures"),
        (["--captures", "none.pt", "--save-captures", "x.safetensors"], "exclude each other"),
        (["--save-captures", "."], "--save-captures . is a folder; name a file"),
        (["--groups"], "--groups needs --save-captures FILE"),
        (["--compact"], "--compact needs --save-captures FILE"),
        (["--name", "../x"], "must be a plain file name"),
    ],
)
def test_mistakes_are_one_line(asked: list[object], arguments: list[str], message: str) -> None:
    assert_refused(run(*asked, *arguments), message)
