"""Texts to measure a model on, as samples of equal length: Python's standard library, or any files."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from muse_lab.models import PreTrainedTokenizerBase

_SUFFIXES = (".py", ".txt", ".md")
"""Files of a folder that are read."""
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Samples:
    tokens: Tensor
    """(samples, length)"""
    source: str
    """what they were taken from, in words"""


def read_samples(tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], length: int, number: int) -> Samples:
    """The first `number` times `length` tokens of some files and folders, or of the standard library if there are none.

    Files are read one after another, and cut without regard to where one ends. Every sample begins as the tokenizer
    begins a text.
    """
    begin, fresh = _beginning(tokenizer, length, number)
    tokens: list[int] = []
    for _, text in read_texts(paths):
        tokens += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(tokens) >= number * fresh:
            break
    else:
        raise ValueError(
            f"the text has {len(tokens)} tokens, too few for {number} samples of {length}: "
            "give more text, fewer samples or a smaller length"
        )
    samples = [begin + tokens[start : start + fresh] for start in range(0, number * fresh, fresh)]
    return Samples(torch.tensor(samples), describe_texts(paths))


def read_samples_inside(tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], length: int, number: int) -> Samples:
    """Samples that are each inside one file: the first of every file that is long enough, then the second."""
    begin, fresh = _beginning(tokenizer, length, number)
    chunks: list[tuple[int, list[int]]] = []
    """where each begins in its file, and its tokens"""
    for _, text in read_texts(paths):
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        chunks += [(start, tokens[start : start + fresh]) for start in range(0, len(tokens) - fresh + 1, fresh)]
        if sum(start == 0 for start, _ in chunks) == number:
            break
    samples = [begin + sample for _, sample in sorted(chunks, key=lambda chunk: chunk[0])[:number]]
    if len(samples) < number:
        raise ValueError(
            f"the text has {len(samples)} samples of {length} tokens inside single files, too few for {number}: give "
            "more or longer files, fewer samples or a smaller length"
        )
    return Samples(torch.tensor(samples), f"{describe_texts(paths)}, each sample inside one file")


def _beginning(tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> tuple[list[int], int]:
    """The tokens with which every sample begins, and how many tokens of a text follow them in a sample."""
    if length < 2 or number < 1:
        raise ValueError(f"cannot measure {number} samples of {length} tokens; use at least 1 sample of 2 tokens")
    begin: list[int] = tokenizer("").input_ids
    return begin, length - len(begin)


def read_texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The (path, text) of files, of those in folders, or of the standard library if no paths are given.

    Paths are relative to their folder.
    """
    for folder, file in list(_files(paths)) if paths else _standard_library():
        try:
            name = file.relative_to(folder).as_posix().encode("utf-8", "replace").decode()  # decoded as the text is
            yield name, file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from None


def describe_texts(paths: Sequence[Path]) -> str:
    if not paths:
        return f"the source of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    return ", ".join(path.name for path in paths)


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """(folder, file) of every text."""
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
            yield from ((path, file) for file in files)
        elif path.is_file():
            yield path.parent, path
        else:
            raise ValueError(f"there is no text {str(path)!r}; give files, or folders of {', '.join(_SUFFIXES)} files")


def _standard_library() -> list[tuple[Path, Path]]:
    """(folder, file) of its modules in alphabetical order, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file for file in folder.rglob("*.py") if not _NOT_LIBRARY.intersection(file.relative_to(folder).parts)
    )
    return [(folder, file) for file in files]
