"""Models that `muse train` trained with the present default, beside exact training with the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from docs_build.records import read_comparison
from muse_attention.config import MuSeConfig
from muse_lab.evaluation.comparison.findings import switching
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.seeds import Seeds, seeds_of
from muse_lab.evaluation.means import Mean
from muse_lab.records.attention_names import EXACT

LENGTHS = (32 * 1024, 64 * 1024)
_RECORDS = {32 * 1024: "far-32k", 64 * 1024: "far-64k"}
_NEAR = 10
"""Of the spans of positions between powers of two, that from 1k to 2k."""


class Trained(NamedTuple):
    """Runs of several seeds at one length, with exact attention and with the default."""

    length: int
    seeds: tuple[int, ...]
    tokens: int
    parameters: int
    losses: tuple[float, float]
    """held out, under exact attention: after exact training and after training with the default, means over seeds"""
    gap: Mean
    """percent, paired by seed; ± is the standard error over seeds"""
    gaps: tuple[float, ...]
    """of each seed"""
    own: float
    """nats: how much the loss of the default's models rises under the default"""
    far_context: tuple[float, float]
    """nats by which the last half of the positions is better than those from 1k to 2k"""
    speeds: tuple[float, float]
    """tokens per second, means over seeds of the median over updates"""
    file: Path


def read_trained(length: int) -> Trained:
    results, path = read_comparison(_RECORDS[length])
    default = f"muse:{MuSeConfig.for_length(length)}"
    groups = {group.attention: group for group in seeds_of(results)}
    if lacking := {EXACT, default} - groups.keys():
        raise ValueError(f"{path} has no runs of several seeds with {', '.join(lacking)}")
    both = groups[EXACT], groups[default]
    exact_loss, loss = (group.loss(results, EXACT) for group in both)
    gap = both[1].difference(results, is_percent=True)
    gaps = [one for one in both[1].differences(results, is_percent=True) if one is not None]
    own = [switching(results, run, default) for run in both[1].runs]
    if exact_loss is None or loss is None or gap is None or None in own:
        raise ValueError(f"{path} is incomplete; run muse compare again")
    return Trained(
        length, tuple(run.recipe.seed for run in both[1].runs), both[1].runs[0].tokens, both[1].runs[0].parameters,
        (exact_loss.mean, loss.mean), gap, tuple(gaps), fmean(one.mean for one in own if one),
        _pair(both, lambda run: _far_context(results, run)), _pair(both, _speed), path,
    )  # fmt: skip


def _pair(groups: tuple[Seeds, Seeds], measure: Callable[[Run], float]) -> tuple[float, float]:
    exact, default = (fmean(map(measure, group.runs)) for group in groups)
    return exact, default


def _far_context(results: ComparisonResults, run: Run) -> float:
    cell = results.whole(run, EXACT)
    assert cell is not None, "its loss was read above"
    return cell.by_position[_NEAR].mean - cell.by_position[-1].mean


def _speed(run: Run) -> float:
    return run.curves.speeds[run.recipe.attention].tokens_per_second
