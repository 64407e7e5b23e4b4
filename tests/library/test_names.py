"""Names of attentions: those that follow the length, and full ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention
from muse_attention.registry import config_at, full_name, split_names
from muse_lab.benchmark.request import at_matched_sparsity
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.run.folder import run_recipe
from muse_lab.pretraining.training import train
from tests.training_runs import SMALL


def tensors(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("length", [300, 2048])
def test_the_papers_method_by_name_is_that_of_the_length(length: int) -> None:
    inputs = tensors(length)
    expected = muse_attention(*inputs, is_causal=True, config=MuSeConfig.paper(length))
    assert torch.equal(get_attention("muse:paper")(*inputs, is_causal=True), expected)
    assert torch.equal(muse_attention(*inputs, is_causal=True, config="paper"), expected)
    other = get_attention("muse:paper,seed=1")(*inputs, is_causal=True)
    assert torch.equal(other, muse_attention(*inputs, is_causal=True, config=MuSeConfig.paper(length).replace(seed=1)))


@pytest.mark.parametrize("name", ["muse:paper,QK32", "muse:paper2", "muse:paper,speed=11", "muse:paperQK32"])
def test_what_is_not_the_papers_method(name: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        get_attention(name)


def test_full_names_say_everything() -> None:
    assert full_name("muse:paper", 65536) == f"muse:{MuSeConfig.paper(65536)}"
    assert full_name("muse", 4096) == f"muse:{MuSeConfig.for_length(4096)}"
    assert full_name("muse:QK8", 1) == full_name("muse:QK8,clustering=auto", 1) == full_name("muse:QK8R8SP1B256", 1)
    assert full_name("muse:QK8", 1).endswith(",clustering=lloyd")
    assert full_name("muse:QK32R2", 4096) == "muse:Q32K32R2SP1B512,clustering=lloyd"
    assert full_name("moba:L64B16R2", 1) == "moba:L64B16R2"
    assert at_matched_sparsity("muse:paper", 16384) == f"muse:{MuSeConfig.paper(16384)}"
    assert config_at("exact", 1) is None
    assert [config_at(name) for name in ("exact", "muse", "muse:paper", "muse:QK32R2")] == [None] * 4
    assert config_at("muse:QK32R2B1k") == MuSeConfig.parse("QK32R2B1k")


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_backend_has_a_clustering_of_its_own(backend: str) -> None:
    query, key, _ = tensors(200)
    left_open, lloyd = (
        find_clusters(query, key, config=f"QK4R1B32{option}", backend=backend) for option in ("", ",clustering=lloyd")
    )
    assert torch.equal(left_open.key_assignment, lloyd.key_assignment)
    assert MuSeConfig(clustering="auto").replace(clustering="auto").clustering == "lloyd"


def test_names_in_one_option() -> None:
    assert split_names(["exact, muse,muse:QK32R2,seed=1,tilt=false", "moba:L1kB64R2,exact"]) == [
        "exact",
        "muse",
        "muse:QK32R2,seed=1,tilt=false",
        "moba:L1kB64R2",
    ]


@pytest.mark.filterwarnings("ignore:.*exact attention runs where")
def test_a_run_records_what_the_papers_method_is_at_its_length(corpus: Any, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["attention=muse:paper", "steps=2", "probe_every=0"]), tmp_path)
    assert run_recipe(tmp_path).attention == f"muse:{MuSeConfig.paper(64)}"
