"""A cache of tensors that depend only on a few numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_remembered: dict[tuple[object, ...], Tensor] = {}
_MOST_REMEMBERED = 64
_read_by_graphs: dict[tuple[object, ...], Tensor] = {}


def once(numbers: tuple[int, ...], device: torch.device, find: Callable[[], Tensor]) -> Tensor:
    """`find()`, cached for each stream: another stream could read the tensor before it is computed.

    A stream that is being captured waits for all others and may use their tensors. What its graph reads must outlive
    the graph, and what it computes itself belongs to the graph.
    """
    is_cuda = device.type == "cuda"
    numbers_and_device = (*numbers, device)
    if is_cuda and torch.cuda.is_current_stream_capturing():
        for key, tensor in [*_read_by_graphs.items(), *_remembered.items()]:
            if key[: len(numbers_and_device)] == numbers_and_device:
                _read_by_graphs[numbers_and_device] = tensor
                return tensor
        return find()
    key = (*numbers_and_device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)
    if key not in _remembered:
        while len(_remembered) >= _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _remembered[key] = find()
    return _remembered[key]
