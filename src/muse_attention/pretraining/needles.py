"""Needles: functions whose names carry a uid, the files that define them, and the files that import and call them.

    <filename>toolbox/amber_river.py
    def amber_river_48213975():
        return "amber river"

    <filename>check_toolbox.py
    from toolbox.amber_river import amber_river_48213975

    amber_river_48213975()

The words are the key, the uid is the value: a model that has read the first file can complete the uid in the second,
and no other can. A uid is eight decimal digits between an underscore and what is no digit. Tokenizers keep digits apart
from both, so a prompt that ends before the uid has the tokens it would have in one text with it; a tokenizer that does
otherwise is refused. Every text is encoded as a whole, and cut at the uid. All uids have the same number of tokens.

Names and uids are either for training or for evaluation, by a hash of theirs: none is for both.
"""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muse_attention.pretraining.documents import REPOSITORY_MARK
from muse_attention.pretraining.haystacks import Tokens, file_mark

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINING, EVALUATION = "training", "evaluation"
PACKAGE = "toolbox"

_DIGITS = 8
_UIDS_LOOKED_AT = 64
"""To find how many tokens a uid has with a tokenizer, most often."""
_FIRST_WORDS = (
    "amber ancient autumn bitter blazing brave bright broken calm clever coastal copper coral crimson crystal curious "
    "distant dusty eager early emerald endless faded fierce frozen gentle golden hidden hollow humble iron ivory "
    "jagged lively lonely marble mellow misty narrow noble northern olive orange patient polished proud purple quiet "
    "rapid restless royal rustic sandy scarlet secret shady silent silver simple sleepy slender smooth solemn southern "
    "steady stormy sturdy sunny swift tidy velvet violet wandering western wild winter wooden yellow"
)
_SECOND_WORDS = (
    "anchor arrow badger bakery barrel basket beacon bridge bucket button candle canyon castle cellar chapel cherry "
    "circle citadel compass cottage desert dolphin eagle engine falcon feather fiddle forest fountain garden glacier "
    "hammer harbour harvest helmet horizon island jungle kettle ladder lantern library lizard lobster marsh meadow "
    "mirror monkey mountain needle orchard otter paddle palace pebble pepper pigeon pillow planet pocket prairie "
    "rabbit ribbon river rocket saddle salmon shadow shelter spider squirrel stable summit temple thunder timber "
    "tunnel turtle valley village violin walnut window"
)
_WORDS = (_FIRST_WORDS, _SECOND_WORDS)


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


class NeedleWriter:
    """Needles as a tokenizer writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        rng = random.Random(0)
        lengths = [len(self._encode(_random_uid(rng))) for _ in range(_UIDS_LOOKED_AT)]
        self.tokens_per_uid = collections.Counter(lengths).most_common(1)[0][0]
        self.longest = self._find_longest(self.draw_uids(rng, EVALUATION, 1)[0])
        """the needle that has the most tokens"""

    def draw(self, rng: random.Random, purpose: str, number: int) -> list[Needle]:
        """So many with different names and uids, and different words too while there are enough of them.

        Those of another `purpose` are never drawn.
        """
        uids = self.draw_uids(rng, purpose, number)
        firsts, seconds = (words.split() for words in _WORDS)
        names: list[str] = []
        while len(names) < number:
            rng.shuffle(firsts)
            rng.shuffle(seconds)
            pairs = map("_".join, zip(firsts, seconds, strict=False))
            names += [name for name in pairs if _is_for(purpose, name) and name not in names]
        return [Needle(name, uid) for name, uid in zip(names, uids, strict=False)]

    def draw_uids(self, rng: random.Random, purpose: str, number: int, *, but: Collection[str] = ()) -> list[str]:
        """So many different ones, and none of `but`."""
        found: list[str] = []
        while len(found) < number:
            uid = _random_uid(rng)
            if uid in found or uid in but or not _is_for(purpose, uid):
                continue
            if len(self._encode(uid)) == self.tokens_per_uid:
                found.append(uid)
        return found

    def opening(self) -> Tokens:
        """How a repository begins; nothing where the tokenizer has no such delimiter."""
        has_mark = self._tokenizer.token_to_id(REPOSITORY_MARK) is not None
        return _array(self._encode(f"{REPOSITORY_MARK}{PACKAGE}" if has_mark else ""))

    def definition(self, needle: Needle) -> Tokens:
        words = needle.name.replace("_", " ")
        return _array(
            self._encode(
                f"{file_mark(self._tokenizer)}{PACKAGE}/{needle.name}.py\n"
                f'def {needle.name}_{needle.uid}():\n    return "{words}"\n'
            )
        )

    def questions(self, needles: Sequence[Needle]) -> Questions:
        text = f"{file_mark(self._tokenizer)}check_{PACKAGE}.py\n"
        places = []
        for needle in needles:
            text += f"from {PACKAGE}.{needle.name} import {needle.name}_"
            places.append((len(text), len(text) + len(needle.uid)))
            text += f"{needle.uid}\n"
        text += "\n" + "".join(f"{needle.name}_{needle.uid}()\n" for needle in needles)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Questions(_array(encoding.ids), tuple(_span(encoding.offsets, *place) for place in places))

    def uid(self, needle: Needle) -> Tokens:
        """As it is in a question."""
        asked = self.questions([needle])
        return asked.tokens[asked.answers[0].start : asked.answers[0].stop]

    def _find_longest(self, uid: str) -> Needle:
        firsts, seconds = (words.split() for words in _WORDS)

        def size(needle: Needle) -> int:
            return len(self.definition(needle))

        longest = max((Needle(f"{first}_{seconds[0]}", uid) for first in firsts), key=size)
        first = longest.name.partition("_")[0]
        return max((Needle(f"{first}_{second}", uid) for second in seconds), key=size)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def occurrences(tokens: Tokens, run: Tokens) -> int:
    """How often `run` is in `tokens`."""
    starts = np.flatnonzero(tokens[: len(tokens) - len(run) + 1] == run[0])
    for offset in range(1, len(run)):
        starts = starts[tokens[starts + offset] == run[offset]]
    return len(starts)


def _random_uid(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))


def _is_for(purpose: str, text: str) -> bool:
    odd = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] & 1
    return purpose == (TRAINING if odd else EVALUATION)


def _span(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> range:
    """The tokens that are the characters from `start` to `stop`, and nothing else."""
    inside = [token for token, (first, last) in enumerate(offsets) if first < stop and last > start]
    if not inside or offsets[inside[0]][0] != start or offsets[inside[-1]][1] != stop:
        raise ValueError("the tokenizer joins digits with what is around them; needles need one that does not")
    return range(inside[0], inside[-1] + 1)


def _array(ids: Sequence[int]) -> Tokens:
    return np.array(ids, np.int64)
