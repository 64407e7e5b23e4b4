"""The PyTorch backend on a GPU. No machine of the continuous integration has one: run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from muse_attention import get_attention
from tests.shapes import Shape
from tests.test_torch_backend import TestTorchBackend as _TorchBackend

pytestmark = pytest.mark.gpu


class TestTorchBackendOnCuda(_TorchBackend):
    device = "cuda"
    sums_in_any_order = True


@pytest.mark.parametrize("name", ["exact", "block_diagonal:32", "moba:L32B8R2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_baselines_agree_with_the_cpu(name: str, dtype: torch.dtype) -> None:
    inputs = Shape("", "", length=150, heads=4).tensors(dtype)
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


def test_compiles_on_a_gpu() -> None:
    attention = get_attention("muse:QK8R2B64")
    compiled = torch.compile(attention, fullgraph=True)
    inputs = [tensor.detach().cuda() for tensor in Shape("", "", length=300).tensors(torch.bfloat16)]
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(compiled(*inputs, is_causal=True), attention(*inputs, is_causal=True))
