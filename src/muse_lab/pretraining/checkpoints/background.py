"""A thread that does one thing while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """Its thread ends with the process: what it writes is whole or absent."""

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait(self, seconds: float | None = None) -> BaseException | None:
        """Return when it is done, with the error that it raised, or after so many seconds."""
        self._thread.join(seconds)
        return self._error

    def _run(self, action: Callable[[], None]) -> None:
        """What the action holds, as copies of tensors, is freed with the thread."""
        try:
            action()
        except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
            self._error = error
