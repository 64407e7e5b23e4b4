"""The rules of clustering that the conformance suite does not see: the cap, determinism, the seed."""

from __future__ import annotations

import math

import pytest
import torch

from muse_attention import MuSeConfig, find_clusters, muse_attention
from muse_attention.core.shuffle import seeded_shuffle
from tests.shapes import Shape

BACKENDS = ["torch", "reference"]
CLUSTERINGS = ["streaming", "lloyd"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [1.0, 1.3, 4.0])
@pytest.mark.parametrize("degenerate", [False, True], ids=["random", "identical"])
@pytest.mark.parametrize("clustering", CLUSTERINGS)
def test_no_cluster_exceeds_its_cap_in_any_block(
    backend: str, factor: float, degenerate: bool, clustering: str
) -> None:
    query, key, _ = Shape("", "", length=150).tensors(torch.float32, requires_grad=False)
    if degenerate:
        query, key = (vectors[:, :, :1].expand_as(vectors).contiguous() for vectors in (query, key))
    config = MuSeConfig.parse(f"Q4K5R1B32,clustering={clustering}").replace(
        cap_factor=factor, query_cap_factor=factor + 0.1
    )
    found = find_clusters(query, key, config=config, backend=backend)
    assert _largest(found.key_assignment, 5) <= math.ceil(factor * 32 / 5)
    assert _largest(found.query_assignment, 4) <= math.ceil(min(factor + 0.1, 4) * 32 / 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_are_not_capped_unless_asked_for(backend: str) -> None:
    query, key, _ = Shape("", "", length=150).tensors(torch.float32, requires_grad=False)
    query, key = (vectors[:, :, :1].expand_as(vectors).contiguous() for vectors in (query, key))
    found = find_clusters(query, key, config="Q4K5R1B32,cap_factor=1.5", backend=backend)
    assert _largest(found.query_assignment, 4) == 32
    assert _largest(found.key_assignment, 5) == math.ceil(1.5 * 32 / 5)


def _largest(assignment: torch.Tensor, clusters: int) -> int:
    """Most tokens of any head, block and cluster."""
    blocks = [block for part in assignment.split(32, dim=-1) for block in part.flatten(0, -2)]
    return max(int(torch.bincount(block, minlength=clusters).max()) for block in blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_goes_to_the_next_nearest_with_room_lowest_position_first(backend: str) -> None:
    # Eight tokens in a block on a line; Lloyd finds the centres 0, 1 and 10; the cap is ceil(1 * 8 / 3) = 3.
    line = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 10.0, 10.0])
    vectors = torch.stack([line, torch.zeros(8)], dim=-1)[None, None]
    config = MuSeConfig.parse("QK3R1B8,clustering=lloyd,lloyd_iterations=5,cap_factor=1.0")
    for seed in range(20):
        clusters = find_clusters(vectors, vectors, config=config.replace(seed=seed), backend=backend)
        centres = clusters.key_centroids[0, 0, :, 0]
        if sorted(centres.tolist()) == [0.0, 1.0, 10.0]:
            break
    else:
        raise AssertionError("no seed finds the three centres")
    found = centres[clusters.key_assignment[0, 0].long()].tolist()
    assert found == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 10.0, 10.0]


@pytest.mark.parametrize("clustering", CLUSTERINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_cap_every_token_goes_to_its_nearest_centroid(backend: str, clustering: str) -> None:
    query, key, _ = Shape("", "", length=150).tensors(torch.float64, requires_grad=False)
    config = f"Q4K5R1B32,cap_factor=none,clustering={clustering}"
    clusters = find_clusters(query, key, config=config, scale=1.0, backend=backend)
    for vectors, centroids, assignment in (
        (query, clusters.query_centroids, clusters.query_assignment),
        (key, clusters.key_centroids, clusters.key_assignment),
    ):
        nearest = torch.cdist(vectors, centroids).argmin(-1)
        assert torch.equal(assignment.long(), nearest)


def test_lloyd_reduces_the_k_means_objective() -> None:
    _, key, _ = Shape("", "", length=500).tensors(torch.float64, requires_grad=False)
    objective = []
    for iterations in (1, 2, 5):
        config = MuSeConfig.parse(f"QK8R1B500,clustering=lloyd,cap_factor=none,lloyd_iterations={iterations}")
        clusters = find_clusters(key, key, config=config)
        objective.append(float(torch.cdist(key, clusters.key_centroids).amin(-1).square().sum()))
    assert objective == sorted(objective, reverse=True)


@pytest.mark.parametrize("clustering", CLUSTERINGS)
def test_the_seed_is_the_only_randomness(clustering: str) -> None:
    query, key, value = Shape("", "", length=150).tensors(torch.float32, requires_grad=False)
    config = f"QK8R1B32,clustering={clustering}"
    torch.manual_seed(1)
    first = muse_attention(query, key, value, is_causal=True, config=config)
    torch.manual_seed(2)
    assert torch.equal(muse_attention(query, key, value, is_causal=True, config=config), first)
    assert not torch.equal(muse_attention(query, key, value, is_causal=True, config=f"{config},seed=1"), first)


@pytest.mark.parametrize("length", [1, 2, 1000, 65537])
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_the_shuffle_is_a_permutation(length: int, seed: int) -> None:
    order = seeded_shuffle(length, seed, torch.device("cpu"))
    assert torch.equal(order.sort().values, torch.arange(length))


def test_the_shuffle_mixes() -> None:
    order = seeded_shuffle(10_000, 0, torch.device("cpu")).double()
    place = torch.arange(10_000).double()
    assert abs(float(torch.corrcoef(torch.stack([order, place]))[0, 1])) < 0.03
    neighbours = (order[1:] - order[:-1]).abs().mean()
    assert neighbours > 3000  # a random permutation has 3333
