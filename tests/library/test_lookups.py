"""Lookups: how much of exact attention's weight on a needle is attended to token by token."""

from __future__ import annotations

import pytest
import torch

from muse_attention import MuSeConfig, find_clusters, ops
from muse_attention.core.call import Call
from muse_attention.core.recording import RecordedCall
from muse_attention.fidelity.lookups import Lookup, found_weight
from muse_lab.synthetic import clustered_qkv
from tests.library.test_fidelity import buckets_of_queries

LENGTH, DIM = 256, 16


def attend(config: MuSeConfig, *inputs: torch.Tensor, is_causal: bool = True) -> RecordedCall:
    clusters = find_clusters(*inputs[:2], config=config, is_causal=is_causal, scale=0.25)
    call = Call(*inputs, clusters, config, is_causal=is_causal, scale=0.25)
    _, selection = ops.attend(call, "torch")
    return RecordedCall(**vars(call), backend="torch", selection=selection)


def look_up(text: str, needle: list[int], position: int = LENGTH - 1) -> tuple[Lookup, torch.Tensor]:
    """What is found with two query heads on each of two key heads; and exact attention's weights of that query."""
    query = torch.randn(1, 4, LENGTH, DIM)
    _, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    call = attend(MuSeConfig.parse(text), query, key, value)
    lookup = found_weight(call, position, needle)
    keys = key.repeat_interleave(2, dim=1)[:, :, : position + 1]
    weights = (0.25 * keys @ query[:, :, position, :, None])[..., 0].softmax(-1).double()
    for head in range(4):
        chosen = buckets_of_queries(call, head)[position]
        found = 0.0
        for token in needle:
            block, cluster = token // 32, int(call.clusters.key_assignment[0, head // 2, token])
            if (block, cluster) in chosen or block == position // 32:
                found += float(weights[0, head, token])
        assert float(lookup.found[0, head]) == pytest.approx(found, rel=1e-5)
        assert int(lookup.pairs[0, head]) == len(chosen)
    return lookup, weights


@pytest.mark.parametrize("text", ["QK8R3B32", "QK8R2SP2B32", "Q4K8T0.1B32"])
def test_what_is_found_is_what_is_retrieved(text: str) -> None:
    needle = list(range(0, 224, 3))
    lookup, weights = look_up(text, needle)
    torch.testing.assert_close(lookup.weight, weights[:, :, needle].sum(-1), rtol=1e-5, atol=0)
    assert (lookup.found <= lookup.weight).all()
    assert 0 < float(lookup.found.sum()) < float(lookup.weight.sum()), "some of it is to be found, some is not"


@pytest.mark.parametrize("text", ["Q4K40R3B32", "Q4K16T0.1B32", "Q4K40R0B32"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_summary_of_one_key_is_that_key(text: str, is_causal: bool) -> None:
    """Every key by itself, by the meaning of a term: it is exact if it is found, or alone in its term."""
    config = MuSeConfig.parse(text)
    query, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    position = 200
    call = attend(config, query, key, value, is_causal=is_causal)
    own = position // 32
    kinds = set()
    for head in range(2):
        assigned = call.clusters.key_assignment[0, head].tolist()
        has_own_summary = config.tolerance is not None
        for token in range(0, 192 if is_causal else LENGTH):
            cluster, block = assigned[token], token // 32
            is_opened = has_own_summary or cluster in call.selection.opened[0, head, position].tolist()
            blocks = [block] if is_opened else [other for other in range(own if is_causal else 8) if other != own]
            beside = sum(assigned[other * 32 : (other + 1) * 32].count(cluster) for other in blocks)
            lookup = found_weight(call, position, [token])
            is_found = bool(lookup.found[0, head] == lookup.weight[0, head])
            is_exact = bool(lookup.exact[0, head] == lookup.weight[0, head])
            assert is_exact == (is_found or beside == 1)
            kinds.add((is_found, is_exact))
    assert {(False, True), (False, False)} <= kinds, "some are alone, some are not"


def test_nothing_is_alone_without_summaries() -> None:
    config = MuSeConfig.parse("Q4K40R1B32,monopole=false")
    query, key, value = clustered_qkv(1, 2, LENGTH, DIM)
    lookup = found_weight(attend(config, query, key, value), 200, range(192))
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


@pytest.mark.parametrize("text", ["QK8R3SP2B32", "Q4K16T0.01B32"])
def test_retrieved_buckets_are_visible_and_not_empty(text: str) -> None:
    call = attend(MuSeConfig.parse(text), *clustered_qkv(1, 2, LENGTH, DIM))
    for head in range(2):
        assigned = call.clusters.key_assignment[0, head].tolist()
        of_queries = buckets_of_queries(call, head)
        assert any(of_queries)
        for position, buckets in enumerate(of_queries):
            for block, cluster in buckets:
                assert block < position // 32
                assert cluster in assigned[block * 32 : (block + 1) * 32]


@pytest.mark.parametrize(("position", "needle"), [(10, [11]), (10, []), (LENGTH, [3]), (10, [-1])])
def test_a_needle_must_be_seen(position: int, needle: list[int]) -> None:
    config = MuSeConfig.parse("QK8R1B32")
    query, key, value = clustered_qkv(1, 1, LENGTH, DIM)
    call = attend(config, query, key, value)
    with pytest.raises(ValueError, match="choose tokens that it sees"):
        found_weight(call, position, needle)
