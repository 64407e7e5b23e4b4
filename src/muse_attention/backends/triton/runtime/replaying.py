"""CUDA graphs of lists of launches that recur with the same addresses.

With short sequences the host takes longer to launch the kernels of a call than the GPU to run them. But PyTorch's
allocator gives each training step the same memory as the step before, so a list of launches soon recurs with every
address the same. The second time it is captured, and from then on it is replayed by one call of the driver.

Such a graph owns no tensor and keeps no memory of PyTorch's. (The driver needs some 200 kB for it.) It is replayed only
if all tensors of a call have its addresses, and then runs exactly what that call would launch. While the user captures
a graph, launches go into it one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

MOST_KEPT = 128
"""Graphs of one list, at most: enough for one in each layer of a model."""
_MOST_REMEMBERED = 1024
"""Most address lists remembered after one call."""
_LONG_UNUSED = 8 * MOST_KEPT
"""Calls without a replay after which a graph makes room for another."""
_NON_BLOCKING = 1
"""A stream that does not wait for the default stream (`CU_STREAM_NON_BLOCKING`)."""

Launch = Callable[[], None]


@dataclass
class _Graph:
    replay: Launch
    last: int
    """the call in which it was replayed last"""


class Replays:
    """The graphs of one list of launches."""

    def __init__(self, capture: Callable[[Launch], Launch | None] | None = None) -> None:
        """`capture` returns the replay of a launch, or None if it cannot be captured."""
        self._capture = capture or _captured
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._remembered: dict[tuple[int, ...], None] = {}
        self._calls = 0
        self._full_until = 0
        self._may_capture = torch.version.hip is None

    def find(self, addresses: tuple[int, ...], launch: Launch) -> Launch | None:
        """The replay of `launch`, or None if `launch` has to be called. `launch()` must launch the same kernels with
        the same arguments whenever the addresses are the same."""
        if not self._may_capture or torch.cuda.is_current_stream_capturing():
            return None
        with _lock:
            graph = self._find(addresses, launch)
        return None if graph is None else graph.replay

    def _find(self, addresses: tuple[int, ...], launch: Launch) -> _Graph | None:
        self._calls += 1
        graph = self._graphs.get(addresses)
        if graph is None and self._comes_again(addresses) and self._has_room():
            replay = self._capture(launch)
            if replay is None:
                self._may_capture = False
            else:
                graph = self._graphs[addresses] = _Graph(replay, self._calls)
        if graph is not None:
            graph.last = self._calls
        return graph

    def _comes_again(self, addresses: tuple[int, ...]) -> bool:
        if addresses in self._remembered:
            return True
        while len(self._remembered) >= _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[addresses] = None
        return False

    def _has_room(self) -> bool:
        if len(self._graphs) < MOST_KEPT:
            return True
        if self._calls <= self._full_until:
            return False
        oldest = min(self._graphs, key=lambda addresses: self._graphs[addresses].last)
        self._full_until = self._graphs[oldest].last + _LONG_UNUSED
        if self._calls <= self._full_until:
            return False
        del self._graphs[oldest]
        return True


_lock = threading.Lock()
"""One thread captures at a time."""
_failed: list[torch.cuda.CUDAGraph] = []
"""PyTorch's allocator may still refer to them."""


def _captured(launch: Launch) -> Launch | None:
    stream = _stream_of_captures(torch.cuda.current_device())
    if stream is None:
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    except RuntimeError:  # of CUDA: nothing was launched
        _failed.append(graph)
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())
        return None
    replay: Launch = graph.replay
    return replay


@functools.cache
def _stream_of_captures(device: int) -> torch.cuda.Stream | None:
    """A stream of our own: work that another thread put on it would become part of the graph, and PyTorch shares its
    streams."""
    handle = ctypes.c_void_p()
    try:
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
        return torch.cuda.ExternalStream(handle.value, device) if error == 0 and handle.value else None
    except (OSError, AttributeError, RuntimeError):
        return None
