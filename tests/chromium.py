"""A page in headless Chromium, through the pipe of its DevTools: what it logs, how wide it is, and a picture of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Page:
    """Commands and events are JSON, each ended by a zero byte."""

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO) -> None:
        self._to, self._from = to_browser, from_browser
        self._sent = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """what the page has logged, and what it could not load"""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, width: int, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=file.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """Of the whole page, as PNG."""
        screenshot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(screenshot["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            content += byte
        message: dict[str, Any] = json.loads(content)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.errors.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(parameters["entry"]))
        return message


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, which ends with the block."""
    assert EXECUTABLE is not None
    (read_here, write_there), (read_there, write_here) = _pipe(), _pipe()
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, read_there, 3), (os.POSIX_SPAWN_DUP2, write_there, 4)]  # where it expects them
    command = [EXECUTABLE, *_OPTIONS, f"--user-data-dir={profile}"]
    process = os.posix_spawn(EXECUTABLE, command, os.environ, file_actions=[*quiet, *pipes])
    os.close(read_there)
    os.close(write_there)
    try:
        with open(write_here, "wb") as to_browser, open(read_here, "rb") as from_browser:
            yield Page(to_browser, from_browser)
    finally:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)


def _pipe() -> list[int]:
    """Its two ends, none of which has a number that the browser's own will have."""
    import fcntl  # here: not on Windows, where no browser is looked for

    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved
