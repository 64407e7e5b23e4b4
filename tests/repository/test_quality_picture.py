"""README's picture of quality against cost: what it reads from records, and records that do not belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from docs_build.needle_records import read_difference, read_mean_over_trainings
from docs_build.quality_picture import MEASURED, Measured, read_trained

from muse_lab.records.means import Mean
from tests.repository.test_documentation import needs_records

OVER_TRAININGS = """
## Less exact, all kinds, 8k

| model | seed-1 | seed-2 | mean |
| --- | ---: | ---: | ---: |
| default | +9.0 ± 1.0 | +9.0 ± 1.0 | +9.0 ± 0.0 |

## Less exact, all kinds, 16k

| model | seed-1 | seed-2 | seed-3 | mean |
| --- | ---: | ---: | ---: | ---: |
| default | -1.0 ± 0.5 | -2.0 ± 0.5 | -3.0 ± 0.5 | -2.0 ± 0.6 |
| other | -1.0 ± 0.5 |  | -3.1 ± 0.5 | -2.1 ± 1.1 |
| alone | -1.0 ± 0.5 |  |  | -1.0 |

| model | seed-1 |
| --- | ---: |
| another table | +1.0 ± 0.5 |
"""
COMPARED = """
### the prompt read by exact

| kind, length | exact | muse | muse less exact |
| --- | ---: | ---: | ---: |
| all kinds, 8k | 9.0% (8.0 to 10.0) of 9 | 9.0% (8.0 to 10.0) of 9 | 0.0 |
| all kinds, 16k | 97.5% (95.7 to 98.6) of 486 | 93.0% (90.4 to 95.0) of 486 |  |
"""


def test_means_over_trainings_are_read_by_model_and_length(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text(OVER_TRAININGS)
    assert read_mean_over_trainings(path, "default", "16k") == (Mean(-2.0, 0.6), 3)
    assert read_mean_over_trainings(path, "other", "16k") == (Mean(-2.1, 1.1), 2)
    for model, length in (("nobody", "16k"), ("another table", "16k"), ("default", "32k"), ("other", "8k")):
        with pytest.raises(ValueError, match="there is not one row with"):
            read_mean_over_trainings(path, model, length)
    with pytest.raises(ValueError, match="alone has no mean over trainings with a standard error"):
        read_mean_over_trainings(path, "alone", "16k")


def test_a_difference_is_that_of_the_length(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text(COMPARED)
    assert read_difference(path, "muse", "16k") == pytest.approx(-4.5)
    with pytest.raises(ValueError, match="there is no model called paper"):
        read_difference(path, "paper", "16k")
    with pytest.raises(ValueError, match="there is not one row with 'all kinds, 4k'"):
        read_difference(path, "muse", "4k")


@needs_records
@pytest.mark.parametrize(
    ("comparisons", "message"),
    [
        (("16k", "16k"), "has the seed 0 twice"),
        (("16k", "32k-moba"), "are of several lengths or head dimensions"),
        (("far-32k", "far-32k-heads-of-128"), "has the seed 11 twice"),
        (("far-64k-alone",), "is no pair with exact training, or was not measured"),
        (("far-32k",), "no time of muse:"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(comparisons: tuple[str, ...], message: str) -> None:
    (times,) = [measured.times for measured in MEASURED if "16k" in measured.comparisons]
    with pytest.raises(ValueError, match=message):
        read_trained(Measured(times, comparisons))
