"""Orders of the expansion: the error of summaries falls with the residual, that of a tilted dipole with its square."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, muse_attention
from muse_attention.baselines import exact_attention
from muse_attention.core.structures import Clusters

LENGTH, BLOCK, CLUSTERS, SIZE = 64, 16, 4, 8
RESIDUALS = (0.1, 0.05, 0.025, 0.0125)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query centroids and directions of residuals; keys, of some clusters; values; assignments of queries and keys."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    of_queries = torch.arange(LENGTH, dtype=torch.int32) % CLUSTERS
    of_keys = (torch.arange(LENGTH, dtype=torch.int32) // 2) % CLUSTERS
    return normal(CLUSTERS, SIZE), normal(LENGTH, SIZE), normal(LENGTH, SIZE), normal(LENGTH, SIZE), of_queries, of_keys


def error(text: str, residual: float, backend: str) -> float:
    """Norm of the error of the output, where queries are off the centroids that they were assigned to."""
    centroids, directions, key, value, of_queries, of_keys = inputs()
    query = centroids[of_queries.long()] + residual * directions
    clusters = Clusters(centroids[None, None], of_queries[None, None], key[None, None, :CLUSTERS], of_keys[None, None])
    tensors = [tensor[None, None] for tensor in (query, key, value)]
    config = MuSeConfig.parse(f"QK{CLUSTERS}R0B{BLOCK},cap_factor=none{text}")
    out = muse_attention(*tensors, is_causal=True, scale=1.0, config=config, clusters=clusters, backend=backend)
    return float((out - exact_attention(*tensors, is_causal=True, scale=1.0)).norm())


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("text", "order"), [("", 1), (",dipole=shared", 1), (",dipole=tilted", 2)])
def test_order_of_the_error(text: str, order: int, backend: str) -> None:
    """Shared covariances are those of other tilts, so their error is of first order again, as the paper derives."""
    errors = [error(text, residual, backend) for residual in RESIDUALS]
    orders = [math.log2(larger / smaller) for larger, smaller in itertools.pairwise(errors)]
    assert orders[-1] == pytest.approx(order, abs=0.05)


def test_dipoles_are_measured_without_a_limit_on_clusters_of_queries() -> None:
    from muse_lab.evaluation.fidelity.presets import find_presets

    (preset,) = find_presets(["dipole"], 65536)
    configs = [MuSeConfig.parse(request.attention.removeprefix("muse:")) for request in preset.requests]
    assert {config.dipole for config in configs} == {"none", "shared", "centred", "tilted"}
    assert all(config.query_cap_factor is None for config in configs)
