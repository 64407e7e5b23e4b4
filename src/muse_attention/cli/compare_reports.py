"""The files that `muse compare` writes for people, from its results alone."""

from __future__ import annotations

from pathlib import Path

from muse_attention.cli.measuring import write
from muse_attention.evaluation.comparison.report import comparison_report
from muse_attention.evaluation.comparison.results import ComparisonResults


def write_comparison_reports(results: ComparisonResults, path: Path) -> None:
    write(comparison_report(results), path, path)
