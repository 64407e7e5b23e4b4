"""Blockwise MuSe: what a tolerance promises beyond conformance to the reference."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from muse_attention import Clusters, MuSeConfig, exact_attention, find_clusters, muse_attention, ops
from muse_attention.core.call import Call
from muse_attention.core.query_tiles import NO_ROW, place_in_tiles
from muse_attention.core.structures import Selection
from muse_lab.synthetic import clustered_qkv
from tests.shapes import Shape
from tests.strict_causality import Combination, assert_nothing_later_matters, draw_case


def _select(inputs: tuple[Tensor, ...], text: str) -> tuple[Clusters, Selection]:
    config = MuSeConfig.parse(text)
    scale = inputs[0].shape[-1] ** -0.5
    clusters = find_clusters(*inputs[:2], config=config, is_causal=True)
    _, selection = ops.attend(Call(*inputs, clusters, config, is_causal=True, scale=scale), "torch")
    return clusters, selection


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_nothing_later_changes_a_bit(first: int) -> None:
    """Of 200 cases, whatever the shape and the configuration, with packed documents among them."""
    for seed in range(first, first + 20):
        assert_nothing_later_matters(draw_case(seed), backend="torch", with_gradients=seed % 4 == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_nothing_later_changes_a_bit_in_other_precisions(dtype: torch.dtype) -> None:
    for seed in range(1000, 1010):
        assert_nothing_later_matters(draw_case(seed), backend="torch", dtype=dtype, with_gradients=seed % 4 == 0)


@pytest.mark.parametrize("case", range(4))
def test_nothing_later_changes_a_bit_of_longer_sequences(case: int) -> None:
    """Of sizes at which matrix products go by other ways."""
    rng = random.Random(case)
    head_dim = rng.choice([33, 64])
    text = f"Q{rng.randint(2, 16)}K{rng.randint(8, 64)}T{rng.choice([0.02, 0.1])}B256,tile={rng.choice([4, 64, 128])}"
    combination = Combination(text, head_dim, rng.choice([head_dim, 24]))
    assert_nothing_later_matters(draw_case(case, lambda _: combination, is_packed=False), backend="torch", cuts=2)


def test_large_logits_later_change_no_bit_of_what_comes_before() -> None:
    """They are computed again in float64, from there on."""
    inputs = [tensor.detach() for tensor in Shape("", "", length=150).tensors(torch.float32)]
    arguments = {"is_causal": True, "config": "QK4T0.1B32", "return_lse": True}
    expected = muse_attention(*inputs, **arguments)
    inputs[0][:, :, 100:] *= 1000
    found = muse_attention(*inputs, **arguments)
    assert found[1].abs().max() > 500
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_the_first_row_that_wants_a_bucket_retrieves_it_for_those_after_it(tile: int) -> None:
    """With tiles of one row each query decides for itself; larger tiles are the running union of that."""
    inputs = tuple(tensor.detach() for tensor in Shape("", "", length=200, heads=2).tensors(torch.float64))
    config = MuSeConfig.parse(f"Q3K6T0.1B64,tile={tile}")
    clusters, selection = _select(inputs, str(config))
    _, alone = _select(inputs, str(config.replace(tile=1)))
    expected = torch.full_like(selection.retrieved, NO_ROW)
    number, row = place_in_tiles(clusters.query_assignment, config)
    by_itself, _ = place_in_tiles(clusters.query_assignment, config.replace(tile=1))
    for head in range(2):
        for query in range(200):
            block = query // 64
            wanted = alone.retrieved[0, head, block, by_itself[0, head, query]] == 0
            first = expected[0, head, block, number[0, head, query]]
            first[wanted] = first[wanted].clamp(max=int(row[0, head, query]))
    assert (expected != NO_ROW).any()
    assert torch.equal(selection.retrieved, expected)


def test_a_tolerance_of_infinity_retrieves_nothing_and_of_zero_everything() -> None:
    inputs = tuple(tensor.detach() for tensor in Shape("", "", length=130).tensors(torch.float64))
    _, nothing = _select(inputs, "Q3K4TinfB32")
    assert (nothing.retrieved == NO_ROW).all()
    clusters, everything = _select(inputs, "Q3K4T0B32,tile=1")
    for block in range(1, 5):
        queries = min(32, 130 - 32 * block)
        sizes = torch.stack(
            [torch.bincount(keys.long(), minlength=4) for keys in clusters.key_assignment[0, 0].split(32)[:block]]
        ).flatten()
        first = everything.retrieved[0, 0, block, :queries, : 4 * block]
        assert torch.equal(first == 0, (sizes > 0).expand_as(first))


def test_a_tolerance_of_zero_has_exact_gradients_even_on_centroids() -> None:
    """All queries are alike, so that every summary is exact; but the gradient of a query needs the keys behind it."""
    torch.manual_seed(0)
    query = torch.randn(1, 1, 1, 64).sign().expand(-1, -1, 512, -1)
    inputs = (query, *torch.randn(2, 1, 1, 512, 64).unbind())
    grad_out = torch.randn(1, 1, 512, 64)
    results = []
    for config in (None, "QK8T0B64"):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        if config is None:
            out = exact_attention(*leaves, is_causal=True)
        else:
            out = muse_attention(*leaves, is_causal=True, config=config)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out)))
    for exact, ours in zip(*results, strict=True):
        assert float((ours - exact).abs().max() / exact.abs().max()) < 1e-5


def test_less_error_than_the_papers_method_for_as_many_keys() -> None:
    query, key, value = clustered_qkv(1, 4, 1024, 16, topics=40)
    exact = exact_attention(query, key, value, is_causal=True)

    def error(config: str) -> float:
        out = muse_attention(query, key, value, is_causal=True, config=config)
        return float((out - exact).square().sum() / exact.square().sum())

    config = MuSeConfig.parse("QK16T0.015B128,tile=1")
    _, selection = _select((query, key, value), str(config))
    buckets = float((selection.retrieved == 0).sum()) / (4 * 1024)
    assert buckets < 1, "the paper's rule retrieves two for each query"
    assert error(str(config)) < 0.6 * error("QK16R2B128")


def test_a_head_does_not_depend_on_what_is_beside_it() -> None:
    inputs = [tensor.detach() for tensor in Shape("", "", length=200, batch=2, heads=4).tensors(torch.float32)]
    settings = {"is_causal": True, "enable_gqa": True, "config": "Q4K8T0.1B32"}
    together = muse_attention(*inputs, **settings)
    for sequence in range(2):
        for head in range(2):
            alone = muse_attention(
                inputs[0][sequence : sequence + 1, 2 * head : 2 * head + 2],
                *(tensor[sequence : sequence + 1, head : head + 1] for tensor in inputs[1:]),
                **settings,
            )
            torch.testing.assert_close(alone[0], together[sequence, 2 * head : 2 * head + 2])


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
    along = (offsets @ direction).square().mean()
    metric = along / (offsets.square().mean() * direction.square().sum())
    errors: dict[str, list[float]] = {"true": [], "false": []}
    for second_order, found in errors.items():
        config = f"Q1K1TinfB{2 * half},second_order={second_order}"
        for size in (0.2, 0.1):
            query = (size * direction).expand(1, 1, 4 * half, dim).contiguous()
            clusters = find_clusters(query, keys, config=config, is_causal=True, scale=1.0)
            clusters = dataclasses.replace(
                clusters,
                query_centroids=torch.zeros_like(clusters.query_centroids),
                key_spread=metric.expand(1, 1, 1, dim).contiguous(),
            )
            _, lse = muse_attention(
                query, keys, values, is_causal=True, scale=1.0, config=config, clusters=clusters, return_lse=True
            )
            _, exact = exact_attention(query, keys, values, is_causal=True, scale=1.0, return_lse=True)
            found.append(float((lse - exact)[0, 0, -1].abs()))
    assert errors["false"][0] / errors["false"][1] == pytest.approx(4, rel=0.1)
    assert errors["true"][0] / errors["true"][1] > 14
    assert errors["true"][0] < 0.05 * errors["false"][0]


def test_error_of_the_values_is_of_second_order_with_one_bucket() -> None:
    """Halving the residual divides the error by 4, where it divides that of the mean by 2."""
    dim, half = 8, 64
    keys, values, direction = torch.randn(1, 1, 2 * half, dim), torch.randn(1, 1, 2 * half, dim), torch.randn(dim)
    keys, values, direction = (tensor.double() for tensor in (keys, values, direction))
    values[:, :, half:], keys[:, :, half:] = 0, 0
    errors: dict[str, list[float]] = {"true": [], "false": []}
    for first_order, found in errors.items():
        config = f"Q1K1TinfB{half},first_order={first_order}"
        for size in (0.02, 0.01):
            query = (size * direction).expand(1, 1, 2 * half, dim).contiguous()
            clusters = find_clusters(query, keys, config=config, is_causal=True, scale=1.0)
            clusters = dataclasses.replace(clusters, query_centroids=torch.zeros_like(clusters.query_centroids))
            out = muse_attention(query, keys, values, is_causal=True, scale=1.0, config=config, clusters=clusters)
            exact = exact_attention(query, keys, values, is_causal=True, scale=1.0)
            found.append(float((out - exact)[0, 0, half].norm()))
    assert errors["false"][0] / errors["false"][1] == pytest.approx(2, rel=0.1)
    assert errors["true"][0] / errors["true"][1] == pytest.approx(4, rel=0.2)


def test_caution_finds_more_of_what_one_key_attracts() -> None:
    """The last query of each head points at one key among many that are far apart."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 24, 512, 32, generator=generator) for _ in range(3))
    query, key = 0.3 * query, 3 * key
    query[:, :, -1] = 0.6 * torch.nn.functional.normalize(key[:, :, 100], dim=-1)
    exact = exact_attention(query, key, value, is_causal=True, scale=1.0)[0, :, -1]

    def found(caution: float) -> int:
        config = f"QK8T0.2B64,tile=1,caution={caution}"
        out = muse_attention(query, key, value, is_causal=True, scale=1.0, config=config)[0, :, -1]
        return int(((out - exact).square().sum(-1) < 0.1 * exact.square().sum(-1)).sum())

    assert found(2) > found(0)


