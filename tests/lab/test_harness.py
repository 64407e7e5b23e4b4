"""Standard tasks through lm-eval: its prompts and scores on hand-made data, and answers of a small model."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from muse_lab.evaluation.tasks.benchmarks import BENCHMARKS
from muse_lab.models import load_model
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from tests.command_line import run_muse
from tests.lab.test_tasks import write_lines
from tests.models import tiny_llama
from tests.refusals import one_line_error

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("accelerate", reason="lm-eval's models need accelerate")

from muse_lab.evaluation.tasks.harness import Harness, import_harness

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CHARACTERS = ["<end>", "\n", *map(chr, range(32, 127))]
ARC = [
    {
        "id": "Mercury_1",
        "question": "Which is the answer?",
        "choices": {"text": ["a", "bbbb", "cc"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    {
        "id": "MCAS_2",
        "question": "And which is it now?",
        "choices": {"text": ["stone", "air", "tree", "sea"], "label": ["1", "2", "3", "4"]},
        "answerKey": "1",
    },
    {
        "id": "Mercury_3",
        "question": "What falls?",
        "choices": {"text": ["rain", "sun", "sky", "day"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    },
]
SCIQ = {
    "question": "What falls?",
    "distractor3": "sky",
    "distractor1": "sun",
    "distractor2": "sea",
    "correct_answer": "rain",
    "support": "  Rain falls.",
}
LCC = {
    "input": "",
    "context": "def add(x, y):\n",
    "answers": ["    return x + y"],
    "length": 4,
    "dataset": "lcc",
    "language": "python",
    "all_classes": None,
    "_id": "1",
}
REPOBENCH = {**LCC, "input": "def subtract(x, y):\n", "answers": ["    return x - y"], "dataset": "repobench-p"}
ESSAYS = [{"text": "The moon is far. " * 300}, {"text": "Some  say\nit is near. " * 300}]


@pytest.fixture(scope="module", autouse=True)
def _without_network() -> Iterator[None]:
    """Whoever asks for it fails, from the first import of lm-eval's tasks on."""
    refuse = Mock(side_effect=AssertionError("the network was asked for"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")  # which importing the harness does, and who comes after this module may not expect
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=len(CHARACTERS), pad_token_id=None, eos_token_id=0)
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", model)


def write_folder(folder: Path, model: PreTrainedModel) -> Path:
    """With a tokenizer of characters that has an end of text."""
    model.save_pretrained(folder)
    characters = Tokenizer(models.BPE({character: index for index, character in enumerate(CHARACTERS)}, []))
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def harness(model_folder: Path) -> Harness:
    return Harness(*load_model(model_folder))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their own formats, with a few made-up rows."""
    folder = tmp_path_factory.mktemp("data")
    files: dict[str, Sequence[Any]] = {
        "arc_easy/test.jsonl": ARC,
        "sciq/test.jsonl": [SCIQ],
        "longbench/lcc.jsonl": [LCC],
        "longbench/repobench-p.jsonl": [REPOBENCH],
        "paul_graham_essays/train.jsonl": ESSAYS,
    }
    for name, rows in files.items():
        write_lines(folder / name, rows)
    sentences = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    sentences.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (sentences / name).write_text("")
    return folder


class Scripted:
    """Says what it is told to, in lm-eval's place for a model, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lm_eval.models.huggingface import HFLM

        self.requests: list[Any] = []
        self.responses: list[Any] = []

        def respond(wrapped: Any, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            self.requests += requests
            return self.responses

        for kind in ("generate_until", "loglikelihood"):
            monkeypatch.setattr(HFLM, kind, respond)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


# Scores of hand-made answers


def test_choices_are_scored_by_hand(harness: Harness, data: Path, scripted: Scripted) -> None:
    opened = harness.open(BENCHMARKS["arc_easy"], None, data, None)
    assert (opened.samples, opened.data.rows) == (3, 3)
    scripted.responses = [(-1.0, True), (-2.0, False), (-9.0, False)]
    answer = harness.answer(opened, 0, "exact")
    # The likeliest is "a"; -2 over the four characters of "bbbb", the right one, is more than -1 over one.
    assert answer.scores == {"acc": 0.0, "acc_norm": 1.0}
    assert [request.args for request in scripted.requests] == [
        ("Question: Which is the answer?\nAnswer:", " a"),
        ("Question: Which is the answer?\nAnswer:", " bbbb"),
        ("Question: Which is the answer?\nAnswer:", " cc"),
    ]
    assert answer.tokens == len("Question: Which is the answer?\nAnswer: bbb")  # the last is not read
    assert not answer.is_cut
    scripted.responses = [(-1.0, True), (-2.0, False), (-3.0, False), (-4.0, False)]
    assert harness.answer(opened, 1, "exact").scores == {"acc": 1.0, "acc_norm": 1.0}
    scripted.responses[2] = (float("nan"), False)
    with pytest.raises(ValueError, match="not a finite number"):
        harness.answer(opened, 1, "exact")


def test_sciq_asks_with_its_support(harness: Harness, data: Path, scripted: Scripted) -> None:
    opened = harness.open(BENCHMARKS["sciq"], None, data, None)
    scripted.responses = [(-3.0, False), (-2.0, False), (-4.0, False), (-1.0, True)]
    assert harness.answer(opened, 0, "exact").scores == {"acc": 1.0, "acc_norm": 1.0}
    assert scripted.requests[3].args == ("Rain falls.\nQuestion: What falls?\nAnswer:", " rain")


@pytest.mark.parametrize(
    ("name", "code", "right"), [("lcc", "", "x + y"), ("repobench-p", REPOBENCH["input"], "x - y")]
)
def test_code_is_scored_by_edit_similarity(
    harness: Harness, data: Path, scripted: Scripted, name: str, code: str, right: str
) -> None:
    opened = harness.open(BENCHMARKS[name], None, data, None)
    scripted.responses = [f"# a comment\n    return {right}\nrest"]
    answer = harness.answer(opened, 0, "exact")
    assert answer.scores == {"edit_similarity": 1.0}
    assert answer.response == scripted.responses[0]
    prompt, options = scripted.requests[0].args
    assert prompt == f"Please complete the code given below. \n{LCC['context']}{code}Next line of code:"
    assert (options["max_gen_toks"], options["do_sample"]) == (64, False)
    scripted.responses = ["    return x"]
    assert harness.answer(opened, 0, "exact").scores == {"edit_similarity": 0.86}  # 2 * 12 / (12 + 16) = 0.857...


def test_needles_are_scored_by_hand(harness: Harness, data: Path, scripted: Scripted) -> None:
    opened = harness.open(BENCHMARKS["niah_multivalue"], 4096, data, 2)
    values = opened.task.eval_docs[0]["outputs"]
    assert len(values) == 4
    scripted.responses = [f"are {values[2]} and {values[0]}, I think"]
    assert harness.answer(opened, 0, "exact").scores == {"string_match_all": 0.5}
    prompt, _ = scripted.requests[0].args
    assert all(prompt.count(value) == 1 for value in values)
    assert "The moon is far. The moon is far." in prompt
    essays = data / "paul_graham_essays" / "train.jsonl"
    assert hashlib.sha256(essays.read_bytes()).hexdigest() in opened.data.source
    scripted.responses = ["I do not know"]
    assert harness.answer(opened, 0, "exact").scores == {"string_match_all": 0.0}


# RULER's samples


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name.startswith("niah_")])
def test_every_needle_task_has_its_needles(harness: Harness, data: Path, name: str) -> None:
    opened = harness.open(BENCHMARKS[name], 4096, data, 2)
    assert (opened.samples, opened.data.rows) == (2, 2)
    for row in opened.task.eval_docs:
        assert row["length"] <= 4096
        assert all(row["input"].count(value) == 1 for value in row["outputs"])
        assert not any(value in row["gen_prefix"] for value in row["outputs"])


