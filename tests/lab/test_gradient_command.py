"""`muse eval needles --gradients`: what it measures, and its report."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from muse_attention.huggingface import use_attention
from muse_lab.evaluation.gradients.gradient_report import depth_table, gradient_report, pool, summary_table
from muse_lab.evaluation.gradients.results import GradientResults, Gradients, Products, differentiate, measure
from muse_lab.evaluation.needles.results import NeedleSettings, NeedleTask, plan
from muse_lab.pretraining.needles.samples import NeedleSamples
from muse_lab.report.markdown import as_markdown
from tests.needle_models import needle_llama

LENGTH = 512
COARSE, ALL = "muse:Q4K4R1SP1B64,clustering=lloyd", "muse:Q4K4R4SP8B64,clustering=lloyd"
SETTINGS = NeedleSettings("tiny", "made up", 0, "cpu", "float32")


def tasks_of(*attentions: str, kind: str = "single") -> list[NeedleTask]:
    return [task for task in plan({LENGTH: attentions}, {LENGTH: [kind]}, 1) if task.bucket in (1, 6)]


# The numbers


@pytest.mark.long
def test_retrieving_all_keys_keeps_all_of_the_gradient(
    tokenizer: Tokenizer, samples: NeedleSamples, tmp_path: Path
) -> None:
    results = GradientResults({}, SETTINGS)
    measure(needle_llama(tokenizer), samples, tasks_of(ALL, COARSE), results, tmp_path / "gradients.json")
    exact, coarse = (pool(results, LENGTH, attention) for attention in (ALL, COARSE))
    for compared in (exact.all_weights, exact.queries_and_keys):
        assert compared.kept.mean == pytest.approx(1, abs=1e-5)
        assert compared.cosine == pytest.approx(1, abs=1e-5)
        assert compared.norm == pytest.approx(1, abs=1e-5)
    assert exact.losses.mean == pytest.approx(exact.exact_losses.mean, rel=1e-5)
    assert coarse.queries_and_keys.cosine < 0.9999
    assert coarse.exact_losses == exact.exact_losses


def test_the_gradient_is_that_of_the_answers_as_in_training(tokenizer: Tokenizer, samples: NeedleSamples) -> None:
    """By labels, of which all but the uids' are left out."""
    model = needle_llama(tokenizer)
    sample = samples.make("multi-query-2", LENGTH, 2, 0)
    loss, gradients = differentiate(model, sample, COARSE)
    tokens = torch.from_numpy(sample.tokens)[None]
    labels = torch.full_like(tokens, -100)
    for question in sample.questions:
        labels[:, list(question.answer)] = tokens[:, list(question.answer)]
    with use_attention(model, COARSE):
        expected = model(tokens, labels=labels, use_cache=False).loss
        assert loss == pytest.approx(expected.item(), rel=1e-6)  # transformers has float32 there
        expected.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-6)


def test_numbers_are_products_of_the_gradients(tokenizer: Tokenizer, samples: NeedleSamples, tmp_path: Path) -> None:
    model, (task, *_) = needle_llama(tokenizer), tasks_of(COARSE)
    results = GradientResults({}, SETTINGS)
    measure(model, samples, [task], results, tmp_path / "gradients.json")
    assert all(weight.grad is None for weight in model.parameters()), "the model is left as it was"
    sample = samples.make(task.kind, LENGTH, task.bucket, task.number)
    (loss, own), (exact_loss, exact) = (differentiate(model, sample, attention) for attention in (COARSE, "exact"))
    found = results.measured[task]
    assert (found.loss, found.exact_loss) == pytest.approx((loss, exact_loss), rel=1e-5)
    for products, chosen in (
        (found.all_weights, list(own)),
        (found.queries_and_keys, [name for name in own if "q_proj" in name or "k_proj" in name]),
    ):
        flat_own, flat_exact = (torch.cat([of[name].flatten().double() for name in chosen]) for of in (own, exact))
        expected = [
            float(one @ other)
            for one, other in ((flat_own, flat_own), (flat_exact, flat_exact), (flat_own, flat_exact))
        ]
        assert [products.square, products.exact_square, products.product] == pytest.approx(expected, rel=1e-4)
    assert 0 < found.queries_and_keys.exact_square < found.all_weights.exact_square
    assert GradientResults.read(tmp_path / "gradients.json").measured == results.measured


def test_a_loss_or_a_gradient_that_is_no_number_is_refused(tokenizer: Tokenizer, samples: NeedleSamples) -> None:
    """A file that holds one could not be read again."""
    sample, refused = samples.make("single", LENGTH, 0, 0), "the loss under exact, or its gradient, is not a finite"
    model = needle_llama(tokenizer)
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(ValueError, match=refused):
        differentiate(model, sample, "exact")
    model = needle_llama(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=refused):
        differentiate(model, sample, "exact")


# The reports


def hand_made() -> GradientResults:
    """Two depths: half of the gradient is kept of a small one, and all of one that is three times as large."""
    zeros = Products(0.0, 0.0, 0.0)
    gradients = {
        NeedleTask(0, LENGTH, "single", 0, COARSE): Gradients(2.0, 1.0, Products(0.25, 1.0, 0.5), zeros),
        NeedleTask(0, LENGTH, "single", 3, COARSE): Gradients(1.0, 1.0, Products(9.0, 9.0, 9.0), zeros),
    }
    machine = {"cpu": "c", "cores": 2, "threads": 1, "memory_gib": 1, "gpu": None, "os": "o", "date": "d"}
    return GradientResults(machine, SETTINGS, ["muse eval needles --gradients"], gradients)


def test_what_is_kept_is_a_share_of_all_that_there_is() -> None:
    results = hand_made()
    (row,) = summary_table(results).rows
    assert row[:2] == ("Q4K4R1SP1B64", "512")
    assert row[5] == "0.950 ± 0.090"  # (0.5 + 9) / (1 + 9); the errors of the two products are -0.45 and 0.45
    assert row[6:8] == ("0.988", "0.962")  # 9.5 / sqrt(9.25 * 10), sqrt(9.25 / 10)
    assert row[8:] == ("", "", ""), "no weights are named as projections of queries and keys"
    assert depth_table(results, LENGTH).rows == [("0.05", "10%", "0.500"), ("0.35", "90%", "1.000")]
    text = as_markdown(gradient_report(results, "tiny"))
    assert "At 512, Q4K4R1SP1B64 keeps 0.950 ± 0.090 of the gradient of answers." in text
    zeros = Products(0.0, 0.0, 0.0)
    nothing = {task: Gradients(0.0, 0.0, zeros, zeros) for task in results.measured}
    text = as_markdown(gradient_report(dataclasses.replace(results, measured=nothing), "tiny"))
    assert "At 512, exact attention has no gradient for the answers that Q4K4R1SP1B64 could keep." in text
    with pytest.raises(ValueError, match="no sample has been differentiated yet"):
        gradient_report(GradientResults({}, SETTINGS), "tiny")
