"""`muse prepare`: documents, the tokenizer, the corpus on disk, its samples, and one line for mistakes."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from muse_lab.pretraining.batches import Batches, Windows, shuffled
from muse_lab.pretraining.data.corpus import HELD_OUT, TRAIN, Corpus, read_corpus
from muse_lab.pretraining.data.corpus_documents import MARKS, Buckets, Document, Piece, cut_text, join_files
from muse_lab.pretraining.data.prepare import UNFINISHED, CorpusSettings, prepare
from muse_lab.pretraining.data.repositories import File, Repository, broken
from muse_lab.pretraining.data.sources import repositories_in
from muse_lab.pretraining.data.tokenizer import Encoder, read_tokenizer, train_tokenizer
from muse_lab.records.files import alone_in
from tests.command_line import assert_done_quietly, assert_refused, run_muse
from tests.lab.test_sources import blob, stack_row, write_folder, write_lines, write_tar
from tests.refusals import one_line_error

SMALL = CorpusSettings(vocabulary=400, buckets=Buckets(64, 4096), held_out=0.2, tokens_per_shard=1000)
WORDS = ("import", "def", "return", "self", "value", "for", "in", "range", "print", "\n    ", "\n", "=", "(x)", "42")


def source(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def sources(number: int = 20) -> dict[str, dict[str, str]]:
    """Repositories of several buckets, each of three files."""
    return {
        f"project{n}": {path: source(10 * n + k, 40 + 20 * n) for k, path in enumerate(("a.py", "b/c.py", "b/a.py"))}
        for n in range(number)
    }


def as_repositories(found: dict[str, dict[str, str]]) -> Iterator[Repository]:
    for name, files in found.items():
        yield Repository(name, [File(path, len(text), lambda text=text: text.encode()) for path, text in files.items()])


def make(folder: Path, settings: CorpusSettings = SMALL, found: dict[str, dict[str, str]] | None = None) -> Corpus:
    return prepare(as_repositories(found or sources()), folder, settings, source="made up")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("corpus"))


# Documents


def test_files_are_joined_by_delimiters_in_the_order_of_their_depth() -> None:
    (document,) = join_files("owner/name", [("b/a/x.py", "1"), ("z.py", "2"), ("a/y.py", "3"), ("a.py", "4")], 100)
    assert document.text == (
        "<reponame>owner/name<filename>a.py\n4<filename>z.py\n2<filename>a/y.py\n3<filename>b/a/x.py\n1"
    )
    assert (document.files, document.size) == (4, 4)


def test_large_repositories_are_cut_between_files_that_are_no_neighbours() -> None:
    files = [(f"{folder}/{n}.py", "x" * 10) for folder in "abc" for n in range(4)]
    documents = join_files("name", reversed(files), 40)
    assert [document.part for document in documents] == [0, 1, 2]
    for folder, document in zip("abc", documents, strict=True):
        assert [piece.text[:6] for piece in document.pieces[1:]] == [f"{folder}/{n}.py" for n in range(4)]
    assert [document.size for document in join_files("name", [("a.py", "x" * 99), ("b.py", "x")], 40)] == [99, 1]
    assert join_files("name", [], 40) == []


@pytest.mark.parametrize("line", ["some words\n", "nolines", "\u00e9\u20ac\U0001f600"])
def test_long_texts_are_cut_at_ends_of_lines(line: str) -> None:
    text = line * 50
    documents = cut_text("name", text, 100)
    assert "".join(document.text for document in documents) == text
    assert all(document.size == len(document.text.encode()) <= 100 for document in documents)
    assert len(documents) <= 2 * len(text.encode()) // 100
    if line.endswith("\n"):
        assert all(document.text.endswith("\n") for document in documents)
    assert [document.text for document in cut_text("name", line, 100)] == [line]


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(16384, 16384), (32767, 16384), (32768, 32768), (65536, 65536), (262143, 131072)]
)
def test_buckets_are_powers_of_two(tokens: int, bucket: int) -> None:
    buckets = Buckets()
    size = -(-tokens * 7 // 2)
    assert buckets.find(size) == bucket
    assert not buckets.is_too_small(size)
    assert not buckets.is_too_large(size)


def test_buckets_end_where_the_papers_do() -> None:
    assert Buckets().is_too_small(16384 * 7 // 2 - 1)
    assert Buckets().is_too_large(262144 * 7 // 2)
    with pytest.raises(ValueError, match="no document has at least 8 and fewer than 8 tokens"):
        Buckets(8, 8)


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([source(seed, 500) + " it's 'll caf\u00e9 \n\n\t x" for seed in range(20)], 500)


@pytest.mark.long
@given(
    st.text(
        st.one_of(st.sampled_from("aZ09 \n\t\r\x0b\x1c\x85\xa0\u00e9\u00b2\u4e2d_'st<>."), st.characters(codec="utf-8"))
    )
)
@settings(max_examples=300, deadline=None)
def test_looking_words_up_gives_what_the_tokenizer_gives(tokenizer: Tokenizer, text: str) -> None:
    (tokens,) = Encoder(tokenizer).encode([Document("", 0, (Piece("", text),), 1, 0)])
    assert tokens[-1] == tokenizer.token_to_id("<endoftext>")
    assert tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    assert tokens[:-1].tolist() == plain.encode(text).ids


def test_words_of_ordinary_length_are_learnt_as_the_library_learns_them(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator([source(seed, 500) + " it's 'll caf\u00e9 \n\n\t x" for seed in range(20)], trainer)
    assert plain.to_str() == tokenizer.to_str()


@pytest.mark.parametrize("letter", ["a", " ", "\u00e9"])
def test_long_words_cost_no_more_than_short_ones(letter: str) -> None:
    """Where time grows with the square of the length, four times the length take sixteen times as long."""

    def seconds(action: Callable[[], object]) -> float:
        began = time.process_time()
        action()
        return time.process_time() - began

    def train(length: int) -> Tokenizer:
        return train_tokenizer([letter * length], 300)

    lengths = [30_000, 120_000]
    short, long = (seconds(lambda length=length: train(length)) for length in lengths)
    assert long < 2 * 4 * short + 1
    encoder = Encoder(train(1000))
    documents = [[Document("", 0, (Piece("", letter * 4 * length),), 1, 0)] for length in lengths]
    short, long = (seconds(lambda document=document: encoder.encode(document)) for document in documents)
    assert long < 2 * 4 * short + 1
    (tokens,) = encoder.encode(documents[0])
    assert encoder.tokenizer.decode(tokens[:-1].tolist()) == letter * 120_000


def test_delimiters_are_tokens_and_their_spelling_is_text(tokenizer: Tokenizer) -> None:
    (document,) = join_files("name", [("a.py", "x = '<endoftext>'")], 1000)
    (tokens,) = Encoder(tokenizer).encode([document])
    assert [tokens.tolist().count(number) for number in range(3)] == [1, 1, 1]
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == f"{document.text}<endoftext>"


def test_text_that_has_no_utf_8_is_one_line(tokenizer: Tokenizer) -> None:
    document = Document("", 0, (Piece("", "a lone surrogate: \ud800"),), 1, 0)
    with pytest.raises(ValueError, match="a text has a lone surrogate, which has no UTF-8; replace it"):
        Encoder(tokenizer).encode([document])


def test_transformers_reads_the_tokenizer(corpus: Corpus) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(corpus.folder)
    assert loaded.eos_token_id == corpus.manifest.end
    assert len(loaded) == corpus.manifest.vocabulary
    text = "def f(x):\n    return caf\u00e9"
    assert loaded.decode(loaded(text).input_ids) == text
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(corpus.folder / "tokenizer.json"))
    assert fast(text).input_ids == loaded(text).input_ids


def test_a_tokenizer_from_elsewhere(tmp_path: Path, corpus: Corpus) -> None:
    taken = make(tmp_path / "taken", CorpusSettings(buckets=SMALL.buckets, tokenizer=corpus.folder, held_out=0.2))
    assert (taken.folder / "tokenizer.json").read_bytes() == (corpus.folder / "tokenizer.json").read_bytes()
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "poor.json"))
    with pytest.raises(ValueError, match="the tokenizer has no token <reponame>"):
        make(tmp_path / "poor", CorpusSettings(tokenizer=tmp_path / "poor.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer"):
        read_tokenizer(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="there is no tokenizer"):
        read_tokenizer(tmp_path / "missing.json")
    assert not (tmp_path / "poor").exists()


# The corpus


def test_tokens_are_those_of_the_documents(corpus: Corpus) -> None:
    tokenizer = read_tokenizer(corpus.folder)
    found = {}
    for stream in corpus.manifest.streams:
        assert sum(shard.tokens for shard in stream.shards) == stream.tokens
        assert all(shard.tokens == SMALL.tokens_per_shard for shard in stream.shards[:-1])
        for document in corpus.documents(stream):
            tokens = corpus.tokens(stream, document.start, document.start + document.tokens)
            found[document.repository] = (stream, tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
    assert any(len(stream.shards) > 1 for stream in corpus.manifest.streams)
    assert len(found) == corpus.manifest.counts["documents"] == len(sources())
    for name, files in sources().items():
        (document,) = join_files(name, files.items(), 10**6)
        stream, text = found[name]
        assert text == f"{document.text}<endoftext>"
        assert stream.bucket <= document.size / 3.5 < 2 * stream.bucket


def test_a_repository_is_held_out_as_a_whole(tmp_path: Path) -> None:
    cut = make(tmp_path, CorpusSettings(vocabulary=300, buckets=Buckets(64, 1024), held_out=0.3))
    names = {
        split: {document.repository for stream in cut.streams(split) for document in cut.documents(stream)}
        for split in (TRAIN, HELD_OUT)
    }
    assert cut.manifest.counts["documents"] > len(sources())
    assert names[TRAIN] | names[HELD_OUT] == set(sources())
    assert not names[TRAIN] & names[HELD_OUT]
    assert 2 <= len(names[HELD_OUT]) <= 10


def test_something_is_held_out_unless_nothing_should_be(tmp_path: Path) -> None:
    for share, number in ((1e-9, 1), (0.0, 0)):
        made = make(tmp_path, replace(SMALL, held_out=share))
        assert sum(stream.documents for stream in made.streams(HELD_OUT)) == number
    with pytest.raises(ValueError, match="all of 1 repositories are held out"):
        make(tmp_path, replace(SMALL, held_out=0.999999), {"one": {"a.py": source(0, 200)}})


def test_the_same_bytes_whatever_the_order_of_the_sources(tmp_path: Path, corpus: Corpus) -> None:
    shuffled_sources = {
        name: dict(reversed(files.items())) for name, files in sorted(sources().items(), key=lambda item: item[0][::-1])
    }
    again = make(tmp_path, found=shuffled_sources)
    assert contents(again.folder) == contents(corpus.folder)
    assert again.fingerprint == corpus.fingerprint
    other = make(tmp_path, replace(SMALL, seed=1))
    assert other.fingerprint != corpus.fingerprint


def test_the_same_bytes_on_one_thread_and_in_another_process(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked += ["--held-out", "0.3", "--output"]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert run_muse(*asked, tmp_path / "1")[0] == 0
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "muse_lab.cli", *asked, tmp_path / "2"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_everything_left_out_is_counted(tmp_path: Path) -> None:
    good = source(1, 200)
    found = list(as_repositories({"good": {"a.py": good, "b.py": "", "vendor/c.py": "x", "d.py": "\0"}}))
    found += as_repositories({"copy": {"a.py": good}, "small": {"a.py": "x"}, "empty": {}})
    found += as_repositories({"large": {"a.py": source(2, 5000)}, "other": {"a.py": source(3, 200)}})
    found += [broken("cut\n.tar.gz", "cut short"), broken("two", "empty"), broken("two", "damaged")]
    made = prepare(found, tmp_path, SMALL, source="made up").manifest
    assert made.skipped_files == {"binary": 1, "empty": 1, "vendored": 1}
    assert made.skipped_documents == {
        "below 64 tokens": 1,
        "broken": 3,
        "copy of another": 1,
        "from 4k tokens on": 1,
        "without a file that is kept": 1,
    }
    assert made.broken == {"cut?.tar.gz": "cut short", "two": "empty; damaged"}
    assert made.counts == {"documents": 2, "files": 5, "repositories": 9}


def test_nothing_of_a_damaged_archive_is_in_the_corpus(tmp_path: Path) -> None:
    """Its last bytes are wrong, behind files that are sound."""
    (tmp_path / "sources").mkdir()
    for name, files in sources(4).items():
        write_tar(tmp_path / "sources" / f"{name}-1.0.tar.gz", files)
    damaged = tmp_path / "sources" / "project3-1.0.tar.gz"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    made = prepare(repositories_in([tmp_path / "sources"], largest=10**6), tmp_path / "out", SMALL, source="made up")
    names = {document.repository for stream in made.manifest.streams for document in made.documents(stream)}
    assert names == {"project0", "project1", "project2"}
    assert made.manifest.counts["files"] == 9
    assert made.manifest.broken == {"project3": "cut short or damaged (Incorrect length of data produced)"}


def test_what_is_known_to_be_too_small_is_not_read(tmp_path: Path) -> None:
    never = Mock(side_effect=AssertionError("read"))
    small = Repository("small", [File("a.py", 5, never)], size=5)
    large = Repository("large", [File("a.py", 10**6, never)], size=10**6)
    found = [small, large, *as_repositories(sources())]
    made = prepare(found, tmp_path, replace(SMALL, skip_large=True), source="made up")
    assert made.manifest.skipped_documents == {"below 64 tokens": 1, "from 4k tokens on": 1}


def test_nothing_left_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document is left of 1 repositories \(1 below 64 tokens\); give other"):
        make(tmp_path, found={"small": {"a.py": "x"}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", ["reading project3", "training", "encoding"])
def test_an_interrupted_run_leaves_nothing_and_can_be_run_again(tmp_path: Path, phase: str, corpus: Corpus) -> None:
    def interrupt(description: str, finished: int, total: int | None) -> None:
        if description.startswith(phase):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(as_repositories(sources()), tmp_path, SMALL, source="made up", on_step=interrupt)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path, {f"{UNFINISHED}/documents": "what a killed run leaves", "train-64-00000.tokens": "old"})
    with pytest.raises(ValueError, match=r"there is no corpus in .* it has no manifest\.json"):
        read_corpus(tmp_path)
    make(tmp_path)
    assert contents(tmp_path) == contents(corpus.folder)


def test_a_corpus_is_kept_until_the_last_file_of_the_next_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
    monkeypatch.setattr("muse_lab.pretraining.data.prepare.write_manifest", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device"):
        make(tmp_path, replace(SMALL, seed=5))
    assert contents(tmp_path) == before


def test_one_corpus_at_a_time_is_written_to_a_folder(tmp_path: Path, corpus: Corpus) -> None:
    refused = []

    def start_another(description: str, finished: int, total: int | None) -> None:
        with pytest.raises(ValueError, match=r"another process is at work in .*; wait for it, or choose another outpu"):
            make(tmp_path, replace(SMALL, seed=5))
        refused.append(description)

    prepare(as_repositories(sources()), tmp_path, SMALL, source="made up", on_step=start_another)
    assert {"reading project0", "training the tokenizer"} < set(refused)
    assert contents(tmp_path) == contents(corpus.folder)
    make(tmp_path)  # nobody is in the way any more


def test_a_corpus_that_another_process_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for after the folder is locked, not before."""

    def lock_late(folder: Path) -> contextlib.AbstractContextManager[None]:
        shutil.copytree(corpus.folder, folder, dirs_exist_ok=True)
        return alone_in(folder)

    monkeypatch.setattr("muse_lab.pretraining.data.prepare.alone_in", lock_late)
    with pytest.raises(ValueError, match=r"there is a corpus in .* already"):
        prepare(as_repositories(sources()), tmp_path, SMALL, source="made up", overwrite=False)
    assert contents(tmp_path) == contents(corpus.folder)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "pipe"])
