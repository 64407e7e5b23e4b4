"""Standard tasks through lm-eval, one sample at a time, with any attention of the library in prefill.

Prompts, stop rules and scores are lm-eval's own; only the data come from this machine, and the similarity of code is
computed by `edit_similarity`. Once lm-eval is imported, nothing in this process reaches the Hugging Face hub any more.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from muse_attention.core.extras import how_to_install
from muse_lab.evaluation.tasks.answers import Answer
from muse_lab.evaluation.tasks.benchmarks import Benchmark, Data, describe_made, read_rows, what_is_missing
from muse_lab.evaluation.tasks.edit_similarity import edit_similarity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_INSTALL = how_to_install("evaluation")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_SEED = 0
"""lm-eval's own: a task of RULER that is run alone there has these samples."""


@dataclass(frozen=True)
class OpenTask:
    """A task with its data, at one length where it has lengths."""

    benchmark: Benchmark
    length: int | None
    data: Data
    samples: int
    """to answer: all rows, or the first of them"""
    task: Any
    """lm-eval's"""


class Harness:
    """One model, as lm-eval sees it."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """A ValueError if lm-eval cannot run this model, an ImportError if there is no lm-eval."""
        import_harness()
        from lm_eval.models.huggingface import HFLM

        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end of text, which lm-eval needs; set its eos_token and save it")
        self._model = model
        self._tokenizer = tokenizer
        self._wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)

    def open(self, benchmark: Benchmark, length: int | None, folder: Path | None, limit: int | None) -> OpenTask:
        """Read or make the samples of a task, the first `limit` of them; a ValueError if its data are not there."""
        if missing := what_is_missing(benchmark, folder):
            raise ValueError(f"{benchmark.name} has no data here: {missing}")
        if benchmark.is_ruler:
            assert length is not None
            task, data = self._open_ruler(benchmark, length, folder, limit)
        else:
            assert benchmark.data is not None
            assert folder is not None
            task, data = _open_file(benchmark, folder)
        return OpenTask(benchmark, length, data, min(data.rows, limit or data.rows), task)

    def answer(self, opened: OpenTask, index: int, attention: str) -> Answer:
        """Of a sample: what the model says under an attention, and its scores."""
        from muse_attention.huggingface import use_attention

        task = opened.task
        row = task.eval_docs[index]
        prompt = task.fewshot_context(row, num_fewshot=0, gen_prefix=task.doc_to_prefix(row))
        asked = task.construct_requests(doc=row, ctx=prompt, metadata=(opened.benchmark.name, index, 1))
        requests = asked if isinstance(asked, list) else [asked]
        with use_attention(self._model, attention):
            responses = getattr(self._wrapped, requests[0].request_type)(requests, disable_tqdm=True)
        _check_finite(responses)
        scores = task.process_results(row, responses)
        if opened.benchmark.is_ruler:
            scores = {"string_match_all": scores[str(opened.length)]}
        tokens = max(self._tokens(*request.args) for request in requests)
        room = self._wrapped.max_length - _generated(requests[0].args[1])
        return Answer(
            index=index,
            scores={metric: float(scores[metric]) for metric in opened.benchmark.metrics},
            tokens=min(tokens, room),
            is_cut=tokens > room,
            response=responses[0] if isinstance(responses[0], str) else None,
        )

    def _tokens(self, prompt: str, rest: str | dict[str, Any]) -> int:
        """That go through the model at once: of a choice, all but the last."""
        if isinstance(rest, str):
            return len(self._wrapped.tok_encode(prompt + rest)) - 1
        return len(self._wrapped.tok_encode(prompt))

    def _open_ruler(
        self, benchmark: Benchmark, length: int, folder: Path | None, limit: int | None
    ) -> tuple[Any, Data]:
        source, essays = "made by lm-eval", []
        if benchmark.data is not None:
            assert folder is not None
            rows, data = read_rows(benchmark.data, folder)
            essays = [str(row["text"]) for row in rows]
            source = f"made by lm-eval from {data.source}, SHA-256 {data.sha256}"
        config = _read_ruler_config(benchmark)
        config["metadata"] |= {"max_seq_lengths": [length]}
        samples = min(limit or benchmark.published, benchmark.published)
        try:
            with _ruler_made_here(config["custom_dataset"].__module__, samples, self._tokenizer, essays, folder):
                task = _new_task(config)
        except (LookupError, OSError, ValueError) as error:
            line = " ".join(str(error).split())
            raise ValueError(f"lm-eval cannot make {benchmark.name} of {length} tokens: {line}") from error
        return task, describe_made(list(task.eval_docs), source)


def import_harness() -> str:
    """Its name and version; an ImportError of one line if it is not there. From here on the hub is out of reach."""
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    try:
        import datasets.config
        import huggingface_hub.constants
        import lm_eval.models.huggingface
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ImportError(f"standard tasks need lm-eval: {_INSTALL} ({' '.join(str(error).split())})") from None
    # The environment is heeded by what is imported after it; these two may have been imported long ago.
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return f"lm-eval {importlib.metadata.version('lm-eval')}"


def _open_file(benchmark: Benchmark, folder: Path) -> tuple[Any, Data]:
    from datasets import Dataset

    assert benchmark.data is not None
    rows, data = read_rows(benchmark.data, folder)
    config = _read_config(benchmark)
    if "edit_similarity" in benchmark.metrics:
        rows = [{**row, "question": row["input"]} for row in rows]  # as in the copy of LongBench that lm-eval reads
        metric = {"metric": "edit_similarity", "aggregation": "mean", "higher_is_better": True}
        config |= {"process_results": _score_code, "metric_list": [metric]}
    used = ["question" if field == "input" else field for field in benchmark.data.fields]
    try:
        kept = Dataset.from_list([{field: row[field] for field in used} for row in rows])
        task = _new_task(config | {"custom_dataset": lambda **options: {config["test_split"]: kept}})
    except Exception as error:  # fields of another shape fail wherever lm-eval first looks at them
        line = " ".join(str(error).split())
        raise ValueError(f"the rows of {data.source} are not as published: {line}; copy the file again") from error
    return task, data


def _score_code(row: dict[str, Any], responses: list[str]) -> dict[str, float]:
    return {"edit_similarity": edit_similarity(responses[0], row["answers"])}


def _read_config(benchmark: Benchmark) -> dict[str, Any]:
    """lm-eval's own, without examples before the question, so that only the tested split is needed."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.tasks.__file__).parent / benchmark.config
    config: dict[str, Any] = load_yaml(path, resolve_func=benchmark.is_ruler)
    config.pop("tag", None)
    return {**config, "training_split": None, "validation_split": None, "num_fewshot": 0}


