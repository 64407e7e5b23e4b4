"""The vectorised PyTorch backend conforms, and equals the reference on whatever shapes are thrown at it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muse_attention import MuSeConfig
from muse_attention.backends.reference import reference_attention
from tests.closeness import assert_as_accurate_as_pytorch, assert_equal_to_rounding
from tests.conformance import OperatorConformance
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
    parsed = MuSeConfig.parse(config)
    out, lse, clusters, selection = TestTorchBackend().attend(*inputs, parsed, is_causal=is_causal)
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    found = [out, lse, *torch.autograd.grad([out, lse], inputs, weights)]

    def of_reference(precision: torch.dtype) -> list[Tensor]:
        tensors = [tensor.detach().to(precision).requires_grad_() for tensor in inputs]
        centroids = replace(clusters, query_centroids=clusters.query_centroids.to(precision))
        result = reference_attention(*tensors, parsed, is_causal=is_causal, clusters=centroids, selection=selection)
        outputs = [result.out, result.lse]
        return outputs + list(torch.autograd.grad(outputs, tensors, [weight.to(precision) for weight in weights]))

    exact, plain = of_reference(torch.float64), of_reference(torch.float32)
    for name, ours, theirs, expected in zip(("out", "lse", "query", "key", "value"), found, plain, exact, strict=True):
        assert_as_accurate_as_pytorch(ours, theirs, expected, name)


@st.composite
def configurations(draw: st.DrawFn) -> MuSeConfig:
    if draw(st.booleans()):
        return MuSeConfig(
            query_clusters=draw(st.integers(1, 6)),
            key_clusters=draw(st.integers(1, 12)),
            block_size=draw(st.integers(1, 40)),
            tolerance=draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, math.inf])),
            tile=draw(st.sampled_from([1, 2, 8, 64, 128])),
            caution=draw(st.sampled_from([0.0, 2.0])),
            first_order=draw(st.booleans()),
            second_order=draw(st.booleans()),
            differentiable_aggregation=draw(st.booleans()),
            seed=draw(st.integers(0, 3)),
        )
    dipole = draw(st.sampled_from(["none", "none", "none", "tilted", "shared", "centred"]))
    key_clusters = draw(st.integers(1, 6))
    return MuSeConfig(
        query_clusters=draw(st.integers(1, 6)),
        key_clusters=key_clusters,
        retrieved_clusters=0 if dipole != "none" else draw(st.integers(0, key_clusters)),
        retrieved_blocks=draw(st.integers(1, 4)),
        block_size=draw(st.integers(1, 40)),
        tilt=draw(st.booleans()),
        monopole=dipole != "none" or draw(st.booleans()),
        dipole=dipole,
        differentiable_aggregation=draw(st.booleans()),
        clustering=draw(st.sampled_from(["streaming", "lloyd"])),
        cap_factor=draw(st.sampled_from([None, 1.0, 1.5, 4.0])),
        query_cap_factor=draw(st.sampled_from([None, 1.0, 4.0])),
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.long
@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    config=configurations(),
    length=st.integers(1, 90),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (4, 7), (7, 4)]),
    is_causal=st.booleans(),
)
def test_equals_reference_whatever_the_configuration(
    config: MuSeConfig, length: int, heads: tuple[int, int], dims: tuple[int, int], is_causal: bool
) -> None:
    torch.manual_seed(length)
    query = torch.randn(1, heads[0], length, dims[0], dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, heads[1], length, dims[0], dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, heads[1], length, dims[1], dtype=torch.float64, requires_grad=True)
    out, lse, _, _ = TestTorchBackend().attend(query, key, value, config, is_causal=is_causal)
    expected = reference_attention(query, key, value, config, is_causal=is_causal)
    assert_equal_to_rounding(out, expected.out)
    assert_equal_to_rounding(lse, expected.lse)
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    found = torch.autograd.grad([out, lse], (query, key, value), weights)
    wanted = torch.autograd.grad([expected.out, expected.lse], (query, key, value), weights)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_equal_to_rounding(ours, theirs)
