"""Two things at a time on a GPU: the fused operators on the caller's stream, the far field on one of its own.

The kernels of the far field are many and small, those of the fused operators few and large. On a stream of higher
priority the small ones take what they need, and the large ones fill what they leave.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

_beside: dict[torch.device, torch.cuda.Stream] = {}


class Aside:
    """A stream beside the caller's, for what is issued inside `with`. On a CPU, nothing at all.

    It starts after all that the caller's stream was given before it was made, and the caller's stream waits for it at
    the end. In between, what the caller's stream is given runs at the same time, until `wait_for_caller`.
    """

    def __init__(self, device: torch.device) -> None:
        self._caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if self._caller is not None:
            if device not in _beside:
                _beside[device] = torch.cuda.Stream(device, priority=-1)
            self._stream = _beside[device]
            self._stream.wait_stream(self._caller)

    def __enter__(self) -> None:
        if self._caller is not None:
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._context.__exit__(kind, error, traceback)
            self._caller.wait_stream(self._stream)

    def wait_for_caller(self) -> None:
        """What follows here runs after all that the caller's stream has been given by now."""
        if self._caller is not None:
            self._stream.wait_stream(self._caller)

    def hand_over(self, *tensors: Tensor) -> None:
        """These were made here, but the caller's stream may use them: their memory is not to be reused before."""
        if self._caller is not None:
            for tensor in tensors:
                tensor.record_stream(self._caller)
