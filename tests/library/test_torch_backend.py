"""The vectorised PyTorch backend conforms, and equals the reference on whatever shapes are thrown at it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, muse_attention
from muse_attention.backends.reference import reference_attention
from tests.closeness import assert_same
from tests.conformance import OperatorConformance
from tests.fuzz_cases import draw_config
from tests.shapes import Shape


class TestTorchBackend(OperatorConformance):
    backend = "torch"


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [600, 2000, 20000])
@pytest.mark.parametrize(
    "config",
    ["QK4R2B32", "QK4R0B32", "QK4R2B200", "QK4T0.05B32,tile=4"],
    ids=["MuSe", "summaries", "one block", "blockwise"],
)
def test_large_logits_in_float32_are_as_accurate_as_in_plain_pytorch(config: str, size: int, is_causal: bool) -> None:
    """Plain PyTorch keeps the weights; they are found again from the lse here, which float32 would round too much."""
    query, key, value = Shape("", "", length=150).tensors(torch.float32, requires_grad=False)
    inputs = [tensor.requires_grad_() for tensor in (size**0.5 * query, size**0.5 * key, value)]
    TestTorchBackend()._check_inputs(inputs, MuSeConfig.parse(config), is_causal=is_causal, terms=0.0)


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 25])
def test_equals_reference_whatever_the_configuration(first: int) -> None:
    """Whose clusters and selection it finds itself."""
    for seed in range(first, first + 25):
        rng = random.Random(seed)
        config = draw_config(rng, rng.randint(1, 40), "torch")
        (heads, key_heads), dims = rng.choice([(1, 1), (2, 2), (4, 2), (3, 1)]), rng.choice([(4, 4), (4, 7), (7, 4)])
        is_causal = rng.random() < 0.5
        inputs = Shape("", "", rng.randint(1, 90), 1, heads, key_heads, *dims).tensors(torch.float64)
        found, expected = (
            TestTorchBackend().attend(*inputs, config, is_causal=is_causal)[:2],
            reference_attention(*inputs, config, is_causal=is_causal),
        )
        assert_same(found, (expected.out, expected.lse), inputs, f"{seed}: {config}")


PAPER_LIMITS = [
    ("grouping.WORKSPACE_ELEMENTS", 1),  # one key head at a time
    ("layout.SUMMARY_ELEMENTS", 1),  # one query cluster at a time
    ("retrieval.PARTIAL_ELEMENTS", 1),  # one query at a time
    ("grouping.TILE_ELEMENTS", 64),  # tiles of a few rows
]
BLOCKWISE_LIMITS = [
    ("grouping.WORKSPACE_ELEMENTS", 1),  # clusters of one head at a time
    ("grouping.TILE_ELEMENTS", 64),  # summaries of a few buckets at a time
    ("blockwise.far_field.SUMMARY_ELEMENTS", 1),  # one query head at a time
    ("blockwise.far_field.SCORED_AT_ONCE", 1),  # one slot at a time
    ("blockwise.far_field.FAINTEST", 2),  # what is not retrieved is always weighed again
    ("blockwise.retrieval.CHUNK", 3),  # a few keys at a time
    ("blockwise.retrieval.CHUNKS_IN_MEMORY", 1),  # one tile at a time
]


@pytest.mark.parametrize(
    ("limit", "size", "config", "is_causal"),
    [
        *((*limit, "Q4K5R3SP2B32", False) for limit in PAPER_LIMITS),
        *((*limit, "Q1K5R2B32,tilt=false", True) for limit in PAPER_LIMITS),
        *((*limit, "Q4K5T0.05B32,tile=4", is_causal) for limit in BLOCKWISE_LIMITS for is_causal in (True, False)),
    ],
)
def test_limits_of_memory_do_not_change_the_result(
    limit: str, size: int, config: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Shape("", config, length=150, batch=2, heads=4).tensors(torch.float64)

    def results() -> list[Tensor]:
        out = muse_attention(*inputs, is_causal=is_causal, enable_gqa=True, config=config)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    expected = results()
    monkeypatch.setattr(f"muse_attention.backends.torch.{limit}", size)
    torch.testing.assert_close(results(), expected, rtol=1e-12, atol=1e-12)
