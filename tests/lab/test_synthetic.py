"""Synthetic queries, keys and values: what their lookups are, and that error control finds them."""

from __future__ import annotations

import pytest
import torch

from muse_attention import MuSeConfig, fidelity, get_attention
from muse_lab.synthetic import clustered_qkv

LENGTH = 1024


def test_a_lookup_takes_its_softmax_from_one_earlier_key_of_its_own() -> None:
    plain = clustered_qkv(1, 4, LENGTH, 32, key_heads=2)
    data = clustered_qkv(1, 4, LENGTH, 32, key_heads=2, lookups=0.1)
    seekers, targets, of_values = (
        (tensor != before).any(-1).any(1)[0].nonzero().flatten() for tensor, before in zip(data, plain, strict=True)
    )
    assert len(seekers) == len(targets) == round(0.1 * LENGTH)
    assert torch.equal(targets, of_values)
    assert targets.max() < seekers.min()
    query, key, _ = data
    logits = query @ key.repeat_interleave(2, dim=1).mT / 32**0.5
    logits.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    weight, found = logits.softmax(-1)[:, :, seekers].max(-1)
    assert weight.median() > 0.95
    for head in range(4):
        of_head = found[0, head][weight[0, head] > 0.5]
        assert len(of_head) > 0.9 * len(seekers)
        assert len(of_head.unique()) == len(of_head)
        assert set(of_head.tolist()) <= set(targets.tolist())


def test_error_control_retrieves_what_lookups_want() -> None:
    data = clustered_qkv(1, 1, 2048, 64, lookups=0.05)
    config = MuSeConfig.parse("Q16K32T0.02B256")
    with_retrieval, without = (
        fidelity.measure(get_attention(f"muse:{one}"), *data, is_causal=True).pooled()
        for one in (config, config.replace(tolerance=float("inf")))
    )
    assert with_retrieval["keys_per_query"] > 1
    assert without["keys_per_query"] == 0
    assert with_retrieval["relative_squared_error"] < without["relative_squared_error"] / 2


@pytest.mark.parametrize("share", [-0.1, 0.6, float("nan")])
def test_a_share_of_lookups_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"lookups=.* must be between 0 and 0\.5"):
        clustered_qkv(1, 1, 64, 16, lookups=share)
