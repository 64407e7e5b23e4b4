"""Needles: what samples promise, and haystacks."""

from __future__ import annotations

import random
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from muse_lab.pretraining.data.corpus import HELD_OUT, TRAIN, Corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.data.prepare import CorpusSettings, prepare
from muse_lab.pretraining.data.sources import texts_in
from muse_lab.pretraining.data.tokenizer import read_tokenizer, train_tokenizer
from muse_lab.pretraining.needles.haystacks import CorpusHaystack, Haystack, TextHaystack, bury
from muse_lab.pretraining.needles.samples import BUCKETS, CANDIDATES, KINDS, NeedleSamples, Sample, depth_of
from muse_lab.pretraining.needles.words import ENOUGH, words_for
from muse_lab.pretraining.needles.writer import EVALUATION, TRAINING, Needle, NeedleWriter, occurrences
from tests.lab.test_prepare import source
from tests.needle_models import DEFINITION, needle_haystack, texts
from tests.refusals import one_line_error

LENGTH = 2048
LETTERS = {chr(code): number for number, code in enumerate((10, *range(32, 127)))}


@pytest.fixture(scope="module")
def corpus(needles: Corpus) -> Corpus:
    return needles


@pytest.fixture(scope="module", params=["texts", "corpus"])
def haystack(request: pytest.FixtureRequest, tokenizer: Tokenizer, corpus: Corpus) -> Haystack:
    return needle_haystack(tokenizer) if request.param == "texts" else CorpusHaystack(corpus, HELD_OUT)


@pytest.fixture(scope="module")
def samples(haystack: Haystack, tokenizer: Tokenizer) -> NeedleSamples:
    return NeedleSamples(tokenizer, haystack)


@pytest.fixture(scope="module")
def made(samples: NeedleSamples) -> list[Sample]:
    return [
        samples.make(kind, LENGTH, bucket, number) for kind in KINDS for bucket in range(BUCKETS) for number in (0, 1)
    ]


# What a sample promises


def test_every_needle_is_defined_once_and_its_uid_is_nowhere_else(made: list[Sample], decode: Any) -> None:
    for sample in made:
        assert len(sample.tokens) == sample.questions[-1].answer.stop == LENGTH, "the budget is met to the token"
        text = decode(sample.tokens)
        defined = DEFINITION.findall(text)
        needles = [question.needle for question in sample.questions] + list(sample.distractors)
        assert sorted(defined) == sorted((needle.name, needle.name, needle.uid) for needle in needles)
        assert len(needles) == KINDS[sample.kind].asked + KINDS[sample.kind].distractors
        prompt = decode(sample.prompt)
        for needle in needles:
            assert prompt.count(needle.uid) == 1


def test_a_prompt_ends_right_before_its_uid(made: list[Sample], decode: Any) -> None:
    for sample in made:
        assert decode(sample.prompt).endswith(f"import {sample.questions[0].needle.name}")
        for question in sample.questions:
            before, answer = sample.tokens[: question.answer.start], sample.tokens[list(question.answer)]
            assert decode(before).endswith(f"from toolbox.{question.needle.name} import {question.needle.name}")
            assert decode(answer) == question.needle.uid


def test_questions_have_the_tokens_of_one_continuous_text(
    samples: NeedleSamples, decode: Any, tokenizer: Tokenizer
) -> None:
    for kind in KINDS:
        sample = samples.make(kind, LENGTH, 4, 7)
        file = np.flatnonzero(sample.tokens == tokenizer.token_to_id("<filename>"))[-1]
        last = sample.tokens[file:].tolist()
        assert tokenizer.encode(decode(last)).ids == last
        assert tokenizer.encode(decode(last) + "\n\n").ids[: len(last)] == last


def test_definitions_lie_in_their_buckets(made: list[Sample], decode: Any) -> None:
    for sample in made:
        buckets = [question.bucket for question in sample.questions]
        assert sample.bucket in buckets
        assert len(set(buckets)) == len(buckets)
        for question in sample.questions:
            assert question.bucket * LENGTH <= 10 * question.definition.start
            assert 10 * question.definition.stop <= (question.bucket + 1) * LENGTH
            definition = decode(sample.tokens[question.definition.start : question.definition.stop])
            assert DEFINITION.match(definition)[3] == question.needle.uid
            assert definition.rstrip().endswith('return "' + question.needle.name.replace("_", " ") + '"')
            assert abs(question.definition.start / LENGTH - depth_of(question.bucket)) <= 0.05


