"""Runs of several seeds in `muse compare`: pairs of the same seed, and the error over seeds."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest

from muse_lab.evaluation.comparison.comparison_report import comparison_report
from muse_lab.evaluation.comparison.findings import difference, reference_of
from muse_lab.evaluation.comparison.positions import (
    context_tables,
    difference_figures,
    differences_by_position,
    history_figures,
    own_attention_tables,
)
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.evaluation.comparison.seeds import seeds_headline, seeds_of
from muse_lab.pretraining.recipes import override
from muse_lab.records.machine import describe_machine
from muse_lab.report.markdown import as_markdown
from tests.compared_runs import MUSE, SETTINGS, add_losses, add_run, change
from tests.training_runs import metrics_line

EXACT = (("exact", 0, 2.0), ("exact", 1, 4.0))
PAIRS = (*EXACT, (MUSE, 0, 2.2), (MUSE, 1, 4.1))


def seeded(*runs: tuple[str, int, float]) -> ComparisonResults:
    """Of each run: its attention, its seed, and its loss, the mean of two samples that are far apart."""
    results = ComparisonResults(describe_machine(), SETTINGS)
    for attention, seed, loss in runs:
        name, speed = f"{attention.partition(':')[0]}-{seed}", 300.0 if attention == MUSE else 150.0
        metrics = [metrics_line(index, 5.0, speed, attention) for index in range(1, 9)]
        add_run(results, name, attention, [loss - 1, loss + 1], metrics, f"seed={seed}")
    return results


def test_a_run_is_compared_with_exact_training_of_its_seed() -> None:
    results = seeded(*PAIRS, (MUSE, 2, 9.0))
    assert [reference_of(results, run).name for run in results.runs.values()] == [
        *("exact-0", "exact-1", "exact-0", "exact-1"),
        "exact-0",  # of another seed, for want of one of its own
    ]
    assert difference(results, results.runs["exact-1"]) is None


def test_a_seed_without_exact_training_has_no_difference() -> None:
    results = seeded(("exact", 0, 2.0), (MUSE, 0, 2.2), (MUSE, 2, 9.0))
    exact, muse = seeds_of(results)
    assert muse.differences(results, is_percent=True) == [pytest.approx(10.0), None]
    assert muse.difference(results) is None
    assert exact.differences(results) == [None]
    assert seeds_headline(results) == []


def test_a_run_that_was_trained_further_is_compared_with_exact_training_of_as_many_tokens() -> None:
    results = seeded(("exact", 0, 2.0), (MUSE, 0, 2.2))
    for name in ("muse-0", "exact-0"):
        run = results.runs[name]
        further = override(run.recipe, ["further_steps=5", "further_attention=exact"])
        changed = dataclasses.replace(run, name=f"{name}-further", recipe=further, step=further.updates)
        results.runs[changed.name] = changed
        expected = {"muse-0": "exact-0", "muse-0-further": "exact-0"}  # for want of one trained as long
        if name == "exact-0":
            expected |= {"muse-0-further": "exact-0-further", "exact-0-further": "exact-0-further"}
        assert {name: reference_of(results, results.runs[name]).name for name in expected} == expected


def test_the_error_is_that_over_seeds() -> None:
    results = seeded(*PAIRS)
    exact, muse = seeds_of(results)
    assert [len(exact.runs), len(muse.runs)] == [2, 2]
    assert exact.spread(results) == pytest.approx(statistics.stdev([2.0, 4.0]))
    assert exact.difference(results) is None
    # of 0.2 and 0.1; the two samples differ by 2
    assert tuple(muse.difference(results)) == pytest.approx((0.15, 0.05))
    assert tuple(muse.difference(results, is_percent=True)) == pytest.approx((6.25, 3.75))  # of 10% and 2.5%
    # Samples of 1 and 3 gain 0.2, those of 3 and 5 0.1: of 20 and 6.7%, and of 3.3 and 2%.
    assert tuple(muse.median_difference(results)) == pytest.approx((8.0, 16 / 3))
    assert muse.speedup(results) == pytest.approx(2.0)
    (line,) = seeds_headline(results)
    assert line.endswith(
        "2 seeds: held-out loss under exact attention +6.25 ± 3.75% against exact training with the same "
        "seeds, median sample +8.00 ± 5.33%, 2.00x its tokens per second"
    )
    assert "| 0, 1 |" in as_markdown(comparison_report(results))


def test_other_recipes_are_no_seeds() -> None:
    results = seeded(*EXACT)
    change(results, "exact-1", "keep=7")
    assert [len(group.runs) for group in seeds_of(results)] == [2]
    change(results, "exact-1", "peak_rate=0.1")
    assert seeds_of(results) == []


def test_what_the_far_context_is_worth() -> None:
    results = ComparisonResults({}, dataclasses.replace(SETTINGS, length=4096))
    add_run(results, "exact", "exact", [], [])
    results.cells[0].sizes = [1 << power for power in range(11)] + [2049]
    results.cells[0].bins = [[9.0] * 10 + [2.0, 1.5], [9.0] * 10 + [4.0, 3.7]]
    (table,) = context_tables(results)
    assert [column.title for column in table.columns] == ["run", "1024 to 2047", "2048 to 4096", "difference"]
    assert table.rows[0] == ("exact", "3.0000 ± 1.0000", "2.6000 ± 1.1000", "-0.4000 ± 0.1000")
    assert context_tables(seeded(("exact", 0, 2.0))) == []


def test_runs_that_differ_by_their_exact_updates_are_told_apart() -> None:
    results = seeded(*PAIRS)
    for seed in (0, 1):
        changes = ("exact_start=0.3", "exact_tail=0.2", f"initial=short-{seed}", f"seed={seed}")
        add_run(results, f"start-{seed}", MUSE, [3.0, 3.0], [], *changes)
    text = shown(results)
    assert "| Q8K8R2SP1B128, exact for the first 30%, exact for the last 20% | 0.0M | 0, 1 |" in text
    assert "tokens are not counted: start-0 with those of short-0; start-1 with those of short-1." in text
    assert "start-1, trained with muse:Q8K8R2SP1B128,clustering=lloyd, exact for the first 30%, exact for" in text


def test_differences_by_position_are_means_over_pairs_of_a_seed() -> None:
    results = seeded(*PAIRS, ("moba:L16B16R1", 1, 4.5))
    curves = differences_by_position(results)
    assert [name for name, _ in curves] == [
        "Q8K8R2SP1B128, exact for the last 5%: 2 seeds, less exact",
        "moba-1 less exact-1",
    ]
    of_muse, of_moba = (curve for _, curve in curves)
    assert [last for last, _ in of_muse] == [1, 2]
    assert [gap for _, gap in of_muse] == pytest.approx([0.15, 0.15])
    assert [gap for _, gap in of_moba] == pytest.approx([0.5, 0.5])
    assert [figure.name for figure in difference_figures(results)] == ["positions"]
    assert history_figures(results) == [], "no run has an earlier checkpoint"
    alone = seeded(*EXACT)
    assert difference_figures(alone) == []
    assert [figure.name for figure in history_figures(alone)] == ["positions-1", "positions-2"]
    del results.runs["exact-1"]
    assert [name for name, _ in differences_by_position(results)] == ["moba-1 less exact-0"], (
        "seed 1 of MuSe has no pair"
    )


def test_pictures_of_differences_leave_the_first_positions_out() -> None:
    results = seeded(("exact", 0, 2.0), (MUSE, 0, 2.2))
    for cell in results.cells:
        cell.sizes[:] = [*(1 << power for power in range(9)), 513]
        cell.bins[:] = [[2.0] * 10 for _ in range(2)]
    ((_, curve),) = differences_by_position(results)
    assert [last for last, _ in curve] == [15, 31, 63, 127, 255, 511, 1024]


def test_what_finished_models_add_under_their_own_attention_is_one_table() -> None:
    results = seeded(("exact", 0, 2.0), (MUSE, 0, 2.2), (MUSE, 1, 4.1))
    for name, loss in (("muse-0", 2.5), ("muse-1", 4.0)):
        add_losses(results, name, MUSE, [loss - 1, loss + 1])
    (table,) = own_attention_tables(results)
    assert table.titles == ["positions", "muse-0", "muse-1"]
    assert table.rows == [("1", "+0.3000", "-0.1000"), ("2", "+0.3000", "-0.1000")]


def test_runs_that_shared_their_gpu_have_no_speed() -> None:
    results = seeded(*PAIRS)
    assert all(word in shown(results) for word in ("speed-up", "tokens/s", "against time"))
    results.settings = dataclasses.replace(results.settings, shared_gpu=True)
    assert "+6.25 ± 3.75%" in shown(results)
    assert "The GPU was shared with other programs" in shown(results)
    assert not any(word in shown(results) for word in ("speed-up", "tokens/s", "against time"))


def test_a_comparison_goes_on_whether_the_gpu_is_said_to_be_shared_again_or_not(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    ComparisonResults.start(dataclasses.replace(SETTINGS, shared_gpu=True), path).write(path)
    assert ComparisonResults.start(SETTINGS, path).settings.shared_gpu
    with pytest.raises(ValueError, match="samples"):
        ComparisonResults.start(dataclasses.replace(SETTINGS, samples=3), path)


def shown(results: ComparisonResults) -> str:
    """The report, with the titles of its figures."""
    report = comparison_report(results)
    return as_markdown(report) + "".join(figure.title for section in report.sections for figure in section.figures)


def test_seeds_may_begin_with_weights_of_their_own() -> None:
    results = seeded(*EXACT)
    for seed in (0, 1):
        change(results, f"exact-{seed}", f"initial=out/{seed}/near/model")
    assert [len(group.runs) for group in seeds_of(results)] == [2]
    change(results, "exact-1", "initial=")
    assert seeds_of(results) == []


def test_runs_of_one_seed_that_begin_with_other_weights_are_no_pair() -> None:
    results = seeded(*PAIRS)
    for name in results.runs:
        change(results, name, f"initial={name}")
    exact, muse = seeds_of(results)
    assert exact.difference(results) is muse.difference(results) is None


def test_a_seed_counts_once() -> None:
    results = seeded(*EXACT)
    results.runs["again"] = dataclasses.replace(results.runs["exact-0"], name="again")
    (exact,) = seeds_of(results)
    assert [run.name for run in exact.runs] == ["exact-0", "exact-1"]
