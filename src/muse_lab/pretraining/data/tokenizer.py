"""Byte-level BPE: trained on a sample, kept as the `tokenizer.json` of transformers, and fast on Python sources.

Delimiters are placed by their ids; a text that spells one out, as this file does, is encoded as any other text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from muse_attention.core.extras import how_to_install
from muse_lab.pretraining.data.corpus_documents import END_MARK, FILE_MARK, MARKS, REPOSITORY_MARK, Document
from muse_lab.records.untrusted import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizer
else:  # in annotations alone: the library is not always installed
    Tokenizer = Any

SMALLEST_VOCABULARY = 256 + len(MARKS)
_OTHER_END_MARK = "<|endoftext|>"
"""End mark of tokenizers that were trained elsewhere."""
_WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""How the byte-level pre-tokenizer splits ASCII."""
_LONGEST_TRAINED_WORD = 256
"""Bytes; longer words are cut in training, whose time grows with the square of the length. No token is longer."""
_LONGEST_KNOWN_WORD = 64
"""Characters; tokens of longer words are not remembered."""
_KNOWN_WORDS = 2**20


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer, the same for the same texts; its vocabulary is smaller if they yield fewer merges."""
    check_vocabulary(vocabulary)
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    words = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = library.pre_tokenizers.Split(library.Regex(f".{{1,{_LONGEST_TRAINED_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([words, parts])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(words.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words  # encoding takes time in proportion to the length of a word, so none is cut
    return tokenizer


def check_vocabulary(vocabulary: int) -> None:
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {vocabulary} has no room for all bytes; choose at least {SMALLEST_VOCABULARY}"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, or the one in a folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer {str(file)!r}; give a tokenizer.json, or the folder of one")
    library = import_tokenizers()
    try:
        return library.Tokenizer.from_buffer(read_regular(file))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a tokenizer of the tokenizers library ({error})") from None


def for_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that reads delimiters in a text as plain text, and neither pads nor truncates."""
    plain = import_tokenizers().Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    plain.no_padding()
    plain.no_truncation()
    return plain


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The files, by name, from which `AutoTokenizer.from_pretrained` reads it."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _end_mark(tokenizer)}
    return {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}


class Encoder:
    """Documents as tokens, with an end mark behind each.

    Words of ASCII text are looked up, with the tokenizer's result several times faster; all other text goes through the
    tokenizer, on all cores.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokenizer = for_plain_text(tokenizer)
        self._ids = {mark: self._id(mark) for mark in (REPOSITORY_MARK, FILE_MARK)}
        self.end = self._id(_end_mark(tokenizer))
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values())
        self._knows_words = _is_plain_byte_level(self._tokenizer)
        self._tokens_of_word = functools.lru_cache(_KNOWN_WORDS)(self._encode_word)

    def encode(self, documents: Sequence[Document]) -> list[NDArray[np.uint32]]:
        unknown = [text for document in documents for _, text in document.pieces if not self._is_known(text)]
        try:
            encodings = self._tokenizer.encode_batch_fast(unknown, add_special_tokens=False)
        except TypeError:  # the library does not take such a text for a string
            raise ValueError("a text has a lone surrogate, which has no UTF-8; replace it before encoding") from None
        encoded = (np.array(encoding.ids, dtype="<u4").tobytes() for encoding in encodings)
        tokens = []
        for document in documents:
            parts = []
            for mark, text in document.pieces:
                parts.append(_as_bytes(self._ids[mark]) if mark else b"")
                parts.append(self._look_up(text) if self._is_known(text) else next(encoded))
            parts.append(_as_bytes(self.end))
            tokens.append(np.frombuffer(b"".join(parts), dtype="<u4"))
        return tokens

    def _is_known(self, text: str) -> bool:
        return self._knows_words and text.isascii()

    def _look_up(self, text: str) -> bytes:
        words = _WORDS.findall(text)
        return b"".join(
            self._tokens_of_word(word) if len(word) <= _LONGEST_KNOWN_WORD else self._encode_word(word)
            for word in words
        )

    def _encode_word(self, word: str) -> bytes:
        return np.array(self._tokenizer.encode(word, add_special_tokens=False).ids, dtype="<u4").tobytes()

    def _id(self, mark: str) -> int:
        token: int | None = self._tokenizer.token_to_id(mark)
        if token is None:
            raise ValueError(
                f"the tokenizer has no token {mark}; choose one that has, or train one: leave out --tokenizer"
            )
        return token


@functools.cache
def _as_bytes(token: int) -> bytes:
    return np.array([token], dtype="<u4").tobytes()


def _end_mark(tokenizer: Tokenizer) -> str:
    return _OTHER_END_MARK if tokenizer.token_to_id(END_MARK) is None else END_MARK


def _is_plain_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether it splits text as those trained here do, and encodes each word by itself."""
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    splits = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return (
        state["normalizer"] is None
        and splits.items() <= (state["pre_tokenizer"] or {}).items()
        and (model["type"], model.get("dropout")) == ("BPE", None)
        and all(token["special"] for token in state["added_tokens"])
    )


def import_tokenizers() -> Any:
    """The library, or an ImportError that says how to get it."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(f"tokenizers is not installed: {how_to_install('pretraining')}") from None
    return tokenizers
