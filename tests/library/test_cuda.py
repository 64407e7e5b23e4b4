"""Both backends on a GPU. No machine of the continuous integration has one: run with `pytest -m gpu`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention, ops
from muse_attention.backends.triton.runtime import launching, replaying, schedule
from muse_attention.core.call import Call
from muse_attention.fidelity import compare
from muse_lab.pretraining.model.sliding_window import sliding_window_attention
from muse_lab.synthetic import clustered_qkv
from tests.against_torch import assert_at_most_twice_the_error_of_torch
from tests.block_choice import SIZES, assert_best_blocks, choose
from tests.chunks import Split
from tests.conformance import OperatorConformance, assert_out_of_range_is_clamped
from tests.layouts import LAYOUTS, against_copies
from tests.library.test_torch_backend import TestTorchBackend as _TorchBackend
from tests.library.test_triton_backend import VARIANTS
from tests.shapes import Shape
from tests.strict_causality import Combination, assert_nothing_later_matters, draw_case

pytestmark = pytest.mark.gpu


class TestTorchBackendOnCuda(_TorchBackend):
    device = "cuda"
    sums_in_any_order = True


SHAPES = [
    Shape("just over a block", "QK16R2B256", length=257),
    Shape("ragged, query heads 4 to 2", "QK16R2B256", length=1500, batch=2, heads=4),
    Shape("full", "Q16K20R3SP2B256", length=1500, is_causal=False),
    Shape("many clusters", "QK128R8B512", length=3000),
    Shape("blockwise, just over a block", "Q16K64T0.1B256", length=257),
    Shape("blockwise, ragged, query heads 4 to 2", "Q16K64T0.05B256", length=1000, heads=4),
    Shape("blockwise, full", "Q8K20T0.05B256,tile=16", length=1500, is_causal=False),
    Shape("blockwise, many clusters", "Q32K128T0.1B512", length=1500),
]


class TestTritonBackend:
    """Against the reference in float64 and the `torch` backend in the same precision, on fresh data, from poison."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("shape", [replace(shape, head_dim=64, value_dim=64) for shape in SHAPES], ids=str)
    def test_error_is_at_most_twice_that_of_the_torch_backend(self, shape: Shape, dtype: torch.dtype) -> None:
        self._check(shape, dtype)

    @pytest.mark.parametrize(("head_dim", "value_dim"), [(128, 128), (80, 48), (256, 256)])
    @pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]], ids=str)
    def test_head_dimensions(self, shape: Shape, head_dim: int, value_dim: int) -> None:
        self._check(replace(shape, head_dim=head_dim, value_dim=value_dim), torch.bfloat16)

    @pytest.mark.parametrize("variant", [*VARIANTS, "Q3K5T0.05B32,tile=1", "Q4K70T0.05B32,tile=128"])
    def test_variants(self, variant: str) -> None:
        text = variant.replace("B32", "B256") + ",differentiable_aggregation=false"
        self._check(Shape(variant, text, length=1000, head_dim=64, value_dim=64), torch.bfloat16)

    @pytest.mark.parametrize(
        ("config", "head_dim", "dtype"),
        [
            ("Q16K600R4SP2B256", 128, torch.bfloat16),
            ("Q600K16R2B256", 128, torch.bfloat16),
            ("Q16K1024R4B256", 128, torch.bfloat16),
            ("QK300R4B256", 256, torch.bfloat16),
            ("Q8K2048R4B512", 64, torch.bfloat16),
            ("Q16K512T0.1B512", 64, torch.bfloat16),
            ("Q128K128T0.1B512", 256, torch.bfloat16),
        ],
    )
    def test_more_clusters_than_the_chip_holds(self, config: str, head_dim: int, dtype: torch.dtype) -> None:
        shape = Shape(config, config, length=1000, heads=1, key_heads=1, head_dim=head_dim, value_dim=head_dim)
        self._check(shape, dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("aggregation", ["", ",differentiable_aggregation=false"], ids=["differentiable", "frozen"])
    @pytest.mark.parametrize(
        "shape",
        [replace(shape, head_dim=64, value_dim=64) for shape in SHAPES if "just over" not in shape.name],
        ids=str,
    )
    def test_keys_with_a_large_common_offset(self, shape: Shape, aggregation: str, dtype: torch.dtype) -> None:
        self._check(replace(shape, config=shape.config + aggregation, key_offset=10.0), dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(
        "text",
        ["Q4K32T0.1B256,tile=16", "Q4K32T0.1B256,tile=128", "Q4K32T0.1B256,caution=2", "Q4K32T0.4B256,search=0.05"],
    )
    def test_retrieves_what_the_torch_backend_retrieves(self, text: str, dtype: torch.dtype) -> None:
        """The first row of a tile that wants a bucket; rounding moves few of them."""
        config, scale = MuSeConfig.parse(text), 64**-0.5
        query, key, value = clustered_qkv(1, 2, 2000, 64, device="cuda", dtype=dtype)
        query = 3 * query
        clusters = ops.cluster(query, key, config, is_causal=True, scale=scale, backend="torch")
        call = Call(query, key, value, clusters, config, is_causal=True, scale=scale)
        expected, seen = (ops.attend(call, backend)[1].retrieved for backend in ("torch", "triton"))
        wanted = (expected < 255).double().mean()
        assert wanted > 0.02
        assert (seen != expected).double().mean() < 0.1 * wanted

    def _check(self, shape: Shape, dtype: torch.dtype) -> None:
        with torch.device("cuda"):
            assert_at_most_twice_the_error_of_torch(shape, dtype, poison_memory=_poison_memory)


class TestTritonConformance(OperatorConformance):
    """In float32: what the suite has in float64 is for the interpreter."""

    backend = "triton"
    device = "cuda"

    test_equals_reference_in_float64 = None
    test_is_as_accurate_as_the_reference_in_its_precision = None
    test_variant_equals_reference = None
    test_finds_the_clusters_and_selection_of_the_reference = None
    test_property_6_nothing_after_a_query_changes_its_output = None
    test_gradient_of_the_lse_alone = None
    test_more_clusters_than_tokens_and_empty_buckets = None

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize(
        "config",
        [
            "QK4R2B32",
            "QK4R2B32,clustering=lloyd,cap_factor=1.0,query_cap_factor=1.0",
            "QK4R2B32,cap_factor=none",
            "QK4T0.01B32",
            "QK4T0B32",
            "QK4TinfB32",
        ],
    )
    @pytest.mark.parametrize(
        "case", ["equal keys", "all equal", "zeros", "logits 1e4", "gigantic key", "gigantic query", "tiny"]
    )
    def test_hostile_inputs_stay_finite_and_near(self, case: str, config: str, is_causal: bool) -> None:
        super().test_hostile_inputs_stay_finite_and_near(case, config, is_causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "length", "head_dim"),
    [
        ("muse:QK8R2B128,clustering=lloyd", 300, 64),
        ("muse:QK8R2B64,clustering=streaming", 300, 40),
        ("muse:Q4K16T0.1B128", 300, 64),
        ("exact", 300, 64),
        ("exact", 100, 40),
        ("block_diagonal:128", 300, 64),
        ("moba:L128B64R2", 300, 64),
    ],
)
def test_strides_change_nothing(name: str, length: int, head_dim: int, layout: str, dtype: torch.dtype) -> None:
    """Through cuDNN, FlashAttention and the kernels; the gradient of queries to rounding, which cuDNN leaves open."""
    shape = Shape("", "", length=length, head_dim=head_dim, value_dim=head_dim)
    strided = [LAYOUTS[layout](tensor.detach().cuda()) for tensor in shape.tensors(dtype)]
    attend = partial(get_attention(name), is_causal=True, return_lse=True)
    found, expected = against_copies(attend, strided, LAYOUTS[layout])
    _assert_same_bits(found, expected, of_queries=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing_for_a_sliding_window(layout: str) -> None:
    shape = Shape("", "", length=300, head_dim=64, value_dim=64)
    strided = [LAYOUTS[layout](tensor.detach().cuda()) for tensor in shape.tensors(torch.bfloat16)]

    def attend(*tensors: Tensor) -> list[Tensor]:
        return [sliding_window_attention(*tensors, window=64)]

    for found, expected in zip(*against_copies(attend, strided, LAYOUTS[layout]), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.detach().abs().max()))


def _assert_same_bits(found: list[Tensor], expected: list[Tensor], *, of_queries: int = 1) -> None:
    """But for the gradient of queries, at that place: cuDNN sums it in any order."""
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if place == of_queries:
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * float(theirs.abs().max()))
        else:
            assert torch.equal(ours, theirs), place


