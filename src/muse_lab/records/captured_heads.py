"""Queries, keys and values of some heads of a model, to measure attentions on without the model.

A file is in the format of safetensors: the tensors, as captured or in eight bits per number, with their origin and,
optionally, the queries that are lookups.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from muse_lab.records.dataclass_json import from_json
from muse_lab.records.eight_bits import EightBits, restore, round_to_eight_bits
from muse_lab.records.untrusted import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TENSORS = ("query", "key", "value")
_ROWS, _CHANNELS = "_rows", "_channels"
"""Suffixes of the names of the scales of a tensor in eight bits."""
_ABOUT = "about"
_TRIAL_TOKENS = 8
"""Tokens of the call that lists the layers."""


@dataclass(frozen=True)
class LookupAt:
    """A query that must find a needle."""

    sample: int
    position: int
    """of the query"""
    needle: tuple[int, ...]
    """positions of the needle's tokens, none after the query"""


@dataclass(frozen=True)
class Origin:
    """Where captures come from, in words."""

    model: str
    text: str
    heads: tuple[str, ...]
    """layer and number of each"""
    laid: str = ""
    """how shorter captures were laid end to end, if they were"""


@dataclass(frozen=True)
class Captures:
    """Heads with keys of their own, or in equal groups that share them, for the softmax scale 1/sqrt(head_dim)."""

    query: Tensor
    """(samples, heads, length, head_dim)"""
    key: Tensor
    """(samples, key heads, length, head_dim)"""
    value: Tensor
    """(samples, key heads, length, value_dim)"""
    origin: Origin
    lookups: tuple[LookupAt, ...] = ()

    @property
    def length(self) -> int:
        return self.query.shape[2]

    @property
    def samples(self) -> int:
        return self.query.shape[0]

    @property
    def group_size(self) -> int:
        """Heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of a hash of the tensors."""
        digest = hashlib.sha256()
        for name in _TENSORS:
            digest.update(getattr(self, name).cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def to(self, device: str, dtype: torch.dtype) -> Captures:
        moved = {name: getattr(self, name).to(device, dtype) for name in _TENSORS}
        return replace(self, **moved)

    def with_heads(self, number: int, key_heads: int | None = None) -> Captures:
        """`number` of the heads, evenly spread, each with its own keys, or in groups that share `key_heads` key heads.

        A multiple of the captured heads repeats each of them equally often.
        """
        heads, shared = self.choose_heads(number, key_heads)
        return replace(
            self,
            query=self.query[:, heads],
            key=self.key[:, shared],
            value=self.value[:, shared],
            origin=replace(self.origin, heads=tuple(self.origin.heads[head] for head in heads)),
        )

    def choose_heads(self, number: int, key_heads: int | None = None) -> tuple[list[int], list[int]]:
        """Indices of the heads, and of the key heads, that `with_heads` returns."""
        available = self.key.shape[1]
        captured = len(self.origin.heads)
        times = number // captured if number >= captured and number % captured == 0 else 1
        if key_heads is None or key_heads == number:
            heads = spread(captured, number // times) * times
            return heads, [head // self.group_size for head in heads]
        if times > 1 and key_heads == times * available:
            return list(range(captured)) * times, list(range(available)) * times
        size = number // key_heads
        if size * key_heads != number or size > self.group_size or key_heads > available:
            wanted = f"{key_heads} of {number / key_heads:g}"
            raise ValueError(
                f"{available} groups of {self.group_size} heads were captured, not {wanted}; choose other --heads and "
                "--key-heads, or capture groups with muse tune --save-captures FILE --groups"
            )
        shared = spread(available, key_heads)
        return [key_head * self.group_size + place for key_head in shared for place in range(size)], shared

    def with_length(self, length: int, *, repeat: bool = False) -> Captures:
        """The first `length` tokens of each sample; or, with `repeat`, samples laid end to end if they are shorter.

        The latter is harder than a text of this length: patterns of positions recur with each sample.
        """
        number = self.samples_of(length, repeat=repeat)
        if length <= self.length:
            tensors = {name: getattr(self, name)[:, :, :length] for name in _TENSORS}
            return replace(self, **tensors, lookups=tuple(at for at in self.lookups if at.position < length))
        pieces = -(-length // self.length)
        rows = [[(row * pieces + piece) % self.samples for piece in range(pieces)] for row in range(number)]
        tensors = {
            name: torch.stack([torch.cat([getattr(self, name)[index] for index in row], 1)[:, :length] for row in rows])
            for name in _TENSORS
        }
        lookups = [
            LookupAt(number, at.position + shift, tuple(position + shift for position in at.needle))
            for number, row in enumerate(rows)
            for shift, index in zip(range(0, length, self.length), row, strict=True)
            for at in self.lookups
            if at.sample == index and at.position + shift < length
        ]
        laid = (
            f"{pieces} captures of {self.length} tokens laid end to end, {min(pieces, self.samples)} of them different"
        )
        return replace(self, **tensors, origin=replace(self.origin, laid=laid), lookups=tuple(lookups))

    def samples_of(self, length: int, *, repeat: bool = False) -> int:
        """Number of samples that `with_length` returns: at least one, and no more than use each short sample once."""
        if length > self.length and not repeat:
            raise ValueError(
                f"the captured samples have {self.length} tokens, less than {length}; choose a smaller --length, or "
                "concatenate them with --repeat-captures"
            )
        return max(1, self.samples // -(-length // self.length))


class _Unit(NamedTuple):
    """Heads that are captured together."""

    layer: int
    heads: range


def spread(available: int, number: int) -> list[int]:
    """Up to `number` indices below `available`, evenly spaced and away from both ends."""
    if number < 1:
        raise ValueError(f"cannot measure {number} heads; use at least 1")
    number = min(number, available)
    return [(2 * index + 1) * available // (2 * number) for index in range(number)]


def capture_heads(
    model: PreTrainedModel, tokens: Tensor, number: int, *, model_name: str, text: str, grouped: bool = False
) -> Captures:
    """Capture `number` heads, spread over the layers without a window, on (samples, length) tokens.

    Each head has keys of its own, though heads of the model may share them. `grouped`: capture whole groups of heads
    that share their keys, with at least `number` heads in all.
    """
    from muse_attention.huggingface.capture import visit_layers  # here: transformers is not always installed

    units: list[_Unit] = []

    def list_units(layer: int, query: Tensor, key: Tensor, *_: object) -> None:
        size = query.shape[1] // key.shape[1] if grouped else 1
        units.extend(_Unit(layer, range(first, first + size)) for first in range(0, query.shape[1], size))

    visit_layers(model, tokens[:1, :_TRIAL_TOKENS], list_units)
    if len({len(unit.heads) for unit in units}) > 1:
        raise ValueError("the layers of this model have groups of different sizes; capture without --groups")
    chosen = [units[index] for index in spread(len(units), -(-number // len(units[0].heads)))]
    samples: list[list[Tensor]] = []

    def keep(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        groups = [unit.heads for unit in chosen if unit.layer == layer]
        heads = [head for group in groups for head in group]
        shared = [group[0] // (query.shape[1] // key.shape[1]) for group in groups]
        # With this factor the scale is the usual one.
        parts = (query[:, heads] * (scale * math.sqrt(query.shape[3])), key[:, shared], value[:, shared])
        if heads:
            layers.append([part.detach() for part in parts])

    for ids in tokens:
        layers: list[list[Tensor]] = []
        visit_layers(model, ids[None], keep)
        if len({part.shape[2:] for parts in layers for part in parts[:2]}) > 1:
            raise ValueError("the layers of this model have heads of different sizes; use another model")
        samples.append([torch.cat(parts, dim=1) for parts in zip(*layers, strict=True)])
    query, key, value = (torch.cat(parts) for parts in zip(*samples, strict=True))
    heads = tuple(f"layer {unit.layer}, head {head}" for unit in chosen for head in unit.heads)
    return Captures(query, key, value, Origin(model_name, text, heads))


def save_captures(captures: Captures, path: Path, *, compact: bool = False) -> None:
    """Write safetensors; `compact`: rounded to eight bits per number."""
    from safetensors.torch import save_file  # here: it is not always installed

    tensors = {name: getattr(captures, name).cpu().contiguous() for name in _TENSORS}
    if compact:
        tensors = _pack(tensors)
    about = json.dumps({"origin": asdict(captures.origin), "lookups": [asdict(lookup) for lookup in captures.lookups]})
    save_file(tensors, path, {_ABOUT: about})


def load_captures(path: Path) -> Captures:
    """Read what `save_captures` wrote; raises ValueError for any other file."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r} of captures; write one with muse tune --save-captures FILE")
    try:
        return _read(path)
    except ImportError:
        raise ValueError(f"reading {path.name} needs the package safetensors; install it") from None
    except Exception:  # safetensors has errors of its own for other files
        fault = "does not hold captures"
        if path.suffix == ".pt":
            fault += " as safetensors, and captures saved by torch.save are not read any more"
        raise ValueError(f"{path} {fault}; write them with muse tune --save-captures FILE") from None


def _read(path: Path) -> Captures:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = parse_json(file.metadata()[_ABOUT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no iterator
    origin, lookups = from_json(Origin, about["origin"]), from_json(tuple[LookupAt, ...], about["lookups"])
    query, key, value = (_unpack(tensors, name) for name in _TENSORS)
    captures = Captures(query, key, value, origin, lookups)
    _check(captures)
    return captures


def _pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in eight bits per number, and their scales."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        packed[name], packed[name + _ROWS], packed[name + _CHANNELS] = round_to_eight_bits(tensor)
    return packed


def _unpack(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name + _ROWS not in tensors:
        return tensors[name]
    return restore(EightBits(tensors[name], tensors[name + _ROWS], tensors[name + _CHANNELS]))


def _check(captures: Captures) -> None:
    query, key, value = (tuple(getattr(captures, name).shape) for name in _TENSORS)
    if {len(query), len(key), len(value)} != {4} or key[:3] != value[:3] or query[3] != key[3]:
        raise ValueError("the tensors are not of the same heads")
    if (query[0], query[2]) != (key[0], key[2]) or not all((*query, *key)) or query[1] % key[1]:
        raise ValueError("the tensors are not of the same heads")
    if len(captures.origin.heads) != query[1]:
        raise ValueError("the heads are not those of the tensors")
    if not all(getattr(captures, name).is_floating_point() for name in _TENSORS):
        raise ValueError("the tensors have no floating-point numbers")
    for at in captures.lookups:
        if not (0 <= at.sample < captures.samples and 0 <= at.position < captures.length and at.needle):
            raise ValueError("a lookup is outside of the samples")
        if not all(0 <= position <= at.position for position in at.needle):
            raise ValueError("a needle is behind its query")
