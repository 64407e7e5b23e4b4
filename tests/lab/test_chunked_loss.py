"""The chunked cross-entropy is PyTorch's, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from muse_lab.pretraining.model.chunked_loss import IGNORED, chunked_cross_entropy
from tests.closeness import assert_as_accurate_as_pytorch, assert_equal_to_rounding

ROWS, WIDTH, VOCABULARY = 37, 8, 19


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(VOCABULARY, (ROWS,))
    targets[::5] = IGNORED
    hidden, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return cross_entropy((hidden @ weight.mT).to(torch.promote_types(hidden.dtype, torch.float32)), targets, **options)


def with_gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return loss, *torch.autograd.grad(3 * loss, tensors)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 36, 37, 38, 2048])
def test_loss_and_gradients_with_every_chunk_size(chunk_size: int, reduction: str) -> None:
    hidden, weight, targets = inputs()
    found = chunked_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_size=chunk_size)
    expected = plain(hidden, weight, targets, reduction=reduction)
    for one, other in zip(with_gradients(found, hidden, weight), with_gradients(expected, hidden, weight), strict=True):
        assert_equal_to_rounding(one, other)


def test_gradcheck() -> None:
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(lambda *tensors: chunked_cross_entropy(*tensors, targets), (hidden, weight))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(needs: tuple[bool, bool]) -> None:
    hidden, weight, targets = inputs()
    expected = with_gradients(plain(hidden, weight, targets), hidden, weight)
    hidden, weight = (
        tensor.detach().requires_grad_(needed) for tensor, needed in zip((hidden, weight), needs, strict=True)
    )
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_size=10)
    assert_equal_to_rounding(loss, expected[0])
    assert loss.requires_grad == any(needs)
    if any(needs):
        (3 * loss).backward()
    for tensor, needed, gradient in zip((hidden, weight), needs, expected[1:], strict=True):
        if needed:
            assert_equal_to_rounding(tensor.grad, gradient)
        else:
            assert tensor.grad is None


def test_nothing_that_counts_is_no_number_as_in_pytorch() -> None:
    hidden, weight, targets = inputs()
    assert chunked_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED)).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_what_it_costs_pytorch(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs()
    exact = with_gradients(plain(hidden, weight, targets), hidden, weight)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
    expected = with_gradients(plain(*low, targets), *low)
    found = with_gradients(chunked_cross_entropy(*low, targets, chunk_size=10), *low)
    assert [tensor.dtype for tensor in found] == [torch.float32, dtype, dtype]
    for one, other, truth in zip(found, expected, exact, strict=True):
        assert_as_accurate_as_pytorch(one, other, truth)


def test_autocast_multiplies_in_its_dtype_and_keeps_float32_gradients() -> None:
    hidden, weight, targets = inputs(torch.float32)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = with_gradients(plain(*wide, targets), *wide)
    with torch.autocast("cpu", torch.bfloat16):
        expected = with_gradients(plain(hidden, weight, targets), hidden, weight)
        found = with_gradients(chunked_cross_entropy(hidden, weight, targets, chunk_size=10), hidden, weight)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert found[0] != plain(hidden, weight, targets)
    for one, other, truth in zip(found, expected, exact, strict=True):
        assert_as_accurate_as_pytorch(one, other, truth)


def test_float64_stays_so_under_autocast() -> None:
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, targets)
    assert_equal_to_rounding(found, plain(hidden, weight, targets))


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_into_one_graph(grad: bool) -> None:
    hidden, weight, targets = inputs()
    torch.compiler.reset()
    compiled = torch.compile(chunked_cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        found = compiled(hidden, weight, targets, chunk_size=10)
    assert_equal_to_rounding(found, plain(hidden, weight, targets))
    if grad:
        expected = with_gradients(plain(hidden, weight, targets), hidden, weight)
        for one, other in zip(with_gradients(found, hidden, weight), expected, strict=True):
            assert_equal_to_rounding(one, other)


def test_is_a_proper_operator() -> None:
    hidden, weight, targets = inputs()
    operator = torch.ops.muse_attention.chunked_cross_entropy.default
    torch.library.opcheck(operator, (hidden, weight, targets, 10, torch.float64, True))
    torch.library.opcheck(operator, (hidden.detach(), weight.detach(), targets, 10, torch.float64, False))


def test_few_logits_exist_at_a_time_and_none_are_kept() -> None:
    rows, vocabulary, chunk, size = 512, 8192, 32, 4
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        chunked_cross_entropy(hidden, weight, torch.randint(vocabulary, (rows,)), chunk_size=chunk)
    events = profiled.events()
    assert max(event.self_cpu_memory_usage for event in events) == size * chunk * vocabulary
    (kept,) = (event.cpu_memory_usage for event in events if event.name == "muse_attention::chunked_cross_entropy")
    assert kept == size * (hidden.numel() + weight.numel() + 1)


def test_second_derivatives_are_refused() -> None:
    hidden, weight, targets = inputs()
    loss = chunked_cross_entropy(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated only once"):
        gradient.sum().backward()


@pytest.mark.parametrize("targets", [torch.zeros(3, dtype=torch.long), torch.zeros(ROWS)])
def test_one_integer_for_each_row(targets: Tensor) -> None:
    with pytest.raises(ValueError, match=r"it must be int64 \(37,\)"):
        chunked_cross_entropy(*inputs()[:2], targets)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_pretraining_cuda.py")
@pytest.mark.parametrize("vocabulary", [19, 64, 5000])
def test_kernel_in_the_interpreter(vocabulary: int) -> None:
    pytest.importorskip("triton")
    from muse_lab.pretraining.model.loss_kernel import replace_by_gradients

    logits = (8 * torch.randn(7, vocabulary)).requires_grad_()
    targets = torch.randint(vocabulary, (7,))
    targets[2], targets[3], targets[4] = IGNORED, 0, vocabulary - 1
    expected = cross_entropy(logits.double(), targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    kept, replaced = logits.detach().clone(), logits.detach().clone()
    for rows, differentiate in ((kept, False), (replaced, True)):
        found = replace_by_gradients(rows, targets, ignore_index=IGNORED, differentiate=differentiate)
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept, logits)
    assert torch.allclose(replaced, gradient, rtol=1e-4, atol=1e-6)
