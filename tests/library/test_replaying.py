"""When launches are captured, and when their graph is replayed. (That replays are right: test_cuda.py.)"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from muse_attention.backends.triton.runtime import replaying
from muse_attention.backends.triton.runtime.replaying import Replays


@pytest.fixture(autouse=True)
def nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Driver:
    """Notes what is launched, captured and replayed."""

    def __init__(self, *, can_capture: bool = True) -> None:
        self.notes: list[str] = []
        self.can_capture = can_capture
        self.replays = Replays(self.capture)

    def run(self, *addresses: int) -> list[str]:
        """What one call does."""
        self.notes = []
        launch = functools.partial(self.notes.append, "launch")
        (self.replays.find(addresses, launch) or launch)()
        return self.notes

    def capture(self, launch: Callable[[], None]) -> Callable[[], None] | None:
        self.notes.append("capture")
        return (lambda: self.notes.append("replay")) if self.can_capture else None


def test_the_second_time_is_captured_and_later_ones_are_replayed() -> None:
    driver = Driver()
    assert [driver.run(1, 2) for _ in range(4)] == [["launch"], ["capture", "replay"], ["replay"], ["replay"]]


def test_other_addresses_are_another_graph() -> None:
    driver = Driver()
    for _ in range(2):
        driver.run(1, 2)
    assert driver.run(1, 3) == ["launch"]
    assert driver.run(2, 1) == ["launch"]
    assert driver.run(1, 2) == ["replay"]


def test_inside_someone_elses_capture_everything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for _ in range(2):
        driver.run(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert driver.run(1) == ["launch"]
    assert [driver.run(2) for _ in range(3)] == [["launch"]] * 3


def test_what_cannot_be_captured_is_launched_and_not_tried_again() -> None:
    driver = Driver(can_capture=False)
    assert [driver.run(1) for _ in range(4)] == [["launch"], ["capture", "launch"], ["launch"], ["launch"]]


def test_graphs_in_use_are_not_given_up_for_others() -> None:
    """Else, with a few layers too many, every call would capture a graph and none would be replayed."""
    driver = Driver()
    layers = range(replaying.MOST_KEPT + 5)
    for _ in range(3):
        done = [driver.run(layer) for layer in layers]
    assert done.count(["replay"]) == replaying.MOST_KEPT
    assert done.count(["launch"]) == 5


def test_graphs_long_out_of_use_make_room() -> None:
    driver = Driver()
    for _ in range(2):
        for layer in range(replaying.MOST_KEPT):
            driver.run(layer)
    later = [driver.run(1000 + call % 3) for call in range(10 * replaying.MOST_KEPT)]
    assert later[-3:] == [["replay"]] * 3


def test_no_more_addresses_are_remembered_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_MOST_REMEMBERED", 10)
    driver = Driver()
    for address in range(30):
        driver.run(address)
    assert driver.run(0) == ["launch"]
    assert driver.run(29) == ["capture", "replay"]
