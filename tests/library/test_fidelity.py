"""The measures of fidelity, on cases whose answer is known."""

from __future__ import annotations

import pytest
import torch

from muse_attention import MuSeConfig, exact_attention, find_clusters, get_attention
from muse_attention.core.recording import RecordedCall, recorded_calls
from muse_attention.fidelity import compare, future_influence, measure, position_error, retrieved
from muse_attention.fidelity.gradients import ExactGradients, measure_gradients
from muse_attention.fidelity.retrieved import SINGLE_WEIGHT, measure_retrieval
from muse_lab.synthetic import clustered_qkv

MEASURES = {
    *("relative_squared_error", "cosine", "centred_error", "lse_gap", "error_p99", "error_p999", "share_far_off"),
}
RETRIEVED = {"pairs_per_query", "keys_per_query", "share_retrieving", "found_share"}


def test_measures_of_a_known_error() -> None:
    exact = torch.tensor([[[[3.0, 4.0], [0.0, 2.0]]]])  # one head, two queries
    out = torch.tensor([[[[3.0, 4.0], [2.0, 2.0]]]])
    lse, exact_lse = torch.tensor([[[1.0, 0.5]]]), torch.tensor([[[1.0, 1.0]]])
    fidelity = compare(out, exact, lse, exact_lse)
    assert fidelity.relative_squared_error.tolist() == [[0.5]]  # (0 / 25 + 4 / 4) / 2
    assert fidelity.centred_error.item() == pytest.approx(4 / 6.5)  # the mean output is (1.5, 3)
    assert fidelity.cosine.item() == pytest.approx((1 + 0.5**0.5) / 2)
    assert fidelity.lse_gap.tolist() == [[0.25]]
    assert position_error(out, exact).tolist() == [[[0.0, 1.0]]]


def test_what_all_queries_share_does_not_hide_the_error() -> None:
    query, key, value = clustered_qkv(1, 2, 512, 16)
    plain, shifted = (
        measure(get_attention("muse:Q4K8T0.1B64"), query, key, value + shift, is_causal=True).pooled()
        for shift in (0, 100)
    )
    assert shifted["relative_squared_error"] < 1e-3 * plain["relative_squared_error"]
    assert shifted["centred_error"] == pytest.approx(plain["centred_error"], rel=1e-2)


def test_equal_outputs_have_no_error_even_if_they_are_zero() -> None:
    nothing, lse = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)
    pooled = compare(nothing, nothing, lse, lse).pooled()
    assert pooled == dict.fromkeys(MEASURES, 0) | {"cosine": 1}


def test_per_head_and_pooled() -> None:
    query, key, value = clustered_qkv(2, 3, 300, 16)
    fidelity = measure(get_attention("muse:QK8R1B64"), query, key, value, is_causal=True)
    assert fidelity.relative_squared_error.shape == (2, 3)
    pooled = fidelity.pooled()
    assert set(pooled) == MEASURES | RETRIEVED
    assert pooled["cosine"] == pytest.approx(float(fidelity.cosine.mean()))
    assert 0 < pooled["relative_squared_error"] < 0.5
    assert pooled["lse_gap"] > 0


def test_the_tail_of_known_errors() -> None:
    """Of 2000 queries, 3 are off by 4, and 30 more by 0.01."""
    exact = torch.ones(1, 1, 2000, 1)
    out = exact.clone()
    out[0, 0, 5:8], out[0, 0, 100:130] = 3, 1.1
    lse = torch.zeros(1, 1, 2000)
    fidelity = compare(out, exact, lse, lse)
    assert fidelity.error_p99.item() == pytest.approx(0.01, rel=1e-5)
    assert fidelity.error_p999.item() == pytest.approx(4)
    assert fidelity.share_far_off.item() == pytest.approx(3 / 2000)
    out[0, 0, 6:8] = 1  # one query in 2000 is no longer one in 1000
    assert compare(out, exact, lse, lse).error_p999.item() == pytest.approx(0.01, rel=1e-5)


def test_exact_attention_may_be_at_hand() -> None:
    query, key, value = clustered_qkv(1, 2, 300, 16)
    attention = get_attention("muse:QK8R1B64")
    exact = get_attention("exact")(query, key, value, is_causal=True, return_lse=True)
    at_hand = measure(attention, query, key, value, exact=exact, is_causal=True)
    assert at_hand.pooled() == measure(attention, query, key, value, is_causal=True).pooled()


