"""Names of attentions: those that follow the length, full ones, and what recorded names from before meant."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from muse_attention import MuSeConfig, config, find_clusters, get_attention, muse_attention
from muse_attention.registry import config_at, full_name, split_names
from muse_lab.benchmark.matched import at_matched_sparsity
from muse_lab.evaluation.fidelity import layers
from muse_lab.pretraining import training
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.run.folder import run_recipe
from muse_lab.pretraining.training import train
from muse_lab.records import attention_names as attentions
from muse_lab.records.recorded_names import may_mean, recorded_name, with_full_names
from tests.training_runs import SMALL, losses, stop_at


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


def test_the_papers_method_compiles() -> None:
    inputs = tensors(600)
    attention = get_attention("muse:paper")
    compiled = torch.compile(lambda *parts: attention(*parts, is_causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), attention(*inputs, is_causal=True))


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


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_backend_has_a_clustering_of_its_own(backend: str) -> None:
    query, key, _ = tensors(200)
    left_open, lloyd = (
        find_clusters(query, key, config=f"QK4R1B32{option}", backend=backend) for option in ("", ",clustering=lloyd")
    )
    assert torch.equal(left_open.key_assignment, lloyd.key_assignment)
    assert MuSeConfig(clustering="auto").replace(clustering="auto").clustering == "lloyd"


@pytest.mark.parametrize("name", ["muse", "muse:paper"])
def test_settings_of_a_name_that_follows_the_length_are_compared_too(name: str) -> None:
    settings = attentions.settings_of(name)
    assert settings is not None
    attentions.check_meaning(name, settings)
    with pytest.raises(ValueError, match="other defaults"):
        attentions.check_meaning(name, {**settings, "4k": "QK8"})
    with pytest.raises(ValueError, match="other defaults"):
        attentions.check_meaning(name, None)


@pytest.mark.parametrize(
    ("attention", "on_cpu", "on_cuda"),
    [
        ("muse:QK8R2B128", "streaming", "lloyd"),
        ("muse:QK8R0B128,dipole=shared", "streaming", "streaming"),
        ("muse:Q8K8R2SP1B128,clustering=lloyd", "lloyd", "lloyd"),
        ("muse:Q8K8R2SP1B128,clustering=streaming", "streaming", "streaming"),
    ],
)
def test_what_recorded_names_meant(attention: str, on_cpu: str, on_cuda: str) -> None:
    for device, clustering in {"cpu": on_cpu, "cuda": on_cuda}.items():
        name = recorded_name(attention, 1024, device)
        assert name == f"muse:{MuSeConfig.parse(attention.removeprefix('muse:')).replace(clustering=clustering)}"
        assert may_mean(attention, name, 1024)
    assert not may_mean(attention, "muse:QK4", 1024)


def test_without_a_block_size_blocks_were_of_8k() -> None:
    assert recorded_name("muse:QK32R2,seed=1", 4096, "cuda") == "muse:Q32K32R2SP1B8k,clustering=lloyd,seed=1"


def test_names_in_one_option() -> None:
    assert split_names(["exact, muse,muse:QK32R2,seed=1,tilt=false", "moba:L1kB64R2,exact"]) == [
        "exact",
        "muse",
        "muse:QK32R2,seed=1,tilt=false",
        "moba:L1kB64R2",
    ]


def test_muse_alone_was_the_papers_scaling_rule() -> None:
    assert recorded_name("muse", 65536, "cuda") == "muse:Q128K128R8SP1B8k,clustering=lloyd"
    assert recorded_name("muse", None, "cuda") == "muse"
    assert recorded_name("exact", 65536, "cuda") == "exact"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_results_from_before_names_were_full_are_read_as_what_they_are(device: str, tmp_path: Path) -> None:
    settings = {"model": "m", "text": "t", "length": 64, "samples": 1, "device": device, "dtype": "float32"}
    entry = {"attention": "muse:QK4R1B16", "config": {**dataclasses.asdict(MuSeConfig.parse("QK4R1B16"))}}
    entry["config"]["clustering"] = "auto"  # type: ignore[index]
    document = {
        "machine": {},
        "settings": settings,
        "commands": [],
        "layers": [0],
        "has_all_layers": True,
        "measured": [{**entry, "length": 64, "samples": [[{name: [0.1] for name in layers.MEASURES}]]}],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    clustering = "lloyd" if device == "cuda" else "streaming"
    (request,) = layers.FidelityResults.read(path).measured
    assert request.attention == f"muse:Q4K4R1SP1B16,clustering={clustering}"


def test_names_beside_settings_that_say_the_clustering_are_left_alone() -> None:
    entry = {"attention": "muse:QK4", "config": {"clustering": "lloyd"}}
    document: dict[str, Any] = {"settings": {"device": "cpu"}, "measured": [entry]}
    assert with_full_names(document) == document
    entry["config"] = {"clustering": "auto"}
    (named,) = with_full_names(document)["measured"]
    assert named["attention"].endswith("clustering=streaming")
    assert named["config"]["clustering"] == "streaming"


@pytest.mark.parametrize(
    ("requested", "attention", "read"),
    [
        ("muse:QK4", "muse:QK4", "muse:Q4K4R4SP1B8k,clustering=streaming"),
        ("muse", "muse:QK4", "muse"),
        ("muse:QK4", "muse:Q4K4R8SP1B8k,clustering=lloyd", "muse:QK4"),
    ],
)
def test_what_was_requested_is_renamed_in_files_from_before_alone(requested: str, attention: str, read: str) -> None:
    case = {"requested": requested, "attention": attention, "length": 65536}
    (found,) = with_full_names({"settings": {"device": "cpu"}, "cases": [case]})["cases"]
    assert found["requested"] == read


@pytest.mark.long
def test_a_run_from_before_names_were_full_goes_on_as_it_ran(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = override(SMALL, ["attention=muse:QK4R1B16", "steps=4", "exact_tail=0", "probe_every=0"])
    with monkeypatch.context() as before:
        before.setattr(config, "AUTO_CLUSTERING", "streaming")
        before.setattr(training, "with_full_name", lambda recipe, output, device: recipe)
        config._parse_cached.cache_clear()
        with pytest.raises(KeyboardInterrupt):
            train(corpus, recipe, tmp_path / "stopped", on_step=stop_at(3))
    config._parse_cached.cache_clear()
    assert run_recipe(tmp_path / "stopped").attention == "muse:QK4R1B16"
    train(corpus, recipe, tmp_path / "stopped", resume=True)
    streaming = "muse:Q4K4R1SP1B16,clustering=streaming"
    assert run_recipe(tmp_path / "stopped").attention == streaming
    train(corpus, override(recipe, [f"attention={streaming}"]), tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"has attention=.*clustering=streaming, not .*clustering=lloyd"):
        train(corpus, recipe, tmp_path / "stopped", resume=True)


@pytest.mark.filterwarnings("ignore:.*exact attention runs where")
def test_a_run_records_what_the_papers_method_is_at_its_length(corpus: Any, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["attention=muse:paper", "steps=2", "probe_every=0"]), tmp_path)
    assert run_recipe(tmp_path).attention == f"muse:{MuSeConfig.paper(64)}"
