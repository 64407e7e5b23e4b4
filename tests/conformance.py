"""What every backend must do. A backend's test class inherits this and says how to call the backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muse_attention import Clusters, MuSeConfig, find_clusters, muse_attention, ops
from muse_attention.backends.reference import reference_attention
from muse_attention.core.call import Call
from muse_attention.core.structures import Selection
from tests.closeness import assert_as_accurate_as_pytorch, assert_equal_to_rounding
from tests.shapes import SHAPES, VARIANTS, Shape

FORMS = pytest.mark.parametrize(
    ("frozen", "is_causal"), [(False, True), (False, False), (True, True)], ids=["causal", "full", "frozen"]
)
"""Of each variant."""


class Conformance:
    """`backend` names the backend; `attend` also returns the clusters and the selection behind the result."""

    backend: str
    is_dense = False
    """Whether the backend multiplies what is invisible by 0 instead of leaving it out: `0 * nan` is then everywhere."""
    device = "cpu"
    batch, heads, length = 2, 4, 150
    """Of inputs that need several, and of those that may be of any length."""
    few_heads = 2
    """Of queries and of keys, where their number is not the subject."""
    short = 100
    """Length of inputs that need a few blocks of 32 tokens."""
    sums_in_any_order = False
    """Whether gradients are summed by atomic additions."""

    @pytest.fixture(autouse=True)
    def _tensors_on_the_device(self) -> Iterator[None]:
        with torch.device(self.device):
            yield

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, config: MuSeConfig, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Clusters, Selection]:
        raise NotImplementedError

    def _inputs(
        self, length: int, dtype: torch.dtype, *, value_dim: int = 16, requires_grad: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of few heads."""
        shape = Shape("", "", length, heads=self.few_heads, key_heads=self.few_heads, value_dim=value_dim)
        return shape.tensors(dtype, requires_grad=requires_grad)

    # --- against the reference ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_equals_reference_in_float64(self, shape: Shape) -> None:
        self._check_against_reference(shape, torch.float64)

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            *((shape, torch.float32) for shape in SHAPES if shape.length < 4000),
            *((shape, dtype) for shape in SHAPES[::3] for dtype in (torch.float16, torch.bfloat16)),
        ],
        ids=str,
    )
    def test_is_as_accurate_as_the_reference_in_its_precision(self, shape: Shape, dtype: torch.dtype) -> None:
        self._check_against_reference(shape, dtype)

    @FORMS
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_variant_equals_reference(self, variant: str, frozen: bool, is_causal: bool) -> None:
        text = f"{variant},differentiable_aggregation={str(not frozen).lower()}"
        shape = Shape(variant, text, length=150, batch=2, heads=4, key_heads=2, value_dim=8, is_causal=is_causal)
        self._check_against_reference(shape, torch.float64)

    def _check_against_reference(self, shape: Shape, dtype: torch.dtype) -> None:
        self._check_inputs(shape.tensors(dtype), MuSeConfig.parse(shape.config), is_causal=shape.is_causal)

    def _check_inputs(
        self, inputs: Sequence[Tensor], config: MuSeConfig, *, is_causal: bool, terms: float = 1.0
    ) -> None:
        """Output, lse and all gradients, the lse's own gradient included, for the same clusters and selection."""
        dtype = inputs[0].dtype
        out, lse, clusters, selection = self.attend(*inputs, config, is_causal=is_causal)
        assert out.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert out.shape == (*inputs[0].shape[:3], inputs[2].shape[3])
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        actual = [out, lse, *torch.autograd.grad([out, lse], inputs, [grad_out, grad_lse])]

        def of_reference(precision: torch.dtype) -> list[Tensor]:
            tensors = [tensor.detach().to(precision).requires_grad_() for tensor in inputs]
            centroids = replace(clusters, query_centroids=clusters.query_centroids.to(precision))
            result = reference_attention(*tensors, config, is_causal=is_causal, clusters=centroids, selection=selection)
            gradients = torch.autograd.grad(
                [result.out, result.lse], tensors, [grad_out.to(precision), grad_lse.to(precision)]
            )
            return [result.out, result.lse, *gradients]

        expected = of_reference(torch.float64)
        plain = None if dtype == torch.float64 else of_reference(dtype)
        for index, name in enumerate(("out", "lse", "grad query", "grad key", "grad value")):
            if plain is None:
                assert_equal_to_rounding(actual[index], expected[index], name)
            else:
                assert_as_accurate_as_pytorch(actual[index], plain[index], expected[index], name, terms=terms)

    @pytest.mark.parametrize(
        "variant",
        [
            "Q4K5R2B32,clustering=streaming",
            "Q4K5R2SP2B32,clustering=lloyd,lloyd_sample=9",
            "Q4K5R2B32,clustering=streaming,cap_factor=1.2,query_cap_factor=2",
            "Q4K5T0.1B32",
            "Q4K5T0.03B32,tile=4,lloyd_sample=5",
            "Q4K5T0.1B32,tile=4,caution=2",
            "Q4K5T0.4B32,tile=4,search=0.05",
        ],
    )
    def test_finds_the_clusters_and_selection_of_the_reference(self, variant: str) -> None:
        config = MuSeConfig.parse(variant)
        inputs = Shape(variant, variant, length=self.length, batch=self.batch, heads=self.heads).tensors(torch.float64)
        _, _, clusters, selection = self.attend(*inputs, config, is_causal=True)
        expected = reference_attention(*inputs, config, is_causal=True)
        assert_equal_to_rounding(clusters.query_centroids, expected.clusters.query_centroids)
        assert_equal_to_rounding(clusters.key_centroids, expected.clusters.key_centroids)
        assert torch.equal(clusters.query_assignment, expected.clusters.query_assignment)
        assert torch.equal(clusters.key_assignment, expected.clusters.key_assignment)
        if expected.clusters.key_spread is not None:
            assert clusters.key_spread is not None
            assert_equal_to_rounding(clusters.key_spread, expected.clusters.key_spread)
        assert torch.equal(selection.opened, expected.selection.opened)
        assert torch.equal(selection.retrieved, expected.selection.retrieved)

    # --- causality (with a tolerance strict_causality.py has more) ---------------------------------------------------

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_property_6_nothing_after_a_query_changes_its_output(self, variant: str) -> None:
        """With the clustering held fixed."""
        cut = self.length // 2 + 10
        inputs = self._inputs(self.length, torch.float64)
        clusters = find_clusters(inputs[0], inputs[1], config=variant, is_causal=True, backend=self.backend)
        out = self._call(*inputs, variant, is_causal=True, clusters=clusters)
        gradients = torch.autograd.grad(out[:, :, :cut].square().sum(), inputs)
        for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
            assert (gradient[:, :, cut:] == 0).all(), f"the future {name} has a gradient"
        others = self._inputs(self.length, torch.float64)
        changed = [
            torch.cat([tensor[:, :, :cut], other[:, :, cut:]], dim=2)
            for tensor, other in zip(inputs, others, strict=True)
        ]
        after = self._call(*changed, variant, is_causal=True, clusters=clusters)
        assert_equal_to_rounding(after[:, :, :cut], out[:, :, :cut])

    # --- inputs as users have them -----------------------------------------------------------------------------------

    @pytest.mark.long
    def test_gradient_strides_may_be_anything(self) -> None:
        shape = Shape("", "", self.short, batch=self.batch, heads=self.few_heads, key_heads=self.few_heads)
        inputs = shape.tensors(torch.float32)
        out, lse = self._call(*inputs, "Q4K5R2B32", is_causal=True, return_lse=True)
        expanded = torch.autograd.grad(out.sum() + lse.sum(), inputs, retain_graph=True)
        dense = torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)])
        torch.testing.assert_close(expanded, dense)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
    def test_only_some_inputs_require_grad(self, wanted: tuple[int, ...]) -> None:
        inputs = self._inputs(self.short, torch.float32)
        expected = torch.autograd.grad(self._call(*inputs, "Q4K5R2B32", is_causal=True).square().sum(), inputs)
        some = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(inputs)]
        self._call(*some, "Q4K5R2B32", is_causal=True).square().sum().backward()
        for index, tensor in enumerate(some):
            if index in wanted:
                torch.testing.assert_close(tensor.grad, expected[index])
            else:
                assert tensor.grad is None

    def test_gradient_of_the_lse_alone(self) -> None:
        inputs = self._inputs(self.short, torch.float64)
        _, lse = self._call(*inputs, "QK4R4SP9B32", is_causal=True, return_lse=True)
        query, key, value = torch.autograd.grad(lse.sum(), inputs, allow_unused=True)
        exact = torch.autograd.grad(exact_logits(*inputs[:2], is_causal=True).logsumexp(-1).sum(), inputs[:2])
        assert_equal_to_rounding(query, exact[0])
        assert_equal_to_rounding(key, exact[1])
        assert value is None or (value == 0).all()

    def test_same_inputs_give_the_same_bits_twice(self) -> None:
        inputs = Shape("", "", length=200, heads=self.heads).tensors(torch.float32)
        first, second = (self._call(*inputs, "Q4K5R2B32", is_causal=True) for _ in range(2))
        assert torch.equal(first, second)
        gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (first, second)]
        for a, b in zip(*gradients, strict=True):
            if self.sums_in_any_order:
                torch.testing.assert_close(a, b)
            else:
                assert torch.equal(a, b)

    # --- hostile inputs ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "config",
        [
            "QK4R2B32,clustering=streaming",
            "QK4R2B32,clustering=lloyd,cap_factor=1.0,query_cap_factor=1.0",
            "QK4R2B32,cap_factor=none",
            "QK4R0B32,dipole=tilted",
            "QK4R0B32,dipole=centred",
            "QK4T0.01B32",
            "QK4T0.4B32,tile=1,search=0.02",
            "QK4T0B32",
            "QK4TinfB32",
        ],
    )
    @pytest.mark.parametrize(
        ("case", "is_causal"),
        [
            *((case, True) for case in ("equal keys", "all equal", "zeros", "logits 1e4", "gigantic key", "tiny")),
            *((case, False) for case in ("equal keys", "logits 1e4", "gigantic query")),
        ],
    )
    def test_hostile_inputs_stay_finite_and_near(self, case: str, config: str, is_causal: bool) -> None:
        query, key, value = self._inputs(150, torch.float32, requires_grad=False)
        if case in ("equal keys", "all equal"):
            key = key[:, :, :1].expand_as(key).contiguous()
            query = query[:, :, :1].expand_as(query).contiguous() if case == "all equal" else query
        elif case == "zeros":
            query, key, value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        elif case == "logits 1e4":
            query, key = 200 * query, 200 * key
        elif case == "gigantic key":
            key[:, :, 20] = 1e6
        elif case == "gigantic query":
            query[:, :, 140] = -1e6
        elif case == "tiny":
            query, key, value = (1e-30 * tensor for tensor in (query, key, value))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        out, lse = self._call(*inputs, config, is_causal=is_causal, return_lse=True)
        gradients = torch.autograd.grad([out, lse], inputs, [torch.randn_like(out), torch.randn_like(lse)])
        for name, tensor in zip(("out", "lse", "query", "key", "value"), (out, lse, *gradients), strict=True):
            assert tensor.isfinite().all(), f"{name} is not finite"
        exact_lse = exact_logits(query.double(), key.double(), is_causal=is_causal).logsumexp(-1)
        slack = 1e-5 * (1 + exact_lse.abs().max())
        if not MuSeConfig.parse(config).uses_second_order:
            assert (lse <= exact_lse + slack).all()
        if case in ("equal keys", "all equal", "zeros", "tiny"):
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize(
        "config", ["QK300R4B32,clustering=streaming", "Q2K64R8SP3B16", "Q64K2R1B32", "QK40R40SP4B16", "Q40K64T0.01B16"]
    )
    @pytest.mark.parametrize("length", [5, 33, 150])
    def test_more_clusters_than_tokens_and_empty_buckets(self, config: str, length: int) -> None:
        inputs = self._inputs(length, torch.float64)
        out, lse = self._call(*inputs, config, is_causal=True, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
        assert all(tensor.isfinite().all() for tensor in (out, lse, *gradients))
        if not MuSeConfig.parse(config).uses_second_order:
            assert (lse <= exact_logits(*inputs[:2], is_causal=True).logsumexp(-1) + 1e-12).all()

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
    @pytest.mark.parametrize("target", [0, 1, 2], ids=["query", "key", "value"])
    @pytest.mark.parametrize(
        "config", ["QK4R2B32,clustering=streaming", "QK4R2B32", "QK4R0B32", "QK4R2B32,monopole=false", "QK4T0.05B32"]
    )
    def test_nan_and_inf_come_out_where_they_do_in_exact_attention(
        self, config: str, target: int, poison: float
    ) -> None:
        at = 50
        inputs = list(self._inputs(self.length, torch.float32, requires_grad=False))
        inputs[target][:, :, at, 3] = poison
        out = self._call(*inputs, config, is_causal=True)
        exact = _row_by_row(*inputs)
        if "monopole=false" not in config:
            # (What is not retrieved does not exist without the monopole.)
            assert not out[~exact.isfinite()].isfinite().any(), "exact attention is not finite here"
        if self.is_dense:
            return
        own_block = at // 32 * 32
        assert out[:, :, :own_block].isfinite().all(), "an earlier block was poisoned"
        if target == 0:
            others = torch.arange(self.length) != at
            assert out[:, :, others].isfinite().all(), "another query was poisoned"

    @pytest.mark.parametrize("target", [0, 1], ids=["query", "key"])
    @pytest.mark.parametrize(("length", "config"), [(5, "QK4R2B32"), (40, "QK4R2B8")], ids=["one block", "blocks of 8"])
    @pytest.mark.parametrize("value_dim", [16, 8])
    def test_nan_in_short_blocks_stays_nan(self, value_dim: int, length: int, config: str, target: int) -> None:
        inputs = list(self._inputs(length, torch.float32, value_dim=value_dim, requires_grad=False))
        inputs[target][:, :, length // 2, 3] = torch.nan
        exact = _row_by_row(*inputs)
        out, lse = self._call(*inputs, config, is_causal=True, return_lse=True)
        assert not out[exact.isnan()].isfinite().any()
        assert not lse[exact.isnan().all(-1)].isfinite().any()

    @pytest.mark.parametrize("scale", [-0.3, -1e-60, 1e-60])
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    def test_a_scale_below_zero_or_too_small(self, scale: float, is_causal: bool) -> None:
        inputs = self._inputs(70, torch.float32)
        arguments = {"is_causal": is_causal, "return_lse": True}
        # Everything is retrieved, so this is exact attention.
        out, lse = self._call(*inputs, "Q2K3R3SP9B32", scale=scale, **arguments)
        logits = exact_logits(*inputs[:2], is_causal=is_causal, scale=scale)
        expected = [logits.softmax(-1) @ inputs[2], logits.logsumexp(-1)]
        weights = [torch.randn_like(out), torch.randn_like(lse)]
        actual = [out, lse, *torch.autograd.grad([out, lse], inputs, weights)]
        expected += torch.autograd.grad(expected, inputs, weights)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, config: str, **arguments: object) -> Tensor:
        return muse_attention(query, key, value, enable_gqa=True, config=config, backend=self.backend, **arguments)


class OperatorConformance(Conformance):
    """For a backend of `ops`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, config: MuSeConfig, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Clusters, Selection]:
        scale = query.shape[-1] ** -0.5
        clusters = ops.cluster(query, key, config, is_causal=is_causal, scale=scale, backend=self.backend)
        call = Call(query, key, value, clusters, config, is_causal, scale)
        merged, selection = ops.attend(call, self.backend)
        return merged.out, merged.lse, clusters, selection


def assert_out_of_range_is_clamped(wrong: int, config: str) -> None:
    """`muse_attention` refuses clusters out of range, on a GPU without waiting for the answer. Below it the kernels
    take the nearest number that is a cluster, and never leave their memory."""
    parsed = MuSeConfig.parse(config)
    inputs = Shape("", config, length=70, heads=1, key_heads=1).tensors(torch.float32)
    clusters = find_clusters(*inputs[:2], config=parsed, is_causal=True, backend="triton")
    query_assignment, key_assignment = clusters.query_assignment.clone(), clusters.key_assignment.clone()
    query_assignment[0, 0, ::9] = wrong
    key_assignment[0, 0, ::8] = wrong
    outside = replace(clusters, query_assignment=query_assignment, key_assignment=key_assignment)
    clamped = replace(
        clusters,
        query_assignment=query_assignment.clamp(0, parsed.query_clusters - 1),
        key_assignment=key_assignment.clamp(0, parsed.key_clusters - 1),
    )
    results = []
    for given in (outside, clamped):
        merged, _ = ops.attend(Call(*inputs, given, parsed, is_causal=True, scale=0.25), "triton")
        results.append([merged.out, *torch.autograd.grad(merged.out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def exact_logits(query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None = None) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return logits


def _row_by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention that touches nothing invisible: a masked matrix product would spread `0 * nan` to the past."""
    scale = query.shape[-1] ** -0.5
    rows = [
        torch.softmax(scale * query[:, :, n, None] @ key[:, :, : n + 1].mT, dim=-1) @ value[:, :, : n + 1]
        for n in range(query.shape[2])
    ]
    return torch.cat(rows, dim=2)
