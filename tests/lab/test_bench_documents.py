"""`muse bench --documents`: packed documents against exact attention in the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from muse_lab.benchmark.packed_documents import DocumentsResults, format_documents, parse_documents
from tests.command_line import run_muse


def run(folder: Path, *options: str) -> tuple[int, str]:
    code, out, err = run_muse("bench", "--output", folder, "--device", "cpu", "--repeats", "2", *options)
    return code, " ".join(f"{out} {err}".split())


def test_documents_are_measured_and_reported(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "--documents", "300,100x2", "--attention", "muse:QK4R1B64,muse", "--heads", "2")
    assert code == 0, printed
    results = DocumentsResults.read(tmp_path / "cpu-documents.json")
    assert results.settings.documents == (300, 100, 100)
    baseline, coarse, default = results.packed
    assert "scaled_dot_product_attention" in baseline.attention
    assert coarse.attention == "muse:QK4R1B64, packed"
    assert coarse.error > 1e-4
    assert default.error < 1e-10
    assert len(coarse.times.forward_backward) == 2
    assert "--documents 300,100x2" in results.commands[0]
    report = (tmp_path / "cpu-documents.md").read_text()
    assert "3 documents with 500 tokens in all" in report
    code, printed = run(tmp_path, "--documents", "300")
    assert code == 2
    assert "exists; choose another --name, or --overwrite it" in printed
    assert run_muse("report", tmp_path / "cpu-documents.json")[0] == 0


def test_one_document_has_muse_attention_beside_it(tmp_path: Path) -> None:
    assert run(tmp_path, "--documents", "200", "--attention", "muse:QK4R1B64", "--name", "one")[0] == 0
    _, packed, whole = DocumentsResults.read(tmp_path / "one.json").packed
    assert whole.attention == "muse:QK4R1B64, muse_attention"
    assert packed.error == pytest.approx(whole.error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--documents", "300,x2"], "cannot read the size"),
        (["--documents", "300x0"], "write them like 32k,2k,2k or 1kx64"),
        (["--documents", "300", "--length", "1k"], "leave out --length"),
        (["--documents", "300", "--attention", "exact"], "--documents measures muse"),
        (["--documents", "300", "--heads", "3", "--key-heads", "2"], "3 heads cannot share 2 key heads"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    code, printed = run(tmp_path, *options)
    assert code == 2
    assert message in printed


def test_documents_read_and_written() -> None:
    assert parse_documents("32k, 2kx2,1") == (32768, 2048, 2048, 1)
    assert format_documents((32768, 2048, 2048, 1)) == "32k,2kx2,1"
