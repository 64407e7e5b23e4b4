"""The vectorised PyTorch backend conforms, and equals the reference on whatever shapes are thrown at it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_attention import MuSeConfig
from muse_attention.reference import reference_attention
from tests.closeness import assert_equal_to_rounding
from tests.conformance import OperatorConformance


class TestTorchBackend(OperatorConformance):
    backend = "torch"


@st.composite
def configurations(draw: st.DrawFn) -> MuSeConfig:
    dipole = draw(st.sampled_from(["none", "none", "none", "tilted", "shared", "centred"]))
    return MuSeConfig(
        query_clusters=draw(st.integers(1, 6)),
        key_clusters=draw(st.integers(1, 6)),
        retrieved_clusters=0 if dipole != "none" else draw(st.integers(0, 7)),
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


@settings(max_examples=80, deadline=None, derandomize=True)
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
