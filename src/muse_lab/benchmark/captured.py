"""The inputs: heads of a real model, from a file that `muse tune --save-captures` wrote, or synthetic data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from muse_lab.benchmark.request import Shape
from muse_lab.benchmark.workload import DTYPES, Workload
from muse_lab.records.captured_heads import Captures, load_captures
from muse_lab.synthetic import clustered_qkv


@dataclass(frozen=True)
class CapturedData:
    """The captured heads that results were measured on."""

    model: str
    text: str
    heads: int
    """number of heads in the file"""
    fingerprint: str
    """of the captured numbers"""
    repeated: bool
    """whether samples are laid end to end where they are shorter than the length"""

    def __str__(self) -> str:
        end_to_end = ", laid end to end where they are shorter" if self.repeated else ""
        return f"{self.model}, {self.text}{end_to_end} ({self.heads} captured heads, {self.fingerprint})"


@dataclass(frozen=True)
class CapturesFile:
    path: Path
    repeat: bool = False
    """lay samples end to end where they are shorter than the length"""

    @functools.cached_property
    def captures(self) -> Captures:
        return load_captures(self.path)

    @property
    def heads(self) -> int:
        return self.captures.query.shape[1]

    @property
    def key_heads(self) -> int:
        return self.captures.key.shape[1]

    @property
    def head_dim(self) -> int:
        return self.captures.query.shape[3]

    @property
    def data(self) -> CapturedData:
        origin = self.captures.origin
        return CapturedData(origin.model, origin.text, self.heads, self.captures.fingerprint, self.repeat)

    def check(self, shape: Shape) -> None:
        """Raise ValueError unless there are captures of this shape."""
        if shape.head_dim != self.head_dim:
            raise ValueError(f"the captured heads have dimension {self.head_dim}, not {shape.head_dim}")
        if shape.heads > self.heads and shape.heads % self.heads:
            raise ValueError(
                f"{self.heads} heads were captured, not {shape.heads}; choose fewer --heads, or a multiple of all"
            )
        self.captures.choose_heads(shape.heads, shape.key_heads)
        samples = self.captures.samples_of(shape.length, repeat=self.repeat)
        if shape.batch > samples:
            raise ValueError(
                f"the captures have {samples} of {shape.batch} samples of {shape.length} tokens; choose a smaller "
                "--batch or --length"
            )

    def tensors(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of evenly spread heads and of the first samples."""
        self.check(shape)
        selection = self.captures.with_heads(shape.heads, shape.key_heads).with_length(shape.length, repeat=self.repeat)
        query, key, value = (
            tensor[: shape.batch].contiguous() for tensor in (selection.query, selection.key, selection.value)
        )
        return query, key, value


def create_workload(
    captures: CapturesFile | None, shape: Shape, *, dtype: str, device: str, is_causal: bool, seed: int = 0
) -> Workload:
    """A workload on captured heads, or on clustered synthetic data."""
    if captures is not None:
        tensors = captures.tensors(shape)
    else:
        sizes = (shape.batch, shape.heads, shape.length, shape.head_dim)
        tensors = clustered_qkv(*sizes, key_heads=shape.key_heads, seed=seed)
    moved = (tensor.to(device, DTYPES[dtype]) for tensor in tensors)
    return Workload.of(*moved, is_causal=is_causal, seed=seed)
