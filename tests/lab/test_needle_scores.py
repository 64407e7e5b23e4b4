"""Answers to needle samples: how they are scored, and runs that are interrupted or fail in one sample."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from muse_attention.huggingface import use_attention
from muse_lab.evaluation.needles import results as needle_results
from muse_lab.evaluation.needles import scores as needle_scores
from muse_lab.evaluation.needles.results import NeedleResults, NeedleSettings, NeedleTask, measure, plan
from muse_lab.evaluation.needles.scores import answer
from muse_lab.evaluation.needles.statistics import failures
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.needles.samples import KINDS, NeedleSamples, Sample
from tests.needle_models import needle_llama

LENGTH = 1024
COARSE = "muse:Q4K4R1SP1B128"
SETTINGS = NeedleSettings("tiny", "made up", 0, "cpu", "float32")


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


# Runs


def test_any_part_of_a_run_is_a_fair_comparison() -> None:
    tasks = plan({1024: ["exact", COARSE], 2048: ["exact"]}, {1024: ["single"], 2048: ["single", "multi-key-2"]}, 2)
    assert len(tasks) == len(set(tasks)) == 2 * 9 * 4
    assert tasks[:2] == [NeedleTask(0, 1024, "single", 0, "exact"), NeedleTask(0, 1024, "single", 0, COARSE)]
    assert {task.number for task in tasks[:36]} == {0}
    assert {task.length for task in tasks if task.kind == "multi-key-2"} == {2048}


def test_a_sample_that_fails_is_kept_and_tried_again(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = needle_llama(tokenizer), tmp_path / "needles.json"
    tasks = plan({LENGTH: ["exact"]}, {LENGTH: ["single"]}, 1)[:3]
    results = NeedleResults({}, SETTINGS)

    def fail(model: Any, words: Any, sample: Sample, attention: str) -> Any:
        if sample.bucket == 1:
            raise RuntimeError("no\nluck")
        return answer(model, words, sample, attention)

    monkeypatch.setattr(needle_results, "answer", fail)
    measure(model, words, samples, tasks, results, path)
    assert failures(results) == [(tasks[1], "RuntimeError: no luck")]
    assert NeedleResults.read(path) == results
    assert NeedleResults.read(path).missing(tasks) == [tasks[1]]
    monkeypatch.undo()
    measure(model, words, samples, tasks, results, path)
    assert failures(NeedleResults.read(path)) == []


def test_a_run_can_be_interrupted_anywhere(
    tokenizer: Tokenizer, words: Any, samples: NeedleSamples, tmp_path: Path
) -> None:
    model = needle_llama(tokenizer)
    tasks = plan({LENGTH: ["exact", COARSE]}, {LENGTH: ["single"]}, 1)[:4]
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    measure(model, words, samples, tasks, NeedleResults({}, SETTINGS), whole)
    interrupt = Mock(side_effect=[None, None, None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        measure(model, words, samples, tasks, NeedleResults({}, SETTINGS), parted, on_step=interrupt)
    part = NeedleResults.read(parted)
    assert part.missing(tasks) == tasks[3:]
    measure(model, words, samples, tasks, part, parted)
    assert parted.read_bytes() == whole.read_bytes()
