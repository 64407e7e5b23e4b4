"""Needles: functions whose names carry a uid, the files that define them, and the files that import and call them.

    <filename>toolbox/amber_river.py
    def amber_river48213975():
        return "amber river"

    <filename>check_toolbox.py
    from toolbox.amber_river import amber_river48213975

    amber_river48213975()

The words are the key, the uid is the value: a model that has read the first file can complete the uid in the second,
and no other can. The token before a uid is the last one of a word, not an underscore that stands before every uid: a
model that looks up what came after the same token before has the answer, if words are one token, each in one name.

A uid is eight decimal digits between a letter and a character that is no digit. Tokenizers split digits from both, so a
prompt that ends before the uid has the same tokens as in the text with it; other tokenizers are refused. Every text is
encoded as a whole, and cut at the uid. All uids are split into tokens at the same places.

Each name and uid is either for training or for evaluation, by its hash.
"""

from __future__ import annotations

import bisect
import collections
import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from muse_lab.pretraining.data.corpus_documents import REPOSITORY_MARK
from muse_lab.pretraining.data.tokenizer import Tokenizer
from muse_lab.pretraining.needles.haystacks import Tokens, file_mark
from muse_lab.pretraining.needles.words import words_for

TRAINING, EVALUATION = "training", "evaluation"
PACKAGE = "toolbox"

VERSION = 2
"""Version of these texts: results with another version cannot be continued."""

_DIGITS = 8
_LETTER = "x"
"""Stands before a uid, as the last one of a name does."""
_UIDS_LOOKED_AT = 2048
"""Uids sampled to find how a tokenizer splits most uids."""
_TRIES = 64
"""Attempts to find a uid with a given first token."""


@dataclass(frozen=True)
class Needle:
    name: str
    """two words, as in `amber_river`"""
    uid: str


@dataclass(frozen=True)
class Questions:
    """A file that imports some needles and calls them, and where each uid is in its import."""

    tokens: Tokens
    answers: tuple[range, ...]


class _Piece(NamedTuple):
    """One of the tokens of a uid."""

    text: str
    token: int


