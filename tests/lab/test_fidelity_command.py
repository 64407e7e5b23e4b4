"""`muse fidelity` and `muse report`: texts, presets, every head of every layer, reports, and one line for mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
import transformers

from muse_attention import MuSeConfig, get_attention
from muse_attention.fidelity import measure as measure_fidelity
from muse_attention.fidelity.gradients import measure_gradients
from muse_attention.registry import full_name
from muse_lab.cli.measuring import write
from muse_lab.evaluation.fidelity import layers, paper
from muse_lab.evaluation.fidelity.fidelity_report import (
    fidelity_report,
    key_curves,
    shown_presets,
    table_of_clusters,
    table_of_clusters_with_tilt,
    table_of_preset,
)
from muse_lab.evaluation.fidelity.layers import FidelityRequest, FidelityResults, measure
from muse_lab.evaluation.fidelity.presets import PRESETS, find_presets
from muse_lab.evaluation.fits import PowerLaw
from muse_lab.evaluation.settings import TextSettings
from muse_lab.evaluation.texts import read_samples, read_samples_inside
from muse_lab.models import load_model
from muse_lab.records import stored_results as stored
from muse_lab.report.html import as_html
from tests.command_line import assert_done_quietly, assert_refused, run_muse
from tests.models import SIZES, capture, tiny_llama, token_ids, write_tokenizer

COARSE = "muse:Q4K4R1SP1B32,clustering=lloyd"
SETTINGS = TextSettings("tiny", "letters", 128, 2, "cpu", "float32")
REQUESTS = [FidelityRequest(COARSE, 128), FidelityRequest("block_diagonal:32", 128), FidelityRequest(COARSE, 64)]


# Every head of every layer


def test_the_numbers_are_those_of_the_captured_layers(tmp_path: Path) -> None:
    model, tokens = tiny_llama(), token_ids(128, batch=2)
    results = FidelityResults({}, SETTINGS)
    requests = [*REQUESTS, FidelityRequest("muse:Q4K8T0.1B32", 128)]
    measure(model, tokens, requests, results, tmp_path / "results.json")
    assert results.layers == [0, 1]
    assert results.heads == 2 * 4  # in two layers
    for request in requests:
        measured = [
            [
                measure_fidelity(
                    get_attention(request.attention), *inputs[:3], is_causal=True, scale=inputs.scale, enable_gqa=True
                ).by_head()
                for inputs in capture(model, ids[None, : request.length])
            ]
            for ids in tokens
        ]
        assert ("keys_per_query" in measured[0][0]) == request.attention.startswith("muse")
        for name in results.measures(request):
            of_samples = torch.stack([torch.stack([of[name][0] for of in of_layers]) for of_layers in measured])
            expected = of_samples.nanmean(0)
            torch.testing.assert_close(
                results.by_head(request, name), expected, rtol=1e-5, atol=1e-12, equal_nan=True, check_dtype=False
            )
            assert results.pooled(request)[name] == pytest.approx(float(expected.nanmean()), rel=1e-5, abs=1e-12)
    assert results.pooled(requests[-1])["keys_per_query"] > 0


def test_attention_that_is_exact_has_no_error(tmp_path: Path) -> None:
    results = FidelityResults({}, SETTINGS)
    requests = [FidelityRequest(name, 128) for name in ("exact", "muse:QK4R4SP4B32", "muse:QK4B128")]
    measure(tiny_llama(), token_ids(128, batch=2), requests, results, tmp_path / "results.json")
    for request in requests:
        pooled = results.pooled(request)
        assert pooled["relative_squared_error"] < 1e-20
        assert pooled["cosine"] == pytest.approx(1)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_an_interrupted_run_goes_on_to_the_same_results(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a layer, at its end, or at the end of a sample."""
    model, tokens = tiny_llama(), token_ids(128, batch=2)
    whole = FidelityResults({}, SETTINGS)
    measure(model, tokens, REQUESTS, whole, tmp_path / "whole.json")

    path = tmp_path / "results.json"
    compare, so_often = layers.measure_fidelity, [DEFAULT] * after
    monkeypatch.setattr(layers, "measure_fidelity", Mock(wraps=compare, side_effect=[*so_often, KeyboardInterrupt]))
    results = FidelityResults.start(SETTINGS, path)
    with pytest.raises(KeyboardInterrupt):
        measure(model, tokens, REQUESTS, results, path)
    monkeypatch.setattr(layers, "measure_fidelity", compare)
    assert not any(FidelityResults.read(path).is_whole(request) for request in REQUESTS)
    results = FidelityResults.start(SETTINGS, path)
    measure(model, tokens, REQUESTS, results, path)
    assert results.measured == whole.measured
    assert FidelityResults.read(path).measured == whole.measured