def _poison_memory() -> None:
    """What is allocated next holds NaN where it is not written."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    block = torch.full((1 << 28,), float("nan"), device="cuda")
    del block


def _whole(data: tuple[Tensor, ...], grad_out: Tensor, config: str) -> list[Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in data]
    out = muse_attention(*inputs, is_causal=True, config=config)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def _long_inputs() -> tuple[tuple[Tensor, ...], Tensor]:
    data = clustered_qkv(1, 4, 8192, 64, dtype=torch.bfloat16, device="cuda")
    return data, torch.randn_like(data[0])


PAPER, BLOCKWISE = "Q16K64R2B1k", "Q16K64T0.1B1k"
METHODS = pytest.mark.parametrize("config", [PAPER, BLOCKWISE])
CONFIGS = pytest.mark.parametrize("config", ["QK64R4B1k", PAPER, BLOCKWISE])


@CONFIGS
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu(config: str) -> None:
    data, grad_out = _long_inputs()
    _whole(data, grad_out, config)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):  # (The second time its launches are captured.)
            _whole(data, grad_out, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CONFIGS
def test_deterministic_algorithms_give_the_same_bits_twice(config: str) -> None:
    data, grad_out = _long_inputs()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (_whole(data, grad_out, config) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@CONFIGS
def test_all_but_the_gradient_of_queries_has_the_same_bits_twice_by_default(config: str) -> None:
    """cuDNN sums the gradient of queries in any order."""
    data, grad_out = _long_inputs()
    first, second = (_whole(data, grad_out, config) for _ in range(2))
    _assert_same_bits(second, first)


@CONFIGS
def test_a_head_has_the_same_bits_alone(config: str) -> None:
    """Save the gradient of queries, as above. (FlashAttention, which deterministic algorithms choose for the own block,
    splits the keys of a query by the number of heads.)"""
    data, grad_out = _long_inputs()
    together = _whole(data, grad_out, config)
    for head in range(data[0].shape[1]):
        alone = _whole(tuple(tensor[:, [head]] for tensor in data), grad_out[:, [head]], config)
        _assert_same_bits(alone, [tensor[:, [head]] for tensor in together])


COMPILED = [
    (Combination("Q8K16T0.05B64,tile=16", 64, 64), torch.bfloat16),
    (Combination("Q8K16T0.05B64,tile=16", 64, 64), torch.float16),
    (Combination("Q8K16T0.05B64,tile=16", 64, 64), torch.float32),
    (Combination("Q16K64T0.1B256", 128, 128), torch.bfloat16),
    (Combination("Q5K70T0.02B128,tile=4,caution=0,second_order=false", 64, 32), torch.bfloat16),
]
"""Few, because kernels are compiled for each."""


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_nothing_later_changes_a_bit(first: int) -> None:
    """Of 200 cases, packed documents among them: replayed or not, and whatever is beside a head."""
    combination, dtype = COMPILED[first // 40]
    for seed in range(first, first + 40):
        case = draw_case(seed, lambda _: combination, most_blocks=9, most_heads=3)
        assert_nothing_later_matters(
            case, backend="triton", dtype=dtype, device="cuda", cuts=3, with_gradients=seed % 2 == 0
        )


def test_nothing_later_changes_a_bit_of_a_long_sequence() -> None:
    """Also where the same memory was used before, so that launches are replayed."""
    data, _ = _long_inputs()
    others = clustered_qkv(1, 4, 8192, 64, dtype=torch.bfloat16, device="cuda", seed=1)
    expected = muse_attention(*data, is_causal=True, config=BLOCKWISE, return_lse=True)
    for cut in (1, 1000, 1024, 5000, 8191):
        changed = [torch.cat([old[:, :, :cut], 3 * new[:, :, cut:]], 2) for old, new in zip(data, others, strict=True)]
        for before, after in zip(
            expected, muse_attention(*changed, is_causal=True, config=BLOCKWISE, return_lse=True), strict=True
        ):
            assert torch.equal(after[:, :, :cut], before[:, :, :cut]), cut


@pytest.mark.parametrize("seed", range(200, 220))
def test_chunks_give_what_one_call_gives(seed: int) -> None:
    Split.draw(seed).check(backend="triton", dtype=torch.float32, device="cuda", rounding=1e-4)


def test_a_million_tokens() -> None:
    data = clustered_qkv(1, 1, 1 << 20, 64, dtype=torch.bfloat16, device="cuda")
    out, *gradients = _whole(data, torch.randn_like(data[0]), str(MuSeConfig.for_length(1 << 20)))
    assert all(tensor.isfinite().all() for tensor in (out, *gradients))
    last, (query, key, value) = 64, (tensor.float() for tensor in data)
    logits = query[:, :, -last:] @ key.mT / 8
    logits += torch.full_like(logits, -torch.inf).triu(logits.shape[-1] - last + 1)
    exact = logits.softmax(-1) @ value
    assert (out[:, :, -last:] - exact).square().sum() < 0.05 * exact.square().sum()


def test_more_programs_than_most_axes_of_a_grid_hold() -> None:
    """The kernels err no more than the stages in PyTorch, which may cluster otherwise."""
    muse = get_attention("muse:Q256K16R2B64")
    attentions = (get_attention("exact"), partial(muse, backend="torch"), partial(muse, backend="triton"))
    data = clustered_qkv(1, 1, 16384, 64, dtype=torch.bfloat16, device="cuda")
    grad_out = torch.randn_like(data[0])
    results = []
    for attention in attentions:
        inputs = [tensor.detach().requires_grad_() for tensor in data]
        out = attention(*inputs, is_causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad_out)])
    for exact, of_stages, of_kernels in zip(*results, strict=True):
        of_torch, of_triton = ((some - exact).float().square().sum() for some in (of_stages, of_kernels))
        assert of_triton < 1.5 * of_torch + 1e-4 * exact.float().square().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("clustering", ["lloyd", "streaming"])
def test_finds_more_clusters_than_the_chip_holds(clustering: str, dtype: torch.dtype) -> None:
    """As tight as those of the stages in PyTorch, and none beyond the cap."""
    query, key, _ = clustered_qkv(1, 2, 8192, 128, dtype=dtype, device="cuda")
    objectives = []
    for backend in ("torch", "triton"):
        config = f"QK1024R1B1k,clustering={clustering},cap_factor=2.0"
        found = find_clusters(query, key, config=config, backend=backend)
        centroids = found.key_centroids.gather(2, found.key_assignment.long()[..., None].expand(-1, -1, -1, 128))
        objectives.append(float((key.float() - centroids).square().sum()))
        of_blocks = torch.nn.functional.one_hot(found.key_assignment.long(), 1024).unflatten(2, (8, 1024)).sum(3)
        assert of_blocks.max() <= 2
    assert objectives[1] < 1.02 * objectives[0]


@pytest.mark.parametrize("config", ["Q3K5R2SP2B32", "Q3K5T0.05B32"])
@pytest.mark.parametrize("wrong", [-7, 1 << 30])
def test_an_assignment_out_of_range_stays_in_memory(wrong: int, config: str) -> None:
    with torch.device("cuda"):
        assert_out_of_range_is_clamped(wrong, config)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@METHODS
def test_clusters_handed_in_are_checked_without_waiting(config: str) -> None:
    data, _ = _long_inputs()
    clusters = find_clusters(*data[:2], config=config, is_causal=True)
    expected = muse_attention(*data, is_causal=True, config=config)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = muse_attention(*data, is_causal=True, config=config, clusters=clusters)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("config", ["QK4R1B64", "QK4T0.1B64"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_clusters_out_of_range_are_refused_by_the_device(backend: str, config: str) -> None:
    """In a process of its own, which can do nothing with its GPU afterwards."""
    script = f"""
