"""What the metrics of a run say: losses against tokens and seconds, and speeds, on lines made by hand."""

from __future__ import annotations

import math

from muse_lab.evaluation.comparison.training_curves import POINTS, Speed, TrainingCurves
from tests.training_runs import metrics_line


def test_seconds_are_those_of_updates() -> None:
    curves = TrainingCurves.of([metrics_line(1, 8.0, 100.0), metrics_line(2, 6.0, 50.0), metrics_line(3, 5.0, 200.0)])
    assert [(point.tokens, point.seconds, point.loss) for point in curves.points] == [
        (100, 1, 8),
        (200, 3, 6),
        (300, 3.5, 5),
    ]
    assert (curves.seconds, curves.averaged) == (3.5, 1)


def test_points_are_means_of_consecutive_updates_counted_from_the_last() -> None:
    number = 2 * POINTS + 4  # three updates in a point, and two in the first: 68 = 22 * 3 + 2
    curves = TrainingCurves.of([metrics_line(index, float(index), 100.0) for index in range(1, number + 1)])
    assert curves.averaged == 3
    assert len(curves.points) == math.ceil(number / 3) <= POINTS
    assert curves.points[-1] == (100 * (number - 1), number - 1, number - 1)
    assert curves.points[0] == (150, 1.5, 1.5)
    assert curves.points[1].loss == 4
    assert TrainingCurves.of([]).points == ()


def test_speeds_are_medians_without_first_updates_and_probes() -> None:
    speeds = [1.0, 1.0, 1.0, 100.0, 300.0, 200.0]
    steps = [metrics_line(index + 1, 5.0, speed) for index, speed in enumerate(speeds)]
    steps.append(metrics_line(7, 5.0, 7.0, rse={"1": 0.5, "3": 0.25}))
    steps.append(metrics_line(7, 5.0, 9.0, answers_loss=4.0))
    steps += [metrics_line(8 + index, 5.0, 40.0 + index, "exact") for index in range(4)]
    steps += [metrics_line(12, 5.0, 1.0, "short")]
    curves = TrainingCurves.of(steps)
    assert curves.speeds == {"muse": Speed(200.0, 3), "exact": Speed(43.0, 1)}
    (probe,) = curves.probes
    assert (probe.tokens, probe.errors, probe.mean) == (700, {1: 0.5, 3: 0.25}, 0.375)
