"""Recipes and schedules of training: changes by `key=value`, and one line for mistakes."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from muse_lab.pretraining.optimiser import make_optimiser
from muse_lab.pretraining.recipes import LEAST_EPSILON, MOST_CLIP, RECIPES, Recipe, override, read_recipe, tiny
from muse_lab.pretraining.schedule import exact_steps, learning_rate
from tests.refusals import one_line_error


def test_a_recipe_is_overridden_field_by_field() -> None:
    recipe = override(tiny(), ["length=2k", "peak_rate=1e-4", "compile=true", "attention=exact", "probe_every=0"])
    assert (recipe.length, recipe.peak_rate, recipe.compile, recipe.attention) == (2048, 1e-4, True, "exact")
    assert recipe.probe_every == 0
    before = {name: getattr(tiny(), name) for name in ("length", "peak_rate", "compile", "attention", "probe_every")}
    assert dataclasses.replace(recipe, **before) == tiny()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("nonsense", "'nonsense' is not of the form key=value; the keys are scale, steps"),
        ("depth=3", "a recipe has no 'depth'; the keys are scale, steps"),
        ("steps=many", "steps=many must be an integer, like 512 or 8k"),
        ("steps=0", "steps=0 must be at least 1"),
        ("steps=2000000k", "steps=2048000000 must be at least 1 and at most 1000000000"),
        ("length=2048g", "length=2048g must be an integer"),
        ("length=2048m", "length=2147483648 must be at least 1 and at most 1073741824"),
        ("batch=1025k", "batch=1049600 must be at least 1 and at most 1048576"),
        ("batch=3", "batch=3 is no multiple of micro_batch=2"),
        ("peak_rate=fast", "peak_rate=fast must be a number"),
        ("peak_rate=nan", "peak_rate=nan must be above 0"),
        ("peak_rate=1.1", "peak_rate=1.1 must be above 0 and at most 1"),
        ("weight_decay=500", "weight_decay=500.0 with peak_rate=0.003 would flip the sign of all weights"),
        ("clip=1e10", "clip=10000000000.0 must be above 0 and at most 1e+09"),
        ("epsilon=1e-46", "epsilon=1e-46 must be at least 1e-30 and at most 1"),
        ("compile=1", "compile=1 must be true or false"),
        ("exact_start=-1", "exact_start=-1.0 must be between 0 and 1"),
        ("exact_tail=2", "exact_tail=2.0 must be between 0 and 1"),
        ("beta2=1", "beta2=1.0 must be at least 0 and below 1"),
        ("scale=7", "scale=7 must be 0 or one of 1, 2, 3, 4, 5, 6, 8"),
        ("head_dim=96", "head_dim=96 must be one of 32, 64, 128"),
        ("warmup=1k", "warmup=1024 is longer than steps=256"),
        ("precision=float16", "precision='float16' must be one of float32, bfloat16"),
        ("mixture=ruler", "mixture='ruler' must be one of none, niah"),
        ("mixture_share=1.5", "mixture_share=1.5 must be between 0 and 1"),
        ("attention=sparse", "unknown attention 'sparse'"),
        ("further_attention=exact", "further_attention=exact needs further_steps=, of at least 1"),
        ("further_steps=2 further_attention=exakt", "unknown attention 'exakt'"),
        ("further_steps=2 final_rate=0", "further_steps=2 would learn nothing: final_rate=0"),
        ("error_limit=0.02 probe_every=0", "error_limit=0.02 needs the probe"),
    ],
)
def test_mistakes_in_a_recipe(changes: str, message: str) -> None:
    with one_line_error(re.escape(message)):
        override(tiny(), changes.split())


def test_recipes_for_a_gpu_use_the_fastest_kernels() -> None:
    """Deterministic runs leave out cuDNN's attention, so that a speed-up over exact attention would be too large."""
    assert [name for name, recipe in RECIPES.items() if recipe().deterministic] == ["tiny"]


NUMBERS = [field.name for field in dataclasses.fields(Recipe) if field.type in ("int", "float")]


@pytest.mark.parametrize("name", NUMBERS)
def test_absurd_numbers_are_refused_before_anything_starts(name: str) -> None:
    """By the command and by whoever reads a recipe from a file."""
    for text in ("1e38", "inf", "-inf", "nan", "1e400", "-1", "-1e-9", "0x10", "1" * 5000, "", " "):
        with one_line_error(f"^{name}=.* must be "):
            override(tiny(), [f"{name}={text}"])
    for value in (1e38, math.inf, -math.inf, math.nan, -1, -(10**400), 10**400, 10**5000, True, None, "1", [1], {}):
        with pytest.raises(ValueError, match=f"^{name}=.* must be ") as raised:
            read_recipe({**dataclasses.asdict(tiny()), name: value})
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 200


def test_the_largest_rate_does_not_overflow_the_optimiser() -> None:
    """At the limits of a recipe, the largest gradients, tiny ones and none leave weights that are finite."""
    limits = ["peak_rate=1", "weight_decay=1", f"clip={MOST_CLIP}", f"epsilon={LEAST_EPSILON}", "beta1=0", "beta2=0"]
    for recipe in (override(tiny(), limits), override(tiny(), [*limits, "beta1=0.999999", "beta2=0.999999999"])):
        model = torch.nn.Linear(3, 1, bias=False)
        optimiser = make_optimiser(model, recipe)
        for gradient in (MOST_CLIP, 0.0, -MOST_CLIP):
            model.weight.grad = torch.tensor([[gradient, 0.0, 1e-30]])
            optimiser.step()
            assert model.weight.isfinite().all()


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


@pytest.mark.parametrize(("share", "exact"), [(0.001, 1), (0.0011, 2), (0, 0), (1, 1000)])
def test_a_share_of_the_updates_is_rounded_up(share: float, exact: int) -> None:
    assert exact_steps(1000, share) == exact


@pytest.mark.parametrize(
    ("start", "tail", "expected"),
    [
        (0, 0, "mmmmmm"),
        (0, 0.1, "mmmmme"),
        (0.2, 0, "eemmmm"),
        (0.5, 0.1, "eeemme"),
        (1, 0, "eeeeee"),
        (0.7, 0.7, "eeeeee"),
    ],
)
def test_exact_attention_may_come_first(start: float, tail: float, expected: str) -> None:
    recipe = override(tiny(), ["steps=6", "warmup=1", "attention=muse", f"exact_start={start}", f"exact_tail={tail}"])
    assert "".join(recipe.attention_at(step)[0] for step in range(6)) == expected


@pytest.mark.parametrize(("further", "tail", "last"), [("moba", 0.5, "moba"), ("", 0.5, "exact"), ("", 0, "muse")])
def test_further_updates_have_their_attention_or_that_of_the_last_one(further: str, tail: float, last: str) -> None:
    changes = ["steps=4", "warmup=1", "attention=muse", f"exact_tail={tail}", "further_steps=3"]
    recipe = override(tiny(), [*changes, f"further_attention={further}"])
    names = [recipe.attention_at(step) for step in range(3, 7)]
    assert names[1:] == [last] * 3
    assert names[0] == ("exact" if tail else "muse")
