"""Packed documents on a GPU. No machine of the continuous integration has one: run with `pytest -m gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from muse_attention import DocumentBoundaries, muse_attn_varlen_func
from muse_attention.documents.rows import attend_to_windows
from muse_lab.pretraining.model.sliding_window import sliding_window_attention
from tests.closeness import assert_as_accurate_as_pytorch
from tests.library.test_packed import loop

pytestmark = pytest.mark.gpu

CONFIG = "QK16R2B256"
MIXED = [1, 700, 256, 257, 64, 700, 1500, 3]
SHORT = [1, 256, 64, 200, 3, 17]


def row(tokens: int, *, heads: int = 4, key_heads: int = 4, head_dim: int = 64, value_dim: int = 64) -> list[Tensor]:
    shapes = ((heads, head_dim), (key_heads, head_dim), (key_heads, value_dim))
    return [torch.randn(tokens, *shape, device="cuda") for shape in shapes]


def as_inputs(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(tensor.to(dtype).requires_grad_() for tensor in tensors)


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def packed(tensors: tuple[Tensor, ...], ends: Any, **settings: Any) -> Any:
    longest = DocumentBoundaries.read(ends).longest
    return muse_attn_varlen_func(*tensors, ends, ends, longest, longest, causal=True, **settings)


def everything(result: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Output, lse, and the gradients of one seeded function of both."""
    out, lse = result
    weight_out, weight_lse = (
        torch.randn(part.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).cuda().to(part.dtype)
        for part in (out, lse)
    )
    return [out, lse, *torch.autograd.grad([out, lse], tensors, [weight_out, weight_lse])]


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """FlashAttention, which sums in one order, attends to own blocks in place of cuDNN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 8, "key_heads": 2, "head_dim": 128, "value_dim": 128},
        {"head_dim": 40, "value_dim": 24},
        {"head_dim": 250, "value_dim": 250},
        {"head_dim": 256, "value_dim": 256},
    ],
    ids=str,
)
def test_short_documents_are_as_accurate_as_one_by_one(shape: dict[str, int], dtype: torch.dtype) -> None:
    """Against exact attention of each document in float64, at most twice the error of PyTorch's in this precision."""
    tensors = row(sum(SHORT), **shape)
    inputs = as_inputs(tensors, dtype)
    found = everything(packed(inputs, ends_of(SHORT), config=CONFIG, return_lse=True), inputs)
    theirs = everything(loop(inputs, SHORT, config=CONFIG, backend="torch"), inputs)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    exact = everything(loop(wide, SHORT, config=CONFIG, backend="torch"), wide)
    for name, ours, other, expected in zip(
        ("output", "lse", "query", "key", "value"), found, theirs, exact, strict=True
    ):
        assert_as_accurate_as_pytorch(ours, other, expected, name)


def test_windows_of_documents_are_as_accurate_as_one_by_one() -> None:
    inputs = as_inputs(row(sum(SHORT)), torch.bfloat16)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    weight = torch.randn_like(inputs[2])

    def one_by_one(tensors: tuple[Tensor, ...]) -> Tensor:
        documents = zip(*(tensor.transpose(0, 1)[None].split(SHORT, 2) for tensor in tensors), strict=True)
        outs = [sliding_window_attention(*document, window=50) for document in documents]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    boundaries = DocumentBoundaries.from_lengths(SHORT)
    outs = [
        attend_to_windows(*inputs, boundaries, sliding_window_attention, window=50, scale=64**-0.5),
        one_by_one(inputs),
        one_by_one(wide),
    ]
    results = [
        [out, *torch.autograd.grad(out, tensors, weight.to(out.dtype))]
        for out, tensors in zip(outs, (inputs, inputs, wide), strict=True)
    ]
    for name, ours, theirs, exact in zip(("output", "query", "key", "value"), *results, strict=True):
        assert_as_accurate_as_pytorch(ours, theirs, exact, name)