def test_samples_are_lm_evals_own_and_always_the_same(harness: Harness, model_folder: Path) -> None:
    from lm_eval.tasks.ruler import niah_utils

    state = random.getstate()
    few, more = (harness.open(BENCHMARKS["niah_multikey_3"], 1024, None, limit) for limit in (2, 5))
    assert random.getstate() == state
    assert list(few.task.eval_docs) == list(more.task.eval_docs)[:2]
    assert few.data.sha256 != more.data.sha256
    assert few.data == harness.open(BENCHMARKS["niah_multikey_3"], 1024, None, 2).data
    random.seed(0)
    own = niah_utils.niah_multikey_3(max_seq_lengths=[1024], tokenizer=str(model_folder))["test"]
    assert len(own) == BENCHMARKS["niah_multikey_3"].published
    assert list(own)[:5] == list(more.task.eval_docs)


# Whole answers


def test_answers_are_those_of_lm_eval(harness: Harness, data: Path) -> None:
    from lm_eval.evaluator import evaluate

    opened = [
        harness.open(BENCHMARKS["arc_easy"], None, data, None),
        harness.open(BENCHMARKS["lcc"], None, data, None),
        harness.open(BENCHMARKS["niah_multikey_2"], 1024, None, 2),
    ]
    found = evaluate(lm=harness._wrapped, task_dict={one.benchmark.name: one.task for one in opened}, bootstrap_iters=0)
    for one in opened:
        answers = [harness.answer(one, index, "exact") for index in range(one.samples)]
        if answers[0].response is not None:  # what a random model generates scores little, but is the same text
            theirs = sorted(found["samples"][one.benchmark.name], key=lambda sample: sample["doc_id"])
            assert [answer.response for answer in answers] == [sample["resps"][0][0] for sample in theirs]
        for metric in one.benchmark.metrics:
            mean = sum(answer.scores[metric] for answer in answers) / len(answers)
            called = str(one.length) if one.benchmark.is_ruler else metric
            assert mean == pytest.approx(found["results"][one.benchmark.name][f"{called},none"])


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")
def test_the_attention_is_used_in_prefill(harness: Harness) -> None:
    opened = harness.open(BENCHMARKS["niah_single_1"], 1024, None, 1)
    exact, again, muse, whole = (
        harness.answer(opened, 0, attention) for attention in ("exact", "exact", "muse:QK2R1B32", "muse:QK2R1B1k")
    )
    assert exact.response == again.response == whole.response  # one block is exact
    assert muse.response != exact.response
    assert 512 < exact.tokens <= 1024 - 128
    assert len(exact.response) <= 128


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")
def test_a_model_of_muse_train_answers_alike(tmp_path: Path) -> None:
    config = DecoderConfig.tiny(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        head_dim=16,
        sliding_window=16,
        initializer_range=0.2,
        max_position_embeddings=1024,
        eos_token_id=0,
    )
    harness = Harness(*load_model(write_folder(tmp_path / "model", DecoderForCausalLM(config))))
    opened = harness.open(BENCHMARKS["niah_multikey_2"], 1024, None, 1)
    exact, muse, whole = (
        harness.answer(opened, 0, attention).response for attention in ("exact", "muse:QK1R0B32", "muse:QK2R1B1k")
    )
    assert exact == whole
    assert muse != exact


