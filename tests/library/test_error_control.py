"""Second-order mass and selection by tolerance: what they promise beyond conformance to the reference."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, exact_attention, find_clusters, get_attention, muse_attention, ops
from muse_attention.core.bits import pack_bits, unpack_bits
from muse_attention.core.call import Call
from muse_attention.fidelity import measure
from muse_lab.synthetic import clustered_qkv
from tests.shapes import Shape


@pytest.mark.parametrize("members", [1, 31, 32, 33, 100])
def test_bits_round_trip(members: int) -> None:
    mask = torch.rand(3, 4, members) > 0.5
    mask[0] = True
    assert torch.equal(unpack_bits(pack_bits(mask), members), mask)


def _pairs(inputs: tuple[Tensor, ...], text: str, clusters: object = None) -> Tensor:
    """(heads,): retrieved buckets for each query, on average."""
    config = MuSeConfig.parse(text)
    found = clusters or find_clusters(*inputs[:2], config=config)
    _, selection = ops.attend(Call(*inputs, found, config, is_causal=True, scale=0.25), "torch")
    return unpack_bits(selection.retrieved, config.key_clusters).sum((0, 2, 3, 4)) / inputs[0].shape[2]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_no_head_exceeds_its_budget(budget: int) -> None:
    inputs = tuple(tensor.detach() for tensor in Shape("", "", length=300, heads=4).tensors(torch.float32))
    wanted = _pairs(inputs, "Q4K8R100T0.001B32")
    assert (wanted > 3).all(), "the budget must matter"
    spent = _pairs(inputs, f"Q4K8R{budget}T0.001B32")
    assert (spent <= budget).all()
    assert budget == 0 or (spent > 0.6 * budget).all(), "most of a budget is used"


def test_a_head_does_not_depend_on_what_is_beside_it() -> None:
    inputs = [tensor.detach() for tensor in Shape("", "", length=200, batch=2, heads=4).tensors(torch.float64)]
    config = "Q4K8R2T0.001B32"  # meets its budget
    together = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=config)
    for sequence in range(2):
        for head in range(2):
            alone = muse_attention(
                inputs[0][sequence : sequence + 1, 2 * head : 2 * head + 2],
                *(tensor[sequence : sequence + 1, head : head + 1] for tensor in inputs[1:]),
                is_causal=True,
                enable_gqa=True,
                config=config,
            )
            torch.testing.assert_close(alone[0], together[sequence, 2 * head : 2 * head + 2], rtol=1e-12, atol=1e-12)


def test_error_of_the_mass_is_of_third_order_where_keys_are_symmetric() -> None:
    """One far bucket of keys `mean +- d`, and a metric that fits them: halving the residual divides the error by 16,
    where it divides that of first order by 4."""
    dim, half = 8, 16
    offsets = torch.randn(half, dim, dtype=torch.float64)
    offsets = torch.linalg.qr(offsets.mT @ offsets)[0][: dim // 2].repeat(half // (dim // 2), 1)
    mean = torch.randn(dim, dtype=torch.float64)
    keys = torch.cat([mean + offsets, mean - offsets, torch.zeros(2 * half, dim, dtype=torch.float64)])[None, None]
    values = torch.zeros_like(keys)
    direction = torch.randn(dim, dtype=torch.float64)
    variance = offsets.square().mean(0)
    errors: dict[str, list[float]] = {"true": [], "false": []}
    for second_order, found in errors.items():
        config = f"Q1K1R0B{2 * half},second_order={second_order},cap_factor=none"
        for size in (0.2, 0.1):
            query = (size * direction).expand(1, 1, 4 * half, dim).contiguous()
            clusters = find_clusters(query, keys, config=config, scale=1.0)
            clusters = dataclasses.replace(
                clusters,
                query_centroids=torch.zeros_like(clusters.query_centroids),
                key_spread=_metric(offsets, direction, variance) if second_order == "true" else None,
            )
            _, lse = muse_attention(
                query, keys, values, is_causal=True, scale=1.0, config=config, clusters=clusters, return_lse=True
            )
            _, exact = exact_attention(query, keys, values, is_causal=True, scale=1.0, return_lse=True)
            found.append(float((lse - exact)[0, 0, -1].abs()))
    assert errors["false"][0] / errors["false"][1] == pytest.approx(4, rel=0.1)
    assert errors["true"][0] / errors["true"][1] > 14
    assert errors["true"][0] < 0.05 * errors["false"][0]


def _metric(offsets: Tensor, direction: Tensor, variance: Tensor) -> Tensor:
    """A metric in which this direction has just the variance that the keys have along it."""
    along = (offsets @ direction).square().mean()
    return (along / (variance.mean() * direction.square().sum())).expand(1, 1, direction.shape[0]).contiguous()


def test_less_error_than_the_papers_rule_for_as_many_pairs() -> None:
    query, key, value = clustered_qkv(1, 4, 1024, 16, topics=40)
    exact = exact_attention(query, key, value, is_causal=True)

    def error(config: str) -> float:
        out = muse_attention(query, key, value, is_causal=True, config=config)
        return float((out - exact).square().sum() / exact.square().sum())

    assert float(_pairs((query, key, value), "QK16R2T0B128").max()) <= 2
    assert error("QK16R2T0B128") < 0.6 * error("QK16R2B128")


def test_caution_finds_more_of_what_one_key_attracts() -> None:
    """The last query of each head points at one key among many that are far apart."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 24, 512, 32, generator=generator) for _ in range(3))
    query, key = 0.3 * query, 3 * key
    query[:, :, -1] = 0.6 * torch.nn.functional.normalize(key[:, :, 100], dim=-1)
    exact = exact_attention(query, key, value, is_causal=True, scale=1.0)[0, :, -1]

    def found(caution: float) -> int:
        config = f"QK8R64T0.2B64,cap_factor=none,caution={caution}"
        out = muse_attention(query, key, value, is_causal=True, scale=1.0, config=config)[0, :, -1]
        return int(((out - exact).square().sum(-1) < 0.1 * exact.square().sum(-1)).sum())

    assert found(2) > found(0) + 3


