"""Needle documents among the samples of a run: what they promise, how they are read, what is learnt of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.data.tokenizer import read_tokenizer
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.monitoring.answer_losses import answer_losses
from muse_lab.pretraining.monitoring.metrics import Step, read_metrics
from muse_lab.pretraining.needles import writer
from muse_lab.pretraining.needles.haystacks import file_mark
from muse_lab.pretraining.needles.mixture import NeedleDocuments
from muse_lab.pretraining.prefetch import READERS, ReadingError, read_ahead
from muse_lab.pretraining.recipes import Recipe, override, tiny
from muse_lab.pretraining.run.folder import run_recipe
from muse_lab.pretraining.training import make_batches, train
from tests.command_line import assert_refused, run_muse
from tests.lab.test_prepare import contents, make
from tests.needle_models import DEFINITION, QUESTION
from tests.patience import PATIENCE
from tests.ranks import CONTEXT
from tests.refusals import one_line_error
from tests.training_runs import losses, train_until

RECIPE: Recipe = override(
    tiny(),
    [
        *("steps=4", "length=256", "batch=4", "micro_batch=2", "attention=exact", "exact_tail=0", "warmup=2"),
        *("checkpoint_every=2", "probe_every=0", "mixture=niah", "mixture_share=0.5"),
    ],
)


@pytest.fixture(scope="module")
def corpus(needles: Corpus) -> Corpus:
    return needles


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


@pytest.mark.long
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


@pytest.mark.long
def test_distances_are_even_on_a_logarithmic_scale(corpus: Corpus, decode: Any) -> None:
    """Of 8k tokens, from 64 on: seven doublings, each with as many questions as the others, about."""
    documents = NeedleDocuments(corpus, 8191, share=1.0)
    distances = []
    for number in range(20):
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


def test_what_is_not_replaced_is_as_without_a_mixture(corpus: Corpus) -> None:
    mixed, plain = make_batches(corpus, RECIPE), Batches(Windows(corpus, 256), 4)
    seen = set()
    for step in range(4):
        for row, (one, other) in enumerate(zip(mixed.read(step), plain.read(step), strict=True)):
            replaced = mixed.mixture.replaces(4 * step + row)
            seen.add(replaced)
            assert torch.equal(one, mixed.mixture.make(4 * step + row) if replaced else other)
    assert seen == {True, False}
    assert make_batches(corpus, override(RECIPE, ["mixture=none"])).mixture is None


@pytest.fixture(scope="module")
def probed_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("probed")
    train(corpus, override(RECIPE, ["probe_every=2"]), output)
    return output


@pytest.mark.long
def test_a_run_with_needles_goes_on_to_the_same_bits(
    corpus: Corpus, probed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was probed, too."""
    train_until(3, corpus, RECIPE, tmp_path)
    train(corpus, RECIPE, tmp_path)
    assert losses(tmp_path) == losses(probed_run)
    assert contents(tmp_path / "model") == contents(probed_run / "model")
    with pytest.raises(ValueError, match="has mixture=niah, not none: it would not be the same run"):
        train(corpus, override(RECIPE, ["mixture=none"]), tmp_path)
    monkeypatch.setattr(writer, "VERSION", writer.VERSION + 1)
    with pytest.raises(ValueError, match="was trained on needles of an earlier version; choose another output"):
        train(corpus, RECIPE, tmp_path)


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
    fields = ["steps=1", "length=256", "batch=2", "warmup=1", "attention=exact", "probe_every=0"]
    asked = ("train", corpus.folder, *fields, "--output", tmp_path, "--device", "cpu", "--train-mixture")
    assert_refused(run_muse(*asked, "ruler"), "muse: mixture='ruler' must be one of none, niah\n")
    assert run_muse(*asked, "niah")[0] == 0
    assert run_recipe(tmp_path).mixture == "niah"


