"""Recipes: all settings of a training run but its data. Each is a function; `key=value` changes a field.

`s3` to `s8` have the paper's models, optimiser, tokens and attention sizes, with the clustering of this library, which
is faster than the paper's, and exact attention in the last 0.1% of the updates. `paper-s3` to `paper-s8` are the paper
to the letter: its streaming clustering, its limits on clusters of queries and of keys, and no exact attention before
the schedule has ended. `muse train --continue-from` then trains further with exact attention, as its Appendix G.5 does.
Frozen aggregation needs neither: `attention=muse:paper,differentiable_aggregation=false`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muse_attention.registry import get_attention
from muse_attention.sizes import format_size, parse_size
from muse_lab.pretraining.mesh_shape import AUTO, read_mesh
from muse_lab.pretraining.schedule import exact_steps
from muse_lab.records.attention_names import EXACT

PAPER_ATTENTION = "muse:Q128K128R8SP1B8k"
"""The paper's sizes, with the clustering of this library."""
PAPER_METHOD = "muse:paper"
"""The paper's method, whatever the length."""
PAPER_TOKENS = {3: 2.0e9, 4: 4.0e9, 5: 7.5e9, 6: 12.9e9, 8: 23.6e9}
"""by scale"""
TOKENS = {1: 0.23e9, 2: 0.71e9, **PAPER_TOKENS}
"""The smaller ones are ours: 20 tokens for each parameter, as in the paper, for a scaling law on one GPU."""
PRECISIONS = ("float32", "bfloat16")
MIXTURES = ("none", "niah")
HEAD_DIMS = (32, 64, 128)
MOST_STEPS, MOST_TOKENS, MOST_SEQUENCES = 10**9, 2**30, 2**20
"""Limits: steps of a run, tokens of a sequence, sequences of an update."""
MOST_CLIP, LEAST_EPSILON = 1e9, 1e-30
"""The square of a clipped gradient is far from overflow in float32, and epsilon far from 0."""
FREE = (
    *("checkpoint_every", "checkpoint_minutes", "keep", "probe_every", "stall_minutes", "skip_budget"),
    *("evaluate_every", "evaluate_samples", "evaluate_needles", "mesh"),
)
"""Fields that do not change what is learned: a run may continue with other values."""
MOST_MINUTES, MOST_SIGMA = 10**6, 1000


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run but its data. The defaults are the paper's, where it gives them.

    Attributes:
        scale: model size: the paper's 3, 4, 5, 6 or 8, or 1 or 2; 0 is `DecoderConfig.tiny`
        head_dim: head dimension, 64 or 128; the model width is fixed, so larger heads are fewer
        steps: number of optimiser updates
        length: sequence length in tokens
        batch: global batch size, in sequences
        micro_batch: sequences per rank and forward pass; larger batches accumulate gradients
        mesh: data-parallel ranks x sequence-parallel ranks, such as 2x4; auto is all data-parallel
        document_mask: mask attention and loss between the documents of a sequence
        attention: attention of the global layers, by name: exact, muse, muse:Q16K64T0.2B4k, moba:L8kB512R1
        exact_start: fraction of the updates, at the start, with exact attention
        exact_tail: fraction of the updates, at the end, with exact attention
        further_steps: extra updates at the final learning rate; --continue-from adds them to a finished run
        further_attention: attention of the extra updates, by name; if empty, that of the last update before them
        peak_rate: peak learning rate
        final_rate: final learning rate, as a fraction of the peak
        warmup: number of warm-up updates
        beta1: AdamW's decay rate of the gradient mean
        beta2: AdamW's decay rate of the squared-gradient mean
        epsilon: AdamW's epsilon
        weight_decay: AdamW's weight decay
        clip: maximum global gradient norm
        precision: autocast precision, float32 or bfloat16; weights and optimiser state stay float32
        compile: compile each layer with torch.compile
        recompute: activation checkpointing: recompute each layer in the backward pass
        deterministic: on CUDA, use only algorithms whose results are bitwise reproducible, which excludes cuDNN
        seed: random seed of the initial weights and of the sample order
        initial: directory of a model to start from, instead of random weights
        mixture: data mixed into the corpus: none, or niah for needle documents
        mixture_share: fraction of the sequences that come from the mixture
        probe_every: updates between measurements of the attention error and of needle answers; 0 disables them
        error_limit: relative squared error above which a layer gets a tighter attention; 0 disables it
        evaluate_every: updates between evaluations of held-out loss and needles; 0 disables them
        evaluate_samples: held-out sequences per evaluation
        evaluate_needles: needle documents, from held-out files, per evaluation; 0 for none
        skip_sigma: skip updates whose loss or gradient norm is this many deviations above the recent mean; 0 is off
        skip_budget: number of skipped updates (outliers, or not finite) after which the run stops
        stall_minutes: stop after this many minutes without progress; 0 disables it
        checkpoint_every: updates between checkpoints
        checkpoint_minutes: maximum minutes between checkpoints; 0 for no limit
        keep: number of newest checkpoints to keep
    """

    scale: int
    steps: int
    head_dim: int = 64
    length: int = 65536
    batch: int = 2
    micro_batch: int = 1
    mesh: str = AUTO
    document_mask: bool = False
    attention: str = PAPER_ATTENTION
    exact_start: float = 0.0
    exact_tail: float = 0.001
    further_steps: int = 0
    further_attention: str = ""
    peak_rate: float = 3e-3
    final_rate: float = 0.1
    warmup: int = 4000
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "bfloat16"
    compile: bool = False
    recompute: bool = False
    deterministic: bool = True
    seed: int = 0
    initial: str = ""
    mixture: str = "none"
    mixture_share: float = 0.5
    probe_every: int = 500
    error_limit: float = 0.0
    evaluate_every: int = 0
    evaluate_samples: int = 8
    evaluate_needles: int = 4
    skip_sigma: float = 0.0
    skip_budget: int = 10
    stall_minutes: float = 60.0
    checkpoint_every: int = 500
    checkpoint_minutes: float = 30.0
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "keep"):
            _check(self, name, lambda value: 1 <= value <= MOST_STEPS, f"at least 1 and at most {MOST_STEPS}")
        for name in ("warmup", "probe_every", "further_steps", "evaluate_every", "skip_budget"):
            _check(self, name, lambda value: 0 <= value <= MOST_STEPS, f"at least 0 and at most {MOST_STEPS}")
        for name in ("batch", "micro_batch"):
            _check(self, name, lambda value: 1 <= value <= MOST_SEQUENCES, f"at least 1 and at most {MOST_SEQUENCES}")
        _check(self, "evaluate_samples", lambda value: 1 <= value <= MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}")
        _check(self, "evaluate_needles", lambda value: 0 <= value <= MOST_SEQUENCES, f"0 to {MOST_SEQUENCES}")
        for name in ("checkpoint_minutes", "stall_minutes"):
            _check(self, name, lambda value: 0 <= value <= MOST_MINUTES, f"at least 0 and at most {MOST_MINUTES}")
        _check(self, "skip_sigma", lambda value: 0 <= value <= MOST_SIGMA, f"at least 0 and at most {MOST_SIGMA}")
        _check(self, "error_limit", lambda value: 0 <= value <= 1, "between 0 and 1")
        _check(self, "length", lambda value: 1 <= value <= MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS}")
        _check(self, "scale", lambda value: value in (0, *TOKENS), f"0 or one of {', '.join(map(str, TOKENS))}")
        _check(self, "head_dim", lambda value: value in HEAD_DIMS, f"one of {', '.join(map(str, HEAD_DIMS))}")
        _check(self, "seed", lambda value: 0 <= value < 2**63, "at least 0 and below 2^63")
        _check(self, "peak_rate", lambda value: 0 < value <= 1, "above 0 and at most 1")
        _check(self, "weight_decay", lambda value: 0 <= value <= 1000, "at least 0 and at most 1000")
        _check(self, "clip", lambda value: 0 < value <= MOST_CLIP, f"above 0 and at most {MOST_CLIP:g}")
        _check(self, "epsilon", lambda value: LEAST_EPSILON <= value <= 1, f"at least {LEAST_EPSILON:g} and at most 1")
        for name in ("exact_start", "exact_tail", "final_rate", "mixture_share"):
            _check(self, name, lambda value: 0 <= value <= 1, "between 0 and 1")
        for name in ("beta1", "beta2"):
            _check(self, name, lambda value: 0 <= value < 1, "at least 0 and below 1")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be true or false")
            if field.type == "str" and not isinstance(value, str):
                raise ValueError(f"{field.name}={value!r} must be a string")
        if self.peak_rate * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay={self.weight_decay} with peak_rate={self.peak_rate} would flip the sign of all weights; "
                "choose a product of at most 1"
            )
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} is longer than steps={self.steps}; choose fewer")
        if self.batch % self.micro_batch:
            raise ValueError(f"batch={self.batch} is no multiple of micro_batch={self.micro_batch}; choose one that is")
        for name, choices in (("precision", PRECISIONS), ("mixture", MIXTURES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        read_mesh(self.mesh)
        if self.further_attention and not self.further_steps:
            raise ValueError(f"further_attention={self.further_attention} needs further_steps=, of at least 1")
        if self.further_steps and not self.final_rate:
            raise ValueError(f"further_steps={self.further_steps} would learn nothing: final_rate=0; choose another")
        if self.error_limit and not self.probe_every:
            raise ValueError(
                f"error_limit={self.error_limit:g} needs the probe, which measures errors; choose a probe_every above 0"
            )

    @property
    def updates(self) -> int:
        """All updates: those of the schedule, and further ones."""
        return self.steps + self.further_steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    def attention_at(self, step: int) -> str:
        """The attention of the global layers in an update, counted from 0: exact in the first `exact_start` and the
        last `exact_tail` of the updates, both rounded up.

        From update `steps` on it is `further_attention`, or, if that is empty, that of update `steps - 1`.
        """
        if step >= self.steps and self.further_attention:
            return self.further_attention
        step = min(step, self.steps - 1)
        first, last = exact_steps(self.steps, self.exact_start), exact_steps(self.steps, self.exact_tail)
        return EXACT if step < first or step >= self.steps - last else self.attention


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


def near() -> Recipe:
    """23M parameters with a vocabulary of 8k, 115M tokens at 2k: the model that `far` starts from. Minutes on a GPU."""
    return dataclasses.replace(
        _sized(2),
        steps=1760,
        length=2048,
        batch=32,
        micro_batch=32,
        attention="exact",
        exact_tail=0.0,
        warmup=200,
        final_rate=0.5,
        recompute=False,
        probe_every=0,
        checkpoint_every=440,
    )


def far() -> Recipe:
    """115M further tokens at 16k for the model of `near`, given by `initial=`: distant context helps."""
    return dataclasses.replace(
        near(),
        length=16384,
        batch=4,
        micro_batch=4,
        attention="muse",
        peak_rate=1.06e-3,
        warmup=100,
        final_rate=0.1,
    )


_SIZES = {
    1: "12M parameters, 0.23B tokens. Not a size of the paper, but by its rule, for fast training.",
    2: "36M parameters, 0.71B tokens. Not a size of the paper either.",
    3: "96M parameters, 2.0B tokens.",
    4: "185M parameters, 4.0B tokens.",
    5: "356M parameters, 7.5B tokens.",
    6: "560M parameters, 12.9B tokens.",
    8: "1.07B parameters, 23.6B tokens.",
}
"""by scale: descriptions of the recipes in `muse recipes`"""


def _of_scale(scale: int, about: str, **changes: Any) -> Callable[[], Recipe]:
    def recipe() -> Recipe:
        return dataclasses.replace(_sized(scale), **changes)

    recipe.__doc__ = about
    return recipe


GOES_ON_FROM = {far.__name__: near.__name__}
"""Recipes for a model that another recipe has trained first, which is given by `initial=`."""
RECIPES: dict[str, Callable[[], Recipe]] = {
    **{recipe.__name__: recipe for recipe in (tiny, near, far)},
    **{f"s{scale}": _of_scale(scale, about) for scale, about in _SIZES.items()},
    **{
        f"paper-s{scale}": _of_scale(
            scale,
            f"{_SIZES[scale]} The paper's attention to the letter, slower than that of s{scale}.",
            attention=PAPER_METHOD,
            exact_tail=0.0,
        )
        for scale in PAPER_TOKENS
    },
}


def get_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; use one of {', '.join(RECIPES)}")
    return RECIPES[name]()


def field_meanings() -> dict[str, str]:
    """What each field of a recipe means, from the docstring of `Recipe`."""
    lines = (Recipe.__doc__ or "").partition("Attributes:")[2].strip().splitlines()
    return {name.strip(): meaning for name, _, meaning in (line.partition(": ") for line in lines)}


def format_field(value: Any) -> str:
    """A value as `override` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    return format_size(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def override(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """A recipe with changed fields, each written `key=value`; sizes as `64k`, booleans as `true` and `false`."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(recipe)}
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            what = f"a recipe has no {key!r}" if equals else f"{change!r} is not of the form key=value"
            raise ValueError(f"{what}; the keys are {', '.join(fields)}")
        values[key] = _parse(key, text, fields[key])
        if key in ("attention", "further_attention") and text:
            get_attention(text)
    return dataclasses.replace(recipe, **values)


def read_recipe(document: dict[str, Any]) -> Recipe:
    """A recipe from what `dataclasses.asdict` returned; raises ValueError for anything else."""
    try:
        return Recipe(**document)
    except TypeError:
        raise ValueError("a recipe of another version of muse train") from None


def differences(recorded: Recipe, other: Recipe) -> list[str]:
    """Fields that change what is learned and differ between a recorded recipe and another."""
    free = [name for name in FREE if name != "probe_every" or not recorded.error_limit]
    names = [field.name for field in dataclasses.fields(recorded) if field.name not in free]
    return [name for name in names if getattr(recorded, name) != getattr(other, name)]


def _sized(scale: int) -> Recipe:
    steps = math.ceil(TOKENS[scale] / (2 * 65536))
    return Recipe(
        scale=scale,
        steps=steps,
        warmup=Recipe.warmup if scale in PAPER_TOKENS else steps // 4,
        peak_rate=3e-3 * scale**-0.5,
        compile=True,
        recompute=True,
        deterministic=False,  # otherwise exact attention lacks its fastest kernels, and speed-ups look too large
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
