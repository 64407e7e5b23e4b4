"""`muse bench --documents`: packed documents."""

from __future__ import annotations

from pathlib import Path

from muse_lab.benchmark.packed_documents import DocumentsSettings, format_documents, measure_documents
from muse_lab.benchmark.packed_documents_report import CAPTION, documents_report, documents_table
from muse_lab.cli.app import progress_bar
from muse_lab.cli.measuring import add_command, show, write


def run(settings: DocumentsSettings, configs: list[str], path: Path, command: str) -> None:
    """Measure, show and write."""
    with progress_bar(settings.repeats + 1) as on_step:
        results = measure_documents(settings, configs, lambda number: on_step(f"round {number}", number))
    add_command(results, command)
    results.write(path)
    table = documents_table(results)
    show(table, format_documents(settings.documents), table.titles[1:], CAPTION)
    write(documents_report(results, path.stem), path, path)
