"""How far a kernel is from `muse_attention()`: functions of the library on the way to the first launch."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled")

from triton.runtime.interpreter import GridExecutor  # noqa: E402

from muse_attention import find_clusters, muse_attention  # noqa: E402
from tests.shapes import Shape  # noqa: E402

CONFIG = "Q3K4R2B16"
LONGEST = 7
"""Functions from `muse_attention` to the one that launches, both counted."""


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The functions of the library on the stack at each launch, outermost first. Nothing is launched."""
    noted: list[list[str]] = []

    def note(launch: GridExecutor, *_: Any, **__: Any) -> None:
        path: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.split(".")[0] == "muse_attention":
                path.insert(0, f"{module}.{frame.f_code.co_name}")
            frame = frame.f_back
        noted.append(path)

    monkeypatch.setattr(GridExecutor, "__call__", note)
    return noted


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("finds_clusters", [True, False], ids=["clustering", "attention"])
def test_the_first_kernel_is_at_most_seven_calls_away(
    finds_clusters: bool, has_gradients: bool, paths: list[list[str]]
) -> None:
    inputs = Shape("", CONFIG, length=40, heads=1, key_heads=1).tensors(torch.float32)
    clusters = None if finds_clusters else find_clusters(*inputs[:2], config=CONFIG, backend="torch")
    for _ in range(2):  # the second call finds its list of launches
        paths.clear()
        with torch.set_grad_enabled(has_gradients):
            muse_attention(*inputs, is_causal=True, config=CONFIG, backend="triton", clusters=clusters)
        first = paths[0]
        assert first[0] == "muse_attention.attention.muse_attention"
        assert any(name.endswith("find_clusters") for name in first) == finds_clusters
        assert len(first) <= LONGEST, " -> ".join(first)
