"""The baselines equal masked exact attention, gradients and lse included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from muse_attention import exact_attention, get_attention, moba_attention
from tests.block_choice import SIZES, assert_best_blocks, choose
from tests.closeness import assert_equal_to_rounding
from tests.shapes import SHAPES, Shape


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.length < 4000], ids=str)
def test_exact_equals_sdpa(shape: Shape) -> None:
    inputs = shape.tensors(torch.float64)
    out, lse = exact_attention(*inputs, is_causal=shape.is_causal, enable_gqa=True, return_lse=True)
    expected = scaled_dot_product_attention(*inputs, is_causal=shape.is_causal, enable_gqa=True)
    weight = torch.randn_like(out)
    assert_equal_to_rounding(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, weight, retain_graph=True),
        torch.autograd.grad(expected, inputs, weight),
        strict=True,
    ):
        assert_equal_to_rounding(ours, theirs)
    _check_masked(out, lse, inputs, torch.ones(shape.length, shape.length, dtype=torch.bool), shape.is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("block", [1, 32, 50, 149, 150, 1000])
def test_block_diagonal(block: int, is_causal: bool) -> None:
    inputs = Shape("", "", length=150, heads=4).tensors(torch.float64)
    out, lse = get_attention(f"block_diagonal:{block}")(*inputs, is_causal=is_causal, enable_gqa=True, return_lse=True)
    number = torch.arange(150) // block
    _check_masked(out, lse, inputs, number[:, None] == number, is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("local", "block", "count"), [(32, 32, 2), (32, 8, 1), (48, 8, 3), (64, 16, 50), (512, 8, 2)])
def test_moba(local: int, block: int, count: int, is_causal: bool) -> None:
    length = 150
    inputs = Shape("", "", length=length, heads=4).tensors(torch.float64)
    out, lse = get_attention(f"moba:L{local}B{block}R{count}")(
        *inputs, is_causal=is_causal, enable_gqa=True, return_lse=True
    )
    # The definition, one query at a time.
    query, key = inputs[0].detach(), inputs[1].detach().repeat_interleave(2, dim=1)
    own = torch.arange(length) // local
    visible = (own[:, None] == own).expand(1, 4, length, length).clone()
    for head in range(4):
        for n in range(length):
            scores = {}
            for begin in range(0, length, block):
                earlier = begin // local < n // local
                if earlier if is_causal else begin // local != n // local:
                    scores[begin] = float(query[0, head, n] @ key[0, head, begin : begin + block].mean(0))
            for begin in sorted(scores, key=lambda at: -scores[at])[:count]:
                visible[0, head, n, begin : begin + block] = True
    _check_masked(out, lse, inputs, visible, is_causal)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_best_blocks_are_chosen_in_bfloat16(sizes: tuple[int, int, int], is_causal: bool) -> None:
    query, key, _ = Shape("", "", length=150, heads=4).tensors(torch.bfloat16, requires_grad=False)
    assert_best_blocks(choose(query, key, sizes, "torch", is_causal=is_causal), query, key, sizes, is_causal=is_causal)


def _check_masked(out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...], visible: Tensor, is_causal: bool) -> None:
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if is_causal:
        visible = visible & torch.ones(visible.shape[-2:], dtype=torch.bool).tril()
    logits = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    expected_out, expected_lse = logits.softmax(-1) @ value, logits.logsumexp(-1)
    assert_equal_to_rounding(out, expected_out, "out")
    assert_equal_to_rounding(lse, expected_lse, "lse")
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    for name, ours, theirs in zip(
        ("query", "key", "value"),
        torch.autograd.grad([out, lse], inputs, weights),
        torch.autograd.grad([expected_out, expected_lse], inputs, weights),
        strict=True,
    ):
        assert_equal_to_rounding(ours, theirs, f"grad {name}")


def test_moba_sizes_are_checked() -> None:
    inputs = Shape("", "", length=40).tensors(torch.float32)
    for sizes in ({"local_block_size": 0}, {"retrieval_block_size": -1}, {"retrieved_blocks": 0}):
        (name, size), *_ = sizes.items()
        with pytest.raises(ValueError, match=f"{name}={size}"):
            moba_attention(*inputs, **sizes)
    with pytest.raises(ValueError, match="local_block_size=48 must be a multiple of retrieval_block_size=32"):
        moba_attention(*inputs, local_block_size=48, retrieval_block_size=32)


def test_moba_first_block_attends_locally_only() -> None:
    inputs = Shape("", "", length=100).tensors(torch.float64, requires_grad=False)
    out = get_attention("moba:L32B8R3")(*inputs, is_causal=True)
    local = get_attention("block_diagonal:32")(*inputs, is_causal=True)
    assert_equal_to_rounding(out[:, :, :32], local[:, :, :32])
    assert not torch.allclose(out[:, :, 32:64], local[:, :, 32:64])
