"""The operators inside PyTorch: schemas, compilation, checkpointing, autocast, and what cannot be done."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention, ops
from tests.compilers import compiled_with
from tests.shapes import Shape

CONFIG = "Q4K5R2B32"
SHAPE = Shape("", CONFIG, length=150, batch=2, heads=4, key_heads=2)
ATTENTIONS = [f"muse:{CONFIG}", "muse:Q4K5T0.01B32", "exact", "block_diagonal:32", "moba:L32B8R2"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (CONFIG, "torch"),
        ("Q4K5T0.01B32", "torch"),
        ("Q3K4R2B32", "triton"),
    ],
)
def test_opcheck(config: str, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
        # Some of what the kernels leave to the backward pass is never written. Then PyTorch fills it, always alike.
        torch.use_deterministic_algorithms(True)
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    query, key, value = Shape("", config, length=40, heads=1, key_heads=1).tensors(torch.float32)
    settings = (config, True, 0.25, 0, backend)
    plain = [tensor.detach() for tensor in (query, key, value)]
    torch.library.opcheck(ops.CLUSTER, (*plain[:2], config, True, 0.25, backend))
    torch.library.opcheck(ops.CHOOSE_BLOCKS, (plain[0], plain[1][:, :, :5], "Q1K2R9B16,monopole=false", True, backend))
    clusters = ops.cluster(query, key, MuSeConfig.parse(config), is_causal=True, scale=0.25, backend=backend)
    parts = (clusters.query_centroids, clusters.query_assignment, clusters.key_assignment, clusters.key_spread)
    torch.library.opcheck(ops.FORWARD, (query, key, value, *parts, None, None, *settings))
    out, lse, opened, retrieved, memory = ops.FORWARD(*plain, *parts, None, None, *settings)
    saved = (*plain, *parts, opened, retrieved, out, lse, memory)
    if backend == "torch":  # the interpreter takes seconds for each
        torch.library.opcheck(ops.FORWARD, (query, key, value, *parts, opened, retrieved, *settings))
        torch.library.opcheck(ops.BACKWARD, (torch.randn_like(out), None, *saved, *settings))
    torch.library.opcheck(ops.BACKWARD, (torch.randn_like(out), torch.randn_like(lse), *saved, *settings))


class _Names(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _whole(inputs: list[Tensor]) -> list[Tensor]:
    out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.long
def test_what_listens_to_operators_hears_of_them() -> None:
    inputs = SHAPE.tensors(torch.float32)
    expected = _whole(inputs)
    with _Names() as listener:
        found = _whole(inputs)
    assert {f"muse_attention.{name}.default" for name in ("cluster", "forward", "backward")} <= set(listener.names)
    with torch.profiler.profile(acc_events=True) as profiler:
        _whole(inputs)
    names = {event.name for event in profiler.events() or ()}
    assert {"muse_attention::cluster", "muse_attention::forward", "muse_attention::backward"} <= names
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_where_nothing_listens_the_dispatcher_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SHAPE.tensors(torch.float32)
    expected = _whole(inputs)
    for name in ("CLUSTER", "FORWARD", "BACKWARD"):
        monkeypatch.setattr(ops, name, Mock(side_effect=AssertionError("went through the dispatcher")))
    torch.testing.assert_close(_whole(inputs), expected, rtol=0, atol=0)
    with torch.no_grad():
        out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG)
    assert torch.equal(out, expected[0])
    assert not out.requires_grad


def test_tensors_without_data_have_a_shape() -> None:
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in SHAPE.tensors(torch.float32)]
    out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.shape == inputs[0].shape
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in inputs]


def test_clusters_carry_no_gradient() -> None:
    inputs = SHAPE.tensors(torch.float32, requires_grad=False)
    clusters = find_clusters(*inputs[:2], config=CONFIG)
    clusters.query_centroids.requires_grad_()
    out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG, clusters=clusters)
    assert not out.requires_grad


def test_an_output_may_be_changed_in_place() -> None:
    inputs = SHAPE.tensors(torch.float32)
    with torch.no_grad():
        out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG)
    expected = 2 * out
    assert torch.equal(out.mul_(2), expected)


@pytest.mark.parametrize(("name", "compiler"), compiled_with(ATTENTIONS))
def test_compiles_into_one_graph_with_the_same_result(name: str, compiler: str) -> None:
    attention = get_attention(name)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(2 * query, key, value, is_causal=True, enable_gqa=True, return_lse=True)
        return out.relu(), lse

    torch.compiler.reset()
    inputs = SHAPE.tensors(torch.float32)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=compiler)):
        out, lse = function(*inputs)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)))
    torch.testing.assert_close(*results)


def test_compiles_with_a_configuration_made_inside_the_graph() -> None:
    given = MuSeConfig.parse(CONFIG)

    def layer(*tensors: Tensor) -> Tensor:
        return muse_attention(*tensors, is_causal=True, enable_gqa=True, config=given.replace(seed=3))

    torch.compiler.reset()
    inputs = SHAPE.tensors(torch.float32)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs), layer(*inputs))


@pytest.mark.parametrize(("config", "dynamic"), [("QK4R1B32", None), ("paper,seed=1", None), (None, True)], ids=str)
def test_compiles_for_lengths_that_vary(config: str | None, dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(muse_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (300, 350, 700):
        inputs = Shape("", "", length=length).tensors(torch.float32, requires_grad=False)
        expected = muse_attention(*inputs, is_causal=True, config=config)
        torch.testing.assert_close(compiled(*inputs, is_causal=True, config=config), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("clustering", ["streaming", "lloyd"])
def test_activation_checkpointing_recomputes_the_same_numbers(use_reentrant: bool, clustering: str) -> None:
    inputs = SHAPE.tensors(torch.float32)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        config = f"{CONFIG},clustering={clustering}"
        return muse_attention(query, key, value, is_causal=True, enable_gqa=True, config=config)

    plain = layer(*inputs)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    torch.rand(5)  # the state of the default generator must not matter
    out = checkpoint(layer, *inputs, use_reentrant=use_reentrant)
    torch.rand(5)
    out.square().sum().backward()
    assert torch.equal(out, plain)
    for tensor, gradient in zip(inputs, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_selective_checkpointing_can_keep_the_operator() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    calls: list[str] = []
    kept = {torch.ops.muse_attention.forward.default, torch.ops.muse_attention.cluster.default}

    def policy(context: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if function in kept and not context.is_recompute:
            calls.append(str(function))
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = SHAPE.tensors(torch.float32)

    def layer(*tensors: Tensor) -> Tensor:
        return muse_attention(*tensors, is_causal=True, enable_gqa=True, config=CONFIG).square()

    expected = torch.autograd.grad(layer(*inputs).sum(), inputs)
    out = checkpoint(
        layer, *inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    found = torch.autograd.grad(out.sum(), inputs)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_what_it_does_to_sdpa(name: str, dtype: torch.dtype) -> None:
    attention = get_attention(name)
    inputs = SHAPE.tensors(torch.float32)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    expected, expected_lse = attention(*low, is_causal=True, enable_gqa=True, return_lse=True)
    with torch.autocast("cpu", dtype):
        out, lse = attention(*inputs, is_causal=True, enable_gqa=True, return_lse=True)
        mixed = attention(low[0], inputs[1], inputs[2], is_causal=True, enable_gqa=True)
        out.float().square().sum().backward()
        wide = attention(*(t.detach().double() for t in inputs), is_causal=True, enable_gqa=True)
    assert out.dtype == mixed.dtype == dtype
    assert lse.dtype == torch.float32
    assert wide.dtype == torch.float64
    assert torch.equal(out, expected)
    assert torch.equal(mixed, expected)
    assert torch.equal(lse, expected_lse)
    for tensor, gradient in zip(inputs, torch.autograd.grad(expected.float().square().sum(), low), strict=True):
        assert tensor.grad.dtype == torch.float32
        assert torch.equal(tensor.grad, gradient.float())


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_every_backend_returns_the_same_dtypes_under_autocast(backend: str) -> None:
    inputs = SHAPE.tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = muse_attention(
            *inputs, is_causal=True, enable_gqa=True, config=CONFIG, backend=backend, return_lse=True
        )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_large_gradient_of_the_lse_survives_half_precision(dtype: torch.dtype) -> None:
    inputs = SHAPE.tensors(dtype)
    arguments = {"is_causal": True, "enable_gqa": True, "config": CONFIG, "return_lse": True}
    gradients = []
    for backend in ("torch", "reference"):
        _, lse = muse_attention(*inputs, **arguments, backend=backend)
        gradients.append(torch.autograd.grad(1e5 * lse[..., -1].sum(), inputs[:2]))
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_forward_mode_and_torch_func_derivatives_are_refused_in_one_line(name: str) -> None:
    query, key, value = SHAPE.tensors(torch.float32, requires_grad=False)

    def function(query: Tensor) -> Tensor:
        return get_attention(name)(query, key, value, is_causal=True, enable_gqa=True).sum()

    with pytest.raises(NotImplementedError, match=r"torch.func derivative.*backend='reference'"):
        torch.func.grad(function)(query)
    with pytest.raises(NotImplementedError, match=r"forward-mode.*backend='reference'"):
        torch.func.jvp(function, (query,), (query,))


def test_second_derivatives_are_refused_in_one_line() -> None:
    inputs = SHAPE.tensors(torch.float32)
    out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config=CONFIG)
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"only once.*backend='reference'"):
        gradient.sum().backward()