# What was retrieved


def buckets_of_queries(call: RecordedCall, head: int) -> list[set[tuple[int, int]]]:
    """The (block, cluster) that each query retrieves, by the meaning of a selection."""
    opened, retrieved = call.selection.opened[0, head], call.selection.retrieved[0, head]
    if call.config.tolerance is None:
        return [
            {
                (int(block), int(cluster))
                for cluster, blocks in zip(opened[position], retrieved[position], strict=True)
                for block in blocks
                if block >= 0
            }
            for position in range(len(opened))
        ]
    assignment, size = call.clusters.query_assignment[0, head], call.config.block_size
    found: list[set[tuple[int, int]]] = [set() for _ in assignment]
    for block in range(len(retrieved)):
        tile = 0
        for cluster in range(call.config.query_clusters):
            members = (assignment[block * size : (block + 1) * size] == cluster).nonzero().flatten().tolist()
            for begin in range(0, len(members), call.config.tile):
                first = retrieved[block, tile].tolist()
                for row, place in enumerate(members[begin : begin + call.config.tile]):
                    found[block * size + place] = {
                        divmod(bucket, call.config.key_clusters) for bucket, wanted in enumerate(first) if wanted <= row
                    }
                tile += 1
    return found


@pytest.mark.parametrize("name", ["muse:QK8R2SP2B64", "muse:Q4K16T0.02B64,tile=8", "muse:Q4K24R1B64"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_a_selection_retrieved(name: str, is_causal: bool) -> None:
    """Counted again, one query after another, with two query heads on each key head."""
    query, _, _ = clustered_qkv(1, 4, 300, 16, seed=1)
    _, key, value = clustered_qkv(1, 2, 300, 16)
    arguments = {"is_causal": is_causal, "enable_gqa": True}
    with recorded_calls() as calls:
        get_attention(name)(query, key, value, **arguments)
    (call,) = calls
    found = measure(get_attention(name), query, key, value, **arguments).retrieval
    assert found is not None
    block = torch.arange(300) // 64
    sees = torch.ones(300, 300).tril().bool() if is_causal else torch.ones(300, 300).bool()
    for head in range(4):
        chosen, opened = buckets_of_queries(call, head), call.selection.opened[0, head]
        assigned = call.clusters.key_assignment[0, head // 2].tolist()
        keys = sum((place // 64, cluster) in one for place, cluster in enumerate(assigned) for one in chosen)
        assert found.pairs_per_query[0, head] == pytest.approx(sum(map(len, chosen)) / 300)
        assert found.keys_per_query[0, head] == pytest.approx(keys / 300)
        assert found.share_retrieving[0, head] == pytest.approx(sum(map(bool, chosen)) / 300)

        logits = (0.25 * query[0, head] @ key[0, head // 2].T).masked_fill(~sees, -torch.inf)
        weights = logits.softmax(-1).double()
        weights[:, 0] = 0
        single = (weights > SINGLE_WEIGHT) & (block[:, None] != block)
        weight_found = 0.0
        for position, place in single.nonzero().tolist():
            cluster = torch.tensor(assigned) == assigned[place]
            with_it = cluster & (block == block[place])
            if call.config.tolerance is None and assigned[place] not in opened[position].tolist():
                with_it = cluster & sees[position] & (block != block[position])
            is_found = (place // 64, assigned[place]) in chosen[position] or int(with_it.sum()) == 1
            weight_found += is_found * float(weights[position, place])
        assert single.any()
        expected = weight_found / float(weights[single].sum())
        assert found.found_share[0, head] == pytest.approx(expected, rel=1e-4)
    assert (found.keys_per_query > found.pairs_per_query).any(), "a bucket has several keys"
    assert 0 < float(found.found_share.mean()) < 1


@pytest.mark.parametrize("is_causal", [True, False])
def test_in_long_sequences_single_keys_are_looked_for_by_evenly_spaced_queries(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the other queries looked nothing up. The step, 7, does not divide blocks, nor the length."""
    query, key, value = clustered_qkv(1, 2, 300, 16)
    attention = get_attention("muse:Q4K16T0.02B64")

    with recorded_calls() as calls:
        attention(query, key, value, is_causal=is_causal)
    (call,) = calls
    _, lse = exact_attention(query, key, value, is_causal=is_causal, return_lse=True)
    everywhere = measure_retrieval(call, lse)
    assert everywhere.found_queries is None
    monkeypatch.setattr(retrieved, "_ALL_QUERIES_UP_TO", 114)
    monkeypatch.setattr(retrieved, "_NUMBERS_AT_ONCE", 5_000)
    sampled = measure_retrieval(call, lse)
    assert sampled.found_queries.tolist() == [[43, 43]]
    monkeypatch.undo()
    others = torch.ones(300, dtype=torch.bool)
    others[3::7] = False
    alone = measure_retrieval(call, lse.masked_fill(others, torch.inf))
    torch.testing.assert_close(sampled.found_share, alone.found_share)
    assert (sampled.found_share != everywhere.found_share).all()


def test_heads_that_look_nothing_up_do_not_count() -> None:
    """A head whose queries weigh all keys alike has no single keys: its share is unknown, and left out of the mean."""
    query, key, value = clustered_qkv(1, 2, 300, 16)
    attention = get_attention("muse:Q4K8T0.1B64")
    alone = measure(attention, query[:, 1:], key[:, 1:], value[:, 1:], is_causal=True).pooled()
    query[:, 0] = 0
    found = measure(attention, query, key, value, is_causal=True)
    assert found.by_head()["found_share"].isnan().tolist() == [[True, False]]
    assert found.pooled()["found_share"] == pytest.approx(alone["found_share"])
    assert "found_share" not in measure(attention, 0 * query, key, value, is_causal=True).pooled()


def test_moba_retrieves_whole_blocks_that_are_visible() -> None:
    query, key, value = clustered_qkv(1, 2, 256, 16)
    pooled = measure(get_attention("moba:L64B16R3"), query, key, value, is_causal=True).pooled()
    assert pooled["keys_per_query"] == pytest.approx(3 * 16 * 3 / 4)  # none in the first of four blocks
    assert pooled["pairs_per_query"] == pytest.approx(3 * 3 / 4)
    assert pooled["share_retrieving"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("name", ["exact", "block_diagonal:64"])
def test_attentions_without_retrieval_say_nothing_of_it(name: str) -> None:
    query, key, value = clustered_qkv(1, 2, 256, 16)
    found = measure(get_attention(name), query, key, value, is_causal=True)
    assert found.retrieval is None
    assert set(found.pooled()) == MEASURES


@pytest.mark.parametrize("name", ["muse:QK8R2B64", "muse:Q4K8T0.001B64"])
def test_one_block_retrieves_nothing(name: str) -> None:
    query, key, value = clustered_qkv(1, 2, 64, 16)
    pooled = measure(get_attention(name), query, key, value, is_causal=True).pooled()
    assert pooled["pairs_per_query"] == pooled["keys_per_query"] == pooled["share_retrieving"] == 0


def test_what_is_measured_does_not_depend_on_how_many_queries_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = clustered_qkv(1, 2, 300, 16)
    attention = get_attention("muse:Q4K8T0.001B64")
    together = measure(attention, query, key, value, is_causal=True).pooled()
    monkeypatch.setattr("muse_attention.fidelity.retrieved._NUMBERS_AT_ONCE", 1000)
    assert measure(attention, query, key, value, is_causal=True).pooled() == pytest.approx(together)


def test_calls_are_recorded_inside_the_context_alone() -> None:
    query, key, value = clustered_qkv(1, 2, 300, 16)
    attention = get_attention("muse:QK8R1B64")
    with recorded_calls() as calls:
        attention(query, key, value)
        attention(query, key, value)
    attention(query, key, value)
    assert len(calls) == 2
    assert calls[0].config == MuSeConfig.parse("QK8R1B64")
    expected = find_clusters(query, key, config="QK8R1B64")
    assert torch.equal(calls[0].clusters.key_assignment, expected.key_assignment)


# Gradients


def test_errors_of_gradients_are_those_of_autograd() -> None:
    query, _, _ = clustered_qkv(1, 4, 200, 16, seed=1, dtype=torch.float64)
    _, key, value = clustered_qkv(1, 2, 200, 16, dtype=torch.float64)
    arguments = {"is_causal": True, "enable_gqa": True}
    exact = ExactGradients.of(query, key, value, **arguments)
    found = measure_gradients(get_attention("muse:QK8R1B64"), query, key, value, exact=exact, **arguments)

    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    gradients = []
    for name in ("exact", "muse:QK8R1B64"):
        out = get_attention(name)(*leaves, **arguments)
        gradients.append(torch.autograd.grad(out, leaves, exact.grad_out))
    for error, wanted, other in zip(vars(found).values(), *gradients, strict=True):
        expected = (other - wanted).square().sum((2, 3)) / wanted.square().sum((2, 3))
        torch.testing.assert_close(error, expected)
        assert (error > 1e-6).all()
    assert found.query_gradient_error.shape == (1, 4)
    assert found.key_gradient_error.shape == found.value_gradient_error.shape == (1, 2)


def test_gradients_of_an_attention_that_is_exact_have_no_error() -> None:
    query, key, value = clustered_qkv(1, 2, 200, 16, dtype=torch.float64)
    with torch.no_grad():  # as where a model's layers are visited
        found = measure_gradients(get_attention("muse:QK8R8SP4B64"), query, key, value, is_causal=True)
    assert all(float(error.max()) < 1e-20 for error in vars(found).values())


def test_the_gradient_of_the_output_is_as_large_as_the_output() -> None:
    query, key, value = clustered_qkv(1, 2, 2000, 16)
    value[:, 1] *= 100
    exact = ExactGradients.of(query, key, value, is_causal=True)
    out = get_attention("exact")(query, key, value, is_causal=True)
    ratio = exact.grad_out.square().mean((2, 3)) / out.square().mean((2, 3))
    torch.testing.assert_close(ratio, torch.ones(1, 2), rtol=0.05, atol=0)
    again = ExactGradients.of(query, key, value, is_causal=True)
    assert torch.equal(again.grad_out, exact.grad_out)


# The leak


def test_exact_attention_has_no_error_and_no_leak() -> None:
    query, key, value = clustered_qkv(1, 2, 300, 16)
    pooled = measure(get_attention("exact"), query, key, value, is_causal=True).pooled()
    assert pooled["relative_squared_error"] == pooled["lse_gap"] == 0
    assert pooled["cosine"] == pytest.approx(1)
    assert future_influence(get_attention("exact"), query, key, value, 200) < 1e-12


def test_a_tolerance_has_no_leak() -> None:
    query, key, value = clustered_qkv(1, 2, 512, 16)
    assert future_influence(get_attention("muse:Q4K8T0.1B64"), query, key, value, 300) == 0


def test_the_leak_of_global_clustering_is_measured_and_no_larger_than_the_error() -> None:
    query, key, value = clustered_qkv(1, 2, 1024, 16)
    attention = get_attention("muse:QK16R1B128")
    leak = future_influence(attention, query, key, value, 700)
    error = measure(attention, query, key, value, is_causal=True).pooled()["relative_squared_error"]
    # Two clusterings give two approximations of the same exact output, so they differ by at most about two errors each.
    assert 0 < leak < 4 * error


def test_the_leak_to_tokens_of_another_text_leaves_out_what_they_have_before_the_position() -> None:
    tokens = clustered_qkv(1, 2, 512, 16)
    others = clustered_qkv(1, 2, 512, 16, seed=1)
    attention = get_attention("muse:QK16R1B128")
    leak = future_influence(attention, *tokens, 300, replacement=others)
    assert leak > 0
    same_end = tuple(
        torch.cat([torch.randn_like(one[:, :, :300]), other[:, :, 300:]], 2)
        for one, other in zip(tokens, others, strict=True)
    )
    assert future_influence(attention, *tokens, 300, replacement=same_end) == leak
    assert future_influence(attention, *tokens, 300, replacement=tokens) == 0


@pytest.mark.parametrize("position", [0, 300, -1])
def test_leak_position_is_checked(position: int) -> None:
    query, key, value = clustered_qkv(1, 1, 300, 8)
    with pytest.raises(ValueError, match=f"position={position}"):
        future_influence(get_attention("exact"), query, key, value, position)