def test_a_model_with_windows_in_every_layer_is_refused(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=16)
    model = transformers.MistralForCausalLM(config).double().eval()
    with pytest.raises(ValueError, match="every layer of this model has a sliding window"):
        measure(model, token_ids(128, batch=2), REQUESTS, FidelityResults({}, SETTINGS), tmp_path / "results.json")


def test_a_killed_run_loses_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `kill -9` leaves is what was written on the way: after every layer, if layers are slow."""
    monkeypatch.setattr(stored, "SECONDS_BETWEEN_WRITES", 0.0)
    path = tmp_path / "results.json"
    seen: list[int] = []

    def look(description: str, finished: int) -> None:
        seen.append(len(FidelityResults.read(path).measured[REQUESTS[0]][0]) if path.exists() else 0)

    measure(tiny_llama(), token_ids(128, batch=1), REQUESTS[:1], FidelityResults({}, SETTINGS), path, on_step=look)
    assert seen == [0, 0, 1]  # before anything, and before each of two layers


def test_gradients_are_measured_where_they_are_asked_for(tmp_path: Path) -> None:
    """Those of a file that has none yet are added to it, and nothing else is measured again."""
    model, tokens, path = tiny_llama(), token_ids(128, batch=2), tmp_path / "results.json"
    results = FidelityResults({}, SETTINGS)
    measure(model, tokens, REQUESTS[:2], results, path)
    assert not results.is_whole(REQUESTS[0], gradients=True)
    before = results.pooled(REQUESTS[0])
    resumed = FidelityResults.read(path)
    measure(model, tokens, REQUESTS[:1], resumed, path, gradients=True)
    assert resumed.is_whole(REQUESTS[0], gradients=True)
    assert not resumed.is_whole(REQUESTS[1], gradients=True)
    after = FidelityResults.read(path).pooled(REQUESTS[0])
    assert before.items() <= after.items()
    for layer, inputs in enumerate(capture(model, tokens[:1])):
        errors = measure_gradients(
            get_attention(COARSE), *inputs[:3], is_causal=True, scale=inputs.scale, enable_gqa=True
        )
        for name, expected in vars(errors).items():
            found = torch.tensor(resumed.measured[REQUESTS[0]][0][layer][name], dtype=torch.float64)
            torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=0)
    assert set(after) - set(before) == {"query_gradient_error", "key_gradient_error", "value_gradient_error"}


# Texts


def test_samples_follow_one_another_through_files(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = load_model(folder)
    (tmp_path / "b.txt").write_text("BBBB")
    (tmp_path / "a.py").write_text("AAAA")
    (tmp_path / "c.png").write_text("CCCC")
    samples = read_samples(tokenizer, [tmp_path], 3, 2)
    assert [text.replace(" ", "") for text in tokenizer.batch_decode(samples.tokens)] == ["AAA", "ABB"]
    with pytest.raises(ValueError, match="the text has 8 tokens, too few for 3 samples of 3"):
        read_samples(tokenizer, [tmp_path], 3, 3)
    with pytest.raises(ValueError, match="there is no text"):
        read_samples(tokenizer, [tmp_path / "missing"], 3, 1)


def test_samples_inside_files(folder: Path, tmp_path: Path) -> None:
    """The first of every file that is long enough, then the second: no sample has parts of two files."""
    _, tokenizer = load_model(folder)
    for name, text in {"a.txt": "AAABBBC", "b.txt": "DD", "c.txt": "EEEFFF", "d.txt": "GGG"}.items():
        (tmp_path / name).write_text(text)

    def samples(number: int) -> list[str]:
        read = read_samples_inside(tokenizer, [tmp_path], 3, number)
        assert read.source.endswith(", each sample inside one file")
        return [text.replace(" ", "") for text in tokenizer.batch_decode(read.tokens)]

    assert samples(2) == ["AAA", "EEE"]
    assert samples(5) == ["AAA", "EEE", "GGG", "BBB", "FFF"]
    with pytest.raises(ValueError, match="the text has 5 samples of 3 tokens inside single files, too few for 100"):
        samples(100)


def test_the_standard_library_is_the_default(folder: Path) -> None:
    _, tokenizer = load_model(folder)
    first, second = (read_samples(tokenizer, [], 500, 2) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert "standard library" in first.source


def test_text_that_is_not_utf8_is_read_as_far_as_it_is(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = load_model(folder)
    (tmp_path / "text.txt").write_bytes(b"abc\xff\xfedef" * 3)
    assert read_samples(tokenizer, [tmp_path / "text.txt"], 12, 1).tokens.shape == (1, 12)


# Presets


@pytest.mark.parametrize("length", [2048, 5000, 8192, 65536])
def test_presets_name_attentions_that_exist(length: int) -> None:
    presets = find_presets(["all"], length)
    assert [preset.name for preset in presets] == list(PRESETS)
    for preset in presets:
        for row in preset.rows:
            get_attention(row.request.attention)
            assert len(row.labels) == len(preset.columns)
            assert row.request.length <= length


@pytest.mark.parametrize(
    ("preset", "texts"),
    {
        "methods": ["QK128R8"],
        "joint": [f"QK{n}R{n // 16}{end}" for n in (16, 32, 64, 128, 256, 512) for end in ("", ",tilt=false")],
        "query-clusters": [*(f"Q{n}K128R8" for n in (256, 128, 64, 32, 16)), "QK128R8,tilt=false"],
        "key-clusters": [f"Q128K{n}R{n // 16}" for n in (256, 128, 64, 32, 16)],
        "monopole": [f"QK{n}R0{end}" for n in (256, 128, 64, 32) for end in ("", ",tilt=false")],
        "retrieval-only": ["QK128R8,monopole=false", "QK128R8,monopole=false,tilt=false"],
        "fixed-retrieval": [f"QK{n}R8" for n in (512, 256, 128, 64)],
        "retrieval-count": [f"QK128R{n}" for n in (16, 8, 4)],
        "block-size": ["QK128R4SP1B16k", "QK128R4SP2B8k", "QK128R4SP4B4k", "QK128R4SP8B2k"],
        "clusters-or-blocks": ["QK128R8SP1", "QK128R4SP2", "QK128R2SP4"],
        "dipole": ["QK128R0", "QK128R0,dipole=shared", "QK128R8"],
    }.items(),
)
def test_at_64k_every_row_of_the_papers_tables_is_measured(preset: str, texts: list[str]) -> None:
    """Blocks of 8k, where a row says nothing else."""
    (found,) = find_presets([preset], 65536)
    for text in texts:
        notation, comma, options = text.partition(",")
        with_block = notation if "B" in notation else f"{notation}B8k"
        name = full_name(f"muse:{with_block}{comma}{options}", 65536)
        assert FidelityRequest(name, 65536) in found.requests


def test_moba_retrieves_as_many_keys_as_muse() -> None:
    (preset,) = find_presets(["methods"], 65536)
    assert preset.requests[1] == FidelityRequest("moba:L8kB512R1", 65536)


def test_lengths_have_the_papers_sizes() -> None:
    (preset,) = find_presets(["length"], 131072)
    assert [row.labels for row in preset.rows] == [row[:3] for row in paper.TABLES["Table 27"].rows]


def test_keys_of_opened_clusters_are_the_papers_keys_per_query() -> None:
    (preset,) = find_presets(["fixed-retrieval"], 65536)
    counted = {row.labels[:2]: int(row.labels[2]) for row in preset.rows}
    for row in (*paper.TABLES["Table 17"].rows, *paper.TABLES["Table 22"].rows):
        assert counted[row[0], row[1]] == int(row[1]) // 8  # one of eight blocks


def test_error_control_at_8k() -> None:
    (preset,) = find_presets(["error-control"], 8192)
    names = [request.attention for request in preset.requests]
    for text in ("QK32R2B1k", "QK64R4B1k", "QK128R8B1k", "Q32K128T0.1B1k", "Q16K256T0.05B1k"):
        assert full_name(f"muse:{text}", 8192) in names
    assert "moba:L1kB64R1" in names
    assert len(names) == len(set(names)) == 3 + 3 + 6 * 4


def test_the_papers_exponents_follow_from_its_tables() -> None:
    for table, exponent in ((paper.TABLES["Table 2"], -0.89), (paper.TABLES["Table 29"], -0.59)):
        law = PowerLaw.fit([(float(row[0]), float(row[1])) for row in table.rows])
        assert round(law.exponent, 2) == exponent


def results_of(errors: dict[str, float], length: int = 8192) -> FidelityResults:
    """One sample, layer and head for each attention."""
    settings = TextSettings("tiny", "letters", length, 1, "cpu", "float32")
    numbers = {
        FidelityRequest(name, length): [
            [{"relative_squared_error": [error], "cosine": [1.0], "centred_error": [0.0], "lse_gap": [0.0]}]
        ]
        for name, error in errors.items()
    }
    machine = FidelityResults.start(settings, Path("missing")).machine
    return FidelityResults(machine, settings, ["muse fidelity"], [0], True, numbers)


def test_effective_clusters_of_known_power_laws() -> None:
    """With errors `1 / C` and `2 / sqrt(C)`, `4 C^2` clusters without tilt are worth `C` with it."""
    errors = {}
    for row in find_presets(["joint"], 8192)[0].rows:
        config = MuSeConfig.parse(row.request.attention.removeprefix("muse:"))
        clusters = config.key_clusters
        errors[row.request.attention] = 1 / clusters if config.tilt else 2 / clusters**0.5
    table = table_of_clusters(results_of(errors), find_presets(["joint"], 8192)[0])
    assert [row[4] for row in table.rows] == ["1024*", "more than 2048*", "more than 2048*", "more than 2048*"]
    assert table.rows[0][3] == "8.0x"
    reverse = table_of_clusters_with_tilt(results_of(errors), find_presets(["joint"], 8192)[0])
    assert [(row[0], row[2], row[3]) for row in reverse.rows] == [
        ("16", "2", "8.0x"),
        ("32", "2.83", "11.3x"),
        ("64", "4", "16.0x"),
        ("128", "5.66", "22.6x"),
    ]


def test_a_table_with_gaps_has_the_rows_there_are() -> None:
    counts = {"muse:Q16K16R1SP1B1k": 0.02, "muse:Q32K32R2SP1B1k": 0.01, "muse:Q64K64R4SP1B1k": 0.005}
    plain = {"muse:Q16K16R1SP1B1k,tilt=false": 2.0, "muse:Q32K32R2SP1B1k,tilt=false": 1.5}
    results = results_of({f"{name},clustering=lloyd": error for name, error in (counts | plain).items()})
    assert "joint" in [preset.name for preset in shown_presets(results)]
    table = table_of_clusters(results, find_presets(["joint"], 8192)[0])
    assert [row[0] for row in table.rows] == ["16", "32"]
    as_html(fidelity_report(results, "t"))


def test_errors_of_zero_have_no_power_law(asked: list[object]) -> None:
    """A text that fits into one block is attended to exactly."""
    out = assert_done_quietly(run_muse(*asked, "--length", "256", "--preset", "joint"))
    assert "error-against-clusters" not in out


def test_what_was_not_measured_is_absent() -> None:
    base = f"muse:{MuSeConfig.paper_sizes(8192)}"
    results = results_of({base: 0.01, "moba:L1kB64R1": 0.5})
    assert [preset.name for preset in shown_presets(results)] == ["methods"]
    table = table_of_preset(results, find_presets(["methods"], 8192)[0])
    assert [row[0] for row in table.rows] == ["MuSe", "MoBA"]
    assert "block-diagonal |" not in as_html(fidelity_report(results, "t"))


# The commands


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> list[object]:
    text = folder.parent / "text.txt"
    arguments = ["fidelity", folder, "--text", text, "--length", "128", "--device", "cpu", "--output", tmp_path / "out"]
    return [*arguments, "--attention", COARSE, "--attention", "block_diagonal:32"]


def test_the_command_writes_results_and_reports(asked: list[object], tmp_path: Path) -> None:
    out = assert_done_quietly(run_muse(*asked))
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"tiny.json", "tiny.md", "tiny.html", "tiny-error-of-every-head.png"}
    document = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert document["machine"]["transformers"]
    (command,) = document["commands"]
    assert command.startswith("muse fidelity tiny --text text.txt --length 128 --samples 1 --attention")
    assert str(tmp_path) not in (tmp_path / "out" / "tiny.json").read_text()
    page = (tmp_path / "out" / "tiny.html").read_text()
    for said in ("n = 8 heads x one sample", "2 layers", "128 tokens of text.txt", COARSE, "data:image/png;base64,"):
        assert said in page
    assert COARSE in out
    markdown = tmp_path / "out" / "tiny.md"
    before = markdown.read_text()
    markdown.unlink()
    out = assert_done_quietly(run_muse("report", tmp_path))
    assert "tiny.md" in out
    assert markdown.read_text() == before


def test_the_command_shows_the_tail_what_was_retrieved_and_gradients(asked: list[object], tmp_path: Path) -> None:
    out = assert_done_quietly(run_muse(*asked, "--attention", "muse:Q4K8T0.1B32", "--gradients"))
    for said in ("99.9%", "pairs", "keys", "retrieving", "found", "dq"):
        assert said in out
    markdown = (tmp_path / "out" / "tiny.md").read_text()
    titles = "RSE 99% | RSE 99.9% | RSE > 0.1 | pairs | keys | retrieving | found | dq RSE | dk RSE | dv RSE |"
    assert titles.replace(">", "\\>") in markdown
    assert "sum |dq - dq_exact|^2 / sum |dq_exact|^2" in markdown.replace("\\|", "|")
    assert "sum |dq - dq_exact|^2" in (tmp_path / "out" / "tiny.html").read_text()
    (command,) = FidelityResults.read(tmp_path / "out" / "tiny.json").commands
    assert "--gradients --device cpu" in command
    assert run_muse(*asked, "--overwrite")[0] == 0
    assert "dq" not in (tmp_path / "out" / "tiny.md").read_text()


def test_the_preset_of_error_control_draws_error_against_keys(tmp_path: Path) -> None:
    (preset,) = find_presets(["error-control"], 8192)
    results = results_of({request.attention: 1 / number for number, request in enumerate(preset.requests, start=1)})
    for number, samples in enumerate(results.measured.values(), start=1):
        if number != 3:
            samples[0][0]["keys_per_query"] = [64.0 * number]
    curves = key_curves(results, preset)
    assert curves["paper"] == [(64, 1), (128, 1 / 2)]
    assert curves["MoBA"] == [(64 * number, 1 / number) for number in (4, 5, 6)]
    assert len(curves) == 2 + 6
    write(fidelity_report(results, "tiny"), tmp_path / "tiny.json")
    assert (tmp_path / "tiny-error-against-retrieved-keys.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "tiny.html").read_text()
    assert 'alt="Error against retrieved keys"' in page
    assert "tolerance, Q16K256" in page


def test_a_finished_run_is_not_measured_again(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_muse(*asked)[0] == 0
    monkeypatch.setattr(layers, "measure_fidelity", Mock(side_effect=AssertionError("measured again")))
    assert run_muse(*asked)[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--attention", "nonsense"], "unknown attention 'nonsense'"),
        (["--preset", "nonsense"], "unknown preset 'nonsense'; use all, or any of methods"),
        (["--length", "2k"], "the model's context is 1024 tokens, less than 2048; choose a smaller length"),
    ],
)
def test_every_mistake_is_answered_by_one_line(asked: list[object], changes: list[str], message: str) -> None:
    assert_refused(run_muse(*asked, *changes), message)


def test_a_model_without_attention_is_refused(folder: Path, tmp_path: Path) -> None:
    mamba = tmp_path / "mamba"
    write_tokenizer(mamba)
    transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).save_pretrained(mamba)
    code, _, err = run_muse(
        "fidelity", mamba, "--text", folder.parent / "text.txt", "--length", "128", "--device", "cpu"
    )
    assert code == 2
    assert "no attention heads" in err.splitlines()[-1]