def _new_task(config: dict[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(config=config)


def _check_finite(responses: list[str] | list[tuple[float, bool]]) -> None:
    """Refuse a NaN among the log-probabilities of choices: which is the largest would be undefined."""
    for response in responses:
        if not isinstance(response, str) and not math.isfinite(response[0]):
            raise ValueError("the log-probability of a choice is not a finite number; use another dtype")


def _generated(options: str | dict[str, Any]) -> int:
    """Tokens for which there must be room after the prompt; none where a choice was read with it."""
    return 0 if isinstance(options, str) else int(options["max_gen_toks"])


def _read_ruler_config(benchmark: Benchmark) -> dict[str, Any]:
    """Reading it imports the code that makes samples, which would look for nltk's sentences on the network."""
    try:
        import nltk
        import wonderwords  # noqa: F401
    except ImportError as error:
        raise ImportError(f"RULER's tasks need nltk and wonderwords: {_INSTALL} ({error})") from None
    without_network = patch.multiple(nltk, download=lambda *arguments, **options: False)
    with without_network, contextlib.redirect_stdout(io.StringIO()):
        return _read_config(benchmark)


@contextlib.contextmanager
def _ruler_made_here(
    module: str, samples: int, tokenizer: PreTrainedTokenizerBase, essays: list[str], folder: Path | None
) -> Iterator[None]:
    """lm-eval makes RULER's samples in here: as many as are asked for, always the same, from these essays, silently.

    On its own it always makes 500, depends on the random numbers drawn before, and looks for essays on the network.
    `module` has the functions that make them.
    """
    import datasets
    import nltk
    from lm_eval.tasks.ruler import prepare_niah

    def generate(*arguments: Any, **options: Any) -> Any:
        return prepare_niah.generate_samples(*arguments, **{**options, "num_samples": samples})

    places = [str(folder / "nltk_data"), *nltk.data.path] if folder is not None else nltk.data.path
    state = random.getstate()
    random.seed(_SEED)
    prepare_niah.get_haystack.cache_clear()
    try:
        with (
            patch.multiple(sys.modules[module], generate_samples=generate, get_tokenizer=lambda name: tokenizer),
            patch.multiple(prepare_niah, tqdm=lambda steps, **options: steps),
            patch.multiple(datasets, load_dataset=lambda *arguments, **options: {"text": essays}),
            patch.multiple(nltk.data, path=places),
        ):
            yield
    finally:
        prepare_niah.get_haystack.cache_clear()
        random.setstate(state)
