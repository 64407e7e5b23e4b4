"""The reference has the seven properties too, and its gradients are those of finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muse_attention import Clusters, MuSeConfig
from muse_attention.backends.reference import find_clusters, reference_attention
from muse_attention.core.structures import Selection
from tests.conformance import FORMS, Conformance
from tests.shapes import VARIANTS, Shape


class TestReference(Conformance):
    backend = "reference"
    is_dense = True

    # It is itself. (`test_variant_equals_reference` hands in the clusters and the selection that it has found.)
    test_equals_reference_in_float64 = None
    test_is_as_accurate_as_the_reference_in_its_precision = None
    test_finds_the_clusters_and_selection_of_the_reference = None

    @pytest.mark.parametrize("config", ["QK40R4B16,clustering=streaming", "Q2K64R8SP3B16", "Q64K2R1B32"])
    @pytest.mark.parametrize("length", [5, 33])
    def test_more_clusters_than_tokens_and_empty_buckets(self, config: str, length: int) -> None:
        super().test_more_clusters_than_tokens_and_empty_buckets(config, length)

    @FORMS
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_variant_equals_reference(self, variant: str, frozen: bool, is_causal: bool) -> None:
        text = f"{variant},differentiable_aggregation={str(not frozen).lower()}"
        shape = Shape(variant, text, length=80, heads=2, key_heads=1, value_dim=8, is_causal=is_causal)
        self._check_against_reference(shape, torch.float64)

    def _check_error_falls(self, series: list[str], length: int) -> None:
        super()._check_error_falls(series, length=512)  # it computes every term of every pair

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, config: MuSeConfig, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Clusters, Selection]:
        wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (query, key, value)]
        result = reference_attention(*wide, config, is_causal=is_causal)
        return result.out.to(query.dtype), result.lse, result.clusters, result.selection


@pytest.mark.long
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_with_clusters_and_selection_held_fixed(variant: str, is_causal: bool) -> None:
    config = MuSeConfig.parse(variant).replace(block_size=5, first_order=False, second_order=False)  # both are constant
    inputs = [torch.randn(1, heads, 17, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    fixed = reference_attention(*inputs, config, is_causal=is_causal)

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        result = reference_attention(
            query, key, value, config, is_causal=is_causal, clusters=fixed.clusters, selection=fixed.selection
        )
        return result.out, result.lse

    # Every derivative of the first; of the others their products with random vectors, in a fiftieth of the time.
    torch.autograd.gradcheck(function, inputs, fast_mode=variant != VARIANTS[0])


def test_frozen_aggregation_gives_exact_attentions_gradient_spread_by_the_weights() -> None:
    """Per unit of a summary's `ds`, key `n` receives `a_n q`: mu brings `a_n c`, the mean brings `a_n r`."""
    config = MuSeConfig.parse("Q2K1R0B4,differentiable_aggregation=false,cap_factor=none")
    query, key, value = (torch.randn(1, 1, 8, 3, dtype=torch.float64) for _ in range(3))
    key.requires_grad_()
    result = reference_attention(query, key, value, config, is_causal=True)
    (gradient,) = torch.autograd.grad(result.lse[0, 0, 6], key)
    summary_weight = result.weights[0, 0, 6, 16].detach()  # the one cluster, after two groups of 8 keys
    scaled = query[0, 0, 6] / 3**0.5
    centroid = result.clusters.query_centroids[0, 0, result.clusters.query_assignment[0, 0, 6]]
    inside = torch.softmax(key[0, 0, :4].detach() @ centroid, dim=0)
    torch.testing.assert_close(gradient[0, 0, :4], summary_weight * inside[:, None] * scaled)


def test_frozen_aggregation_freezes_the_weights_inside_buckets_alone() -> None:
    """The paper freezes the weights that form a summary. Shares of blocks in what accumulates follow the log-masses.

    Written out for a query of the third block, which sees one accumulated summary of the first two.
    """
    config = MuSeConfig.parse("Q1K1R0B4,differentiable_aggregation=false,cap_factor=none")
    query, key, value = (torch.randn(1, 1, 12, 3, dtype=torch.float64) for _ in range(3))
    key.requires_grad_()
    result = reference_attention(query, key, value, config, is_causal=True)
    (found,) = torch.autograd.grad(result.out[0, 0, 8].sum(), key)

    centroid = result.clusters.query_centroids[0, 0, 0]
    scaled = query[0, 0, 8] / 3**0.5
    keys, values = key[0, 0], value[0, 0]
    masses, key_means, value_means = [], [], []
    for bucket in (slice(0, 4), slice(4, 8)):
        logits = keys[bucket] @ centroid
        weights = torch.softmax(logits, 0).detach()
        masses.append(logits.logsumexp(0))
        key_means.append(weights @ keys[bucket])
        value_means.append(weights @ values[bucket])
    mass = torch.stack(masses)
    shares = torch.softmax(mass, 0)
    summary = mass.logsumexp(0) + (scaled - centroid) @ (shares @ torch.stack(key_means))
    weights = torch.softmax(torch.stack([summary, scaled @ keys[8]]), 0)
    out = weights @ torch.stack([shares @ torch.stack(value_means), values[8]])
    (expected,) = torch.autograd.grad(out.sum(), key)
    torch.testing.assert_close(result.out[0, 0, 8], out)
    torch.testing.assert_close(found, expected)


def test_streaming_is_the_papers_sequential_rule() -> None:
    """One centroid at a time, in a loop over single vectors, for a case small enough to write out."""
    from muse_attention.core.shuffle import seeded_shuffle

    vectors = torch.randn(1, 1, 150, 4, dtype=torch.float64)
    config = MuSeConfig.parse("QK3R1B32,clustering=streaming")
    order = seeded_shuffle(150, 0, vectors.device)
    shuffled = vectors[0, 0, order]
    totals, counts = [shuffled[i * 50].clone() for i in range(3)], [1.0, 1.0, 1.0]
    for begin in range(0, 150, 64):
        centroids = torch.stack([total / count for total, count in zip(totals, counts, strict=True)])
        for vector in shuffled[begin : begin + 64]:
            nearest = int((centroids - vector).square().sum(-1).argmin())
            totals[nearest] = 0.9 * totals[nearest] + vector
            counts[nearest] = 0.9 * counts[nearest] + 1
    expected = torch.stack([total / count for total, count in zip(totals, counts, strict=True)])
    torch.testing.assert_close(find_clusters(vectors, vectors, config, is_causal=True).key_centroids[0, 0], expected)