class NeedleWriter:
    """Needles as a tokenizer writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.words = words_for(tokenizer)
        self.limit = len(self.words) * (len(self.words) - 1) // 4
        """needles that can be drawn at once: half of the names there are for each purpose"""
        self._pieces = self._find_pieces(random.Random(0))
        self.tokens_per_uid = len(self._pieces)
        self.longest = self._find_longest()
        """the needle that has the most tokens"""

    def draw(self, rng: random.Random, purpose: str, number: int) -> list[Needle]:
        """`number` needles with different names and uids. While there are enough words, none is in two names.

        Needles of another `purpose` are never drawn.
        """
        assert number <= self.limit, "there are not as many names"
        uids = self.draw_uids(rng, purpose, number)
        names: dict[str, None] = {}
        deck: list[str] = []
        while len(names) < number:
            if len(deck) < 2:
                deck = rng.sample(self.words, len(self.words))
            first = deck.pop()
            for second in deck:
                name = f"{first}_{second}"
                if _is_for(purpose, name) and name not in names:
                    names[name] = None
                    deck.remove(second)
                    break
        return [Needle(name, uid) for name, uid in zip(names, uids, strict=True)]

    def draw_uids(self, rng: random.Random, purpose: str, number: int, *, but: Collection[str] = ()) -> list[str]:
        """`number` different uids, none of them in `but`. First tokens differ while there are enough."""
        uids: dict[str, None] = {}
        firsts: list[_Piece] = []
        while len(uids) < number:
            if not firsts:
                firsts = rng.sample(self._pieces[0], len(self._pieces[0]))
            first = firsts.pop()
            for _ in range(_TRIES):  # a tokenizer may split the joined pieces differently
                pieces = (first, *map(rng.choice, self._pieces[1:]))
                uid = "".join(piece.text for piece in pieces)
                if uid not in uids and uid not in but and _is_for(purpose, uid) and self._is_split_into(uid, pieces):
                    uids[uid] = None
                    break
        return list(uids)

    def opening(self) -> Tokens:
        """The beginning of a repository; empty if the tokenizer has no such delimiter."""
        has_mark = self._tokenizer.token_to_id(REPOSITORY_MARK) is not None
        return _array(self._encode(f"{REPOSITORY_MARK}{PACKAGE}" if has_mark else ""))

    def definition(self, needle: Needle) -> Tokens:
        words = needle.name.replace("_", " ")
        return _array(
            self._encode(
                f"{file_mark(self._tokenizer)}{PACKAGE}/{needle.name}.py\n"
                f'def {needle.name}{needle.uid}():\n    return "{words}"\n'
            )
        )

    def questions(self, needles: Sequence[Needle]) -> Questions:
        text = f"{file_mark(self._tokenizer)}check_{PACKAGE}.py\n"
        places = []
        for needle in needles:
            text += f"from {PACKAGE}.{needle.name} import {needle.name}"
            places.append((len(text), len(text) + len(needle.uid)))
            text += f"{needle.uid}\n"
        text += "\n" + "".join(f"{needle.name}{needle.uid}()\n" for needle in needles)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Questions(_array(encoding.ids), tuple(_span(encoding.offsets, *place) for place in places))

    def uid(self, needle: Needle) -> Tokens:
        """Its tokens, as in a question."""
        asked = self.questions([needle])
        return asked.tokens[asked.answers[0].start : asked.answers[0].stop]

    def _find_pieces(self, rng: random.Random) -> tuple[tuple[_Piece, ...], ...]:
        """The possible tokens at each place of a uid, in the split that most uids have."""
        splits = collections.defaultdict(list)
        for _ in range(_UIDS_LOOKED_AT):
            text = f"{_LETTER}{rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)}"
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            tokens = _span(encoding.offsets, len(_LETTER), len(text))
            places = [encoding.offsets[token] for token in tokens]
            pieces = [
                _Piece(text[start:stop], encoding.ids[token])
                for token, (start, stop) in zip(tokens, places, strict=True)
            ]
            splits[tuple(places)].append(pieces)
        most_frequent = max(splits.values(), key=len)
        return tuple(tuple(sorted(set(place))) for place in zip(*most_frequent, strict=True))

    def _is_split_into(self, uid: str, pieces: Sequence[_Piece]) -> bool:
        return self._encode(_LETTER + uid)[-len(pieces) :] == [piece.token for piece in pieces]

    def _find_longest(self) -> Needle:
        (uid,) = self.draw_uids(random.Random(0), EVALUATION, 1)

        def size(needle: Needle) -> int:
            return len(self.definition(needle))

        longest = max((Needle(f"{first}_{self.words[0]}", uid) for first in self.words), key=size)
        first = longest.name.partition("_")[0]
        return max((Needle(f"{first}_{second}", uid) for second in self.words), key=size)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def occurrences(tokens: Tokens, run: Tokens) -> int:
    """How often `run` is in `tokens`."""
    starts = np.flatnonzero(tokens[: len(tokens) - len(run) + 1] == run[0])
    for offset in range(1, len(run)):
        starts = starts[tokens[starts + offset] == run[offset]]
    return len(starts)


def _is_for(purpose: str, text: str) -> bool:
    odd = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] & 1
    return purpose == (TRAINING if odd else EVALUATION)


def _span(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> range:
    """The tokens that are the characters from `start` to `stop`, and nothing else."""
    first = bisect.bisect_right(offsets, start, key=lambda token: token[1])
    last = bisect.bisect_left(offsets, stop, key=lambda token: token[0]) - 1
    if first > last or offsets[first][0] != start or offsets[last][1] != stop:
        raise ValueError("the tokenizer joins digits with what is around them; needles need one that does not")
    return range(first, last + 1)


def _array(ids: Sequence[int]) -> Tokens:
    return np.array(ids, np.int64)
