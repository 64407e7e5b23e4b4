"""The standard tasks: what each one is called, how many samples were published, and which data it needs from where.

RULER makes its own samples; some of its tasks hide needles in essays, which are data like those of the other tasks.
Nothing is downloaded. Data lie in one folder:

    DIR/arc_easy/test.jsonl               allenai/ai2_arc, ARC-Easy, split test
    DIR/sciq/test.jsonl                   allenai/sciq, split test
    DIR/longbench/lcc.jsonl               the files of LongBench's data.zip
    DIR/longbench/repobench-p.jsonl
    DIR/paul_graham_essays/train.jsonl    baber/paul_graham_essays, split train
    DIR/nltk_data/tokenizers/punkt_tab/   punkt_tab of nltk_data, unpacked

each with the data set's own fields, one row of JSON in a line, or as Parquet under the same name with .parquet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muse_attention.core.extras import how_to_install


@dataclass(frozen=True)
class DataSet:
    """Rows in one file."""

    published_as: str
    file: str
    """in the folder of data, without its ending"""
    fields: tuple[str, ...]
    """those that are used"""


@dataclass(frozen=True)
class Benchmark:
    name: str
    config: str
    """of lm-eval, in its folder of tasks"""
    metrics: tuple[str, ...]
    published: int
    """samples, of each length where there are lengths"""
    data: DataSet | None = None
    """None if samples are generated without data"""
    is_ruler: bool = False
    """whether samples are made, at any length"""


@dataclass(frozen=True)
class Data:
    """What the samples of a task were taken from or, where they are made, the samples themselves."""

    source: str
    """in words"""
    rows: int
    sha256: str


_ESSAYS = DataSet("baber/paul_graham_essays, split train", "paul_graham_essays/train", ("text",))
_SENTENCES = "nltk_data/tokenizers/punkt_tab"


def _needles(name: str, *, in_essays: bool) -> Benchmark:
    data = _ESSAYS if in_essays else None
    return Benchmark(name, f"ruler/{name}.yaml", ("string_match_all",), 500, data, is_ruler=True)


def _code(name: str) -> Benchmark:
    data = DataSet(f"LongBench, {name}.jsonl of data.zip", f"longbench/{name}", ("context", "input", "answers"))
    return Benchmark(name, f"longbench/{name}.yaml", ("edit_similarity",), 500, data)


_CHOICES = ("acc", "acc_norm")
_ARC_EASY = DataSet("allenai/ai2_arc, ARC-Easy, split test", "arc_easy/test", ("question", "choices", "answerKey"))
_SCIQ = DataSet(
    "allenai/sciq, split test",
    "sciq/test",
    ("question", "support", "correct_answer", "distractor1", "distractor2", "distractor3"),
)
RULER = (
    _needles("niah_single_1", in_essays=False),
    _needles("niah_single_2", in_essays=True),
    _needles("niah_single_3", in_essays=True),
    _needles("niah_multikey_1", in_essays=True),
    _needles("niah_multikey_2", in_essays=False),
    _needles("niah_multikey_3", in_essays=False),
    _needles("niah_multivalue", in_essays=True),
    _needles("niah_multiquery", in_essays=True),
)
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("arc_easy", "arc/arc_easy.yaml", _CHOICES, 2376, _ARC_EASY),
        Benchmark("sciq", "sciq/sciq.yaml", _CHOICES, 1000, _SCIQ),
        _code("lcc"),
        _code("repobench-p"),
        *RULER,
    )
}


def choose(names: Iterable[str]) -> list[Benchmark]:
    """By name, each once; `ruler` is all needle tasks of RULER. A ValueError if there is no such task."""
    chosen: dict[str, Benchmark] = {}
    for name in names:
        if name == "ruler":
            chosen |= {benchmark.name: benchmark for benchmark in RULER}
        elif name in BENCHMARKS:
            chosen[name] = BENCHMARKS[name]
        else:
            raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(BENCHMARKS)}, and ruler for all niah_")
    return list(chosen.values())


def what_is_missing(benchmark: Benchmark, folder: Path | None) -> str | None:
    """What to put where for this task to run; None if all is there."""
    needed = benchmark.data
    if needed is None:
        return None
    place = Path("DIR") if folder is None else folder
    wanted: list[str] = []
    if folder is None or _find(needed, folder) is None:
        fields = ", ".join(needed.fields)
        wanted.append(f"{needed.published_as} as {place / needed.file}.jsonl or .parquet (fields {fields})")
    if benchmark.is_ruler and not (place / _SENTENCES / "english").is_dir():
        wanted.append(f"punkt_tab of nltk_data as {place / _SENTENCES}/")
    if not wanted:
        return None
    return f"put {' and '.join(wanted)}{', and give --data DIR' if folder is None else ''}"


def read_rows(needed: DataSet, folder: Path) -> tuple[list[dict[str, Any]], Data]:
    """All rows of a data set that is there, and what names it; a ValueError if they are not its rows."""
    path = _find(needed, folder)
    if path is None:
        raise ValueError(f"there is no {folder / needed.file}.jsonl or .parquet")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path, content)
    if not rows:
        raise ValueError(f"{path} has no rows; copy it again")
    for number, row in enumerate(rows):
        if lacking := [field for field in needed.fields if field not in row]:
            raise ValueError(f"row {number + 1} of {path} has no field {lacking[0]!r}; {needed.published_as} has it")
    return rows, Data(f"{needed.published_as}: {path.name}", len(rows), hashlib.sha256(content).hexdigest())


def describe_made(rows: Sequence[dict[str, Any]], source: str) -> Data:
    """Of samples that were made: the hash is of themselves."""
    text = json.dumps(rows, sort_keys=True)
    return Data(source, len(rows), hashlib.sha256(text.encode()).hexdigest())


def _find(needed: DataSet, folder: Path) -> Path | None:
    paths = (folder / f"{needed.file}{ending}" for ending in (".jsonl", ".parquet"))
    return next((path for path in paths if path.is_file()), None)


def _json_rows(path: Path, content: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(content.splitlines()):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"line {number + 1} of {path} is not a row of JSON; copy the file again")
        rows.append(row)
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import read_table
    except ImportError:
        raise ImportError(f"reading {path} needs pyarrow: {how_to_install('evaluation')}") from None
    try:
        rows: list[dict[str, Any]] = read_table(path).to_pylist()
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"cannot read {path}: {' '.join(str(error).split())}; copy the file again") from None
    return rows