@pytest.mark.parametrize("ending", ["00000.tokens", "documents.jsonl", "tokenizer.json"])
def test_damaged_files_are_named_in_one_line(corpus: Corpus, tmp_path: Path, damage: str, ending: str) -> None:
    shutil.copytree(corpus.folder, tmp_path, dirs_exist_ok=True)
    file = next(file for file in sorted(tmp_path.iterdir()) if file.name.endswith(ending))
    content = file.read_bytes()
    if damage in ("gone", "pipe"):
        file.unlink()
    if damage == "pipe":
        os.mkfifo(file)
    elif damage != "gone":
        file.write_bytes(content[:-2] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    with one_line_error(rf"{file.name}.*; run muse prepare again"):
        read_corpus(tmp_path)
    if ending == "00000.tokens" and damage != "flip":
        with pytest.raises(ValueError, match="run muse prepare again"):
            read_corpus(tmp_path, hashes=False)


@pytest.mark.parametrize(
    "change",
    ["", "[]", "[" * 10**5, "cut", {"format": 0}, {"dtype": "float16"}, {"surprise": 1}, {"files": {"../x": ""}}],
)
def test_a_manifest_that_is_none_is_one_line(corpus: Corpus, tmp_path: Path, change: Any) -> None:
    shutil.copytree(corpus.folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "manifest.json"
    text = path.read_text()
    if isinstance(change, dict):
        path.write_text(json.dumps({**json.loads(text), **change}))
    else:
        path.write_text(text[:-9] if change == "cut" else change)
    with pytest.raises(ValueError, match=r"manifest\.json is no manifest of this version"):
        read_corpus(tmp_path)


def test_a_manifest_that_contradicts_itself_is_one_line(tmp_path: Path) -> None:
    path = make(tmp_path).folder / "manifest.json"
    document = json.loads(path.read_text())
    document["streams"][0]["tokens"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="contradicts itself"):
        read_corpus(tmp_path)


# Samples


def test_windows_use_every_token_at_most_once(corpus: Corpus) -> None:
    windows = Windows(corpus, 50)
    start = 0
    for stream in corpus.streams(TRAIN):
        count = (stream.tokens - 1) // 50
        tokens = torch.from_numpy(corpus.tokens(stream, 0, stream.tokens))
        inputs = torch.cat([windows[start + index][:-1] for index in range(count)])
        targets = torch.cat([windows[start + index][1:] for index in range(count)])
        assert torch.equal(inputs, tokens[: count * 50])
        assert torch.equal(targets, tokens[1 : count * 50 + 1])
        start += count
    assert start == len(windows)
    with pytest.raises(IndexError):
        windows[start]


def test_windows_that_there_are_not(corpus: Corpus) -> None:
    assert len(Windows(corpus, 50, split=HELD_OUT)) > 0
    with pytest.raises(ValueError, match=r"none has a sample of 1000000 \+ 1; prepare more text or choose a shorter"):
        Windows(corpus, 10**6)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Windows(corpus, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000])
def test_shuffling_is_a_permutation(size: int) -> None:
    orders = [[shuffled(position, size, key) for position in range(size)] for key in ("0/0", "0/1", "1/0")]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size >= 64:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert sum(abs(order - position) for position, order in enumerate(orders[0])) > size**2 / 5


def test_an_epoch_has_every_window_once_and_the_next_another_order(corpus: Corpus) -> None:
    batches = Batches(Windows(corpus, 50), batch=1, seed=3)
    size = len(batches.windows)
    first, second = ([batches.read(epoch * size + step)[0].tolist() for step in range(size)] for epoch in range(2))
    assert sorted(first) == sorted(second) == sorted(batches.windows[index].tolist() for index in range(size))
    assert first != second
    assert first != [Batches(batches.windows, 1, seed=4).read(step)[0].tolist() for step in range(size)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_has_the_same_samples_however_many_ranks_there_are(corpus: Corpus, ranks: int) -> None:
    alone = Batches(Windows(corpus, 50), batch=4, seed=1)
    shared = Batches(alone.windows, batch=4, seed=1, ranks=ranks)
    for step in (7, 0, 1000, 7):  # in any order: nothing is remembered
        parts = [shared.read(step, rank) for rank in reversed(range(ranks))][::-1]
        assert torch.equal(torch.cat(parts), alone.read(step))
        assert parts[0].shape == (4 // ranks, 51)


def test_impossible_batches_are_refused(corpus: Corpus) -> None:
    windows = Windows(corpus, 50)
    with pytest.raises(ValueError, match="batch=3 cannot be shared by 2 ranks; choose a multiple, like batch=2"):
        Batches(windows, 3, ranks=2)
    with pytest.raises(ValueError, match="there is no step 0 of rank 1 of 1"):
        Batches(windows, 3).read(0, 1)


# The command


@pytest.fixture
def asked(tmp_path: Path) -> list[object]:
    folder = tmp_path / "sources"
    for name, files in sources(6).items():
        write_folder(folder / name, files)
    write_tar(folder / "packed-1.0.tar.gz", sources(8)["project7"], "packed-1.0/")
    return ["prepare", folder, "--output", tmp_path / "out", "--vocabulary", "300", "--smallest", "64"]


def test_the_command_writes_a_corpus_and_says_what_is_in_it(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / "sources" / "cut-1.0.tar.gz").write_bytes(b"cut")
    code, out, err = run_muse(*asked)
    assert code == 0, err
    made = read_corpus(tmp_path / "out")
    assert made.manifest.source == "repositories: sources"
    assert made.manifest.counts["repositories"] == 8
    for said in ("held-out", "7 documents, 21 files, 8 repositories", "left out, documents: 1 broken", "wrote"):
        assert said in out
    assert err == "muse: left out cut: cut short or damaged (Not a gzipped file (b'cu'))\n"
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert sorted([*made.manifest.file_names(), "manifest.json"]) == sorted(contents(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["python", "stack", "dolma", "text"])
def test_the_command_reads_every_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [source(number, 300) for number in range(6)]
    folder = tmp_path / "sources"
    folder.mkdir()
    asked: list[object] = [] if kind == "python" else [folder]
    if kind == "python":
        monkeypatch.setattr("muse_lab.cli.prepare.python_libraries", lambda: as_repositories(sources(6)))
    elif kind == "stack":
        (tmp_path / "content").mkdir()
        for number, text in enumerate(texts):
            (tmp_path / "content" / blob(number)).write_bytes(gzip.compress(text.encode()))
        rows = [stack_row(f"owner/{n}", {"path": "/a.py", "blob_id": blob(n), "length_bytes": 900}) for n in range(6)]
        write_lines(folder / "ids.jsonl", rows)
        asked += ["--contents", tmp_path]
    elif kind == "dolma":
        write_lines(folder / "part.jsonl.gz", [{"id": str(n), "text": text} for n, text in enumerate(texts)])
    else:
        write_folder(folder, {f"{n}.txt": text for n, text in enumerate(texts)})
    options = ["--kind", kind, "--smallest", "64", "--vocabulary", "300", "--output", tmp_path / "out"]
    out = assert_done_quietly(run_muse("prepare", *asked, *options))
    made = read_corpus(tmp_path / "out")
    assert made.manifest.counts["documents"] == 6
    stream = made.streams(TRAIN)[0]
    text = read_tokenizer(made.folder).decode(made.tokens(stream, 0, 60).tolist(), skip_special_tokens=False)
    assert text.startswith("<reponame>") == (kind in ("python", "stack"))
    assert "tokens to train on" in out


def test_the_same_corpus_is_kept_and_another_is_refused(asked: list[object], tmp_path: Path) -> None:
    assert run_muse(*asked)[0] == 0
    before = contents(tmp_path / "out")
    out = assert_done_quietly(run_muse(*asked))
    assert "is there already; --overwrite prepares it again" in out
    code, out, err = run_muse(*asked, "--held-out", "0.4")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "held_out was " in line
    assert line.endswith(", now 0.4; choose another --output, or replace it with --overwrite")
    assert contents(tmp_path / "out") == before
    assert run_muse(*asked, "--held-out", "0.4", "--overwrite")[0] == 0
    assert contents(tmp_path / "out") != before


def test_ctrl_c_and_a_full_disk_are_one_line(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, code, said in ((KeyboardInterrupt(), 130, "interrupted"), (full, 1, str(full.strerror))):
        monkeypatch.setattr("os.fsync", Mock(side_effect=error))
        assert_refused(run_muse(*asked), f"{said}; no new corpus was written; run the same command again", code)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--kind", "nonsense"], "unknown kind 'nonsense'; use one of python, repositories, stack, dolma, text"),
        (["--kind", "python"], "leave out SOURCE"),
        (["--kind", "stack"], "give the folder or URL of the contents with --contents"),
        (["--kind", "stack", "--contents", "nowhere"], "there are no contents in 'nowhere'"),
        (["--vocabulary", "many"], "cannot read the size 'many'"),
        (["--vocabulary", "100"], "a vocabulary of 100 has no room for all bytes"),
        (["--smallest", "512k"], "no document has at least 524288"),
        (["--smallest", "100k"], "no document is left of 7 repositories (7 below 100k tokens)"),
        (["--held-out", "1"], "held_out is 1.0"),
        (["--tokenizer", "missing"], "there is no tokenizer 'missing'"),
        (["missing"], "there is no source 'missing'"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    asked: list[object], changes: list[str], message: str, tmp_path: Path
) -> None:
    assert_refused(run_muse(*asked, *changes), message)
    assert not (tmp_path / "out").exists()


def test_a_kind_that_needs_a_source_says_so() -> None:
    assert_refused(run_muse("prepare", "--kind", "text"), "muse: the kind text needs a SOURCE\n")


@pytest.mark.parametrize("name", ["[bold]text", "a[0]", ":smile:", "line\nbreak", "\udcff not UTF"])
def test_names_are_printed_as_they_are(name: str, asked: list[object]) -> None:
    """Save for what cannot be printed, which is a question mark."""
    folder = Path(str(asked[1]))
    (folder / "project0").rename(folder / name)
    (folder / f"cut{name}.zip").write_bytes(b"cut")
    asked[1] = folder.rename(folder.with_name(name))
    code, out, err = run_muse(*asked)
    assert code == 0, err
    printed = "".join(letter if letter.isprintable() else "?" for letter in name)
    assert f"repositories: {printed}" in out
    assert f"left out cut{printed}: " in err
    assert read_corpus(folder.with_name("out")).manifest.source == f"repositories: {printed}"


@pytest.mark.parametrize(("encoding", "name"), [("utf-8:strict", "\udcff"), ("latin-1", "\u4e2d")])
def test_a_name_that_the_terminal_cannot_show_ends_no_command(
    encoding: str, name: str, asked: list[object], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "muse_lab.cli", *asked, "--output", tmp_path / name]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(name.encode("ascii", "backslashreplace") + b"\n")


@pytest.mark.parametrize(("package", "kind"), [("tokenizers", "text"), ("zstandard", "dolma")])
def test_a_missing_package_is_one_line(
    package: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "dolma" and sys.version_info >= (3, 14):
        pytest.skip("Python reads .zst by itself")
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b"x")
    assert_refused(
        run_muse("prepare", path, "--kind", kind, "--output", tmp_path / "out"), f"{package} is not installed"
    )
