"""Shared by commands that measure a language model: the model, its texts, and their options."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from muse_lab.benchmark.workload import DTYPES, check_device
from muse_lab.cli.app import busy, say
from muse_lab.cli.options import flag, option
from muse_lab.evaluation.settings import TextSettings, check_context, describe_model, take_fingerprint
from muse_lab.evaluation.texts import describe_texts, read_samples, read_samples_inside
from muse_lab.models import DEFAULT_MODEL, PreTrainedModel, PreTrainedTokenizerBase, load_model

Model = Annotated[
    str,
    typer.Argument(
        help=f"Directory of a causal language model, {DEFAULT_MODEL}, or with --download a Hugging Face name.",
        show_default=DEFAULT_MODEL,
    ),
]
Download = Annotated[bool, flag("--download", "Download the model, named like org/model, from the Hugging Face hub.")]
Text = Annotated[
    list[Path] | None,
    option(
        "Text file, or directory of .py, .txt and .md files. Repeatable.", "the source of Python's standard library"
    ),
]
Length = Annotated[str, option("Sample length in tokens; k means 1024.")]
Dtype = Annotated[str | None, option("float32, bfloat16 or float16.", "float32 on cpu, bfloat16 on cuda")]
_STACK = "\nException raised from "
"""Begins the stack of C++ calls that some warnings of PyTorch end with."""


@dataclass(frozen=True)
class Place:
    """Where a model runs, and in which precision."""

    device: str
    dtype: str

    @classmethod
    def choose(cls, device: str | None, dtype: str | None) -> Place:
        """The device and dtype asked for, or this machine's defaults; raises ValueError for unknown ones."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(device)
        dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
        return cls(device, dtype)


def name_of(path: str | Path) -> str:
    """The last part of a path; for the model in the folder of a run, the name of the run."""
    folder = Path(path).expanduser().resolve()
    is_in_a_run = folder.name == "model" and (folder.parent / "run.json").is_file()
    return folder.parent.name if is_in_a_run else folder.name


def load_quietly(
    model: str, place: Place, *, download: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model without progress bars and warnings of transformers; raises ValueError or ImportError."""
    with busy(f"loading {name_of(model)}"):
        silence_transformers()
        return load_model(model, dtype=DTYPES[place.dtype], device=place.device, download=download)


def silence_transformers() -> None:
    """Switch off the progress bars and warnings of transformers, if it is installed."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


@dataclass(frozen=True)
class Subject:
    """A model and the tokens that it is measured on."""

    model: PreTrainedModel
    tokens: Tensor
    """(samples, length)"""
    settings: TextSettings


def open_subject(
    model: str,
    texts: Sequence[Path],
    length: int,
    samples: int,
    place: Place,
    *,
    download: bool = False,
    inside_files: bool = False,
) -> Subject:
    """Load a model and read its text; raises a ValueError or ImportError of one line if that is not possible."""
    loaded, tokenizer = load_quietly(model, place, download=download)
    check_context(loaded, length)
    with busy(f"reading {describe_texts(texts)}"):
        read = (read_samples_inside if inside_files else read_samples)(tokenizer, texts, length, samples)
        model_settings = settings_of_model(model, loaded, place, read.tokens)
    return Subject(
        loaded, read.tokens, TextSettings(text=read.source, length=length, samples=samples, **model_settings)
    )


def settings_of_model(name: str, model: PreTrainedModel, place: Place, tokens: Tensor) -> dict[str, Any]:
    """The settings of every measurement that describe the model; `tokens` are part of its fingerprint."""
    return {
        "model": describe_model(name_of(name), model),
        "device": place.device,
        "dtype": place.dtype,
        "fingerprint": take_fingerprint(model, tokens),
    }


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Print each warning as one line, without its source code and without PyTorch's stack of C++ calls."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where: say(str(message).partition(_STACK)[0])
        yield
