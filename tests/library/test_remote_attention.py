"""Attention to keys of other shards, and the merge of results over disjoint keys into one softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from muse_attention import get_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.distributed import merge_partials, remote_attention
from tests.closeness import assert_as_accurate_as_pytorch, assert_equal_to_rounding, assert_same


def tensors(queries: int, keys: int, heads: int = 4, key_heads: int = 2) -> tuple[Tensor, ...]:
    shapes = ((heads, queries, 8), (key_heads, keys, 8), (key_heads, keys, 6))
    return tuple(torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float = 8**-0.5) -> tuple[Tensor, Tensor]:
    """The oracle: softmax attention to all keys in plain PyTorch."""
    repeats = query.shape[1] // key.shape[1]
    logits = scale * query @ key.repeat_interleave(repeats, 1).mT
    return logits.softmax(-1) @ value.repeat_interleave(repeats, 1), logits.logsumexp(-1)


@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (40, 96), (96, 40), (80, 40), (1, 33), (33, 1)])
@pytest.mark.parametrize("name", ["exact", "muse:Q3K4R4SP16B8"])
def test_attention_to_keys_of_another_length(name: str, queries: int, keys: int) -> None:
    """The second retrieves everything, which is exact attention."""
    inputs = tensors(queries, keys)
    assert_same(remote_attention(name, *inputs), dense(*inputs), inputs)
    assert_same(remote_attention(name, *inputs, scale=0.2), dense(*inputs, scale=0.2), inputs)


def test_muse_approximates_remote_keys() -> None:
    """By summaries: no lse is above the exact one, and all of one call's keys are clustered together."""
    inputs = tuple(tensor.detach() for tensor in tensors(64, 128))
    with recorded_calls() as calls:
        out, lse = remote_attention("muse:QK8R2B16", *inputs)
    (call,) = calls
    assert call.key.shape[2] == 128
    expected, exact_lse = dense(*inputs)
    assert (lse <= exact_lse + 1e-12).all()
    assert 0 < float((out - expected).square().sum() / expected.square().sum()) < 0.5


def test_equal_lengths_are_one_plain_call() -> None:
    inputs = tensors(64, 64)
    expected = get_attention("muse:QK4R1B16")(*inputs, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(remote_attention("muse:QK4R1B16", *inputs), expected, rtol=0, atol=0)


def test_disjoint_keys_merge_into_one_softmax() -> None:
    query, key, value = inputs = tensors(20, 60)
    partials = [
        dense(query, *part) for part in zip(key.split([10, 1, 49], 2), value.split([10, 1, 49], 2), strict=True)
    ]
    assert_same(merge_partials(*zip(*partials, strict=True)), dense(*inputs), inputs)


def test_merging_many_queries_is_differentiable() -> None:
    outs, lses = torch.randn(2, 1, 9, 5000, 1), torch.randn(2, 1, 9, 5000, requires_grad=True)
    merged, _ = merge_partials(list(outs), list(lses))
    weights = lses.softmax(0)
    (gradient,) = torch.autograd.grad(merged.sum(), lses)
    torch.testing.assert_close(gradient, weights * (outs - merged)[..., 0].detach())


def test_merge_sums_half_precision_in_float32() -> None:
    outs = torch.randn(8, 3, 50, 16, dtype=torch.float64)
    lses = torch.randn(8, 3, 50, dtype=torch.float64)
    exact, _ = merge_partials(list(outs), list(lses))
    halves = outs.to(torch.bfloat16)
    plain = (lses.softmax(0).to(torch.bfloat16)[..., None] * halves).sum(0)
    found, lse = merge_partials(list(halves), list(lses.float()))
    assert found.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert_as_accurate_as_pytorch(found, plain, exact)


def test_a_query_that_saw_no_key_takes_part_in_nothing() -> None:
    """Neither in a merge with others nor by itself, and its gradients are no NaN."""
    out = torch.randn(2, 3, 4, dtype=torch.float64)
    out[:, 0] = 0
    lse = torch.randn(2, 3, dtype=torch.float64)
    lse[:, 0] = -math.inf  # neither saw a key
    lse[0, 1] = -math.inf  # only the second did
    out[0, 1] = 0
    outs, lses = ([tensor.clone().requires_grad_() for tensor in part] for part in (out, lse))
    merged, merged_lse = merge_partials(outs, lses)
    assert torch.equal(merged[0], torch.zeros(4, dtype=torch.float64))
    assert merged_lse[0] == -math.inf
    assert_equal_to_rounding(merged[1], out[1, 1])
    total = merged.square().sum() + merged_lse[1:].sum()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, [*outs, *lses]))


def test_what_cannot_be_merged_or_attended_to_is_refused() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="1 outputs and 2 lses; pass one lse with each output"):
        merge_partials([out], [lse, lse])
    with pytest.raises(ValueError, match="0 outputs and 0 lses"):
        merge_partials([], [])
    with pytest.raises(ValueError, match=r"output 1 has shape \(2, 3, 4\) and its lse \(3,\)"):
        merge_partials([out, out], [lse, lse[0]])
    with pytest.raises(ValueError, match="is_causal is set already"):
        remote_attention("exact", *tensors(4, 4), is_causal=True)
    with pytest.raises(ValueError, match="key has shape"):
        remote_attention("exact", torch.zeros(1, 2, 4, 8), torch.zeros(2, 4, 8), torch.zeros(1, 2, 4, 8))