# Limits that docs/explanation/error-control.md states


def test_a_tolerance_of_0_leaves_wrong_the_gradient_of_queries_on_their_centroid() -> None:
    """All queries are alike, of numbers whose mean is exact. No summary is expected to err, and none does; but the
    gradient of a query needs the keys behind it."""
    torch.manual_seed(0)
    query = torch.randn(1, 1, 1, 64).sign().expand(-1, -1, 512, -1)
    inputs = (query, *torch.randn(2, 1, 1, 512, 64).unbind())
    grad_out = torch.randn(1, 1, 512, 64)
    results = []
    for attention in (exact_attention, partial(muse_attention, config="QK8R512T0B64,caution=2")):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attention(*leaves, is_causal=True)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out)))
    out, query_gradient, key_gradient, value_gradient = (
        float((ours - exact).abs().max() / exact.abs().max()) for exact, ours in zip(*results, strict=True)
    )
    assert max(out, key_gradient, value_gradient) < 1e-5
    assert query_gradient == pytest.approx(0.21, abs=0.03)


def test_large_logits_are_expected_to_err_less_than_they_do() -> None:
    """One key then has the weight of its bucket, and a summary's own mass does not show it: little is retrieved, though
    the budget allows more."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 512, 64).unbind()
    attention = get_attention("muse:QK32R32T0.001B64,caution=2,cap_factor=none")
    moderate, large = (
        measure(attention, deviation**0.5 * query, deviation**0.5 * key, value, is_causal=True).pooled()
        for deviation in (3, 10)  # of the logits
    )
    assert large["at_budget"] == 0
    assert [of["keys_per_query"] for of in (moderate, large)] == pytest.approx([136, 34], abs=5)
    assert [of["share_far_off"] for of in (moderate, large)] == pytest.approx([0.016, 0.22], abs=0.03)
