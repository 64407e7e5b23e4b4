"""What the kernels cannot count or address is refused in a line that says what to do."""

from __future__ import annotations

import pytest
import torch

from muse_attention import MuSeConfig
from muse_attention.backends.choice import resolve_backend
from tests.refusals import one_line_error

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ((1, 2, 40, 512), "QK4R1B16", "head dimensions of at most 256, these tensors have 512"),
        ((1, 2, 40, 8), "QK4R0B16,dipole=tilted", "no kernels for dipoles.*dipole='tilted'"),
        ((1, 40_000, 128, 16), "QK4R1B32", "at most 65535 heads of queries and keys in a batch, these are 80000"),
        ((1, 1, 70_000, 16), "QK4R1B1", "at most 65535 blocks, these are 70000: use a larger block_size"),
        ((1, 1, 1 << 20, 128), "Q64K256R1B1k", "fewer than 1024 blocks with these clusters and heads, these are 1024"),
        (
            (1, 4, 1 << 20, 64),
            "Q4K1024R512B128k",
            "fewer than 2\\^31 retrieved buckets .* use fewer retrieved_clusters",
        ),
        ((1, 1, 4096, 64), "Q16K2049R1B1k", "at most 2048 clusters, the config has 2049: use fewer"),
        ((1, 1, 1 << 24, 128), "QK16R1B1m", "fewer than 2\\^31 numbers in the queries of a key head"),
        ((1, 1, 4096, 64), "Q16K513T0.1B1k", "at most 512 clusters with a tolerance .*, the config has 513: use fewer"),
        ((1, 1, 4096, 80), "Q257K16T0.1B1k", "at most 256 clusters with a tolerance .*, the config has 257: use fewer"),
        (
            (1, 1, 1 << 17, 64),
            "Q16K64T0.1B64k",
            "blocks of at most 32768 with a tolerance, .* 65536: use a smaller block_size",
        ),
        ((1, 1, (1 << 24) + 1, 64), "Q1K1T0.1B32k", "at most 16777216 tokens with a tolerance, .* 16809984: split"),
        (
            (1, 1, 1 << 18, 64),
            "QK16T0.1B16",
            "fewer than 11585 blocks with these clusters, these are 16384: use a larger",
        ),
        (
            (1, 1, 1 << 20, 64),
            "QK256T0.1B1k",
            "fewer than 256 blocks with these clusters, these are 1024: use a larger",
        ),
    ],
)
def test_limits(shape: tuple[int, ...], config: str, message: str) -> None:
    query = torch.empty(shape, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "meta")
    key = query[:, :1] if shape[1] == 4 else query
    with one_line_error(message):
        resolve_backend("triton", query, key, MuSeConfig.parse(config))
    if query.is_cuda:
        assert resolve_backend("auto", query, key, MuSeConfig.parse(config)) == "torch"


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_as_many_clusters_as_a_tolerance_may_have(head_dim: int) -> None:
    """As many as the limit names, and as it refuses one more."""
    query = torch.empty(1, 1, 1 << 16, head_dim, device="cuda" if torch.cuda.is_available() else "meta")
    most = 32768 // max(16, 1 << (head_dim - 1).bit_length())
    assert resolve_backend("triton", query, query, MuSeConfig.parse(f"Q16K{most}T0.1B8k")) == "triton"
    with pytest.raises(ValueError, match=f"at most {most} clusters with a tolerance"):
        resolve_backend("triton", query, query, MuSeConfig.parse(f"Q16K{most + 1}T0.1B8k"))


@pytest.mark.parametrize("config", ["QK1024R64B8k", "Q2048K16R1B8k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_clusters_are_served(head_dim: int, config: str) -> None:
    query = torch.empty(1, 1, 1 << 16, head_dim, device="cuda" if torch.cuda.is_available() else "meta")
    assert resolve_backend("triton", query, query, MuSeConfig.parse(config)) == "triton"
