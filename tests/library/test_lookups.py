"""Lookups: how much of exact attention's weight on a needle is attended to token by token."""

from __future__ import annotations

import pytest
import torch

from muse_attention import MuSeConfig, find_clusters, ops
from muse_attention.core.bits import unpack_bits
from muse_attention.core.call import Call
from muse_attention.fidelity.lookups import Lookup, found_weight
from muse_attention.fidelity.retrieved import retrieved_buckets
from muse_lab.synthetic import clustered_qkv

LENGTH, DIM = 256, 16


def look_up(text: str, needle: list[int], position: int = LENGTH - 1) -> tuple[Lookup, torch.Tensor]:
    """What is found with two query heads on each of two key heads; and exact attention's weights of that query."""
    config = MuSeConfig.parse(text)
    query = torch.randn(1, 4, LENGTH, DIM)
    _, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    clusters = find_clusters(query, key, config=config, scale=0.25)
    _, selection = ops.attend(Call(query, key, value, clusters, config, is_causal=True, scale=0.25), "torch")
    lookup = found_weight(query, key, clusters, selection, config, position, needle, scale=0.25)
    keys = key.repeat_interleave(2, dim=1)[:, :, : position + 1]
    weights = (0.25 * keys @ query[:, :, position, :, None])[..., 0].softmax(-1).double()
    # Token by token, by the meaning of a selection.
    for head in range(4):
        found = 0.0
        for token in needle:
            block, cluster = token // config.block_size, int(clusters.key_assignment[0, head // 2, token])
            if config.tolerance is None:
                opened = selection.opened[0, head, position].tolist()
                retrieved = selection.retrieved[0, head, position]
                is_found = cluster in opened and block in retrieved[opened.index(cluster)]
            else:
                words = selection.retrieved[0, head, position, block]
                is_found = bool(unpack_bits(words, config.key_clusters)[cluster])
            if is_found or block == position // config.block_size:
                found += float(weights[0, head, token])
        assert float(lookup.found[0, head]) == pytest.approx(found, rel=1e-5)
    return lookup, weights


@pytest.mark.parametrize("text", ["QK8R3B32", "QK8R2SP2B32", "Q4K8R4T0.003B32"])
def test_what_is_found_is_what_is_retrieved(text: str) -> None:
    needle = list(range(0, 224, 3))
    lookup, weights = look_up(text, needle)
    torch.testing.assert_close(lookup.weight, weights[:, :, needle].sum(-1), rtol=1e-5, atol=0)
    assert (lookup.found <= lookup.weight).all()
    assert 0 < float(lookup.found.sum()) < float(lookup.weight.sum()), "some of it is to be found, some is not"


@pytest.mark.parametrize("text", ["Q4K40R3B32", "Q4K40R4T0.003B32", "Q4K40R0B32"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_summary_of_one_key_is_that_key(text: str, is_causal: bool) -> None:
    """Every key by itself, by the meaning of a term: it is exact if it is found, or alone in its term."""
    config = MuSeConfig.parse(text)
    query, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    position = 200
    clusters = find_clusters(query, key, config=config)
    _, selection = ops.attend(Call(query, key, value, clusters, config, is_causal=is_causal, scale=0.25), "torch")
    arguments = (query, key, clusters, selection, config, position)
    own = position // 32
    kinds = set()
    for head in range(2):
        assigned = clusters.key_assignment[0, head].tolist()
        of_query = selection.opened[0, head, position]
        for token in range(0, 192 if is_causal else LENGTH):
            cluster, block = assigned[token], token // 32
            if config.tolerance is None:
                is_opened = cluster in of_query.tolist()
            else:
                is_opened = bool(unpack_bits(of_query, config.key_clusters)[cluster])
            blocks = [block] if is_opened else [other for other in range(own if is_causal else 8) if other != own]
            beside = sum(assigned[other * 32 : (other + 1) * 32].count(cluster) for other in blocks)
            lookup = found_weight(*arguments, [token], scale=0.25, is_causal=is_causal)
            is_found = bool(lookup.found[0, head] == lookup.weight[0, head])
            is_exact = bool(lookup.exact[0, head] == lookup.weight[0, head])
            assert is_exact == (is_found or beside == 1)
            kinds.add((is_found, is_exact))
    assert {(False, True), (False, False)} <= kinds, "some are alone, some are not"


def test_nothing_is_alone_without_summaries() -> None:
    config = MuSeConfig.parse("Q4K40R1B32,monopole=false")
    query, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    clusters = find_clusters(query, key, config=config)
    _, selection = ops.attend(Call(query, key, value, clusters, config, is_causal=True, scale=0.25), "torch")
    lookup = found_weight(query, key, clusters, selection, config, 200, range(192), scale=0.25)
    assert torch.equal(lookup.exact, lookup.found)


def test_the_own_block_is_found_without_retrieval() -> None:
    lookup, _ = look_up("QK8R0B32", [LENGTH - 32, LENGTH - 1])
    assert torch.equal(lookup.found, lookup.weight)
    assert not lookup.pairs.any()
    beyond, _ = look_up("QK8R0B32", [LENGTH - 33])
    assert not beyond.found.any()


def test_pairs_are_the_buckets_of_the_query() -> None:
    lookup, _ = look_up("QK8R2SP2B32", [3])
    assert lookup.pairs.tolist() == [[4] * 4]
    early, _ = look_up("QK8R2SP2B32", [3], position=40)
    assert early.pairs.tolist() == [[2] * 4], "one block is before it"


@pytest.mark.parametrize("text", ["QK8R3SP2B32", "Q4K40R4T0.001B32"])
def test_retrieved_buckets_are_visible_and_not_empty(text: str) -> None:
    config = MuSeConfig.parse(text)
    inputs = clustered_qkv(1, 2, LENGTH, DIM)
    clusters = find_clusters(*inputs[:2], config=config)
    _, selection = ops.attend(Call(*inputs, clusters, config, is_causal=True, scale=0.25), "torch")
    found = retrieved_buckets(selection, config, LENGTH)
    assert found.shape == (1, 2, LENGTH, 8, config.key_clusters)
    assert found.any()
    for block in range(8):
        assert not found[:, :, block * 32 : (block + 1) * 32, block:].any()
        for head in range(2):
            held = set(clusters.key_assignment[0, head, block * 32 : (block + 1) * 32].tolist())
            assert set(found[0, head, :, block].any(0).nonzero().flatten().tolist()) <= held


@pytest.mark.parametrize(("position", "needle"), [(10, [11]), (10, []), (LENGTH, [3]), (10, [-1])])
def test_a_needle_must_be_seen(position: int, needle: list[int]) -> None:
    config = MuSeConfig.parse("QK8R1B32")
    query, key, value = clustered_qkv(1, 1, LENGTH, DIM)
    clusters = find_clusters(query, key, config=config)
    _, selection = ops.attend(Call(query, key, value, clusters, config, is_causal=True, scale=1.0), "torch")
    with pytest.raises(ValueError, match="choose tokens that it sees"):
        found_weight(query, key, clusters, selection, config, position, needle, scale=1.0)
