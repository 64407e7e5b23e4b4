"""Tensors that depend on a few numbers alone: found once, not in every call of every layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_found: dict[tuple[object, ...], Tensor] = {}
_MOST_FOUND = 64
_read_by_graphs: dict[tuple[object, ...], Tensor] = {}


def once(numbers: tuple[int, ...], device: torch.device, find: Callable[[], Tensor]) -> Tensor:
    """What depends on a few numbers alone is found once for each stream, not in every call of every layer.

    (Another stream could read it before it is there.) A stream that is being captured comes after all others. What its
    graph reads must outlive it, and what it finds itself belongs to the graph.
    """
    is_cuda = device.type == "cuda"
    what = (*numbers, device)
    if is_cuda and torch.cuda.is_current_stream_capturing():
        for key, tensor in [*_read_by_graphs.items(), *_found.items()]:
            if key[: len(what)] == what:
                _read_by_graphs[what] = tensor
                return tensor
        return find()
    key = (*what, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)
    if key not in _found:
        while len(_found) >= _MOST_FOUND:
            del _found[next(iter(_found))]
        _found[key] = find()
    return _found[key]
