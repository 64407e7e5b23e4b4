"""Inputs and gradients of any strides give what their contiguous copies give, bit for bit, compiled or not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from muse_attention import get_attention
from tests.compilers import compiled_with
from tests.layouts import LAYOUTS, against_copies
from tests.shapes import Shape

ATTENTIONS = ["muse:Q3K4R2B16", "exact", "block_diagonal:16", "moba:L16B8R2"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_strides_change_nothing(name: str, layout: str, dtype: torch.dtype) -> None:
    strided = [LAYOUTS[layout](tensor) for tensor in _inputs(dtype)]
    attend = partial(get_attention(name), is_causal=True, return_lse=True)
    torch.testing.assert_close(*against_copies(attend, strided, LAYOUTS[layout]), rtol=0, atol=0)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_values_expanded_from_a_column_of_zeros(name: str) -> None:
    """In memory, the column is followed by other numbers."""
    query, key, _ = _inputs(torch.float32)
    memory = torch.ones(1, 2, 40, 2)
    memory[..., 0] = 0
    out = get_attention(name)(query, key, memory[..., :1].expand(-1, -1, -1, 16), is_causal=True)
    assert (out == 0).all()


@pytest.mark.parametrize(("name", "compiler"), compiled_with(ATTENTIONS))
def test_compiled_with_columns_before_rows(name: str, compiler: str) -> None:
    attention = get_attention(name)

    def layer(*tensors: Tensor) -> Tensor:
        return attention(*(tensor.mT for tensor in tensors), is_causal=True).mT

    torch.compiler.reset()
    inputs = [tensor.detach().mT.contiguous().requires_grad_() for tensor in _inputs(torch.float32)]
    weight = torch.randn_like(inputs[0])
    out = torch.compile(layer, fullgraph=True, backend=compiler)(*inputs)
    found = [out, *torch.autograd.grad(out, inputs, weight)]
    copies = [tensor.detach().mT.contiguous().requires_grad_() for tensor in inputs]
    plain = attention(*copies, is_causal=True)
    gradients = torch.autograd.grad(plain, copies, weight.mT.contiguous())
    torch.testing.assert_close(found, [tensor.mT for tensor in (plain, *gradients)])


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    return [tensor.detach() for tensor in Shape("", "", length=40).tensors(dtype)]
