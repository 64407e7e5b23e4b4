"""Answers to needle samples, what is derived from them, `muse eval needles`, its files, and one line for mistakes."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("rich")

import transformers
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from muse_attention.cli import commands
from muse_attention.cli.language_model import name_of
from muse_attention.evaluation import needle_comparison, needle_results, needle_scores
from muse_attention.evaluation.needle_comparison import have_same_questions
from muse_attention.evaluation.needle_report import as_csv, depth_table, html_report, markdown_report, summary_table
from muse_attention.evaluation.needle_results import Outcome, Results, Settings, Task, measure, plan, read_results
from muse_attention.evaluation.needle_scores import Answer, answer
from muse_attention.evaluation.needle_statistics import (
    Share,
    against_exact,
    answers,
    by_depth,
    failures,
    is_exact,
    is_preferred,
    share,
    token_means,
)
from muse_attention.evaluation.needles import KINDS, NeedleSamples, Sample
from muse_attention.huggingface import use_attention
from muse_attention.machine import describe_machine
from muse_attention.pretraining.configuration import DecoderConfig
from muse_attention.pretraining.decoder import DecoderForCausalLM
from tests.needle_models import needle_haystack, needle_llama, needle_tokenizer, write_needle_model, write_texts
from tests.test_prepare import make

LENGTH = 1024
COARSE = "muse:Q4K4R1SP1B128"
SETTINGS = Settings("tiny", "made up", 0, "cpu", "float32")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return needle_tokenizer()


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def samples(tokenizer: Tokenizer) -> NeedleSamples:
    return NeedleSamples(tokenizer, needle_haystack(tokenizer))


def log_probabilities(model: Any, tokens: Tensor, attention: str = "exact") -> Tensor:
    """(length, vocabulary), without a cache."""
    with torch.no_grad(), use_attention(model, attention):
        return model(tokens[None], use_cache=False).logits[0].log_softmax(-1)


def decoder(tokenizer: Tokenizer) -> DecoderForCausalLM:
    """Its windows are shorter than the prompt."""
    torch.manual_seed(0)
    config = DecoderConfig.tiny(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048, sliding_window=64, initializer_range=0.2
    )
    return DecoderForCausalLM(config).double().eval()


# Scores


@pytest.mark.parametrize("make_model", [needle_llama, decoder])
@pytest.mark.parametrize("kind", ["multi-key-2", "multi-query-2"])
def test_scores_are_those_of_the_whole_text_without_a_cache(
    make_model: Any, kind: str, tokenizer: Tokenizer, words: Any, samples: NeedleSamples
) -> None:
    model, sample = make_model(tokenizer), samples.make(kind, LENGTH, 3, 0)
    answers = answer(model, words, sample, "exact")
    assert len(answers) == len(sample.questions)
    tokens = torch.from_numpy(sample.tokens)
    whole = log_probabilities(model, tokens)
    for question, found in zip(sample.questions, answers, strict=True):
        places = list(question.answer)
        expected = [float(whole[place - 1, tokens[place]]) for place in places]
        assert found.log_probability == pytest.approx(sum(expected), rel=1e-9)
        ranks = [int((whole[place - 1] > value).sum()) for place, value in zip(places, expected, strict=True)]
        assert found.ranks == tuple(ranks)
        others = []
        for candidate in question.candidates[1:]:
            changed = torch.cat([tokens[: places[0]], torch.from_numpy(candidate)])
            chances = log_probabilities(model, changed)
            others.append(sum(float(chances[place - 1, changed[place]]) for place in places))
        assert found.margin == pytest.approx(sum(expected) - max(others), rel=1e-6)
        assert found.is_preferred == (sum(expected) > max(others))
        assert (found.bucket, found.uid) == (question.bucket, question.needle.uid)


def test_generation_is_that_of_transformers(tokenizer: Tokenizer, words: Any, samples: NeedleSamples) -> None:
    model, sample = needle_llama(tokenizer), samples.make("single", LENGTH, 3, 0)
    (found,) = answer(model, words, sample, "exact")
    number = len(sample.questions[0].answer)
    prompt = torch.from_numpy(sample.prompt)[None]
    expected = model.generate(prompt, max_new_tokens=number, min_new_tokens=number, do_sample=False)
    assert found.generated == words.decode(expected[0, prompt.shape[1] :])
    assert not found.is_exact


@pytest.mark.parametrize("make_model", [needle_llama, decoder])
def test_the_first_token_is_predicted_by_the_attention_under_test(
    make_model: Any, tokenizer: Tokenizer, words: Any, samples: NeedleSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = make_model(tokenizer), samples.make("single", LENGTH, 3, 0)
    seen: list[Tensor] = []
    inner = needle_scores._answer
    monkeypatch.setattr(needle_scores, "_answer", lambda *given: seen.append(given[3]) or inner(*given))
    results = {name: answer(model, words, sample, name)[0] for name in ("exact", COARSE)}
    prompt = torch.from_numpy(sample.prompt)
    for name, last in zip(results, seen, strict=True):
        torch.testing.assert_close(last.log_softmax(-1), log_probabilities(model, prompt, name)[-1])
    assert results["exact"].log_probability != pytest.approx(results[COARSE].log_probability, rel=1e-6)


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")
@pytest.mark.parametrize("make_model", [needle_llama, decoder])
@pytest.mark.parametrize("name", ["muse:QK4R1B2k", "muse:QK4R4SP8B128"])
def test_muse_that_attends_to_everything_answers_the_same(
    make_model: Any, name: str, tokenizer: Tokenizer, words: Any, samples: NeedleSamples
) -> None:
    """In one block, or because every bucket is retrieved."""
    model, sample = make_model(tokenizer), samples.make("multi-query-2", LENGTH, 3, 0)
    for found, expected in zip(answer(model, words, sample, name), answer(model, words, sample, "exact"), strict=True):
        assert found.ranks == expected.ranks
        assert found.log_probability == pytest.approx(expected.log_probability, rel=1e-9)


def test_how_many_candidates_are_scored_at_once_does_not_matter(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = needle_llama(tokenizer), samples.make("single", LENGTH, 3, 0)
    expected = answer(model, words, sample, "exact")[0]
    for at_once in (1, 3 * LENGTH):
        monkeypatch.setattr(needle_scores, "_CACHED_AT_ONCE", at_once)
        found = answer(model, words, sample, "exact")[0]
        assert dataclasses.replace(found, log_probability=0, margin=0) == dataclasses.replace(
            expected, log_probability=0, margin=0
        )
        assert (found.log_probability, found.margin) == pytest.approx((expected.log_probability, expected.margin))


class Scripted(LlamaForCausalLM):
    """Has read a text before: behind each position it expects the token that is there."""

    script: Tensor

    def forward(self, input_ids: Tensor, past_key_values: Any = None, logits_to_keep: int = 0, **others: Any) -> Any:
        start = past_key_values.get_seq_length()
        out = super().forward(input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **others)
        following = self.script[start + 1 : start + input_ids.shape[1] + 1][-logits_to_keep:]
        out.logits = 20.0 * torch.nn.functional.one_hot(following, out.logits.shape[-1]).double().expand_as(out.logits)
        return out


def scripted(tokenizer: Tokenizer, script: Tensor) -> Scripted:
    model = Scripted(needle_llama(tokenizer).config).double().eval()
    model.script = torch.cat([script, script[-1:]])
    return model


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_that_knows_the_answers(kind: str, tokenizer: Tokenizer, words: Any, samples: NeedleSamples) -> None:
    sample = samples.make(kind, 2048, 6, 0)
    model = scripted(tokenizer, torch.from_numpy(sample.tokens))
    for question, found in zip(sample.questions, answer(model, words, sample, "exact"), strict=True):
        number = len(question.answer)
        assert (found.is_exact, found.is_preferred, found.generated) == (True, True, question.needle.uid)
        assert found.ranks == (0,) * number
        each = -math.log(1 + (tokenizer.get_vocab_size() - 1) * math.exp(-20))
        assert found.log_probability == pytest.approx(number * each, rel=1e-6)


@pytest.mark.parametrize("kind", ["multi-key-2", "multi-query-2"])
def test_a_model_that_takes_one_needle_for_another(
    kind: str, tokenizer: Tokenizer, words: Any, samples: NeedleSamples
) -> None:
    sample = samples.make(kind, 2048, 6, 0)
    question = sample.questions[0]
    script = torch.from_numpy(sample.tokens.copy())
    script[list(question.answer)] = torch.from_numpy(question.candidates[1])
    found, *others = answer(scripted(tokenizer, script), words, sample, "exact")
    assert (found.is_exact, found.is_preferred) == (False, False)
    assert found.generated == words.decode(question.candidates[1])
    assert max(found.ranks) == 1
    assert all(other.is_exact for other in others), "each right answer is fed before the next question"


@pytest.mark.parametrize(("widths", "is_right"), [((1, 1, 2, 4), True), ((1, 1, 1, 1), False)])
def test_the_digits_count_and_not_their_tokens(
    widths: tuple[int, ...], is_right: bool, tokenizer: Tokenizer, samples: NeedleSamples
) -> None:
    """As many tokens as the uid has: in another split they are all of its digits, or too few."""
    sample = samples.make("single", LENGTH, 3, 0)
    (question,) = sample.questions
    uid, ends = question.needle.uid, list(itertools.accumulate(widths))
    pieces = [uid[end - width : end] for width, end in zip(widths, ends, strict=True)]
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_tokens(pieces)
    script = torch.from_numpy(sample.tokens.copy())
    script[list(question.answer)] = torch.tensor(list(map(other.token_to_id, pieces)))
    (found,) = answer(scripted(other, script), PreTrainedTokenizerFast(tokenizer_object=other), sample, "exact")
    assert found.generated == "".join(pieces)
    assert found.is_exact == is_right
    assert max(found.ranks) == 1


def test_a_model_that_is_indifferent_prefers_nothing(tokenizer: Tokenizer, words: Any, samples: NeedleSamples) -> None:
    model, sample = needle_llama(tokenizer), samples.make("single", LENGTH, 3, 0)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    (found,) = answer(model, words, sample, "exact")
    assert not found.is_preferred
    assert found.margin == 0


def test_probabilities_that_are_no_numbers_are_refused(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples
) -> None:
    model = needle_llama(tokenizer)
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    with pytest.raises(ValueError, match=r"not a finite number in torch\.float64; use another dtype"):
        answer(model, words, samples.make("single", LENGTH, 3, 0), "exact")


# Statistics, by hand


def made_up(bucket: int, exact: bool, preferred: bool = True, ranks: tuple[int, ...] = (0, 0)) -> Answer:
    return Answer(bucket, "12345678", "12345678" if exact else "1\n2|3", exact, preferred, -1.5, 0.5, ranks)


def hand_made() -> Results:
    """Exact attention is right in 3 of 4, MuSe in 1 of 4; one more failed under MuSe."""
    machine = {**describe_machine(), "transformers": transformers.__version__}
    results = Results(machine, SETTINGS)
    for number, (exact, muse) in enumerate([(True, True), (True, False), (True, False), (False, False)]):
        results.outcomes[Task(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, exact),))
        results.outcomes[Task(number, 2048, "single", 0, COARSE)] = Outcome((made_up(0, muse, muse, (0, 3)),))
    results.outcomes[Task(9, 2048, "single", 5, "exact")] = Outcome((made_up(5, True),))
    results.outcomes[Task(9, 2048, "single", 5, COARSE)] = Outcome(error="RuntimeError: no")
    return results


def test_a_share_has_the_binomial_standard_error() -> None:
    assert share([made_up(0, exact) for exact in (True, True, True, False)], is_exact) == Share(3, 4)
    assert Share(3, 4).value == 0.75
    assert Share(3, 4).standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert Share(2491, 2547).standard_error == pytest.approx(0.0029, abs=5e-5), "the paper's 97.80 ± 0.29%"
    assert share([], is_exact) is None


def test_shares_are_by_the_depth_of_the_definition() -> None:
    results = hand_made()
    assert by_depth(answers(results, 2048, "single", "exact"), is_exact) == [
        *(Share(3, 4), None, None, None, None, Share(1, 1), None, None, None)
    ]
    asked = Outcome((made_up(7, True), made_up(2, False)))
    query = Results({}, SETTINGS, outcomes={Task(0, 2048, "multi-query-2", 2, "exact"): asked})
    found = by_depth(answers(query, 2048, "multi-query-2", "exact"), is_exact)
    assert (found[7], found[2]) == (Share(1, 1), Share(0, 1))


def test_differences_are_paired() -> None:
    difference = against_exact(hand_made(), 2048, "single", COARSE, is_exact)
    assert difference is not None
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(math.sqrt((4 * 0.25) / 3) / 2)
    own = against_exact(hand_made(), 2048, "single", "exact", is_preferred)
    assert own is not None
    assert (own.mean, own.standard_error) == (0, 0)
    assert against_exact(hand_made(), 4096, "single", COARSE, is_exact) is None


def test_means_over_tokens() -> None:
    means = token_means([made_up(0, True, ranks=(0, 3)), made_up(0, True, ranks=(0, 1))])
    assert means == (0.5, 1.0)
    assert token_means([]) is None


def test_tables() -> None:
    header, rows = summary_table(hand_made())
    exact, muse = (dict(zip(header[:6], row, strict=False)) for row in rows)
    assert exact["exact match"] == "80.0 ± 17.9%"
    assert (muse["n"], muse["exact match"], muse["against exact"]) == ("4", "25.0 ± 21.7%", "-50.0 ± 28.9")
    assert [row[-1] for row in rows] == ["", "1"]
    header, rows = depth_table(hand_made(), 2048, "single", is_exact)
    assert header == ("depth", "exact", COARSE)
    assert rows[0] == ("0.05", "75.0 ± 21.7% of 4", "25.0 ± 21.7% of 4")
    assert rows[5] == ("0.55", "100.0 ± 0.0% of 1", "")
    report = markdown_report(hand_made(), title="Needles")
    assert "Failed: 1 of 10 samples" in report
    assert "depth 0.55, sample 9: RuntimeError: no" in report


def test_reports_say_where_muse_was_exact() -> None:
    results = hand_made()
    report = markdown_report(results, title="Needles")
    assert "MuSe is exact attention" not in report
    for length in (4096, 2048, 8192):
        results.outcomes[Task(0, length, "single", 0, "muse:QK4R1B4k")] = Outcome((made_up(0, True),))
    assert "MuSe is exact attention: muse:QK4R1B4k at 2k, 4k\n" in markdown_report(results, title="Needles")
    assert "MuSe is exact attention" in html_report(results, title="Needles", pictures={})


def test_csv_has_a_line_for_every_question() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(hand_made()))))
    assert len(rows) == 10
    assert rows[3]["generated"] == "1\n2|3"
    assert (rows[3]["exact"], rows[3]["ranks"], rows[3]["depth"]) == ("0", "0 3", "0.05")
    assert (rows[9]["error"], rows[9]["exact"]) == ("RuntimeError: no", "")


# Runs


def test_any_part_of_a_run_is_a_fair_comparison() -> None:
    tasks = plan({1024: ["exact", COARSE], 2048: ["exact"]}, {1024: ["single"], 2048: ["single", "multi-key-2"]}, 2)
    assert len(tasks) == len(set(tasks)) == 2 * 9 * 4
    assert tasks[:2] == [Task(0, 1024, "single", 0, "exact"), Task(0, 1024, "single", 0, COARSE)]
    assert {task.number for task in tasks[:36]} == {0}
    assert {task.length for task in tasks if task.kind == "multi-key-2"} == {2048}


def test_a_sample_that_fails_is_kept_and_tried_again(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = needle_llama(tokenizer), tmp_path / "needles.json"
    tasks = plan({LENGTH: ["exact"]}, {LENGTH: ["single"]}, 1)[:3]
    results = Results({}, SETTINGS)

    def fail(model: Any, words: Any, sample: Sample, attention: str) -> Any:
        if sample.bucket == 1:
            raise RuntimeError("no\nluck")
        return answer(model, words, sample, attention)

    monkeypatch.setattr(needle_results, "answer", fail)
    measure(model, words, samples, tasks, results, path)
    assert failures(results) == [(tasks[1], "RuntimeError: no luck")]
    assert read_results(path) == results
    assert read_results(path).missing(tasks) == [tasks[1]]
    monkeypatch.undo()
    measure(model, words, samples, tasks, results, path)
    assert failures(read_results(path)) == []


def test_a_run_can_be_interrupted_anywhere(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples, tmp_path: Path
) -> None:
    model = needle_llama(tokenizer)
    tasks = plan({LENGTH: ["exact", COARSE]}, {LENGTH: ["single"]}, 1)[:4]
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    measure(model, words, samples, tasks, Results({}, SETTINGS), whole)

    def interrupt(description: str, finished: int) -> None:
        if finished == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, words, samples, tasks, Results({}, SETTINGS), parted, on_step=interrupt)
    part = read_results(parted)
    assert part.missing(tasks) == tasks[3:]
    measure(model, words, samples, tasks, part, parted)
    assert parted.read_bytes() == whole.read_bytes()


# The command


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needles")
    (folder / "model").mkdir()
    write_needle_model(folder / "model", tokenizer)
    write_texts(folder / "texts")
    return folder


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    result = CliRunner().invoke(commands.app, ["eval", "needles", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def options(folder: Path) -> list[object]:
    return [
        *(folder / "model", "--text", folder / "texts", "--length", "1k", "--kind", "single,multi-key-2"),
        *("--attention", COARSE, "--samples-per-depth", 1, "--device", "cpu", "--name", "tiny"),
    ]


@pytest.fixture(scope="module")
def measured(folder: Path, options: list[object]) -> Path:
    code, out, err = run(*options, "--output", folder / "out")
    assert code == 0, err
    assert "exact" in out
    return folder / "out"


def test_the_command_writes_tables_pictures_and_a_page(measured: Path) -> None:
    endings = {"tiny.json", "tiny.md", "tiny.csv", "tiny.png", "tiny-of-8.png", "tiny.html"}
    assert {file.name for file in measured.iterdir()} == endings
    results = read_results(measured / "tiny.json")
    assert len(results.outcomes) == 2 * 9 * 2
    assert failures(results) == []
    page = (measured / "tiny.html").read_text()
    assert page.count("data:image/png") == 2
    assert 'src="http' not in page
    (spelled,) = results.commands
    assert spelled.startswith(
        f"muse eval needles model --text texts --length 1k --kind single,multi-key-2 --attention {COARSE}"
    )
    document = json.loads((measured / "tiny.json").read_text())
    assert [entry["attention"] for entry in document["attentions"]] == ["exact", COARSE]
    assert document["attentions"][1]["config"]["block_size"] == 128


def test_results_are_resumed_and_extended(folder: Path, measured: Path, options: list[object], tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path / "out")
    path = tmp_path / "out" / "tiny.json"
    before = read_results(path)
    code, _, err = run(*options, "--attention", "block_diagonal:256", "--output", tmp_path / "out", "--resume")
    assert code == 0, err
    after = read_results(path)
    assert {task: after.outcomes[task] for task in before.outcomes} == before.outcomes
    assert len(after.outcomes) == 3 * 9 * 2
    assert len(after.commands) == 2
    code, _, err = run(*options, "--seed", 1, "--output", tmp_path / "out", "--resume")
    assert code == 2
    assert "cannot resume tiny.json" in err
    assert "seed" in err


@pytest.mark.parametrize("change", ["version", "haystack"])
def test_results_of_other_samples_are_not_continued(
    change: str, folder: Path, measured: Path, options: list[object], tmp_path: Path
) -> None:
    """Of another version of the texts, or with another last file in the haystack."""
    shutil.copytree(measured, tmp_path / "out")
    shutil.copytree(folder / "texts", tmp_path / "texts")
    arguments = [tmp_path / "texts" if option == folder / "texts" else option for option in options]
    assert run(*arguments, "--output", tmp_path / "out", "--resume")[0] == 0
    if change == "version":
        file = tmp_path / "out" / "tiny.json"
        document = json.loads(file.read_text())
        del document["settings"]["version"]
        file.write_text(json.dumps(document))
    else:
        last = sorted((tmp_path / "texts").rglob("*.py"))[-1]
        last.write_text(last.read_text()[:-1] + "?")
    code, _, err = run(*arguments, "--output", tmp_path / "out", "--resume")
    assert code == 2
    assert "cannot resume tiny.json" in err
    assert ("version differ" if change == "version" else "fingerprint differ") in err


def test_kinds_without_room_are_left_out(options: list[object], tmp_path: Path) -> None:
    code, _, err = run(*options, "--output", tmp_path, "--length", "640,1k", "--kind", "single,multi-query-4")
    assert code == 0
    assert re.search(r"^muse: left out: multi-query-4 at 640, which needs \d{3} tokens$", err, re.MULTILINE)
    results = read_results(tmp_path / "tiny.json")
    found = {(task.length, task.kind) for task in results.outcomes}
    assert found == {(640, "single"), (1024, "single"), (1024, "multi-query-4")}


def test_an_interruption_says_how_to_go_on(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(*given)

    monkeypatch.setattr(needle_results, "answer", interrupted)
    code, _, err = run(*options, "--output", tmp_path)
    assert code == 130
    assert f"what is finished is in {tmp_path / 'tiny.json'}; continue with: muse eval needles" in err
    assert err.rstrip().endswith("--resume")
    assert len(read_results(tmp_path / "tiny.json").outcomes) == 2


def test_failures_are_counted_and_the_rest_is_reported(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, words: Any, sample: Sample, attention: str) -> Any:
        if attention == COARSE:
            raise RuntimeError("no luck")
        return answer(model, words, sample, attention)

    monkeypatch.setattr(needle_results, "answer", fail)
    code, _, err = run(*options, "--output", tmp_path)
    assert code == 1
    assert "18 samples failed" in err
    assert err.rstrip().endswith("--resume")
    assert "RuntimeError: no luck" in (tmp_path / "tiny.html").read_text()
    code, _, _ = run(*options, "--output", tmp_path, "--resume")
    assert code == 1, "what is asked for has failed again"
    monkeypatch.setattr(needle_results, "answer", lambda *given: 1 / 0)
    code, _, err = run(*options, "--output", tmp_path)
    assert code == 1
    assert "36 samples failed" in err


def test_muse_report_writes_the_reports_anew(measured: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "tiny.json", tmp_path)
    result = CliRunner().invoke(commands.app, ["report", str(tmp_path)])
    assert result.exit_code == 0
    for name in ("tiny.md", "tiny.csv", "tiny.html"):
        assert (tmp_path / name).read_text() == (measured / name).read_text()
    (tmp_path / "tiny.json").write_text('{"needles": []}')
    assert CliRunner().invoke(commands.app, ["report", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--kind", "triple"], "unknown kind 'triple'; use one of single"),
        (["--length", "far"], "cannot read the size 'far'"),
        (["--length", "4k"], "the model's context is 2048 tokens, less than 4096"),
        (["--length", "64"], "a tenth of 64 tokens has no room for the needles of single"),
        (["--attention", "sparse"], "unknown attention 'sparse'"),
        (["--samples-per-depth", "0"], "--samples-per-depth 0 measures nothing"),
        (["--corpus", "nowhere"], "a haystack is either a corpus or texts"),
        (["--name", "a/b"], "must be a plain file name"),
    ],
)
def test_mistakes(options: list[object], changes: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = run(*options, "--output", tmp_path / "out", *changes)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_corpus_must_have_the_tokenizer_of_the_model(folder: Path, tmp_path: Path) -> None:
    code, _, err = run(folder / "model", "--corpus", tmp_path / "none", "--device", "cpu", "--length", "1k")
    assert code == 2
    assert "there is no corpus in" in err
    make(tmp_path / "corpus")
    code, _, err = run(folder / "model", "--corpus", tmp_path / "corpus", "--device", "cpu", "--length", "1k")
    assert code == 2
    assert "the model has another tokenizer than the corpus" in err


def test_the_group_shows_its_commands() -> None:
    result = CliRunner().invoke(commands.app, ["eval"])
    assert result.exit_code == 0
    assert "needles" in result.stdout


# Several models


def other_model(*, right: int) -> Results:
    """Asked the same as `hand_made`; right so often of the first four."""
    results = hand_made()
    for number in range(4):
        results.outcomes[Task(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, number < right),))
    return results


def test_models_are_compared_on_the_same_samples() -> None:
    models = {"one": hand_made(), "other": other_model(right=1)}
    (title, (header, rows)), (other_title, (_, other_rows)) = needle_comparison.summary_tables(models, is_exact)
    assert (title, other_title) == ("read by exact", f"read by {COARSE}")
    assert header == ("kind, length", "one", "other", "other less one")
    assert rows == [("single, 2k", "80.0 ± 17.9% of 5", "40.0 ± 21.9% of 5", "-40.0 ± 24.5")]
    assert other_rows == [("single, 2k", "25.0 ± 21.7% of 4", "25.0 ± 21.7% of 4", "+0.0 ± 0.0")]
    ((title, (columns, depths)),) = needle_comparison.depth_tables(models, is_exact)
    assert title == "single, 2k"
    names = [f"{name}, read by {attention}" for attention in ("exact", COARSE) for name in ("one", "other")]
    assert columns == ("depth", *names)
    assert depths[0] == ("0.05", "75.0 ± 21.7% of 4", "25.0 ± 21.7% of 4", *["25.0 ± 21.7% of 4"] * 2)
    assert depths[1] == ("0.15", "", "", "", "")
    assert f"one,{COARSE},2048,single,0.05,exact match,0.25,0.217\n" in needle_comparison.as_csv(models)


def with_more(results: Results, length: int, kind: str, *names: str) -> Results:
    asked = (made_up(0, True), made_up(2, False))[: KINDS[kind].asked]
    for name in names:
        results.outcomes[Task(0, length, kind, 2, name)] = Outcome(asked)
    return results


def test_all_kinds_together_are_those_that_all_models_have() -> None:
    everything = [with_more(hand_made(), 2048, "multi-query-2", "exact", COARSE) for _ in range(2)]
    models = dict(zip(("one", "other"), everything, strict=True))
    (title, (_, rows)), *others = needle_comparison.depth_tables(models, is_exact)
    assert [title, *(other for other, _ in others)] == ["all kinds, 2k", "single, 2k", "multi-query-2, 2k"]
    assert rows[0][1] == "80.0 ± 17.9% of 5", "four of single, and one of multi-query-2"
    models["other"] = hand_made()
    assert [title for title, _ in needle_comparison.depth_tables(models, is_exact)] == [
        "single, 2k",
        "multi-query-2, 2k",
    ]


def test_tables_are_in_order_and_have_no_columns_of_other_lengths() -> None:
    longer = "muse:Q4K4R1SP1B256"
    results = with_more(hand_made(), 4096, "multi-key-2", "exact", longer)
    with_more(results, 1024, "single", "exact")
    models = {"one": results, "other": results}
    tables = dict(needle_comparison.summary_tables(models, is_exact))
    assert [row[0] for row in tables["read by exact"][1]] == ["single, 1k", "single, 2k", "multi-key-2, 4k"]
    columns = {title: header[1::2] for title, (header, _) in needle_comparison.depth_tables(models, is_exact)}
    assert columns["single, 1k"] == ("one, read by exact",)
    assert columns["multi-key-2, 4k"] == ("one, read by exact", f"one, read by {longer}")


def test_models_that_were_asked_something_else_are_not_compared() -> None:
    ours, theirs = hand_made(), hand_made()
    assert have_same_questions(ours, theirs)
    for name in ("exact", COARSE):
        asked = dataclasses.replace(made_up(0, True), uid="87654321")
        theirs.outcomes[Task(0, 2048, "single", 0, name)] = Outcome((asked,))
    assert not have_same_questions(ours, theirs)
    assert not have_same_questions(ours, Results({}, SETTINGS)), "nothing"
    elsewhere = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, haystack="other files"))
    assert not have_same_questions(ours, elsewhere), "uids do not depend on the haystack"


def test_samples_that_failed_for_one_model_are_told_and_compared_in_no_difference() -> None:
    ours, theirs = hand_made(), hand_made()
    theirs.outcomes[Task(0, 2048, "single", 0, "exact")] = Outcome(error="RuntimeError: no")
    theirs.outcomes[Task(0, 2048, "single", 0, COARSE)] = Outcome(error="RuntimeError: no")
    assert have_same_questions(ours, theirs)
    models = {"one": ours, "other": theirs}
    (_, (_, rows)), *_ = needle_comparison.summary_tables(models, is_exact)
    assert rows[0][1:] == ("80.0 ± 17.9% of 5", "75.0 ± 21.7% of 4", "+0.0 ± 0.0")
    assert "Failed of other: 3 of 10 samples" in needle_comparison.markdown_report(models, title="")


def run_report(folder: Path) -> tuple[int, list[str]]:
    found = CliRunner().invoke(commands.app, ["report", str(folder)])
    return found.exit_code, found.stderr.splitlines()


def test_the_report_of_a_folder_compares_its_models(tmp_path: Path) -> None:
    strange = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, seed=7))
    found = {"a-strange": strange, "one": hand_made(), "other": other_model(right=1), "alone/only": hand_made()}
    (tmp_path / "alone").mkdir()
    for name, results in found.items():
        needle_results.write_results(results, tmp_path / f"{name}.json")
    code, lines = run_report(tmp_path)
    assert (code, lines) == (
        0,
        [f"muse: {tmp_path / 'a-strange'}.json is compared with none: no other model in the folder was asked the same"],
    )
    text = (tmp_path / "needles-compared.md").read_text()
    assert text.startswith("# Needles compared: one, other\n")
    assert "| single, 2k | 80.0 ± 17.9% of 5 | 40.0 ± 21.9% of 5 | -40.0 ± 24.5 |" in text
    page = (tmp_path / "needles-compared.html").read_text()
    assert "other less one" in page
    assert "<img" in page
    assert (tmp_path / "index.html").read_text().count('href="needles-compared.html"') == 1
    assert not (tmp_path / "alone" / "needles-compared.html").exists()
    assert run_report(tmp_path)[0] == 0, "its own files are no results"


def test_two_groups_of_models_have_a_comparison_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        settings = dataclasses.replace(SETTINGS, seed="ac".count(name))
        needle_results.write_results(dataclasses.replace(hand_made(), settings=settings), tmp_path / f"{name}.json")
    assert run_report(tmp_path) == (0, [])
    assert (tmp_path / "needles-compared.md").read_text().startswith("# Needles compared: a, c\n")
    assert (tmp_path / "needles-compared-2.md").read_text().startswith("# Needles compared: b, d\n")


def test_results_with_the_name_of_a_comparison_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("needles-compared", "other"):
        needle_results.write_results(hand_made(), tmp_path / f"{name}.json")
    code, (line,) = run_report(tmp_path)
    assert code == 0
    assert line.endswith("needles-compared.json has the name of a comparison; rename it, and the models are compared")
    assert (tmp_path / "needles-compared.md").read_text().startswith("# Needles: needles-compared\n")
    refused = CliRunner().invoke(commands.app, ["eval", "needles", "--name", "needles-compared", "--device", "cpu"])
    assert refused.exit_code == 2
    assert "is that of the comparison of several models; choose another" in refused.stderr


def test_a_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    for folder in ("run/model", "model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert name_of(str(tmp_path / "run" / "model")) == "run"
    assert name_of(str(tmp_path / "model")) == "model"
    assert name_of("smollm2") == "smollm2"
