"""Needles: what samples promise, haystacks, and needle documents among the samples of a training run."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("rich")

from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from muse_attention.cli import commands
from muse_attention.evaluation.needles import BUCKETS, CANDIDATES, KINDS, NeedleSamples, Sample, depth_of
from muse_attention.pretraining.batches import Batches, Windows
from muse_attention.pretraining.corpus import HELD_OUT, TRAIN, Corpus
from muse_attention.pretraining.documents import Buckets
from muse_attention.pretraining.haystacks import CorpusHaystack, Haystack, TextHaystack, bury
from muse_attention.pretraining.mixture import NeedleDocuments
from muse_attention.pretraining.needles import EVALUATION, TRAINING, Needle, NeedleWriter, occurrences
from muse_attention.pretraining.prepare import Settings, prepare
from muse_attention.pretraining.recipes import Recipe, override, tiny
from muse_attention.pretraining.sources import texts_in
from muse_attention.pretraining.tokenizer import read_tokenizer, train_tokenizer
from muse_attention.pretraining.training import make_batches, run_recipe, train
from muse_attention.pretraining.words import ENOUGH, words_for
from tests.needle_models import needle_haystack, needle_tokenizer, texts
from tests.test_prepare import make, source, sources
from tests.training_runs import assert_same_run, stop_at

LENGTH = 2048
DEFINITION = re.compile(r"<filename>toolbox/(\w+)\.py\ndef (\w+?)(\d{8})\(\):\n")
QUESTION = re.compile(r"from toolbox\.(\w+) import (\w+?)(\d{8})")
RECIPE: Recipe = override(
    tiny(),
    [
        *("steps=4", "length=256", "batch=4", "micro_batch=2", "attention=exact", "exact_tail=0", "warmup=2"),
        *("checkpoint_every=2", "probe_every=0", "mixture=niah", "mixture_share=0.5"),
    ],
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return needle_tokenizer()


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Its held-out split has more than one document, each shorter than a sample."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    settings = Settings(tokenizer=file, buckets=Buckets(64, 4096), held_out=0.3, tokens_per_shard=1000)
    return make(tmp_path_factory.mktemp("corpus"), settings, sources(30))


@pytest.fixture(scope="module", params=["texts", "corpus"])
def haystack(request: pytest.FixtureRequest, tokenizer: Tokenizer, corpus: Corpus) -> Haystack:
    return needle_haystack(tokenizer) if request.param == "texts" else CorpusHaystack(corpus, HELD_OUT)


@pytest.fixture(scope="module")
def samples(haystack: Haystack, tokenizer: Tokenizer) -> NeedleSamples:
    return NeedleSamples(tokenizer, haystack)


@pytest.fixture(scope="module")
def decode(tokenizer: Tokenizer) -> Callable[[Any], str]:
    return lambda tokens: tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)


def all_samples(samples: NeedleSamples) -> list[Sample]:
    return [
        samples.make(kind, LENGTH, bucket, number) for kind in KINDS for bucket in range(BUCKETS) for number in (0, 1)
    ]


# What a sample promises


def test_the_budget_is_met_to_the_token(samples: NeedleSamples) -> None:
    for sample in all_samples(samples):
        assert len(sample.tokens) == LENGTH
        assert sample.questions[-1].answer.stop == LENGTH


def test_every_needle_is_defined_once_and_its_uid_is_nowhere_else(samples: NeedleSamples, decode: Any) -> None:
    for sample in all_samples(samples):
        text = decode(sample.tokens)
        defined = DEFINITION.findall(text)
        needles = [question.needle for question in sample.questions] + list(sample.distractors)
        assert sorted(defined) == sorted((needle.name, needle.name, needle.uid) for needle in needles)
        assert len(needles) == KINDS[sample.kind].asked + KINDS[sample.kind].distractors
        prompt = decode(sample.prompt)
        for needle in needles:
            assert prompt.count(needle.uid) == 1


def test_a_prompt_ends_right_before_its_uid(samples: NeedleSamples, decode: Any) -> None:
    for sample in all_samples(samples):
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


def test_definitions_lie_in_their_buckets(samples: NeedleSamples, decode: Any) -> None:
    for sample in all_samples(samples):
        buckets = [question.bucket for question in sample.questions]
        assert sample.bucket in buckets
        assert len(set(buckets)) == len(buckets)
        for question in sample.questions:
            assert question.bucket * LENGTH <= 10 * question.position
            match = DEFINITION.match(decode(sample.tokens[question.position :]))
            assert match is not None
            assert match[3] == question.needle.uid
            inside = decode(sample.tokens[question.position : (question.bucket + 1) * LENGTH // 10])
            assert f'return "{question.needle.name.replace("_", " ")}"\n' in inside
            assert abs(question.position / LENGTH - depth_of(question.bucket)) <= 0.05


def test_depths_are_spread_over_a_bucket(samples: NeedleSamples) -> None:
    positions = [samples.make("single", LENGTH, 4, number).questions[0].position for number in range(40)]
    low, high = 0.4 * LENGTH, 0.5 * LENGTH
    assert min(positions) < low + 0.2 * (high - low)
    assert len(set(positions)) > 20


def test_distractors_are_in_other_buckets(samples: NeedleSamples, decode: Any) -> None:
    sample = samples.make("multi-key-4", LENGTH, 4, 0)
    bounds = [-(-bucket * LENGTH // 10) for bucket in range(BUCKETS + 1)]
    found = [len(DEFINITION.findall(decode(sample.tokens[low:high]))) for low, high in pairwise(bounds)]
    assert found[4] == 1
    assert sorted(found) == [0] * 4 + [1] * 5


def test_candidates_are_distinct_and_of_one_form(samples: NeedleSamples, decode: Any) -> None:
    for sample in all_samples(samples):
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
    with pytest.raises(ValueError, match=message) as raised:
        samples.make(kind, length, bucket, 0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_length_is_enough_for_every_sample(samples: NeedleSamples, kind: str) -> None:
    shortest = samples.shortest(kind)
    for bucket in range(BUCKETS):
        for number in range(20):
            sample = samples.make(kind, shortest + number, bucket, number)
            assert len(sample.tokens) == shortest + number
            assert sample.tokens.size - sample.questions[0].answer.start < shortest // 10 + 3
    with pytest.raises(ValueError, match=f"choose at least {shortest}"):
        samples.make(kind, shortest - 1, 0, 0)


# Tokenizers


def test_a_tokenizer_that_joins_digits_with_their_neighbours_is_refused() -> None:
    letters = {chr(code): number for number, code in enumerate((10, *range(32, 127)))}
    for joined in (("x", "4"), ("4", "\n")):
        vocabulary = {**letters, "".join(joined): len(letters)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [joined]))
        with pytest.raises(ValueError, match="joins digits with what is around them"):
            NeedleWriter(tokenizer).questions([Needle("amber_river", "12345674")])
    plain = NeedleWriter(Tokenizer(models.BPE(letters, [])))
    assert plain.tokens_per_uid == 8


def test_without_delimiters_a_path_is_a_comment() -> None:
    letters = {chr(code): number for number, code in enumerate((10, *range(32, 127)))}
    tokenizer = Tokenizer(models.BPE(letters, []))
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
    letters = {chr(code): number for number, code in enumerate((10, *range(32, 127)))}
    uids = NeedleWriter(Tokenizer(models.BPE(letters, []))).draw_uids(random.Random(0), TRAINING, 27)
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
    settings = Settings(vocabulary=300, buckets=Buckets(4, 4096), held_out=0.3)
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


def asked_in(text: str) -> list[tuple[str, int, int]]:
    """The name, where it is defined and where it is asked for, of every question, in characters."""
    defined = {(match[1], match[3]): match.start() for match in DEFINITION.finditer(text)}
    return [(match[1], defined[match[1], match[3]], match.start()) for match in QUESTION.finditer(text)]


def is_asked_at_the_end(text: str) -> bool:
    return text.rindex("\ndef ") < text.index("<filename>check_toolbox.py")


def test_needle_documents_ask_for_what_was_defined_before(corpus: Corpus, decode: Any) -> None:
    documents = NeedleDocuments(corpus, 4095, share=1.0)
    together = set()
    for number in range(20):
        tokens = documents.make(number)
        assert tokens.shape == (4096,)
        text = decode(tokens)
        asked = asked_in(text)
        assert len({name for name, _, _ in asked}) == len(asked) == len(DEFINITION.findall(text)) > 10
        for name, defined, question in asked:
            assert defined < question
            assert len(re.findall(rf"{name}\d{{8}}\(\)", text)) == 2, "defined, and called behind the import"
        together |= {file.count("import ") for file in re.findall(r"<filename>check_toolbox\.py\n[^<]*", text)}
    assert together == {1, 2, 4}


def test_needles_fill_two_thirds_of_a_document(corpus: Corpus, tokenizer: Tokenizer, decode: Any) -> None:
    documents = NeedleDocuments(corpus, 4095, share=1.0)
    mark, own = tokenizer.token_to_id("<filename>"), re.compile(r"<filename>(toolbox/|check_toolbox)")
    for number in range(20):
        tokens = documents.make(number).numpy()
        files = np.split(tokens, np.flatnonzero(tokens == mark))
        filled = sum(len(file) for file in files if own.match(decode(file))) / 4096
        assert is_asked_at_the_end(decode(tokens)) or 0.55 < filled <= 2 / 3


def test_the_questions_of_a_quarter_of_the_documents_are_in_their_last_tenth(corpus: Corpus, decode: Any) -> None:
    documents = NeedleDocuments(corpus, 2047, share=1.0)
    at_the_end, depths = 0, []
    for number in range(120):
        tokens = documents.make(number)
        text = decode(tokens)
        if is_asked_at_the_end(text):
            at_the_end += 1
            assert text.index("<filename>check_toolbox.py") >= len(decode(tokens[: int(0.9 * 2048)]))
            depths += [defined / len(text) for _, defined, _ in asked_in(text)]
    assert abs(at_the_end - 30) < 5 * (120 * 0.25 * 0.75) ** 0.5
    assert min(depths) < 0.1
    assert max(depths) > 0.8
    assert 0.35 < sum(depths) / len(depths) < 0.55, "anywhere before"


def test_distances_are_even_on_a_logarithmic_scale(corpus: Corpus, decode: Any) -> None:
    """Of 8k tokens, from 64 on: seven doublings, each with as many questions as the others, about."""
    documents = NeedleDocuments(corpus, 8191, share=1.0)
    distances = []
    for number in range(40):
        text = decode(documents.make(number))
        if not is_asked_at_the_end(text):
            distances += [(question - defined) * 8192 / len(text) for _, defined, question in asked_in(text)]
    # Definition and question are next to a distance, and within it: near ones are longer than they were drawn.
    octaves = np.histogram(distances, [0, 256, 512, 1024, 2048, 4096, 8192])[0] / len(distances)
    assert (octaves[1:] > 0.07).all()
    assert 0.15 < octaves[0] < 0.45
    assert min(distances) < 150
    assert max(distances) > 7000


def test_needle_documents_are_fast(corpus: Corpus) -> None:
    """One of 16k tokens takes some 30 ms."""
    documents = NeedleDocuments(corpus, 16383, share=1.0)

    def seconds() -> float:
        began = time.process_time()
        for number in range(4):
            documents.make(number)
        return (time.process_time() - began) / 4

    assert min(seconds() for _ in range(3)) < 0.15


def test_needle_documents_are_a_pure_function(corpus: Corpus) -> None:
    first = NeedleDocuments(corpus, 512, share=0.5, seed=3)
    again = NeedleDocuments(corpus, 512, share=0.5, seed=3)
    assert torch.equal(first.make(7), again.make(7))
    assert not torch.equal(first.make(7), first.make(8))
    assert not torch.equal(first.make(7), NeedleDocuments(corpus, 512, share=0.5, seed=4).make(7))


def test_a_share_of_the_samples_is_replaced(corpus: Corpus) -> None:
    documents = NeedleDocuments(corpus, 512, share=0.25)
    replaced = sum(documents.replaces(number) for number in range(4000))
    assert abs(replaced - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    none, every = (NeedleDocuments(corpus, 512, share=share) for share in (0.0, 1.0))
    assert not any(none.replaces(number) for number in range(1000))
    assert all(every.replaces(number) for number in range(1000))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_samples_of_a_step_are_the_same_for_any_number_of_ranks(corpus: Corpus, ranks: int) -> None:
    alone = make_batches(corpus, RECIPE)
    shared = make_batches(corpus, RECIPE, ranks)
    for step in (0, 5):
        assert torch.equal(alone.read(step), torch.cat([shared.read(step, rank) for rank in range(ranks)]))


def test_what_is_not_replaced_is_as_without_a_mixture(corpus: Corpus) -> None:
    mixed, plain = make_batches(corpus, RECIPE), Batches(Windows(corpus, 256), 4)
    assert mixed.mixture is not None
    seen = set()
    for step in range(4):
        for row, (one, other) in enumerate(zip(mixed.read(step), plain.read(step), strict=True)):
            replaced = mixed.mixture.replaces(4 * step + row)
            seen.add(replaced)
            assert torch.equal(one, mixed.mixture.make(4 * step + row) if replaced else other)
    assert seen == {True, False}
    assert make_batches(corpus, override(RECIPE, ["mixture=none"])).mixture is None


def test_a_run_with_needles_goes_on_to_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, RECIPE, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(corpus, RECIPE, tmp_path / "parted", on_step=stop_at(3))
    train(corpus, RECIPE, tmp_path / "parted", resume=True)
    assert_same_run(tmp_path / "parted", tmp_path / "whole")
    with pytest.raises(ValueError, match="has mixture=niah, not none: it would not be the same run"):
        train(corpus, override(RECIPE, ["mixture=none"]), tmp_path / "whole", resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("mixture=ruler", "mixture='ruler' must be one of none, niah"),
        ("mixture_share=1.5", "mixture_share=1.5 must be between 0 and 1"),
    ],
)
def test_mistakes_in_a_recipe(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        override(RECIPE, [change])


def test_too_short_a_length_is_known_before_training(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needle documents of 32 tokens have no room for needles; choose a") as raised:
        train(corpus, override(RECIPE, ["length=32"]), tmp_path / "short")
    assert not (tmp_path / "short").exists()
    shortest = int(str(raised.value).rsplit(maxsplit=1)[-1])
    documents = NeedleDocuments(corpus, shortest, share=1.0)
    for number in range(200):
        assert documents.make(number).shape == (shortest + 1,)
    with pytest.raises(ValueError, match=f"at least {shortest}"):
        NeedleDocuments(corpus, shortest - 1, share=1.0)


def test_the_mixture_is_an_option_of_the_command(corpus: Corpus, tmp_path: Path) -> None:
    def run(*options: str) -> Any:
        fields = ["steps=1", "length=256", "batch=2", "warmup=1", "attention=exact", "probe_every=0"]
        arguments = ["train", str(corpus.folder), *fields, "--output", str(tmp_path), "--device", "cpu", *options]
        return CliRunner().invoke(commands.app, arguments)

    refused = run("--train-mixture", "ruler")
    assert refused.exit_code == 2
    assert refused.stderr == "muse: mixture='ruler' must be one of none, niah\n"
    assert run("--train-mixture", "niah").exit_code == 0
    assert run_recipe(tmp_path).mixture == "niah"