def test_a_search_finds_single_keys() -> None:
    """More of them as the weight that it looks for falls."""
    query, key, value = clustered_qkv(1, 2, 2048, 32, topics=60, lookups=0.02)
    exact = exact_attention(query, key, value, is_causal=True)

    def look(search: str) -> tuple[int, int]:
        """The queries that are misled, and the buckets that tiles retrieve."""
        config = f"Q8K32TinfB256,search={search}"
        out = muse_attention(query, key, value, is_causal=True, config=config)
        error = (out - exact).square().sum(-1) / exact.square().sum(-1)
        _, selection = _select((query, key, value), config)
        return int((error > 0.5).sum()), int((selection.retrieved != NO_ROW).sum())

    (misled, none), *found = map(look, ("none", "1000", "0.3", "0.1", "0.02"))
    assert none == 0
    assert misled > 20
    assert found[0] == (misled, 0), "no key has that weight"
    wrong, buckets = zip(*found, strict=True)
    assert list(wrong) == sorted(wrong, reverse=True)
    assert list(buckets) == sorted(buckets)
    assert wrong[-1] < 0.2 * misled


def test_lookups_are_found() -> None:
    """Queries that take almost all of their softmax from one key far back, unlike all others."""
    query, key, value = clustered_qkv(1, 2, 2048, 32, topics=60, lookups=0.02)
    exact = exact_attention(query, key, value, is_causal=True)
    error = {
        config: (muse_attention(query, key, value, is_causal=True, config=config) - exact).square().sum(-1)
        / exact.square().sum(-1)
        for config in ("Q8K32TinfB256", "Q8K32T0.01B256")
    }
    summaries, retrieved = (of.amax(1) for of in error.values())
    assert (summaries > 0.5).sum() > 20, "summaries alone do not find them"
    assert (retrieved > 0.5).sum() <= 0.1 * (summaries > 0.5).sum()
