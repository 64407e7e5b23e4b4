"""The reference has the seven properties, and with it what equals it; its gradients are those of finite differences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muse_attention import Clusters, MuSeConfig, exact_attention, find_clusters
from muse_attention.backends.reference import reference_attention
from muse_attention.core.structures import Selection
from muse_attention.fidelity import compare
from muse_lab.synthetic import clustered_qkv
from tests.closeness import assert_equal_to_rounding
from tests.conformance import FORMS, Conformance, exact_logits
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

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, config: MuSeConfig, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Clusters, Selection]:
        wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (query, key, value)]
        result = reference_attention(*wide, config, is_causal=is_causal)
        return result.out.to(query.dtype), result.lse, result.clusters, result.selection

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("config", ["QK4R1B200", "Q3K5R5SP9B32", "Q3K5R5SP100B32", "Q3K5T0B32"])
    def test_property_1_exact_when_one_block_or_everything_is_retrieved(self, config: str, is_causal: bool) -> None:
        query, key, value = Shape(config, config, length=self.length, heads=self.heads).tensors(torch.float64)
        out, lse = self._call(query, key, value, config, is_causal=is_causal, return_lse=True)
        logits = exact_logits(query, key, is_causal=is_causal)
        expected_out, expected_lse = (
            logits.softmax(-1) @ value.repeat_interleave(self.heads // 2, 1),
            logits.logsumexp(-1),
        )
        weights = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad([out, lse], (query, key, value), weights)
        expected = torch.autograd.grad([expected_out, expected_lse], (query, key, value), weights)
        assert_equal_to_rounding(out, expected_out, "out")
        assert_equal_to_rounding(lse, expected_lse, "lse")
        for name, ours, exact in zip(("query", "key", "value"), found, expected, strict=True):
            assert_equal_to_rounding(ours, exact, f"grad {name}")

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("config", ["Q6K4R1B32", "Q6K4T0.05B32"])
    def test_property_2_exact_when_queries_are_their_centroids(self, config: str, is_causal: bool) -> None:
        query, key, value = self._inputs(self.length, torch.float64, requires_grad=False)
        scale = 0.25
        prototypes = torch.randn(1, self.few_heads, 6, 16, dtype=torch.float64)
        assignment = torch.randint(6, (1, self.few_heads, self.length))
        query = prototypes.gather(2, assignment[..., None].expand(-1, -1, -1, 16)) / scale
        found = find_clusters(query, key, config=config, is_causal=is_causal, scale=scale, backend=self.backend)
        if found.query_centroids.dim() == 5:  # of each generation
            prototypes = prototypes[:, :, None].expand_as(found.query_centroids).contiguous()
        clusters = replace(found, query_centroids=prototypes, query_assignment=assignment.int())
        self._check_exact(query, key, value, config, is_causal=is_causal, scale=scale, clusters=clusters)

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("config", ["Q3K5R0B32,cap_factor=none", "Q3K5TinfB32"])
    def test_property_2_exact_when_all_keys_of_a_cluster_are_equal(self, config: str, is_causal: bool) -> None:
        query, key, value = self._inputs(self.length, torch.float64, requires_grad=False)
        prototypes = torch.randn(1, self.few_heads, 5, 16, dtype=torch.float64)
        assignment = torch.randint(5, (1, self.few_heads, self.length))
        key = prototypes.gather(2, assignment[..., None].expand(-1, -1, -1, 16))
        found = find_clusters(query, key, config=config, is_causal=is_causal, backend=self.backend)
        clusters = replace(found, key_assignment=assignment.int())
        self._check_exact(query, key, value, config, is_causal=is_causal, scale=None, clusters=clusters)

    def _check_exact(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        config: str,
        *,
        is_causal: bool,
        scale: float | None,
        clusters: Clusters,
    ) -> None:
        out, lse = self._call(
            query, key, value, config, is_causal=is_causal, scale=scale, clusters=clusters, return_lse=True
        )
        logits = exact_logits(query, key, is_causal=is_causal, scale=scale)
        assert_equal_to_rounding(lse, logits.logsumexp(-1), "lse")
        assert_equal_to_rounding(out, logits.softmax(-1) @ value, "out")

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_property_3_lse_is_never_above_the_exact_lse(self, variant: str, is_causal: bool) -> None:
        """Of first order; the mass of second order is an estimate, which may be above."""
        if MuSeConfig.parse(variant).uses_second_order:
            variant += ",second_order=false"
        query, key, value = self._inputs(self.length, torch.float64, requires_grad=False)
        _, lse = self._call(query, key, value, variant, is_causal=is_causal, return_lse=True)
        gap = exact_logits(query, key, is_causal=is_causal).logsumexp(-1) - lse
        assert gap.min() > -1e-12
        if "SP9" not in variant:
            assert gap.max() > 1e-6, "the approximation cannot be exact here"

    def test_property_4_invariance_under_translation_of_keys(self) -> None:
        query, key, value = self._inputs(self.length, torch.float64, requires_grad=False)
        clusters = find_clusters(query, key, config="Q4K5R2B32", backend=self.backend)
        shift = torch.randn(16, dtype=torch.float64)
        arguments = {"config": "Q4K5R2B32", "is_causal": True, "clusters": clusters, "return_lse": True}
        out, lse = self._call(query, key, value, **arguments)
        moved_out, moved_lse = self._call(query, key + shift, value, **arguments)
        assert_equal_to_rounding(moved_out, out)
        assert_equal_to_rounding(moved_lse, lse + (query @ shift) / 4)

    def test_property_4_invariance_under_change_of_basis(self) -> None:
        query, key, value = self._inputs(self.length, torch.float64, requires_grad=False)
        clusters = find_clusters(query, key, config="Q4K5R2B32", backend=self.backend)
        basis = torch.randn(16, 16, dtype=torch.float64) + 4 * torch.eye(16, dtype=torch.float64)
        inverse = torch.linalg.inv(basis)
        out = self._call(query, key, value, "Q4K5R2B32", is_causal=True, clusters=clusters)
        clusters = replace(clusters, query_centroids=clusters.query_centroids @ inverse)
        moved = self._call(query @ inverse, key @ basis.mT, value, "Q4K5R2B32", is_causal=True, clusters=clusters)
        torch.testing.assert_close(moved, out, rtol=1e-9, atol=1e-9)  # the basis has a condition number of about 10

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("variant", [v for v in VARIANTS if "dipole" not in v])
    def test_property_5_weights_sum_to_one_over_exactly_the_visible_keys(self, variant: str, is_causal: bool) -> None:
        heads, length = self.few_heads, self.length
        query, key, _ = self._inputs(length, torch.float64, requires_grad=False)
        # With the identity as values, the output is the matrix of weights.
        identity = torch.eye(length, dtype=torch.float64).expand(1, heads, length, length)
        result = reference_attention(query, key, identity, MuSeConfig.parse(variant), is_causal=is_causal)
        weights = result.out
        assert_equal_to_rounding(weights.sum(-1), torch.ones(1, heads, length, dtype=torch.float64))
        visible = torch.ones(length, length, dtype=torch.bool)
        visible = visible.tril() if is_causal else visible
        assert (weights[..., ~visible] == 0).all(), "an invisible key has weight"
        if "monopole=false" in variant:
            return
        if not MuSeConfig.parse(variant).uses_first_order:  # which also takes weight from keys on the other side
            assert (weights[..., visible] > 0).all(), "a visible key has no weight"
        assert torch.equal(result.stands_for, visible.int().expand(1, heads, -1, -1)), (
            "a key is not in exactly one term"
        )

    @pytest.mark.parametrize(
        "series",
        [
            ["QK4R0B128", "QK16R0B128", "QK64R0B128"],
            ["QK16R0B128", "QK16R1B128", "QK16R4B128", "QK16R16SP8B128"],
            ["QK16R4SP1B128", "QK16R4SP2B128", "QK16R4SP8B128"],
            ["Q1K16R0B128,tilt=false", "Q4K16R0B128", "Q32K16R0B128"],
            [f"QK16T{tolerance}B128,tile=16" for tolerance in ("inf", 1, 0.3, 0.1, 0.03, 0.01, 0)],
        ],
        ids=["clusters", "retrieved clusters", "retrieved blocks", "query clusters", "tolerance"],
    )
    def test_property_7_error_falls_as_clusters_or_retrieval_grow(self, series: list[str]) -> None:
        query, key, value = clustered_qkv(1, 2, 512, 16, topics=40)
        exact_out, exact_lse = exact_attention(query, key, value, is_causal=True, return_lse=True)
        errors = []
        for config in series:
            config += "" if "," in config else ",clustering=streaming"
            out, lse = self._call(query, key, value, config, is_causal=True, return_lse=True)
            errors.append(compare(out, exact_out, lse, exact_lse).pooled()["relative_squared_error"])
        # (To rounding: two tolerances may retrieve the same.)
        assert all(after <= 1.0001 * before for before, after in itertools.pairwise(errors)), errors
        assert errors[-1] < 0.7 * errors[0]


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
    found = find_clusters(vectors, vectors, config=config, is_causal=True, backend="reference")
    torch.testing.assert_close(found.key_centroids[0, 0], expected)
