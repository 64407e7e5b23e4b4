"""`muse prepare --pack` and `document_mask=true`: whole documents in rows, which neither see nor predict each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.data.corpus import HELD_OUT, TRAIN, Corpus, read_corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.document_mask import separate_documents
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.model.chunked_loss import IGNORED
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import make_batches, train
from tests.command_line import assert_done, assert_refused, run_muse
from tests.lab.test_prepare import SMALL as PREPARED
from tests.lab.test_prepare import contents, make, source
from tests.training_runs import SMALL, losses

pytestmark = pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")

ROW = 128
SEPARATE = override(SMALL, [f"length={ROW}", "document_mask=true"])
END = 0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_packed(tmp_path_factory.mktemp("packed"), ROW)


def make_packed(folder: Path, row: int | None) -> Corpus:
    """Documents of a few tokens up to several rows; in rows of so many tokens, or one after another for None."""
    found = {f"project{n}": {"a.py": source(n, 4 + 5 * n)} for n in range(40)}
    return make(folder, dataclasses.replace(PREPARED, buckets=Buckets(1, 4096), pack=row), found)


def documents_of(corpus: Corpus) -> list[Tensor]:
    """The tokens of each indexed document, without what fills up its row."""
    (stream,) = corpus.streams(TRAIN)
    found = []
    for document in corpus.documents(stream):
        tokens = torch.from_numpy(corpus.tokens(stream, document.start, document.start + document.tokens))
        real = (tokens != corpus.manifest.end).nonzero()
        found.append(tokens[: int(real[-1]) + 1])
    return found


def test_rows_hold_whole_documents(packed: Corpus) -> None:
    (stream,) = packed.streams(TRAIN)
    assert stream.tokens % ROW == 0
    filled = 0
    for document in packed.documents(stream):
        assert document.start // ROW == (document.start + document.tokens - 1) // ROW
        filled += document.tokens
    assert filled == stream.tokens
    plain = sum(len(document) + 1 for document in documents_of(packed))
    assert plain > 0.85 * stream.tokens


def test_the_documents_are_those_of_an_unpacked_corpus(packed: Corpus, tmp_path: Path) -> None:
    unpacked = make_packed(tmp_path, None)
    expected: list[Tensor] = []
    for stream in unpacked.streams(TRAIN):
        for document in unpacked.documents(stream):
            tokens = unpacked.tokens(stream, document.start, document.start + document.tokens - 1)
            expected += torch.from_numpy(tokens).split(ROW)
    assert sorted(map(Tensor.tolist, documents_of(packed))) == sorted(map(Tensor.tolist, expected))


def test_the_same_sources_give_the_same_bytes(packed: Corpus, tmp_path: Path) -> None:
    make_packed(tmp_path, ROW)
    assert contents(tmp_path) == contents(packed.folder)


def test_positions_restart_and_no_target_is_of_another_document() -> None:
    tokens = torch.tensor([[5, 6, END, 7, END, END, END, 8, 9, 4], [END, 5, END, END, 6, 7, 8, 9, 4, END]])
    ids, positions, labels = separate_documents(tokens, END)
    assert torch.equal(ids, tokens[:, :-1])
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1, 2, 3, 4]]
    none = IGNORED
    assert labels.tolist() == [[6, END, none, END, none, none, none, 9, 4], [none, END, none, none, 7, 8, 9, 4, END]]


def test_the_loss_of_a_row_is_that_of_its_documents(packed: Corpus) -> None:
    model, end = make_model(packed, SEPARATE), packed.manifest.end
    windows = Windows(packed, ROW)
    rows = [separate_documents(windows[index][None], end) for index in range(len(windows))]
    ids, positions, labels = max(rows, key=lambda row: int((row.position_ids == 0).sum()))
    found = model(ids, position_ids=positions, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss
    begins = (positions[0] == 0).nonzero()[:, 0].tolist()
    assert len(begins) > 3
    assert labels[0, -1] == IGNORED  # its last token is an end mark
    total = 0.0
    for begin, stop in zip(begins, [*begins[1:], ROW], strict=True):
        one = ids[:, begin:stop]
        targets = torch.cat([one[:, 1:], torch.full((1, 1), IGNORED)], 1).masked_fill(one == end, IGNORED)
        if (targets != IGNORED).any():
            total += model(one, shift_labels=targets, num_items_in_batch=1, use_cache=False).loss.item()
    assert found.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.long
def test_training_on_a_packed_corpus(packed: Corpus, tmp_path: Path) -> None:
    train(packed, override(SEPARATE, ["steps=3"]), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    model = make_model(packed, SEPARATE)
    tokens = make_batches(packed, SEPARATE).read(0)
    ids, positions, labels = separate_documents(tokens, packed.manifest.end)
    expected = model(ids, position_ids=positions, shift_labels=labels, use_cache=False).loss.item()
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_evaluation_keeps_documents_apart(packed: Corpus) -> None:
    model, windows = make_model(packed, SEPARATE), Windows(packed, ROW, split=HELD_OUT)
    recipe = override(SEPARATE, ["evaluate_every=1", f"evaluate_samples={len(windows)}", "evaluate_needles=0"])
    found = Evaluation(packed, recipe, World(torch.device("cpu"))).run(model, lambda: None)["held_out_loss"]
    total, number = 0.0, 0
    for index in range(len(windows)):
        ids, positions, labels = separate_documents(windows[index][None], packed.manifest.end)
        with torch.no_grad():
            loss = model(ids, position_ids=positions, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss
        total, number = total + loss.item(), number + int((labels != IGNORED).sum())
    assert found == pytest.approx(total / number, rel=1e-5)


@pytest.mark.parametrize("changes", [["document_mask=false"], ["length=64"]])
def test_rows_that_would_be_cut_or_mixed_are_refused(packed: Corpus, changes: list[str]) -> None:
    with pytest.raises(ValueError, match="is packed into rows of 128 tokens: train with document_mask=true length=128"):
        make_batches(packed, override(SEPARATE, changes))


def test_the_option_packs(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / "texts" / f"project{number}").mkdir(parents=True)
        (tmp_path / "texts" / f"project{number}" / "a.py").write_text(source(number, 30 + 10 * number))
    words = ["prepare", tmp_path / "texts", "--output", tmp_path / "corpus", "--vocabulary", "400", "--held-out", "0.2"]
    assert_done(run_muse(*words, "--pack", "256"))
    corpus = read_corpus(tmp_path / "corpus")
    assert corpus.manifest.settings["pack"] == 256
    assert all(stream.tokens % 256 == 0 for stream in corpus.manifest.streams)
    assert_refused(run_muse(*words, "--smallest", "1"), "pack was 256, now none")
