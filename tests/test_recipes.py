"""Recipes and schedules of training: the paper's numbers, changes by `key=value`, and one line for mistakes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from muse_attention.pretraining.recipes import RECIPES, override, read_recipe, tiny
from muse_attention.pretraining.schedule import attention_at, exact_steps, learning_rate


@pytest.mark.parametrize(
    ("name", "steps", "rate"),
    [("s3", 15259, 1.7321e-3), ("s4", 30518, 1.5e-3), ("s5", 57221, 1.3416e-3), ("s6", 98420, 1.2247e-3)],
)
def test_recipes_of_the_paper(name: str, steps: int, rate: float) -> None:
    recipe = RECIPES[name]()
    assert recipe.steps == steps
    assert recipe.peak_rate == pytest.approx(rate, rel=1e-4)
    assert recipe.tokens_per_step == 131072
    assert (recipe.beta1, recipe.beta2, recipe.epsilon, recipe.weight_decay, recipe.clip) == (0.9, 0.95, 1e-6, 0.01, 1)
    assert (recipe.warmup, recipe.final_rate, recipe.precision) == (4000, 0.1, "bfloat16")


def test_a_recipe_is_overridden_field_by_field() -> None:
    recipe = override(tiny(), ["length=2k", "peak_rate=1e-4", "compile=true", "attention=exact", "probe_every=0"])
    assert (recipe.length, recipe.peak_rate, recipe.compile, recipe.attention) == (2048, 1e-4, True, "exact")
    assert recipe.probe_every == 0
    before = {name: getattr(tiny(), name) for name in ("length", "peak_rate", "compile", "attention", "probe_every")}
    assert dataclasses.replace(recipe, **before) == tiny()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nonsense", "'nonsense' is not of the form key=value; the keys are scale, steps"),
        ("depth=3", "a recipe has no 'depth'; the keys are scale, steps"),
        ("steps=many", "steps=many must be an integer, like 512 or 8k"),
        ("steps=0", "steps=0 must be at least 1"),
        ("peak_rate=fast", "peak_rate=fast must be a number"),
        ("peak_rate=nan", "peak_rate=nan must be above 0"),
        ("compile=1", "compile=1 must be true or false"),
        ("exact_tail=2", "exact_tail=2.0 must be between 0 and 1"),
        ("beta2=1", "beta2=1.0 must be at least 0 and below 1"),
        ("scale=7", "scale=7 must be 0 or one of the paper's: 3, 4, 5, 6, 8"),
        ("warmup=1k", "warmup=1024 is longer than steps=256"),
        ("batch=3", "batch=3 is no multiple of micro_batch=2"),
        ("precision=float16", "precision='float16' must be one of float32, bfloat16"),
        ("attention=sparse", "unknown attention 'sparse'"),
    ],
)
def test_mistakes_in_a_recipe(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        override(tiny(), [change])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["compile", "recompute", "deterministic"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_truth_that_is_read_back_is_one(name: str, value: object) -> None:
    document = dataclasses.asdict(tiny())
    assert read_recipe(document) == tiny()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be true or false"):
        read_recipe({**document, name: value})


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    rates = [learning_rate(step, steps=100, warmup=10, peak=2.0, final=0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2
    assert rates[55] == pytest.approx(1.1)
    assert rates[100] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("steps", "tail", "exact"), [(1000, 0.001, 1), (15259, 0.001, 16), (8, 0, 0), (8, 1, 8)])
def test_exact_attention_comes_last(steps: int, tail: float, exact: int) -> None:
    assert exact_steps(steps, tail) == exact
    names = [attention_at(step, steps=steps, attention="muse", exact_tail=tail) for step in range(steps)]
    assert names == ["muse"] * (steps - exact) + ["exact"] * exact