def test_a_prompt_beyond_the_context_is_said_to_be_cut(
    harness: Harness, data: Path, tmp_path: Path, scripted: Scripted
) -> None:
    write_lines(tmp_path / "longbench" / "lcc.jsonl", [{**LCC, "context": "x = 1\n" * 400}])
    scripted.responses = ["x = 1"]
    answer = harness.answer(harness.open(BENCHMARKS["lcc"], None, tmp_path, None), 0, "exact")
    assert answer.is_cut
    assert answer.tokens == 1024 - 64


# What is not there, or not right


def test_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it was imported, and in use, before lm-eval was asked for."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(AssertionError, match="the network was asked for"):
        huggingface_hub.HfApi().model_info("gpt2")
    import_harness()
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    with pytest.raises(OfflineModeIsEnabled):
        huggingface_hub.HfApi().model_info("gpt2")
    with pytest.raises(ConnectionError, match=r"[Oo]ffline"):
        datasets.load_dataset("nobody/nothing")  # which no cache has


def test_rows_of_another_shape_are_one_line(harness: Harness, tmp_path: Path) -> None:
    write_lines(tmp_path / "arc_easy" / "test.jsonl", [{**ARC[0], "choices": ["a", "b"]}])
    with one_line_error(r"are not as published: .*; copy the file again"):
        harness.open(BENCHMARKS["arc_easy"], None, tmp_path, None)


def test_a_task_without_its_data_is_refused(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="niah_single_2 has no data here: put baber/paul_graham_essays"):
        harness.open(BENCHMARKS["niah_single_2"], 1024, tmp_path, 1)


def test_broken_data_of_ruler_are_one_line(harness: Harness, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    (tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english").mkdir()
    tokenizer_of_sentences = importlib.import_module("nltk.tokenize")
    tokenizer_of_sentences._get_punkt_tokenizer.cache_clear()
    with one_line_error("lm-eval cannot make niah_single_2 of 1024 tokens: "):
        harness.open(BENCHMARKS["niah_single_2"], 1024, tmp_path, 1)
    (tmp_path / "paul_graham_essays" / "train.jsonl").write_text('{"essay": ""}')
    with pytest.raises(ValueError, match="has no field 'text'"):
        harness.open(BENCHMARKS["niah_single_2"], 1024, tmp_path, 1)


def test_a_length_without_room_is_one_line(harness: Harness) -> None:
    with pytest.raises(
        ValueError, match="lm-eval cannot make niah_single_1 of 256 tokens: Could not generate any sample"
    ):
        harness.open(BENCHMARKS["niah_single_1"], 256, None, 1)


def test_a_tokenizer_without_an_end_is_refused(model_folder: Path) -> None:
    model, tokenizer = load_model(model_folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="set its eos_token"):
        Harness(model, tokenizer)


@pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")
def test_the_command_runs_tasks_of_every_kind(model_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["eval", "tasks", model_folder, "--task", "arc_easy,lcc,niah_single_1,niah_single_2", "--length", "1k"]
    arguments += ["--attention", "muse:QK2R1B64", "--limit", "1", "--data", data, "--device", "cpu"]
    code, _, err = run_muse(*arguments, "--output", tmp_path)
    assert code == 0, err
    assert all(line.startswith("muse: ") for line in err.splitlines())
    document = json.loads((tmp_path / f"{model_folder.name}.json").read_text())
    assert [(entry["task"], entry["length"], entry["samples"]) for entry in document["tasks"]] == [
        ("arc_easy", None, 1),
        ("lcc", None, 1),
        ("niah_single_1", 1024, 1),
        ("niah_single_2", 1024, 1),
    ]
    for entry in document["tasks"]:
        assert [named["attention"] for named in entry["attentions"]] == ["exact", "muse:Q2K2R1SP1B64,clustering=lloyd"]
        assert all(answer["error"] is None for named in entry["attentions"] for answer in named["answers"])
    assert "1 of 2376 published" in (tmp_path / f"{model_folder.name}.md").read_text()