# Reading ahead


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_what_is_read_ahead_is_what_would_be_read(corpus: Corpus, rank: int, ranks: int) -> None:
    batches = make_batches(corpus, RECIPE, ranks)
    before = torch.random.get_rng_state()
    ahead = list(read_ahead(batches, range(2, 7), rank))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(ahead) == 5
    assert all(torch.equal(tokens, batches.read(step, rank)) for step, tokens in enumerate(ahead, 2))
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_a_process_that_may_have_no_children_reads_by_itself(corpus: Corpus, tmp_path: Path) -> None:
    # (Not forked from this process, whose threads of PyTorch a fork would lack.)
    process = CONTEXT.Process(
        target=train, args=(corpus, override(RECIPE, ["steps=1", "warmup=1"]), tmp_path), daemon=True
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert (tmp_path / "model").exists()


def test_a_fork_that_fails_is_one_line(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = BlockingIOError(11, "Resource temporarily unavailable")
    monkeypatch.setattr(os, "fork", Mock(side_effect=refuse))
    with pytest.raises(TrainingError, match=r"no process can be started to read ahead \(Resource .*; resume the run$"):
        train(corpus, RECIPE, tmp_path)


def test_readers_that_are_left_early_end(corpus: Corpus) -> None:
    reader = read_ahead(make_batches(corpus, RECIPE), range(1000))
    next(reader)
    processes = multiprocessing.active_children()
    assert len(processes) == READERS
    reader.close()
    assert not any(process.is_alive() for process in processes)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_readers_end_with_a_run_that_is_killed(corpus: Corpus) -> None:
    """They are not there for long after a run that could not say goodbye."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        reader = read_ahead(make_batches(corpus, RECIPE), range(1000))
        next(reader)
        there.send([process.pid for process in multiprocessing.active_children()])
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    assert here.poll(PATIENCE)
    readers = here.recv()
    assert len(readers) == READERS
    process.join()
    try:
        deadline = time.monotonic() + PATIENCE
        while any(is_alive(reader) for reader in readers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for reader in filter(is_alive, readers):
            os.kill(reader, signal.SIGKILL)


@pytest.mark.long
def test_a_run_whose_reader_is_killed_says_where_to_go_on(corpus: Corpus, tmp_path: Path) -> None:
    def kill(done: Step) -> None:
        if done.step == 2:
            process, *_ = multiprocessing.active_children()
            os.kill(process.pid, signal.SIGKILL)

    recipe = override(RECIPE, ["steps=20"])  # the pipe has room for some of them
    message = r"^a process that reads ahead has died before step \d+; the last good .*step-\d+; resume the run$"
    with one_line_error(message, TrainingError):
        train(corpus, recipe, tmp_path, on_step=kill)
    assert not multiprocessing.active_children()


def test_a_corpus_that_is_cut_short_ends_reading_ahead(tmp_path: Path) -> None:
    corpus = make(tmp_path)
    reader = read_ahead(make_batches(corpus, RECIPE), range(1000))
    next(reader)
    for file in corpus.folder.glob("train-*.tokens"):
        os.truncate(file, 0)
    with pytest.raises(ReadingError, match="changed after"):
        list(reader)


# What is learnt of answers


def test_answers_are_the_uids_of_imports(corpus: Corpus) -> None:
    documents = NeedleDocuments(corpus, 4095, share=1.0)
    tokenizer = read_tokenizer(corpus.folder)
    for number in (-1, 0, 7):
        document, distances = documents.make_with_answers(number)
        assert torch.equal(document, documents.make(number))
        text = tokenizer.decode(document.tolist(), skip_special_tokens=False)
        answers = tokenizer.decode(document[distances > 0].tolist(), skip_special_tokens=False)
        assert re.sub(r"\s", "", answers) == "".join(uid for _, _, uid in QUESTION.findall(text))


def test_an_answer_is_as_far_back_as_its_definition(corpus: Corpus) -> None:
    """A definition begins with a file of its own, in whose few lines the name and the uid are."""
    tokenizer = read_tokenizer(corpus.folder)
    document, distances = NeedleDocuments(corpus, 4095, share=1.0).make_with_answers(0)
    starts = [place for place in torch.nonzero(distances)[:, 0].tolist() if not distances[place - 1]]
    assert len(starts) > 8
    for start in starts:
        stop = next(place for place in range(start, 4097) if place == 4096 or not distances[place])
        uid = tokenizer.decode(document[start:stop].tolist()).strip()
        definition = start - int(distances[start])
        text = tokenizer.decode(document[definition : definition + 60].tolist(), skip_special_tokens=False)
        assert text.startswith(file_mark(tokenizer))
        assert re.search(rf"def \w+{uid}\(", "\n".join(text.splitlines()[:3]))


@pytest.mark.long
def test_a_run_measures_what_it_has_learnt_of_answers(probed_run: Path) -> None:
    steps = read_metrics(probed_run)
    assert [step["step"] for step in steps if "answers_loss" in step] == [2, 4]
    assert {"first tokens", "later tokens"} <= steps[1]["answers"].keys()
    assert all("rse" not in step for step in steps), "exact attention has no error"
    curves = TrainingCurves.of(steps)
    assert [answers.tokens for answers in curves.answers] == [2048, 4096]


@pytest.mark.long
def test_the_loss_of_answers_is_their_mean(corpus: Corpus) -> None:
    model = make_model(corpus, RECIPE)
    probes = NeedleDocuments(corpus, 2048, share=1.0).make_probes()
    assert len(probes) == 4
    of_documents = []
    for document, distances in probes:
        with torch.no_grad():
            log_probabilities = model(document[None, :-1]).logits[0].double().log_softmax(-1)
        places = torch.nonzero(distances)[:, 0]
        of_documents.append(-log_probabilities[places - 1, document[places]])
    assert len({len(of_document) for of_document in of_documents}) > 1, "a mean of means would be another"
    found = {kind: (float(summed), int(number)) for kind, (summed, number) in answer_losses(model, probes).items()}
    expected = torch.cat(of_documents)
    assert found["all"] == (pytest.approx(float(expected.sum()), rel=1e-5), len(expected))
    back = torch.cat([distances[distances > 0] for _, distances in probes])
    follows = torch.cat([distances[torch.nonzero(distances)[:, 0] - 1] > 0 for _, distances in probes])
    for kind, counted in {
        "first tokens": ~follows,
        "later tokens": follows,
        "1 to 256 back": back <= 256,
        "257 to 512 back": (back > 256) & (back <= 512),
        "1025 to 2048 back": back > 1024,
    }.items():
        assert found[kind] == (pytest.approx(float(expected[counted].sum()), rel=1e-5), int(counted.sum()))
        assert counted.any()


def test_ranks_measure_by_as_many_documents_which_are_not_the_same(corpus: Corpus) -> None:
    documents = NeedleDocuments(corpus, 2048, share=1.0)
    probes = [[document for document, _ in documents.make_probes(rank, 2)] for rank in range(2)]
    assert len(probes[0]) == len(probes[1]) == 4
    for one, other in itertools.combinations([*probes[0], *probes[1]], 2):
        assert not torch.equal(one, other)
