"""The paper's data as they are published, and a stand-in for its scientific texts: Parquet, topics, buckets, prose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from muse_lab.pretraining.data.corpus import read_corpus
from muse_lab.pretraining.data.datasets import dolma_documents, stack_repositories
from muse_lab.pretraining.data.filters import is_prose, read_prose
from muse_lab.pretraining.data.repositories import File, SkippedFileError
from muse_lab.pretraining.data.sources import repositories_in
from tests.command_line import assert_done, assert_done_quietly, assert_refused, run_muse
from tests.lab.test_sources import DOLMA, LARGEST, STACK, write_folder, write_lines, write_tar

PROSE = "This package reads tables and writes reports about them.\n" * 4
TREE = {
    "a.py": "x = 1\n",
    "README.md": PROSE,
    "docs/guide.rst": f"Guide\n{PROSE}",
    "vendor/docs.md": PROSE,
    "docs/numbers.txt": "1.23, 4.56, 7.89\n" * 20,
    "requirements.txt": "numpy\n",
    "LICENSE.txt": PROSE,
    "x.egg-info/SOURCES.txt": "a.py\n",
}


# The Stack v2 in Parquet


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {**dict.fromkeys(("repo_name", "files")), "repo_url": None}
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
    parquet.write_table(table, path, row_group_size=2)
    return path


def test_ids_from_parquet_are_those_of_lines(tmp_path: Path) -> None:
    rows = [{**STACK, "repo_name": f"owner/project-{number}"} for number in range(5)]
    packed = write_parquet(tmp_path / "train-00000.parquet", rows)
    lines = write_lines(tmp_path / "ids.jsonl", rows)

    def found(path: Path) -> list[tuple[str, int | None, list[tuple[str, str]]]]:
        return [
            (project.name, project.size, [(file.path, file.refused) for file in project.files])
            for project in stack_repositories([path], lambda blob_id: b"x = 1\n")
        ]

    assert found(packed) == found(lines)
    assert [name for name, _, _ in found(packed)] == [row["repo_name"] for row in rows]


@pytest.mark.parametrize("damage", [lambda content: content[:-30], lambda content: b"nonsense" * 50])
def test_a_damaged_parquet_file_says_so(damage: Any, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "ids.parquet", [STACK])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"ids\.parquet is cut short or damaged .*; get it again"):
        list(stack_repositories([path], lambda blob_id: b""))


def test_without_pyarrow_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ids.parquet").write_bytes(b"PAR1")
    (tmp_path / "content").mkdir()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert_refused(
        run_muse("prepare", tmp_path, "--kind", "stack", "--contents", tmp_path, "--output", tmp_path / "out"),
        "pyarrow is not installed, and .parquet files need it: pip install 'muse-attention[parquet]'",
    )


# LongMino


@pytest.fixture
def longmino(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for number, name in enumerate(("pdfs-science_tech-2e15", "pdfs-science_tech-2e16", "pdfs-health-2e16")):
        (folder / name).mkdir(parents=True)
        write_lines(folder / name / "part.jsonl", [{**DOLMA[0], "id": f"{number}"}])
    return folder


@pytest.mark.parametrize(
    ("topic", "bucket", "expected"),
    [
        ("science_tech", "2e16", ["1"]),
        ("science_tech", None, ["0", "1"]),
        (None, "2e16", ["1", "2"]),
        (None, None, ["0", "1", "2"]),
    ],
)
def test_topics_and_length_buckets_by_name(
    topic: str | None, bucket: str | None, expected: list[str], longmino: Path
) -> None:
    found = dolma_documents([longmino], topic=topic, length_bucket=bucket)
    assert sorted(document.name for document in found) == expected


def test_a_topic_that_is_not_there_is_refused_with_those_that_are(longmino: Path) -> None:
    with pytest.raises(
        ValueError, match=r"topic science and the length bucket 2e16; there are pdfs-health-2e16, pdfs-"
    ):
        list(dolma_documents([longmino], topic="science", length_bucket="2e16"))


# Prose


def test_prose_is_known_by_its_name() -> None:
    assert [path for path in TREE if is_prose(path)] == [
        "README.md",
        "docs/guide.rst",
        "vendor/docs.md",
        "docs/numbers.txt",
    ]


def test_prose_is_mostly_words() -> None:
    def read(path: str) -> str:
        content = TREE[path].encode()
        return read_prose(File(path, len(content), lambda: content))

    assert read("README.md") == PROSE
    for path, reason in (("docs/numbers.txt", "not prose"), ("vendor/docs.md", "vendored")):
        with pytest.raises(SkippedFileError, match=reason):
            read(path)


def test_prose_of_folders_and_archives_is_the_same(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    write_folder(sources / "one", TREE)
    write_tar(sources / "two-1.0.tar.gz", TREE, "two-1.0/")
    one, two = repositories_in([sources], largest=LARGEST, prose=True)
    kept = [{file.path for file in repository.files} for repository in (one, two)]
    assert kept[0] == kept[1] == {"README.md", "docs/guide.rst", "vendor/docs.md", "docs/numbers.txt"}
    assert one.is_prose
    assert two.is_prose


def test_a_corpus_of_prose_and_a_corpus_of_code_are_two(tmp_path: Path) -> None:
    for number in range(4):
        texts = {"docs/guide.md": f"Number {number} of many. {PROSE * 40}", "a.py": f"x = {number}\n" * 900}
        write_folder(tmp_path / "sources" / f"project{number}", texts)
    asked = ("prepare", tmp_path / "sources", "--smallest", "64", "--largest", "8k", "--vocabulary", "300")
    assert_done_quietly(run_muse(*asked, "--content", "prose", "--held-out", "0.3", "--output", tmp_path / "out"))
    manifest = read_corpus(tmp_path / "out").manifest
    assert manifest.source == "repositories: sources (prose)"
    assert manifest.counts["files"] == 4
    code, _, err = run_muse(*asked, "--held-out", "0.3", "--output", tmp_path / "out")
    assert code == 2
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--content", "poems"), "unknown content 'poems'; use code or prose"),
        (("--content", "prose", "--kind", "text"), "--content prose is read from repositories only"),
        (("--topic", "science_tech"), "--topic and --length-bucket are for LongMino (kind dolma), not repositories"),
    ],
)
def test_parts_that_a_kind_does_not_have(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert_refused(run_muse("prepare", tmp_path, *words, "--output", tmp_path / "out"), message)


@pytest.mark.parametrize(("kind", "skips"), [("dolma", True), ("text", False)])
def test_what_is_too_large_is_left_out_of_the_papers_data_alone(kind: str, skips: bool, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    texts = [f"{number} {PROSE * (4 + 40 * (number == 0))}" for number in range(6)]
    if kind == "dolma":
        write_lines(folder / "part.jsonl", [{"id": str(number), "text": text} for number, text in enumerate(texts)])
    else:
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
    asked = ("prepare", folder, "--kind", kind, "--smallest", "64", "--largest", "1k", "--vocabulary", "300")
    assert_done_quietly(run_muse(*asked, "--held-out", "0.3", "--output", tmp_path / "out"))
    manifest = read_corpus(tmp_path / "out").manifest
    assert manifest.settings["skip_large"] is skips
    assert ("from 1k tokens on" in manifest.skipped_documents) is skips
    assert_done(run_muse(*asked, "--held-out", "0.3", "--output", tmp_path / "cut", "--cut-large"))
    assert read_corpus(tmp_path / "cut").manifest.settings["skip_large"] is False
