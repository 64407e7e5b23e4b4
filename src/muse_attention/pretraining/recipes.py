"""Recipes: all that a training run is made of, but for its data. Each is a function; `key=value` changes a field.

`s3` to `s8` are the paper's. The paper's attention is Q128K128R8SP1B8k with 0.1% of exact attention at the end, or
frozen aggregation with none: `attention=muse:Q128K128R8SP1B8k,differentiable_aggregation=false exact_tail=0`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muse_attention.by_name import full_name, get_attention
from muse_attention.recorded_names import may_mean
from muse_attention.sizes import parse_size

PAPER_ATTENTION = "muse:Q128K128R8SP1B8k"
PAPER_TOKENS = {3: 2.0e9, 4: 4.0e9, 5: 7.5e9, 6: 12.9e9, 8: 23.6e9}
"""by scale"""
PRECISIONS = ("float32", "bfloat16")
MIXTURES = ("none", "niah")
MOST_STEPS, MOST_TOKENS, MOST_SEQUENCES = 10**9, 2**30, 2**20
"""Of a run, of a sequence, and of an update."""
MOST_CLIP, LEAST_EPSILON = 1e9, 1e-30
"""The square of a clipped gradient is far from overflow in float32, and epsilon far from 0."""
FREE = ("checkpoint_every", "keep", "probe_every")
"""Fields that do not change what is learnt: a run may go on with others."""


@dataclass(frozen=True)
class Recipe:
    """The defaults are the paper's, where it says something."""

    scale: int
    """of the paper's models, or 0 for `DecoderConfig.tiny`"""
    steps: int
    """updates"""
    length: int = 65536
    """tokens of a sequence"""
    batch: int = 2
    """sequences of an update, over all ranks"""
    micro_batch: int = 1
    """sequences that a rank computes at the same time: gradients of more are accumulated"""
    attention: str = PAPER_ATTENTION
    """of the global layers, named as for `get_attention`"""
    exact_tail: float = 0.001
    """share of the updates, the last ones, with exact attention"""
    peak_rate: float = 3e-3
    final_rate: float = 0.1
    """of the peak"""
    warmup: int = 4000
    """updates until the peak"""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 1.0
    """largest norm of all gradients together"""
    precision: str = "bfloat16"
    """of products, by autocast; weights and optimiser are always float32"""
    compile: bool = False
    recompute: bool = False
    """activations of a layer, in the backward pass, instead of keeping them"""
    deterministic: bool = True
    """on CUDA, only algorithms that give the same bits twice"""
    seed: int = 0
    """of the initial weights and of the order of samples"""
    initial: str = ""
    """folder of a model to take the initial weights from, in place of the seed's"""
    mixture: str = "none"
    """what is mixed into the corpus: nothing, or needle documents"""
    mixture_share: float = 0.5
    """of the sequences, if something is"""
    probe_every: int = 500
    """updates between two measurements of the attention's error, and of answers to needles; 0 for none"""
    checkpoint_every: int = 500
    keep: int = 2
    """newest checkpoints; older ones are removed"""

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "keep"):
            _check(self, name, lambda value: 1 <= value <= MOST_STEPS, f"at least 1 and at most {MOST_STEPS}")
        for name in ("warmup", "probe_every"):
            _check(self, name, lambda value: 0 <= value <= MOST_STEPS, f"at least 0 and at most {MOST_STEPS}")
        for name in ("batch", "micro_batch"):
            _check(self, name, lambda value: 1 <= value <= MOST_SEQUENCES, f"at least 1 and at most {MOST_SEQUENCES}")
        _check(self, "length", lambda value: 1 <= value <= MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS}")
        _check(self, "scale", lambda value: 0 <= value <= max(PAPER_TOKENS), f"at least 0, at most {max(PAPER_TOKENS)}")
        _check(self, "seed", lambda value: 0 <= value < 2**63, "at least 0 and below 2^63")
        _check(self, "peak_rate", lambda value: 0 < value <= 1, "above 0 and at most 1")
        _check(self, "weight_decay", lambda value: 0 <= value <= 1000, "at least 0 and at most 1000")
        _check(self, "clip", lambda value: 0 < value <= MOST_CLIP, f"above 0 and at most {MOST_CLIP:g}")
        _check(self, "epsilon", lambda value: LEAST_EPSILON <= value <= 1, f"at least {LEAST_EPSILON:g} and at most 1")
        for name in ("exact_tail", "final_rate", "mixture_share"):
            _check(self, name, lambda value: 0 <= value <= 1, "between 0 and 1")
        for name in ("beta1", "beta2"):
            _check(self, name, lambda value: 0 <= value < 1, "at least 0 and below 1")
        for name in ("compile", "recompute", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        if not isinstance(self.initial, str):
            raise ValueError(f"initial={self.initial!r} must be a string, the path of a folder")
        if self.scale and self.scale not in PAPER_TOKENS:
            raise ValueError(f"scale={self.scale} must be 0 or one of the paper's: {', '.join(map(str, PAPER_TOKENS))}")
        if self.peak_rate * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay={self.weight_decay} with peak_rate={self.peak_rate} would turn the sign of all weights; "
                "choose a product of at most 1"
            )
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} is longer than steps={self.steps}; choose fewer")
        if self.batch % self.micro_batch:
            raise ValueError(f"batch={self.batch} is no multiple of micro_batch={self.micro_batch}; choose one that is")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if self.mixture not in MIXTURES:
            raise ValueError(f"mixture={self.mixture!r} must be one of {', '.join(MIXTURES)}")
        get_attention(self.attention)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length


