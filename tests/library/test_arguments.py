"""Bad arguments of any attention give one line that names the argument, its value, and the way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*(shape or (1, 2, 40, 8)), dtype=dtype)


BAD_CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("rank", {"query": _tensor(2, 40, 8)}, ["query", "(2, 40, 8)", "(batch, heads, length, head_dim)"]),
    ("five axes", {"key": _tensor(1, 1, 2, 40, 8)}, ["key", "(1, 1, 2, 40, 8)", "four axes"]),
    ("not a tensor", {"key": [1.0]}, ["key", "list", "torch.Tensor"]),
    ("head dims", {"key": _tensor(1, 2, 40, 4)}, ["key has head_dim 4", "query 8"]),
    ("key and value heads", {"value": _tensor(1, 1, 40, 8)}, ["key has 2 heads", "value 1"]),
    (
        "gqa not enabled",
        {"key": _tensor(1, 1, 40, 8), "value": _tensor(1, 1, 40, 8)},
        ["query has 2 heads", "key 1", "enable_gqa=True"],
    ),
    (
        "heads that do not divide",
        {"query": _tensor(1, 3, 40, 8), "enable_gqa": True},
        ["query has 3 heads", "not a multiple of the 2 heads of key"],
    ),
    ("batch", {"value": _tensor(2, 2, 40, 8)}, ["value has batch size 2", "query 1"]),
    ("lengths", {"key": _tensor(1, 2, 50, 8)}, ["key has length 50", "query 40", "scaled_dot_product_attention"]),
    ("empty", {"query": _tensor(1, 2, 0, 8)}, ["query", "(1, 2, 0, 8)", "at least 1"]),
    ("dtypes", {"key": _tensor(dtype=torch.float16)}, ["key", "torch.float16", "torch.float32", "one dtype"]),
    ("integers", {"query": _tensor(dtype=torch.int64)}, ["query", "torch.int64", "bfloat16"]),
    ("complex", {"query": _tensor(dtype=torch.complex64)}, ["query", "torch.complex64", "bfloat16"]),
    ("devices", {"value": _tensor().to("meta")}, ["value is on meta", "query on cpu"]),
    ("mask", {"attn_mask": torch.ones(40, 40)}, ["attn_mask", "is_causal"]),
    ("dropout", {"dropout_p": 0.1}, ["dropout_p=0.1", "dropout_p=0.0"]),
    ("scale of zero", {"scale": 0.0}, ["scale=0.0", "logits", "None"]),
    ("scale", {"scale": float("nan")}, ["scale=nan", "None"]),
    ("infinite scale", {"scale": -math.inf}, ["scale=-inf", "None"]),
    ("scale that is a switch", {"scale": True}, ["scale=True", "None"]),
    ("scale that is a tensor", {"scale": torch.ones(3)}, ["scale=a tensor", "None"]),
    ("scale that is no number", {"scale": "large"}, ["scale='large'", "None"]),
    ("scale that no float holds", {"scale": 10**400}, ["scale=1000", "3.4e+38"]),
    ("scale beyond float32", {"scale": -1e39}, ["scale=-1e+39", "3.4e+38"]),
    ("causal text", {"is_causal": "x"}, ["is_causal is a str", "True or False"]),
    ("causal None", {"is_causal": None}, ["is_causal is a NoneType", "True or False"]),
    ("causal tensor", {"is_causal": torch.ones(2) > 0}, ["is_causal is a Tensor", "True or False"]),
    ("gqa text", {"enable_gqa": "no"}, ["enable_gqa is a str", "True or False"]),
    ("dropout text", {"dropout_p": "some"}, ["dropout_p='some'", "dropout_p=0.0"]),
    ("sparse query", {"query": _tensor().to_sparse()}, ["query", "sparse_coo", "to_dense()"]),
    ("sparse value", {"value": _tensor().to_sparse()}, ["value", "sparse_coo", "to_dense()"]),
    ("nested key", {"key": torch.nested.nested_tensor([_tensor()[0]], layout=torch.jagged)}, ["key", "nested", "pad"]),
]
ATTENTIONS = ["muse:QK4R1B16", "exact", "block_diagonal:16", "moba:L16B8R1"]


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(("change", "words"), [call[1:] for call in BAD_CALLS], ids=[call[0] for call in BAD_CALLS])
def test_bad_arguments_of_every_attention(name: str, change: dict[str, Any], words: list[str]) -> None:
    arguments: dict[str, Any] = {"query": _tensor(), "key": _tensor(), "value": _tensor(), **change}
    _expect(words, lambda: get_attention(name)(**arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": "fastest"}, ["'fastest'", "Q128K128R8SP1B8k"]),
        ({"config": "QK0"}, ["query_clusters=0"]),
        ({"config": "QK4R5B16"}, ["retrieved_clusters=5", "key_clusters=4", "at most 4"]),
        ({"config": MuSeConfig(key_clusters=4)}, ["retrieved_clusters=8", "key_clusters=4", "at most 4"]),
        ({"config": 128}, ["config=128", "MuSeConfig"]),
        ({"config": "QK1024B8"}, ["query_clusters=1024", "5 blocks", "5242880 summaries", "fewer clusters"]),
        ({"backend": "cuda"}, ["backend='cuda'", "auto, torch, triton, reference"]),
        ({"backend": "triton"}, ["backend='triton'", "CUDA", "backend='torch'"]),
    ],
)
def test_bad_settings(arguments: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _expect(words, lambda: muse_attention(_tensor(), _tensor(), _tensor(), **arguments))


def test_a_text_without_a_block_size_is_not_exact_by_accident() -> None:
    query = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0))
    found = {
        name: get_attention(name)(query, query, query, is_causal=True)
        for name in ("exact", "muse:QK4R1", "muse:QK4R1B256", "muse:QK4R1B8k")
    }
    torch.testing.assert_close(found["muse:QK4R1B8k"], found["exact"])
    assert torch.equal(found["muse:QK4R1"], found["muse:QK4R1B256"])
    assert not torch.allclose(found["muse:QK4R1"], found["exact"], atol=1e-3)


@pytest.mark.parametrize("clusters", [64, 8192])
def test_a_block_of_a_text_without_its_size_has_a_token_for_each_cluster(clusters: int) -> None:
    """So there is never more work than exact attention has: with more clusters than tokens, it is exact attention."""
    query, key, value = (torch.randn(1, 1, 300, 8) for _ in range(3))
    assert MuSeConfig.named(f"QK{clusters}", 300).block_size == max(clusters, 256)
    out = muse_attention(query, key, value, is_causal=True, config=f"QK{clusters}")
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(out, exact, atol=1e-5) == (clusters == 8192)


def test_clusters_of_another_configuration() -> None:
    clusters = find_clusters(_tensor(), _tensor(), config="QK4R1B16")
    _expect(
        ["clusters.query_centroids", "(1, 2, 4, 8)", "(1, 2, 5, 8)"],
        lambda: muse_attention(_tensor(), _tensor(), _tensor(), config="QK5R1B16", clusters=clusters),
    )


def test_clusters_of_another_kind() -> None:
    clusters = find_clusters(_tensor(), _tensor(), config="QK4R1B16")
    arguments = (_tensor(), _tensor(), _tensor())
    floats = dataclasses.replace(clusters, key_assignment=clusters.key_assignment.float())
    _expect(["key_assignment", "float32"], lambda: muse_attention(*arguments, config="QK4R1B16", clusters=floats))
    integers = dataclasses.replace(clusters, key_centroids=clusters.key_centroids.int())
    _expect(["key_centroids", "int32"], lambda: muse_attention(*arguments, config="QK4R1B16", clusters=integers))
    poisoned = dataclasses.replace(clusters, query_centroids=clusters.query_centroids * torch.nan)
    _expect(
        ["query_centroids", "not finite", "find_clusters"],
        lambda: muse_attention(*arguments, config="QK4R1B16", clusters=poisoned),
    )
    for wrong in (-1, 4):
        outside = dataclasses.replace(clusters, query_assignment=clusters.query_assignment.clone())
        outside.query_assignment[0, 1, 7] = wrong
        _expect(
            ["query_assignment", "0 to 3", "find_clusters"],
            lambda outside=outside: muse_attention(*arguments, config="QK4R1B16", clusters=outside),
        )
    _expect(["tuple", "find_clusters"], lambda: muse_attention(*arguments, config="QK4R1B16", clusters=()))


def test_float64_beside_float32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _expect(["float64", "one dtype"], lambda: muse_attention(_tensor(), _tensor().double(), _tensor()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("linear", ["'linear'", "exact, muse, block_diagonal, moba"]),
        ("exact:8k", ["'exact:8k'", "no settings"]),
        ("muse:", ["'muse:'", "colon"]),
        ("muse:QQ", ["'QQ'"]),
        ("block_diagonal", ["'block_diagonal'", "block_diagonal:8k"]),
        ("block_diagonal:0", ["'0'", "positive", "8k"]),
        ("moba:8k", ["'moba:8k'", "moba:L8kB512R1"]),
        ("moba:L100B64R1", ["100", "multiple", "64"]),
        ("moba:L64B64R0", ["'0'", "positive"]),
        ("flex_attention", ["a window like 'flex_attention:W4k', or blocks like 'flex_attention:B8k'"]),
        ("flex_attention:8k", ["cannot read 'flex_attention:8k'"]),
        ("nsa:64", ["write the sizes like 'nsa:B64R16'"]),
        ("nsa:B64R33", ["at least twice the retrieved blocks"]),
        ("nsa:B48R16", ["must be a power of 2"]),
        ("flash_sparse_attn:1", ["write the threshold like 'flash_sparse_attn:T1'"]),
    ],
)
def test_bad_names(name: str, words: list[str]) -> None:
    _expect(words, lambda: get_attention(name))


def test_a_name_is_a_string() -> None:
    _expect(["string"], lambda: get_attention(MuSeConfig()))


def _expect(words: list[str], call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
