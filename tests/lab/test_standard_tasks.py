"""`examples/standard_tasks.py`: lm-eval scores a small model on tasks of its own, without a network."""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-evaluation")

import lm_eval.tasks

from muse_attention.core.recording import recorded_calls
from tests.markdown_pages import ROOT
from tests.models import tiny_llama, write_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning"),
]
EXAMPLE = ROOT / "examples" / "standard_tasks.py"
TASK = """
dataset_path: json
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{next}}"
"""
NEXT_WORDS = """
task: next_words
output_type: loglikelihood
metric_list: [{metric: perplexity, aggregation: mean, higher_is_better: true}]
"""
NEXT_LINE = """
task: next_line
output_type: generate_until
generation_kwargs: {max_gen_toks: 4, until: [], do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
PROMPT = "the quick brown fox " * 10
SCORE = "perplexity,none"
"""The mean log-probability: lm-eval's perplexity before its exponential."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "model"
    tiny_llama().float().save_pretrained(folder)
    write_tokenizer(folder, eos_token="~")
    return folder


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks with one row. lm-eval's own, which take long to list, are left out."""
    folder, rows = tmp_path / "tasks", tmp_path / "rows.jsonl"
    folder.mkdir()
    rows.write_text(json.dumps({"text": PROMPT, "next": "jumps over"}))
    place = f"dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {tmp_path}}}"
    for name, task in (("words", NEXT_WORDS), ("line", NEXT_LINE)):
        (folder / f"{name}.yaml").write_text(TASK + task + place)
    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, model: Path, tasks: Path, tmp_path: Path) -> Any:
    """The example, with these options: what it writes."""
    output = tmp_path / "out" / "results.json"

    def run_example(*options: str) -> Any:
        words = [EXAMPLE, model, "--include-path", tasks, "--output", output, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return json.loads(output.read_text())

    return run_example


def test_a_task_is_scored_under_exact_attention_and_with_muse(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    exact = run("--tasks", "next_words")["results"]["next_words"][SCORE]
    assert "|next_words|" in capsys.readouterr().out
    one_block = run("--tasks", "next_words", "--attention", "muse:Q4K4R1SP1B1k")
    assert one_block["config"]["attention"] == "muse:Q4K4R1SP1B1k"
    assert one_block["results"]["next_words"][SCORE] == pytest.approx(exact, rel=1e-5)
    blocks = run("--tasks", "next_words", "--attention", "muse:Q4K4R1SP1B32")
    assert blocks["results"]["next_words"][SCORE] != pytest.approx(exact, rel=1e-3)


def test_muse_reads_the_prompt_and_decoding_is_exact(run: Any) -> None:
    with recorded_calls() as calls:
        results = run("--tasks", "next_*", "--limit", "1", "--attention", "muse:Q4K4R1SP1B32")["results"]
    assert set(results) == {"next_words", "next_line"}
    assert {call.query.shape[2] for call in calls} == {len(PROMPT), len(PROMPT + "jumps over") - 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "next_words,arc_hard"], "unknown task 'arc_hard'; lm-eval ls tasks lists all"),
        (["--tasks", "next_words", "--attention", "muze"], "unknown attention 'muze'; the kinds are exact, muse"),
    ],
)
def test_mistakes_are_one_line(run: Any, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*options)
    assert str(stopped.value.code).startswith(message)
    assert "\n" not in str(stopped.value.code)


def test_a_tokenizer_without_an_end_is_refused(run: Any, model: Path) -> None:
    write_tokenizer(model)
    with pytest.raises(SystemExit, match="the tokenizer has no end of text"):
        run("--tasks", "next_line")


def test_without_lm_eval_it_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"standard tasks need lm-eval: pip install 'muse-attention\[evaluation\]'"):
        run("--tasks", "next_words")