def tiny() -> Recipe:
    """1.3M parameters on a CPU, in minutes: 512 sequences of 1k tokens."""
    return Recipe(
        scale=0,
        steps=256,
        length=1024,
        batch=2,
        micro_batch=2,
        attention="muse:QK8R2SP1B128",
        exact_tail=0.05,
        warmup=16,
        precision="float32",
        probe_every=32,
        checkpoint_every=64,
    )


def s3() -> Recipe:
    """96M parameters, 2.0B tokens."""
    return _paper(3)


def s4() -> Recipe:
    """185M parameters, 4.0B tokens."""
    return _paper(4)


def s5() -> Recipe:
    """356M parameters, 7.5B tokens."""
    return _paper(5)


def s6() -> Recipe:
    """560M parameters, 12.9B tokens."""
    return _paper(6)


def s8() -> Recipe:
    """1.07B parameters, 23.6B tokens."""
    return _paper(8)


RECIPES: dict[str, Callable[[], Recipe]] = {recipe.__name__: recipe for recipe in (tiny, s3, s4, s5, s6, s8)}


def get_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; use one of {', '.join(RECIPES)}")
    return RECIPES[name]()


def override(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """With other values of some fields, each written `key=value`; sizes as `64k`, truths as `true` and `false`."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(recipe)}
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            what = f"a recipe has no {key!r}" if equals else f"{change!r} is not of the form key=value"
            raise ValueError(f"{what}; the keys are {', '.join(fields)}")
        values[key] = _parse(key, text, fields[key])
    return dataclasses.replace(recipe, **values)


def read_recipe(document: dict[str, Any]) -> Recipe:
    """From what `dataclasses.asdict` gave; a ValueError if it is something else."""
    try:
        return Recipe(**document)
    except TypeError:
        raise ValueError("a recipe of another version of muse train") from None


def differences(recorded: Recipe, other: Recipe) -> list[str]:
    """Fields that change what is learnt, and differ between a recorded recipe and another."""
    names = [field.name for field in dataclasses.fields(recorded) if field.name not in FREE]
    differing = [name for name in names if getattr(recorded, name) != getattr(other, name)]
    if may_mean(recorded.attention, full_name(other.attention, other.length), recorded.length):
        differing = [name for name in differing if name != "attention"]
    return differing


def _paper(scale: int) -> Recipe:
    return Recipe(
        scale=scale,
        steps=math.ceil(PAPER_TOKENS[scale] / (2 * 65536)),
        peak_rate=3e-3 * scale**-0.5,
        compile=True,
        recompute=True,
    )


def _parse(key: str, text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key}={text} must be true or false")
        return text.lower() == "true"
    try:
        if kind == "float":
            return float(text)
        return 0 if text == "0" else parse_size(text)
    except ValueError:
        raise ValueError(
            f"{key}={text} must be {'a number' if kind == 'float' else 'an integer, like 512 or 8k'}"
        ) from None


def _check(recipe: Recipe, name: str, holds: Callable[[Any], bool], what: str) -> None:
    value = getattr(recipe, name)
    is_integer = next(field for field in dataclasses.fields(recipe) if field.name == name).type == "int"
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        raise ValueError(f"{name}={value!r} must be {'an integer' if is_integer else 'a number'}")
    if not holds(value):  # as NaN never does
        shown = "a huge number" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
        raise ValueError(f"{name}={shown} must be {what}")
