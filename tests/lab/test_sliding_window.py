"""Sliding-window attention against a dense mask, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from muse_lab.pretraining.model import sliding_window
from muse_lab.pretraining.model.sliding_window import sliding_window_attention
from tests.closeness import assert_as_accurate_as_pytorch, assert_equal_to_rounding


def inputs(length: int, heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, length, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]


def dense(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position
    return scaled_dot_product_attention(query, key, value, (distance >= 0) & (distance < window))


def gradients(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), tensors)


def assert_same(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """Outputs and gradients."""
    assert_equal_to_rounding(found, expected)
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert_equal_to_rounding(one, other)


@pytest.mark.parametrize("window", [1, 2, 16, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
def test_equals_a_dense_mask(length: int, window: int) -> None:
    tensors = inputs(length)
    expected = dense(*tensors, window)
    found = sliding_window_attention(*tensors, window=window)
    assert_same(found, expected, tensors)


def test_bfloat16_costs_what_it_costs_sdpa() -> None:
    tensors = inputs(200, dtype=torch.float32)
    exact = dense(*(tensor.double() for tensor in tensors), 32)
    low = [tensor.detach().bfloat16() for tensor in tensors]
    assert_as_accurate_as_pytorch(sliding_window_attention(*low, window=32), dense(*low, 32), exact)


def test_a_long_sequence_needs_no_square_of_its_length() -> None:
    """The logits of 64k tokens would take 17 GB a head."""
    tensors = [torch.randn(1, 1, 65536, 8).requires_grad_() for _ in range(3)]
    sliding_window_attention(*tensors, window=256).sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)


@pytest.mark.gpu
def test_cuda_has_a_fused_kernel_for_the_band() -> None:
    """Logits in memory are as large as eight copies of the queries, and unfused they exist at least thrice."""
    tensors = inputs(65536, heads=8, head_dim=64)
    exact = sliding_window_attention(*tensors, window=256)
    low = [tensor.detach().bfloat16().cuda().requires_grad_() for tensor in tensors]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = sliding_window_attention(*low, window=256)
    found.sum().backward()
    copies = (torch.cuda.max_memory_allocated() - before) / (low[0].numel() * low[0].element_size())
    assert copies < 24
    assert (found.double().cpu() - exact).square().mean() < 1e-4 * exact.square().mean()


@pytest.mark.parametrize(
    ("capability", "head_dim", "by_flash"),
    [
        ((7, 5), 64, False),
        ((8, 0), 60, False),
        ((8, 0), 256, True),
        ((8, 0), 264, False),
        ((8, 9), 200, False),
        ((12, 0), 192, True),
        ((12, 0), 256, False),
    ],
)
def test_flash_attention_is_for_gpus_that_have_it(
    capability: tuple[int, int], head_dim: int, by_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turing has none, and most GPUs have no backward pass above 192."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(sliding_window, "_attend_by_flash", lambda *_: "flash")
    monkeypatch.setattr(sliding_window, "_attend_in_blocks", lambda *_: "blocks")
    with FakeTensorMode():
        query = torch.empty(1, 2, 64, head_dim, dtype=torch.bfloat16, device="cuda:0")
        found = sliding_window_attention(query, query, query, window=16)
    assert found == ("flash" if by_flash else "blocks")


@pytest.mark.long
def test_compiles_into_one_graph() -> None:
    tensors = inputs(50)
    torch.compiler.reset()
    compiled = torch.compile(sliding_window_attention, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*tensors, window=16), dense(*tensors, 16), tensors)