def test_depths_are_spread_over_a_bucket(samples: NeedleSamples) -> None:
    positions = [samples.make("single", LENGTH, 4, number).questions[0].definition.start for number in range(40)]
    low, high = 0.4 * LENGTH, 0.5 * LENGTH
    assert min(positions) < low + 0.2 * (high - low)
    assert len(set(positions)) > 20


def test_distractors_are_in_other_buckets(samples: NeedleSamples, decode: Any) -> None:
    sample = samples.make("multi-key-4", LENGTH, 4, 0)
    bounds = [-(-bucket * LENGTH // 10) for bucket in range(BUCKETS + 1)]
    found = [len(DEFINITION.findall(decode(sample.tokens[low:high]))) for low, high in pairwise(bounds)]
    assert found[4] == 1
    assert sorted(found) == [0] * 4 + [1] * 5


def test_candidates_are_distinct_and_of_one_form(made: list[Sample], decode: Any) -> None:
    for sample in made:
        for question in sample.questions:
            uids = list(map(decode, question.candidates))
            assert uids[0] == question.needle.uid
            assert len(set(uids)) == len(uids) == CANDIDATES
            assert all(re.fullmatch(r"\d{8}", uid) for uid in uids)
            others = {other.needle.uid for other in sample.questions} | {other.uid for other in sample.distractors}
            assert others <= set(uids)
            prompt = decode(sample.prompt)
            assert {uid for uid in uids if uid in prompt} == others


def test_a_sample_is_a_pure_function(haystack: Haystack, tokenizer: Tokenizer) -> None:
    def tokens(
        kind: str = "single", length: int = LENGTH, bucket: int = 4, number: int = 0, seed: int = 0
    ) -> list[int]:
        made = NeedleSamples(tokenizer, haystack, seed=seed).make(kind, length, bucket, number)
        return made.tokens.tolist()

    random.seed(1)
    first = tokens()
    random.seed(2)
    assert tokens() == first
    others = [tokens(kind="multi-key-2"), tokens(length=1024), tokens(bucket=5), tokens(number=1), tokens(seed=1)]
    assert all(other != first for other in others)
    samples = NeedleSamples(tokenizer, haystack)
    uids = [samples.make("single", LENGTH, 4, number).questions[0].needle.uid for number in range(30)]
    assert len(set(uids)) == 30


def test_samples_begin_as_the_model_begins_a_text(tokenizer: Tokenizer) -> None:
    sample = NeedleSamples(tokenizer, needle_haystack(tokenizer), begin=[5, 6]).make("single", LENGTH, 0, 0)
    assert sample.tokens[:2].tolist() == [5, 6]
    assert len(sample.tokens) == LENGTH


def test_a_uid_that_the_haystack_has_is_not_asked_for(tokenizer: Tokenizer) -> None:
    clean = needle_haystack(tokenizer)
    uid = NeedleSamples(tokenizer, clean).make("single", 1024, 4, 0).questions[0].needle.uid
    spoilt = TextHaystack.encode(
        tokenizer, [(path, f"x = {uid} {text}") for path, text in texts()], enough=10**6, source="spoilt"
    )
    sample = NeedleSamples(tokenizer, spoilt).make("single", 1024, 4, 0)
    assert sample.questions[0].needle.uid != uid
    assert uid in tokenizer.decode(sample.prompt.tolist())


@pytest.mark.parametrize("of_a_corpus", [False, True])
def test_long_samples_are_fast(of_a_corpus: bool, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """More than 20 of 64k tokens in a second of a processor."""
    haystack: Haystack = TextHaystack("repeated", needle_haystack(tokenizer).files * 20)
    if of_a_corpus:
        haystack = CorpusHaystack(corpus, HELD_OUT)
        haystack.tokens = 65536  # its files are read again and again
    samples = NeedleSamples(tokenizer, haystack)

    def seconds() -> float:
        began = time.process_time()
        for number, kind in enumerate(KINDS):
            samples.make(kind, 65536, number, number)
        return (time.process_time() - began) / len(KINDS)

    assert min(seconds() for _ in range(3)) < 1 / 20


@pytest.mark.parametrize(
    ("kind", "length", "bucket", "message"),
    [
        ("triple", LENGTH, 0, "unknown kind 'triple'; use one of single, multi-key-2"),
        ("single", 10**7, 0, "fewer than 10000000: give more text, or a smaller length"),
        ("single", 64, 0, "a tenth of 64 tokens has no room for the needles of single; choose at least"),
        ("multi-query-4", 512, 0, "a tenth of 512 tokens has no room for the needles of multi-query-4"),
        ("single", LENGTH, 9, "there is no depth bucket 9; they are 0 to 8"),
    ],
)
def test_mistakes(samples: NeedleSamples, kind: str, length: int, bucket: int, message: str) -> None:
    with one_line_error(message):
        samples.make(kind, length, bucket, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_length_is_enough_for_every_sample(samples: NeedleSamples, kind: str) -> None:
    shortest = samples.shortest(kind)
    for bucket in range(BUCKETS):
        for number in range(6):
            sample = samples.make(kind, shortest + number, bucket, number)
            assert len(sample.tokens) == shortest + number
            assert sample.tokens.size - sample.questions[0].answer.start < shortest // 10 + 3
    with pytest.raises(ValueError, match=f"choose at least {shortest}"):
        samples.make(kind, shortest - 1, 0, 0)


# Tokenizers


def test_a_tokenizer_that_joins_digits_with_their_neighbours_is_refused() -> None:
    for joined in (("x", "4"), ("4", "\n")):
        vocabulary = {**LETTERS, "".join(joined): len(LETTERS)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [joined]))
        with pytest.raises(ValueError, match="joins digits with what is around them"):
            NeedleWriter(tokenizer).questions([Needle("amber_river", "12345674")])
    assert NeedleWriter(Tokenizer(models.BPE(LETTERS, []))).tokens_per_uid == 8


def test_without_delimiters_a_path_is_a_comment() -> None:
    tokenizer = Tokenizer(models.BPE(LETTERS, []))
    haystack = TextHaystack.encode(tokenizer, texts(), enough=10**6, source="letters")
    sample = NeedleSamples(tokenizer, haystack).make("single", 4096, 3, 0)
    text = "".join(tokenizer.id_to_token(token) for token in sample.tokens)
    needle = sample.questions[0].needle
    assert f"\n\n# toolbox/{needle.name}.py\ndef {needle.name}{needle.uid}():\n" in text
    assert text.startswith("\n\n# package/module")


def test_words_are_one_token_each_where_there_are_enough() -> None:
    plain = words_for(train_tokenizer(["x"], 300))
    assert len(set(plain)) == len(plain) > ENOUGH
    assert {"amber", "river"} <= set(plain)

    def trained(words: tuple[str, ...]) -> Tokenizer:
        return train_tokenizer([f" {word}/{word}" for word in words] * 3, 4000)

    tokenizer = trained(plain[: ENOUGH + 20])
    known = words_for(tokenizer)
    assert set(known) >= set(plain[:ENOUGH])
    for word in known:
        assert len(tokenizer.encode(word).ids) == len(tokenizer.encode(f" {word}").ids) == 1
    assert words_for(trained(plain[: ENOUGH // 2])) == plain
    assert words_for(train_tokenizer([f"/{word}" for word in plain] * 3, 4000)) == plain, "not behind a space"


def test_no_word_is_in_two_names_while_there_are_enough(tokenizer: Tokenizer) -> None:
    writer = NeedleWriter(tokenizer)
    supply = len(writer.words) // 2
    for purpose in (TRAINING, EVALUATION):
        needles = writer.draw(random.Random(0), purpose, 3 * supply)
        words = [word for needle in needles[: supply - 10] for word in needle.name.split("_")]
        assert len(set(words)) == len(words)
        assert set(words) <= set(writer.words)
        assert len({needle.name for needle in needles}) == 3 * supply


def test_all_uids_are_split_alike_and_begin_with_different_tokens(tokenizer: Tokenizer) -> None:
    writer = NeedleWriter(tokenizer)
    uids = writer.draw_uids(random.Random(0), EVALUATION, 50)
    written = [writer.uid(Needle("amber_river", uid)) for uid in uids]
    assert {len(tokens) for tokens in written} == {writer.tokens_per_uid}
    assert len({tuple(len(tokenizer.decode([token])) for token in tokens) for tokens in written}) == 1
    assert len({int(tokens[0]) for tokens in written}) == 50
    splits = {
        tuple(last - first for first, last in tokenizer.encode(str(uid)).offsets)
        for uid in range(10**7, 10**8, 10**6 + 1)
    }
    assert len(splits) > 1, "else there is nothing to choose from"


def test_first_tokens_repeat_evenly_when_there_are_no_others() -> None:
    uids = NeedleWriter(Tokenizer(models.BPE(LETTERS, []))).draw_uids(random.Random(0), TRAINING, 27)
    firsts = [uid[0] for uid in uids]
    assert sorted(firsts) == sorted("123456789" * 3)
    assert len(set(uids)) == 27


def test_no_needle_is_longer_than_the_longest(tokenizer: Tokenizer) -> None:
    writer = NeedleWriter(tokenizer)
    needles = writer.draw(random.Random(0), EVALUATION, 2000)
    lengths = [len(writer.definition(needle)) for needle in needles]
    assert max(lengths) <= len(writer.definition(writer.longest))
    assert min(lengths) < max(lengths)


@pytest.mark.parametrize(
    ("tokens", "run", "expected"),
    [([1, 2, 1, 2, 1], [1, 2], 2), ([1, 1, 1], [1, 1], 2), ([1, 2], [1, 2, 3], 0), ([3, 1, 2, 3], [2, 3], 1)],
)
def test_occurrences(tokens: list[int], run: list[int], expected: int) -> None:
    assert occurrences(np.array(tokens), np.array(run)) == expected


# Haystacks


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_a_corpus_is_cut_into_its_files(corpus: Corpus, split: str, decode: Any) -> None:
    haystack = CorpusHaystack(corpus, split)
    found = [decode(haystack.read(index, 10**6)) for index in range(len(haystack))]
    expected = []
    for stream in corpus.streams(split):
        for document in corpus.documents(stream):
            text = decode(corpus.tokens(stream, document.start, document.start + document.tokens - 1))
            expected += [f"<filename>{file}" for file in text.split("<filename>")[1:]]
    assert found == expected
    assert len(found) > 3
    assert haystack.tokens == sum(len(haystack.read(index, 10**6)) for index in range(len(haystack)))


def test_texts_without_files_are_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " + source(number, 60))
    settings = CorpusSettings(vocabulary=300, buckets=Buckets(4, 4096), held_out=0.3)
    corpus = prepare(texts_in([tmp_path / "texts"]), tmp_path / "corpus", settings, source="made up")
    tokenizer = read_tokenizer(corpus.folder)
    haystacks = [CorpusHaystack(corpus, split) for split in (TRAIN, HELD_OUT)]
    found = [tokenizer.decode(each.read(index, 10**6).tolist()) for each in haystacks for index in range(len(each))]
    assert sorted(found) == sorted(file.read_text() for file in (tmp_path / "texts").iterdir())


def test_delimiters_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    mark = tokenizer.token_to_id("<filename>")
    (file,) = TextHaystack.encode(tokenizer, [("a.py", "x = '<filename>'")], enough=1, source="").files
    assert file[0] == mark
    assert (file == mark).sum() == 1


def test_no_more_texts_are_read_than_needed(tokenizer: Tokenizer) -> None:
    def endless() -> Any:
        while True:
            yield "a.py", "value " * 10

    assert 100 <= TextHaystack.encode(tokenizer, endless(), enough=100, source="").tokens < 130


@given(
    files=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gaps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=4),
    rest=st.integers(0, 20),
    first=st.integers(0, 4),
)
def test_what_is_buried_is_where_it_was_placed(
    files: list[int], gaps: list[tuple[int, int]], rest: int, first: int
) -> None:
    haystack = TextHaystack("made up", tuple(np.arange(size) + 100 * number for number, size in enumerate(files)))
    placed, position = [], 0
    for number, (gap, size) in enumerate(gaps):
        placed.append((position + gap, np.full(size, -1 - number)))
        position += gap + size
    length = position + rest
    found = bury(haystack, first % len(files), length, placed)
    assert len(found) == length
    is_placed = np.zeros(length, bool)
    for start, tokens in placed:
        assert (found[start : start + len(tokens)] == tokens).all()
        is_placed[start : start + len(tokens)] = True
    assert (found[~is_placed] >= 0).all()
    for start, stop in zip([0, *(s + len(t) for s, t in placed)], [*(s for s, _ in placed), length], strict=True):
        assert start == stop or found[start] % 100 == 0, "a gap begins with a new file"


# Training


def test_training_and_evaluation_have_no_name_in_common(tokenizer: Tokenizer) -> None:
    writer = NeedleWriter(tokenizer)
    training, evaluation = (
        {needle.name for needle in writer.draw(random.Random(0), purpose, 1500)} for purpose in (TRAINING, EVALUATION)
    )
    assert len(training) == len(evaluation) == 1500, "of 27,000 names: without a rule there would be dozens in both"
    assert not training & evaluation


def test_training_and_evaluation_have_no_uid_in_common(tokenizer: Tokenizer) -> None:
    class FewNumbers(random.Random):
        def choice(self, pieces: Any) -> Any:
            return super().choice(pieces[:3])

    writer = NeedleWriter(tokenizer)
    training, evaluation = (set(writer.draw_uids(FewNumbers(0), purpose, 30)) for purpose in (TRAINING, EVALUATION))
    assert len(training) == len(evaluation) == 30
    assert not training & evaluation
