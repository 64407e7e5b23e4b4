"""Attentions of other libraries: what they are called with, and what is refused. Their kernels need a GPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from muse_attention import fidelity, get_attention
from muse_attention.baselines import flash_sparse, flex, nsa
from muse_attention.registry import split_names
from muse_lab.benchmark.plan import Plan
from muse_lab.benchmark.request import at_matched_sparsity
from muse_lab.benchmark.results import BenchmarkSettings
from muse_lab.synthetic import clustered_qkv

LENGTH = 300
SETTINGS = BenchmarkSettings(
    device="cuda", batch=1, heads=64, key_heads=4, head_dim=64, dtype="bfloat16", causal=True, repeats=1, memory=False
)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`flex_attention` as PyTorch runs it on a CPU, not compiled."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    monkeypatch.setattr(flex, "check_flex", lambda device: None)
    flex._block_mask.cache_clear()
    yield
    flex._block_mask.cache_clear()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("name", "sees"),
    [
        ("flex_attention:W50", lambda distance, query, key: distance.abs() < 50),
        ("flex_attention:B64", lambda distance, query, key: query // 64 == key // 64),
    ],
)
def test_flex_attention_sees_its_window_or_its_block(
    name: str, sees: Callable[[Tensor, Tensor, Tensor], Tensor], is_causal: bool
) -> None:
    """Without gradients: on a CPU PyTorch has none for it."""
    inputs = clustered_qkv(1, 4, LENGTH, 16, key_heads=2)
    out, lse = get_attention(name)(*inputs, is_causal=is_causal, enable_gqa=True, return_lse=True)
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = sees(query - key, query, key) & ((query >= key) | (not is_causal))
    expected = scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(out, expected, atol=1e-5)
    logits = inputs[0] @ inputs[1].repeat_interleave(2, dim=1).mT / 4
    assert torch.allclose(lse, logits.masked_fill(~mask, -torch.inf).logsumexp(-1), atol=1e-4)


class FakeNsa(ModuleType):
    """A package whose `parallel_nsa` is exact attention, and notes what it was called with."""

    def __init__(self) -> None:
        super().__init__("fla.ops.nsa")
        self.options: dict[str, Any] = {}

    def parallel_nsa(self, query: Tensor, key: Tensor, value: Tensor, *, g_cmp: Tensor, **options: Any) -> Tensor:
        self.options = options
        assert g_cmp.shape == query.shape[:3]
        assert not g_cmp.any()
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def fake_nsa(monkeypatch: pytest.MonkeyPatch) -> FakeNsa:
    package = FakeNsa()
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", package)
    return package


def test_nsa_is_called_in_its_own_layout(fake_nsa: FakeNsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsa, "check_nsa", lambda *arguments, **options: None)
    inputs = clustered_qkv(1, 16, LENGTH, 16, key_heads=1)
    found = fidelity.measure(get_attention("nsa:B32R8"), *inputs, is_causal=True, enable_gqa=True).pooled()
    assert found["relative_squared_error"] < 1e-9
    assert "lse_gap" not in found, "the kernels do not give an lse"
    assert fake_nsa.options == {"block_counts": 8, "block_size": 32, "window_size": 0, "scale": 0.25}


def test_flash_sparse_attn_is_called_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a package that is exact attention, and notes what it was called with."""
    package, options = ModuleType("flash_sparse_attn"), {}

    def flash_sparse_attn_func(*rows: Tensor, **given: Any) -> Tensor:
        options.update(given)
        heads = [tensor.transpose(1, 2) for tensor in rows]
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    package.flash_sparse_attn_func = flash_sparse_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_sparse_attn", package)
    monkeypatch.setattr(flash_sparse, "check_flash_sparse", lambda device: None)
    inputs = clustered_qkv(1, 4, LENGTH, 16, key_heads=2)
    attention = get_attention("flash_sparse_attn:T0.5")
    found = fidelity.measure(attention, *inputs, is_causal=True, enable_gqa=True).pooled()
    assert found["relative_squared_error"] < 1e-9
    assert options == {"is_causal": True, "softmax_scale": 0.25, "softmax_threshold": 0.5}


def test_peers_have_settings_of_their_own_in_a_benchmark() -> None:
    assert at_matched_sparsity("flex_attention", 65536) == "flex_attention:W4608"
    assert at_matched_sparsity("nsa", 65536) == "nsa:B64R16"
    assert at_matched_sparsity("flash_sparse_attn", 65536) == "flash_sparse_attn:T1"
    assert split_names(["muse,flex_attention,nsa:B64R16"]) == ["muse", "flex_attention", "nsa:B64R16"]
    for length in (1, 300, 65536, 1 << 20):
        get_attention(at_matched_sparsity("flex_attention", length))


@pytest.mark.parametrize(
    ("attention", "changes", "message"),
    [
        ("flex_attention", {"device": "cpu"}, "flex_attention is compiled for CUDA, not for cpu"),
        ("nsa", {"device": "cpu"}, "nsa has kernels for CUDA, not for cpu"),
        ("nsa", {"causal": False}, "nsa is causal"),
        ("nsa", {"key_heads": 8}, "heads for each key head, not 8; use 64 heads, 4 key heads"),
        ("nsa", {"heads": 48, "key_heads": 2}, "heads for each key head, not 24"),
        ("nsa", {}, "pip install flash-linear-attention"),
        ("flash_sparse_attn", {"device": "cpu"}, "flash_sparse_attn has kernels for CUDA, not for cpu"),
        ("flash_sparse_attn", {}, "pip install flash-sparse-attn"),
    ],
)
def test_a_benchmark_says_what_a_peer_needs_before_it_runs(
    attention: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.nsa", None)
    monkeypatch.setitem(sys.modules, "flash_sparse_attn", None)
    with pytest.raises(ValueError, match=message):
        Plan.at_lengths(dataclasses.replace(SETTINGS, **changes), (1024,), (attention,))


def test_a_call_on_a_cpu_is_refused() -> None:
    for name in ("flex_attention:W32", "nsa", "flash_sparse_attn"):
        with pytest.raises(ValueError, match="CUDA, not for cpu"):
            get_attention(name)(*clustered_qkv(1, 16, 64, 16), is_causal=True)


def test_a_benchmark_of_peers_can_be_planned(fake_nsa: FakeNsa) -> None:
    plan = Plan.at_lengths(SETTINGS, (65536,), ("muse", "flex_attention", "nsa"))
    assert [request.full_name for request in plan.requests][1:] == ["flex_attention:W4608", "nsa:B64R16"]
