"""The measures of fidelity, on cases whose answer is known."""

from __future__ import annotations

import pytest
import torch

from muse_attention import get_attention
from muse_attention.fidelity import compare, future_influence, measure, position_error
from muse_attention.synthetic import clustered_qkv


def test_measures_of_a_known_error() -> None:
    exact = torch.tensor([[[[3.0, 4.0], [0.0, 2.0]]]])  # one head, two queries
    out = torch.tensor([[[[3.0, 4.0], [2.0, 2.0]]]])
    lse, exact_lse = torch.tensor([[[1.0, 0.5]]]), torch.tensor([[[1.0, 1.0]]])
    fidelity = compare(out, exact, lse, exact_lse)
    assert fidelity.relative_squared_error.tolist() == [[0.5]]  # (0 / 25 + 4 / 4) / 2
    assert fidelity.energy_error.item() == pytest.approx(4 / 29)
    assert fidelity.cosine.item() == pytest.approx((1 + 0.5**0.5) / 2)
    assert fidelity.lse_gap.tolist() == [[0.25]]
    assert position_error(out, exact).tolist() == [[[0.0, 1.0]]]


def test_equal_outputs_have_no_error_even_if_they_are_zero() -> None:
    nothing, lse = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)
    pooled = compare(nothing, nothing, lse, lse).pooled()
    assert pooled == {"relative_squared_error": 0, "cosine": 1, "energy_error": 0, "lse_gap": 0}


def test_per_head_and_pooled() -> None:
    query, key, value = clustered_qkv(2, 3, 300, 16)
    fidelity = measure(get_attention("muse:QK8R1B64"), query, key, value, is_causal=True)
    assert fidelity.relative_squared_error.shape == (2, 3)
    pooled = fidelity.pooled()
    assert set(pooled) == {"relative_squared_error", "cosine", "energy_error", "lse_gap"}
    assert pooled["cosine"] == pytest.approx(float(fidelity.cosine.mean()))
    assert 0 < pooled["relative_squared_error"] < 0.5
    assert pooled["lse_gap"] > 0


def test_exact_attention_has_no_error_and_no_leak() -> None:
    query, key, value = clustered_qkv(1, 2, 300, 16)
    pooled = measure(get_attention("exact"), query, key, value, is_causal=True).pooled()
    assert pooled["relative_squared_error"] == pooled["lse_gap"] == 0
    assert pooled["cosine"] == pytest.approx(1)
    assert future_influence(get_attention("exact"), query, key, value, 200) < 1e-12


def test_the_leak_of_global_clustering_is_measured_and_no_larger_than_the_error() -> None:
    query, key, value = clustered_qkv(1, 2, 1024, 16)
    attention = get_attention("muse:QK16R1B128")
    leak = future_influence(attention, query, key, value, 700)
    error = measure(attention, query, key, value, is_causal=True).pooled()["relative_squared_error"]
    # Two clusterings give two approximations of the same exact output, so they differ by at most about two errors each.
    assert 0 < leak < 4 * error


@pytest.mark.parametrize("position", [0, 300, -1])
def test_leak_position_is_checked(position: int) -> None:
    query, key, value = clustered_qkv(1, 1, 300, 8)
    with pytest.raises(ValueError, match=f"position={position}"):
        future_influence(get_attention("exact"), query, key, value, position)
