"""The Triton kernels conform: run by Triton's interpreter, so small. `test_cuda.py` runs them on a GPU.

The interpreter takes seconds for what a GPU does in microseconds, so the tests with the longest lists of cases have
shorter ones here, and inputs have one head where the number of heads is not the subject. It multiplies bfloat16
wrongly, which is left to the GPU; float64, which the GPU is not offered, shows the formulas to be right to rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention, ops
from muse_attention.backends.triton.integer_tables import size_of_tables
from muse_attention.baselines.moba import _block_means
from muse_attention.core.call import Call
from muse_attention.core.query_tiles import NO_ROW
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Selection
from tests.against_torch import assert_at_most_twice_the_error_of_torch
from tests.block_choice import SIZES, assert_best_blocks, choose
from tests.closeness import assert_equal_to_rounding
from tests.conformance import OperatorConformance, assert_out_of_range_is_clamped
from tests.shapes import Shape
from tests.strict_causality import Combination, assert_nothing_later_matters, draw_case

pytest.importorskip("triton")

from muse_attention.backends.triton import numbers
from muse_attention.backends.triton.blockwise import pieces
from muse_attention.backends.triton.layout import Plan
from muse_attention.backends.triton.runtime import launching, schedule
from muse_attention.backends.triton.runtime.chips import Chip

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_cuda.py")

SHAPES = [
    Shape("one token", "QK4R1B16", length=1),
    Shape("one whole block", "QK4R1B64", length=64),
    Shape("ragged", "Q6K5R2B48", length=110, heads=1, key_heads=1),
    Shape("batch 2, query heads 2 to 1", "Q3K4R2SP2B32", length=70, batch=2, key_heads=1),
    Shape("head dim 80", "QK4R1B64", length=100, heads=1, key_heads=1, head_dim=80, value_dim=80),
    Shape("wide values", "QK4R1B64", length=100, heads=1, key_heads=1, head_dim=16, value_dim=40),
    Shape("narrow values, full", "QK4R1B64", length=100, heads=1, key_heads=1, head_dim=40, is_causal=False),
    Shape("blocks of three tokens", "QK3R2B3", length=20, heads=1, key_heads=1),
    Shape("blockwise, one whole block", "QK4T0.1B64", length=64, heads=1, key_heads=1),
    Shape(
        "blockwise, batch 2, query heads 2 to 1, wide values", "Q3K5T0.05B16", 40, batch=2, key_heads=1, value_dim=24
    ),
    Shape("blockwise, narrow values, full", "Q3K5T0.05B32,tile=4", 80, 1, 1, 1, head_dim=40, is_causal=False),
    Shape("blockwise, more than 64 key clusters", "Q2K70T0.05B32", length=70, heads=1, key_heads=1),
    Shape("blockwise, blocks of three tokens", "QK3T0.1B3,tile=2", length=20, heads=1, key_heads=1),
    Shape("blockwise, head dim 192", "Q3K5T0.05B32", 80, heads=1, key_heads=1, head_dim=192, value_dim=128),
]
VARIANTS = [
    "Q3K5R2SP2B32",
    "Q3K5R0B32",
    "Q3K5R2B32,monopole=false",
    "Q3K5R2B32,tilt=false,cap_factor=none",
    "Q3K5R2B32,clustering=streaming,cap_factor=1.5,query_cap_factor=1.2",
    "Q3K5T0.05B32",
    "Q3K5T0.03B32,tile=4,caution=2",
    "Q3K5T0.4B32,tile=4,search=0.05",
    "Q3K5T0.05B32,tile=16,second_order=false",
    "Q3K5T0.05B32,tile=16,first_order=false",
    "Q3K5TinfB32",
]
FROZEN = [VARIANTS[0], "Q3K5T0.05B32,tile=4"]
"""Variants that are also tested with frozen aggregation, causal; on a GPU all are."""


class TestTritonBackend(OperatorConformance):
    backend = "triton"
    batch, heads, length = 1, 2, 70
    few_heads, short = 1, 70

    # What equals the reference to rounding has its properties. (The interpreter has one order of everything.)
    test_same_inputs_give_the_same_bits_twice = None

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_equals_reference_in_float64(self, shape: Shape) -> None:
        self._check_against_reference(shape, torch.float64)

    @pytest.mark.parametrize("head_dim", [16, 32])
    def test_equals_reference_with_the_tiles_of_other_chips(
        self, head_dim: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows of 128 and of 256 bytes."""
        for module in (numbers, launching):
            monkeypatch.setattr(module, "current_chip", lambda: Chip(has_shared_operands=False, threads_of_warp=32))
        monkeypatch.setattr(schedule, "_schedules", {})
        shape = Shape("", "Q3K40T0.05B48", 110, heads=1, key_heads=1, head_dim=head_dim, value_dim=head_dim)
        self._check_against_reference(shape, torch.float64)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES[2:3], ids=str)
    def test_is_as_accurate_as_the_reference_in_its_precision(self, shape: Shape, dtype: torch.dtype) -> None:
        self._check_against_reference(shape, dtype)

    @pytest.mark.parametrize(
        ("variant", "is_causal"),
        [
            *((variant, False) for variant in VARIANTS),
            *((f"{variant},differentiable_aggregation=false", True) for variant in FROZEN),
        ],
    )
    def test_variant_equals_reference(self, variant: str, is_causal: bool) -> None:
        shape = Shape(variant, variant, length=80, heads=1, key_heads=1, value_dim=8, is_causal=is_causal)
        self._check_against_reference(shape, torch.float64)

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_rounds_of_lists_equal_reference(self, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many as there are blocks to see: very long sequences have several."""
        monkeypatch.setattr(schedule, "_schedules", {})
        monkeypatch.setattr(pieces, "_MOST_LISTED", 1)
        variant = "Q3K5T0.4B16,tile=4,search=0.05"
        shape = Shape(variant, variant, length=80, heads=1, key_heads=1, value_dim=8, is_causal=is_causal)
        self._check_against_reference(shape, torch.float64)

    def test_keys_with_a_large_common_offset_equal_reference(self) -> None:
        shape = Shape("", "Q3K5R1B32", length=70, heads=1, key_heads=1, value_dim=8, is_causal=False, key_offset=10.0)
        self._check_against_reference(shape, torch.float64)

    @pytest.mark.long
    def test_keys_with_a_large_common_offset(self) -> None:
        shape = Shape("", "Q3K5R1B32", length=100, heads=1, key_heads=1, key_offset=10.0)
        assert_at_most_twice_the_error_of_torch(shape, torch.float16)

    @pytest.mark.long
    @pytest.mark.parametrize("variant", ["Q4K5R2B32"])
    def test_property_6_nothing_after_a_query_changes_its_output(self, variant: str) -> None:
        super().test_property_6_nothing_after_a_query_changes_its_output(variant)

    @pytest.mark.long
    @pytest.mark.parametrize("wanted", [(1,)], ids=str)
    def test_only_some_inputs_require_grad(self, wanted: tuple[int, ...]) -> None:
        super().test_only_some_inputs_require_grad(wanted)

    @pytest.mark.long
    @pytest.mark.parametrize("is_causal", [True], ids=["causal"])
    @pytest.mark.parametrize(
        ("case", "config"),
        [
            ("equal keys", "QK4R2B64,cap_factor=1.0,query_cap_factor=1.5"),
            ("zeros", "QK4R1B64"),
            ("gigantic query", "QK4R1B64"),
            ("equal keys", "QK4T0.01B64"),
            ("gigantic key", "QK4T0.01B64"),
        ],
    )
    def test_hostile_inputs_stay_finite_and_near(self, case: str, config: str, is_causal: bool) -> None:
        super().test_hostile_inputs_stay_finite_and_near(case, config, is_causal)

    @pytest.mark.long
    @pytest.mark.parametrize("config", ["Q2K64R8B16", "Q40K64T0.01B16"])
    @pytest.mark.parametrize("length", [20])
    def test_more_clusters_than_tokens_and_empty_buckets(self, config: str, length: int) -> None:
        super().test_more_clusters_than_tokens_and_empty_buckets(config, length)

    @pytest.mark.parametrize(("scale", "is_causal"), [(-0.3, True), (1e-60, False)])
    def test_a_scale_below_zero_or_too_small(self, scale: float, is_causal: bool) -> None:
        super().test_a_scale_below_zero_or_too_small(scale, is_causal)

    @pytest.mark.long
    @pytest.mark.parametrize("config", ["Q3K5R1B16", "Q3K5T0.05B16"])
    def test_a_group_of_heads_has_the_same_bits_alone(self, config: str) -> None:
        shape = Shape("", "", length=24, heads=4, key_heads=2)
        query, key, value = (tensor.detach() for tensor in shape.tensors(torch.float32))
        settings = {"config": config, "backend": "triton", "is_causal": True, "enable_gqa": True}
        together = muse_attention(query, key, value, **settings)
        alone = muse_attention(query[:, 2:], key[:, 1:], value[:, 1:], **settings)
        assert torch.equal(alone, together[:, 2:])

    @pytest.mark.parametrize(
        ("target", "poison"), [(0, float("inf")), (1, float("nan")), (2, float("inf"))], ids=["query", "key", "value"]
    )
    @pytest.mark.parametrize("config", ["QK4R2B32", "QK4T0.05B32"])
    def test_nan_and_inf_come_out_where_they_do_in_exact_attention(
        self, config: str, target: int, poison: float
    ) -> None:
        super().test_nan_and_inf_come_out_where_they_do_in_exact_attention(config, target, poison)

    @pytest.mark.parametrize("target", [0, 1], ids=["query", "key"])
    @pytest.mark.parametrize(("length", "config"), [(40, "QK4R2B8")], ids=["blocks of 8"])
    @pytest.mark.parametrize("value_dim", [8])
    def test_nan_in_short_blocks_stays_nan(self, value_dim: int, length: int, config: str, target: int) -> None:
        super().test_nan_in_short_blocks_stays_nan(value_dim, length, config, target)


@pytest.mark.long
def test_more_words_and_longer_selections() -> None:
    """More key clusters than two words of bits have, and more opened clusters than a warp has lanes."""
    shape = Shape("", "Q1K70R34SP2B16", length=40, heads=1, key_heads=1)
    TestTritonBackend()._check_against_reference(shape, torch.float64)


def test_moba_goes_through_the_retrieval_kernels() -> None:
    inputs = Shape("", "", length=70, heads=2, key_heads=1).tensors(torch.float64)
    results = []
    for backend in ("torch", "triton"):
        out = get_attention("moba:L32B8R2")(*inputs, is_causal=True, enable_gqa=True, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_best_blocks_are_chosen(sizes: tuple[int, int, int], is_causal: bool) -> None:
    query, key, _ = Shape("", "", 150, heads=2, key_heads=1, head_dim=24).tensors(torch.float32, requires_grad=False)
    assert_best_blocks(choose(query, key, sizes, "triton", is_causal=is_causal), query, key, sizes, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_best_blocks_are_chosen_in_every_precision(dtype: torch.dtype) -> None:
    """And are those of the `torch` backend: products of half precision are exact in float32. Those of bfloat16 are
    multiplied as float32, as the interpreter does not multiply them rightly."""
    shape = Shape("", "", 110, batch=2, heads=2, key_heads=1)
    query, key, _ = shape.tensors(dtype, requires_grad=False)
    means = _block_means(key, 8)
    assert means.dtype == dtype
    multiplied = torch.float32 if dtype == torch.bfloat16 else dtype
    config = MuSeConfig.parse("Q1K4R3B32,monopole=false")
    found = ops.choose_blocks(query.to(multiplied), means.to(multiplied), config, is_causal=True, backend="triton")
    assert_best_blocks(found, query, key, (32, 8, 3), is_causal=True)
    expected = ops.choose_blocks(query, means, config, is_causal=True, backend="torch")
    for ours, theirs in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert torch.equal(ours, theirs)


def test_of_equal_blocks_the_first_are_chosen_and_before_them_what_is_not_finite() -> None:
    query, key = torch.ones(1, 1, 40, 16), torch.ones(1, 1, 40, 16)
    key[:, :, 9] = torch.nan
    found = choose(query, key, (8, 4, 3), "triton", is_causal=True)
    chosen = (2 * found.retrieved[..., 0] + found.opened)[0, 0, ::8]
    assert chosen.tolist() == [[-3] * 3, [0, 1, -3], [2, 0, 1], [2, 0, 1], [2, 0, 1]]


FEW_BLOCKS = [
    Combination("Q3K5T0.05B16,tile=4", 16, 16),
    Combination("Q4K20T0.1B16", 16, 24),
    Combination("Q2K70T0.02B12,tile=1,caution=2", 24, 8),
    Combination("Q5K3T0B16,tile=64,second_order=false,differentiable_aggregation=false", 16, 16),
]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long if seed else ()) for seed in range(12)])
def test_nothing_later_changes_a_bit(seed: int) -> None:
    """Every third case has packed documents."""
    case = draw_case(seed, lambda _: FEW_BLOCKS[seed % 4], most_blocks=3, most_heads=1, is_packed=seed % 3 == 1)
    assert_nothing_later_matters(case, backend="triton", dtype=torch.float16 if seed % 4 == 1 else torch.float32)


@pytest.mark.long
def test_heads_in_groups_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from muse_attention.backends.triton import layout
    from muse_attention.backends.triton.runtime import schedule

    inputs = Shape("", "", length=24).tensors(torch.float32)
    results = []
    for room in (1 << 40, 0):
        monkeypatch.setattr(schedule, "_schedules", {})
        monkeypatch.setattr(layout, "WORKSPACE_BYTES", room)
        monkeypatch.setattr(layout, "WORKSPACE_OF_INPUTS", 0)
        out = muse_attention(*inputs, is_causal=True, config="Q3K4R2B16", backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_plan_is_views_of_one_tensor() -> None:
    shapes = Plan.shapes(MuSeConfig.parse("Q5K6R2B4"), heads=4, key_heads=2, length=10, query_clusters=5, picks=2)
    memory = torch.arange(size_of_tables(shapes), dtype=torch.int32)
    plan = Plan.of(memory, shapes)
    assert plan.pairs.order.shape == (2, 40)
    tables = [table for groups in vars(plan).values() for table in (groups.order, groups.starts)]
    assert len(torch.cat([table.flatten() for table in tables]).unique()) == sum(
        rows * columns for rows, columns in shapes
    )
    assert all(table.data_ptr() % 16 == 0 for table in tables)
    assert plan.for_heads(slice(1, 2), slice(2, 4)).segments.order.shape == (2, 10)


@pytest.mark.parametrize("config", ["Q3K4R2B32", "Q3K4T0.1B32"])
def test_compiles_into_one_graph(config: str) -> None:
    shape = Shape("", config, length=40, heads=1, key_heads=1)
    inputs = shape.tensors(torch.float32)

    def attend(*tensors: Tensor) -> Tensor:
        return muse_attention(*tensors, is_causal=True, config=shape.config, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, attend):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.fixture
def small_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centroids come in chunks of 16, and means in slices of 16 dimensions, where there are more."""
    from muse_attention.backends.triton import nearest, selection
    from muse_attention.backends.triton.runtime import schedule

    monkeypatch.setattr(schedule, "_schedules", {})
    for module in (nearest, selection):
        monkeypatch.setattr(module, "_MOST_NUMBERS", 512)
    monkeypatch.setattr(nearest, "_NUMBERS_OF_CHUNK", 512)
    monkeypatch.setattr(selection, "_MOST_LOGITS", 1024)


@pytest.mark.long
@pytest.mark.usefixtures("small_chip")
def test_more_clusters_than_the_chip_holds() -> None:
    shape = Shape("", "Q2K20R3SP2B32", length=70, heads=1, key_heads=1, head_dim=20)
    TestTritonBackend()._check_against_reference(shape, torch.float64)


@pytest.mark.usefixtures("small_chip")
@pytest.mark.parametrize(
    "variant",
    [
        "Q20K40R1B64,clustering=streaming,cap_factor=1.0,query_cap_factor=1.2",
        "QK36R1B64,clustering=lloyd,lloyd_sample=2,cap_factor=1.2",
    ],
)
def test_finds_the_clusters_of_the_reference_in_chunks(variant: str) -> None:
    query, key, _ = Shape("", "", length=150, heads=1, key_heads=1, head_dim=20).tensors(torch.float64)
    found, expected = (
        vars(find_clusters(query, key, config=variant, backend=name)) for name in ("triton", "reference")
    )
    for side in ("query", "key"):
        assert_equal_to_rounding(found[f"{side}_centroids"], expected[f"{side}_centroids"], side)
        assert torch.equal(found[f"{side}_assignment"], expected[f"{side}_assignment"])


@pytest.mark.usefixtures("small_chip")
def test_of_equally_near_centroids_the_first_with_room_counts() -> None:
    """Also of those in different chunks: with zeros, all are equally near."""
    zeros = torch.zeros(1, 1, 40, 32, dtype=torch.float16)
    found = find_clusters(zeros, zeros, config="QK50R1B20,cap_factor=1.0", backend="triton")
    assert (found.query_assignment == 0).all()
    assert found.key_assignment.flatten().tolist() == 2 * list(range(20))


def test_first_order_of_single_keys_is_nothing_however_large_the_logits() -> None:
    """A bucket of one key is its own summary: there is no covariance, and rounding must not make one."""
    query, key, value = Shape("", "", length=64, heads=1, key_heads=1).tensors(torch.float32, requires_grad=False)
    config = MuSeConfig.parse("Q3K16TinfB16")
    found = find_clusters(30 * query, 30 * key, config=config, is_causal=True, backend="triton")
    assert all(len(set(block.tolist())) == 16 for block in found.key_assignment[0, 0, :48].split(16))
    out, without = (
        muse_attention(
            30 * query, 30 * key, value, is_causal=True, config=f"Q3K16TinfB16,first_order={order}", backend="triton"
        )
        for order in ("true", "false")
    )
    torch.testing.assert_close(out, without, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "config"), [(-7, "Q3K5R2SP2B32"), (1 << 30, "Q3K5R1B32"), (-7, "Q3K5T0.05B32"), (1 << 30, "Q3K5T0.05B32")]
)
def test_an_assignment_out_of_range_stays_in_memory(wrong: int, config: str) -> None:
    assert_out_of_range_is_clamped(wrong, config)


def test_a_selection_may_name_buckets_that_are_not_seen() -> None:
    """Nothing is listed for them: there is no room."""
    torch.manual_seed(3)
    config, blocks = MuSeConfig.parse("Q3K3T0.1B16,tile=4"), 3
    inputs = [torch.randn(1, 1, 16 * blocks, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    clusters = ops.cluster(*inputs[:2], config, is_causal=True, scale=0.25, backend="triton")
    every = SelectionShapes.of(config, 16 * blocks, is_causal=True).none(inputs[0])
    every.retrieved.zero_()
    block, bucket = torch.arange(blocks)[:, None, None], torch.arange(every.retrieved.shape[-1])
    seen = Selection(every.opened, every.retrieved.masked_fill(bucket // 3 >= block, NO_ROW))
    results = []
    for selection in (every, seen):
        merged, _ = ops.attend(Call(*inputs, clusters, config, True, 0.25), "triton", selection)
        results.append([merged.out, merged.lse, *torch.autograd.grad(merged.out.sum() + merged.lse.sum(), inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    exact = muse_attention(*inputs, config="T0B16", is_causal=True, scale=0.25)
    assert_equal_to_rounding(results[0][0], exact, "out")