@pytest.mark.usefixtures("_deterministic")
def test_long_documents_give_the_bits_of_the_loop() -> None:
    """Two of 700 tokens share their launches."""
    inputs = as_inputs(row(sum(MIXED)), torch.bfloat16)
    found = everything(packed(inputs, ends_of(MIXED), config=CONFIG, return_lse=True), inputs)
    expected = everything(loop(inputs, MIXED, config=CONFIG), inputs)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        dim = 1 if index == 1 else 0
        pairs = zip(ours.split(MIXED, dim), theirs.split(MIXED, dim), strict=True)
        for length, (one, other) in zip(MIXED, pairs, strict=True):
            if length > 256:
                assert torch.equal(one, other), (index, length)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("changed", [1, 2, 6])
def test_a_changed_document_changes_no_other(changed: int) -> None:
    outcomes = []
    for other in (False, True):
        torch.manual_seed(3)
        tensors = row(sum(MIXED))
        if other:
            for tensor in tensors:
                tensor.split(MIXED)[changed].mul_(-3).add_(1)
        inputs = as_inputs(tensors, torch.bfloat16)
        out, lse, *grads = everything(packed(inputs, ends_of(MIXED), config=CONFIG, return_lse=True), inputs)
        outcomes.append([out, lse.T, *grads])
    for before, after in zip(*outcomes, strict=True):
        for index, (one, two) in enumerate(zip(before.split(MIXED), after.split(MIXED), strict=True)):
            assert torch.equal(one, two) == (index != changed)


@pytest.mark.parametrize("lengths", [MIXED, SHORT, [2000]], ids=str)
def test_boundaries_on_the_host_do_not_wait_for_the_gpu(lengths: list[int]) -> None:
    inputs, ends = as_inputs(row(sum(lengths)), torch.bfloat16), ends_of(lengths).cpu()
    for _ in range(3):  # compiles, and captures what comes again
        packed(inputs, ends, config=CONFIG).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        packed(inputs, ends, config=CONFIG).sum().backward()
        packed(inputs, DocumentBoundaries.from_lengths(lengths), config=CONFIG).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_reused_tensor_is_read_in_every_call() -> None:
    """The second write is none that the tensor counts as a change of its own."""
    inputs, ends = tuple(row(400)), ends_of([300, 100])
    for target, lengths in ((ends, [200, 200]), (ends.data, [350, 50])):
        packed(inputs, ends, config=CONFIG)
        target.copy_(ends_of(lengths))
        assert torch.equal(packed(inputs, ends, config=CONFIG), packed(inputs, ends_of(lengths), config=CONFIG))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_boundaries_on_the_gpu_are_refused_while_a_graph_is_captured() -> None:
    inputs, ends = tuple(row(400)), ends_of([300, 100])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="cannot be read while a CUDA graph is captured"), torch.cuda.graph(graph):
        muse_attn_varlen_func(*inputs, ends, ends, 300, 300)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("form", [DocumentBoundaries.from_lengths, ends_of], ids=["boundaries", "tensor"])
@pytest.mark.parametrize("return_lse", [True, False])
def test_one_compiled_graph_serves_every_batch(form: Any, return_lse: bool) -> None:
    """Short documents share one call, whose backward pass has the output and the lse of the forward pass."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def compiled(query: Tensor, key: Tensor, value: Tensor, ends: Any, longest: int) -> Any:
        settings: dict[str, Any] = {"causal": True, "config": CONFIG, "return_lse": return_lse}
        return muse_attn_varlen_func(query * 2, key, value, ends, ends, longest, longest, **settings)

    for lengths in (MIXED, SHORT, [2000], [700, 20]):
        inputs = as_inputs(row(sum(lengths)), torch.bfloat16)
        doubled = (inputs[0] * 2, *inputs[1:])
        results = (
            compiled(*inputs, form(lengths), max(lengths)),
            packed(doubled, ends_of(lengths), config=CONFIG, return_lse=return_lse),
        )
        if return_lse:
            found, expected = (everything(result, inputs) for result in results)
        else:
            found, expected = ([out, *torch.autograd.grad(out.square().sum(), inputs)] for out in results)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counter.frame_count == 1