import torch
from muse_attention import find_clusters, muse_attention
data = torch.randn(1, 1, 300, 64, device="cuda")
clusters = find_clusters(data, data, config={config!r})
clusters.key_assignment[0, 0, 7] = 4
muse_attention(data, data, data, config={config!r}, clusters=clusters, backend={backend!r})
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "_assert_async" in done.stderr  # (What the host then finds first is any error of CUDA.)


@METHODS
def test_later_launches_go_without_triton(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, grad_out = _long_inputs()
    expected = _whole(data, grad_out, config)

    def refuse(launch: launching.Launch) -> None:
        raise AssertionError(f"{launch.kernel} went through Triton")

    monkeypatch.setattr(launching.Launch, "now", refuse)
    assert torch.equal(_whole(data, grad_out, config)[0], expected[0])


@METHODS
def test_launches_at_the_same_addresses_are_replayed(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of launches one by one, on any stream, from inputs that changed meanwhile."""
    data, grad_out = _long_inputs()
    at_first = [tensor.clone() for tensor in data]
    later = [tensor.flip(2) for tensor in data]
    expected, of_later = (_same_bits_twice(tuple(some), grad_out, config) for some in (at_first, later))
    assert not torch.equal(expected[0], of_later[0])
    captured, capture = [], replaying._captured

    def noted(launch: replaying.Launch) -> replaying.Launch | None:
        captured.append(capture(launch))
        return captured[-1]

    monkeypatch.setattr(replaying, "_captured", noted)
    monkeypatch.setattr(schedule, "_schedules", {})
    beside = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), beside):
        for contents, results in ((at_first, expected), (later, of_later)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for tensor, source in zip(data, contents, strict=True):
                    tensor.copy_(source)
                for _ in range(5):
                    assert all(map(torch.equal, _same_bits_twice(data, grad_out, config), results))
            torch.cuda.current_stream().wait_stream(stream)
    assert len(captured) >= 6  # clusters, forward and backward pass, on two streams
    assert None not in captured


def _same_bits_twice(data: tuple[Tensor, ...], grad_out: Tensor, config: str) -> list[Tensor]:
    """The output and the gradients of keys and values; cuDNN sums that of queries in any order."""
    out, _, grad_key, grad_value = _whole(data, grad_out, config)
    return [out, grad_key, grad_value]


@METHODS
def test_layers_in_a_row_keep_what_their_backward_passes_need(config: str) -> None:
    """A replayed forward pass of the next layer must not touch what the layer before has saved."""
    data, grad_out = _long_inputs()
    results = []
    for _ in range(5):
        inputs = [tensor.detach().requires_grad_() for tensor in data]
        hidden = inputs[0]
        for _ in range(3):
            hidden = hidden + muse_attention(hidden, *inputs[1:], is_causal=True, config=config)
        results.append(torch.autograd.grad(hidden, inputs, grad_out))
    for gradients in results[1:]:
        for found, expected in zip(gradients, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@METHODS
def test_replays_hold_no_memory(config: str) -> None:
    data, grad_out = _long_inputs()
    _whole(data, grad_out, config)
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        _whole(data, grad_out, config)
    assert torch.cuda.memory_allocated() - before < 1 << 20  # a few numbers of the random generator, at most


@pytest.mark.parametrize(
    ("config", "some", "least"),
    [
        (PAPER, {"_take_starts", "_attend_to_summaries", "_add_to_queries"}, 60),
        (BLOCKWISE, {"_summarise_bucket", "_attend_to_columns", "_keys_backward_to_queries"}, 20),
    ],
)
def test_hooks_of_triton_see_every_launch(config: str, some: set[str], least: int) -> None:
    data, grad_out = _long_inputs()
    expected = _whole(data, grad_out, config)
    names = []
    hooks = triton.knobs.runtime.launch_enter_hook

    def listen(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    hooks.add(listen)
    try:
        found = _whole(data, grad_out, config)
    finally:
        hooks.remove(listen)
    assert some <= set(names)
    assert len(names) > least
    assert torch.equal(found[0], expected[0])


@CONFIGS
def test_is_captured_in_a_cuda_graph(config: str) -> None:
    data, grad_out = _long_inputs()
    expected = _whole(data, grad_out, config)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        _whole(data, grad_out, config)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _whole(data, grad_out, config)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(b.abs().max()))


@pytest.mark.parametrize("config", ["QK64R4B2k", "Q16K64T0.1B2k"])
def test_error_on_clustered_data_is_that_of_the_torch_backend(config: str) -> None:
    """Better centroids may lower the error; nothing may raise it by more than 2%."""
    query, key, value = clustered_qkv(1, 4, 16384, 64, dtype=torch.bfloat16, device="cuda")
    exact = get_attention("exact")(query.float(), key.float(), value.float(), is_causal=True, return_lse=True)
    errors = []
    for backend in ("torch", "triton"):
        out, lse = muse_attention(query, key, value, is_causal=True, config=config, backend=backend, return_lse=True)
        errors.append(compare(out.float(), exact[0], lse, exact[1]).pooled()["relative_squared_error"])
    assert errors[1] <= 1.02 * errors[0]


@pytest.mark.parametrize("name", ["exact", "block_diagonal:32", "block_diagonal:128", "moba:L32B8R2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_baselines_agree_with_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Blocks of 128 go through cuDNN, with fewer heads of keys than of queries."""
    inputs = Shape("", "", length=300, batch=2, heads=4).tensors(dtype)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    results = []
    for tensors in (inputs, on_gpu):
        out, lse = get_attention(name)(*tensors, is_causal=True, enable_gqa=True, return_lse=True)
        weight = torch.ones_like(out) / 10
        gradients = torch.autograd.grad((out * weight).sum() + lse.mean(), tensors)
        results.append([out, lse, *gradients])
    for cpu, gpu in zip(*results, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2  # outputs of order 1
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (128, 16, 16)], ids=str)
def test_best_blocks_are_chosen(sizes: tuple[int, int, int], dtype: torch.dtype, is_causal: bool) -> None:
    for length, head_dim in ((150, 16), (3000, 64), (1000, 80), (1000, 128), (1000, 256)):
        shape = Shape("", "", length=length, batch=2, heads=4, head_dim=head_dim)
        query, key = (tensor.detach().cuda() for tensor in shape.tensors(dtype)[:2])
        _poison_memory()
        found = choose(query, key, sizes, "triton", is_causal=is_causal)
        assert_best_blocks(found, query, key, sizes, is_causal=is_causal)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 256), (64, 320), (256, 64), (320, 16)])
def test_head_dims_beyond_the_fused_operators(head_dim: int, value_dim: int) -> None:
    shape = Shape("", "", length=150, head_dim=head_dim, value_dim=value_dim)
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in shape.tensors(torch.bfloat16)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for tensors in (inputs, wide):
        out, lse = get_attention("exact")(*tensors, is_causal=True, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.sum() + lse.sum(), tensors)])
    for found, expected in zip(*results, strict=True):
        tolerance = 0.02 * float(expected.detach().abs().max())  # a few units in the last place of bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("config", ["muse:QK16R2B256", "muse:Q16K64T0.1B256", "muse"])
def test_compiles_on_a_gpu(config: str) -> None:
    attention = get_attention(config)
    compiled = torch.compile(attention, fullgraph=True)
    for length in (1500, 2300):
        shape = Shape("", "", length=length, head_dim=64, value_dim=64)
        inputs = [tensor.detach().cuda().requires_grad_() for tensor in shape.tensors(torch.bfloat16)]
        results = []
        for function in (compiled, attention):
            with torch.autocast("cuda", torch.bfloat16):
                out = function(*inputs, is_causal=True)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch.testing.assert_close(*results, rtol=2**-6, atol=2**-6)
