"""Shared by all commands of `muse`: the application, one-line errors, progress, tables and files."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from muse_attention import __version__

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer has its own copy of click, or depends on it


_LISTED = {
    "demo": "See MuSe at work: one long attention call, and a tiny model trained with and without it.",
    "info": "Show versions, hardware, backends and default configurations.",
    "bench": "Measure time, memory and error of attentions on this machine.",
    "prepare": "Make a corpus of tokens for pretraining from source code and texts.",
    "train": "Pretrain a language model with any attention.",
    "recipes": "List the recipes of muse train, and what their fields mean.",
    "compare": "Compare training runs: loss, speed, error of the attention.",
    "fidelity": "Measure the error of attentions on the heads of a language model.",
    "loss": "Measure a language model's loss at every position of long texts.",
    "tune": "Find the fastest configuration below a given error, for a model on this device.",
    "eval": "Evaluate a language model: code needle-in-a-haystack.",
    "report": "Regenerate reports from existing results.",
}
"""The lines of `muse --help`. The module of a command is imported when it is called: most need PyTorch, which takes
seconds."""
_MODULES = {"eval": "needles"}
"""Modules that do not have the name of their command."""


class _Commands(TyperGroup):
    """The commands of `_LISTED`.

    Wrong arguments and paths that cannot be opened give one line on stderr and exit code 2.
    """

    _shows_help = False

    def main(self, args: Any = None, *, standalone_mode: bool = True, **others: Any) -> Any:  # type: ignore[override]
        try:
            code = super().main(args, standalone_mode=False, **others)
        except _USAGE_ERROR as error:
            if not standalone_mode:
                raise
            say(" ".join(error.format_message().split()))  # type: ignore[attr-defined]
            code = 2
        except OSError as error:
            if not standalone_mode or error.filename is None:
                raise
            say(f"{error.filename}: {error.strerror}")
            code = 2
        return sys.exit(code or 0) if standalone_mode else code

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_LISTED)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _LISTED:
            return None
        if self._shows_help:
            return TyperCommand(cmd_name, help=_LISTED[cmd_name])
        with busy(f"importing what muse {cmd_name} needs"):
            importlib.import_module(f"muse_lab.cli.{_MODULES.get(cmd_name, cmd_name)}")
        return get_group(app).commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in _LISTED:  # typer would only suggest commands that are already imported
            close = [f"muse {name}" for name in difflib.get_close_matches(args[0], _LISTED)]
            ctx.fail(
                f"there is no command {args[0]!r}; "
                + (f"did you mean {' or '.join(close)}?" if close else "muse --help lists all")
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._shows_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._shows_help = False


app = typer.Typer(
    cls=_Commands, add_completion=False, rich_markup_mode="markdown", help="Multipole Semantic Attention."
)
_PLAIN_TEXT: dict[str, Any] = {"markup": False, "emoji": False}
"""Brackets in names of files and documents are not markup."""
console = Console(**_PLAIN_TEXT)

SECONDS_BEFORE_FIRST_LINE, SECONDS_BETWEEN_LINES = 2.0, 30.0
"""Times of progress lines, which are printed where there is no terminal."""
_STARTING = "starting"
LONG_RUN_SECONDS = 60.0
"""The time left is printed at once if it is longer than this."""

CONTENTS = "index.html"
"""The list of reports that `muse report` writes into a folder."""


def nonempty_path(text: str) -> Path:
    """A `parser=` of options and arguments: an empty text, from an unset variable, would mean the current folder."""
    if not str(text):
        raise typer.BadParameter("it is empty; give a folder, or . for the current one")
    return Path(text)


Output = Annotated[Path, typer.Option(help="Output directory.", parser=nonempty_path)]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if available, else cpu")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Overwrite existing results; by default they are resumed.")
]
"""The policy is that of `earlier_results`."""
RepeatCaptures = Annotated[
    bool,
    typer.Option(
        "--repeat-captures",
        help="Concatenate captured samples that are shorter than --length. This is harder than one long text.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"muse-attention {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def muse(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def file_stem(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"--name {name!r} must be a plain file name: letters, digits, '_', '-' and '.'")
    if name.lower() == Path(CONTENTS).stem:
        raise ValueError(f"--name {name} would be overwritten by {CONTENTS} of muse report; choose another name")
    return name


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write to the folder {folder}")


def is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def new_table(title: str, name: str, *headers: str) -> Table:
    """A table of numbers, with a name in each row, which wraps where the terminal is too narrow."""
    looks: dict[str, Any] = {"title_style": "", "title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, **looks)
    table.add_column(name, overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


@contextlib.contextmanager
def progress_bar(steps: int, before: str = _STARTING) -> Iterator[Callable[[str, int], None]]:
    """Show the progress of work of a known size. Yields the function to call with a description and the steps done.

    Args:
        before: the description until that function is first called
    """
    with phases_bar() as on_step:
        on_step(before, 0, steps)
        yield lambda description, finished: on_step(description, finished, steps)


@contextlib.contextmanager
def phases_bar(*, says_lines: bool = True) -> Iterator[Callable[[str, int, int | None], None]]:
    """Like `progress_bar`, for work whose total may change: every step passes the total, or None while it is unknown.

    On a terminal, a bar on stderr that disappears when it is full. Elsewhere lines on stderr: the first after
    `SECONDS_BEFORE_FIRST_LINE`, then one every `SECONDS_BETWEEN_LINES`, however long a step takes. Of several
    processes, only the first shows progress.

    Args:
        says_lines: False for a command that prints its own lines once the total is known
    """
    stderr = Console(stderr=True, **_PLAIN_TEXT)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    is_first = os.environ.get("RANK", "0") == "0"  # set by torchrun
    lines = _Lines() if is_first and not stderr.is_terminal else None
    with (
        lines or contextlib.nullcontext(),
        Progress(*columns, console=stderr, transient=True, disable=not (is_first and stderr.is_terminal)) as progress,
    ):
        task = progress.add_task(_STARTING, total=None)

        def on_step(description: str, finished: int, total: int | None) -> None:
            progress.update(task, description=description, completed=finished, total=total)
            if lines is not None:
                if says_lines or total is None:
                    lines.on_step(description, finished, total)
                else:
                    lines.stop()

        yield on_step


@contextlib.contextmanager
def busy(description: str) -> Iterator[None]:
    """Show a description of work that has no steps to count."""
    with phases_bar() as on_step:
        on_step(description, 0, None)
        yield


class _Lines:
    """Progress lines, printed by a thread. The first estimate of a long run is printed at once."""

    def __init__(self) -> None:
        self._description, self._done = _STARTING, ""
        self._total: int | None = None
        self._began, self._first = time.monotonic(), 0
        self._end: float | None = None
        self._next = self._began + SECONDS_BEFORE_FIRST_LINE
        self._is_estimated = False
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def on_step(self, description: str, finished: int, total: int | None) -> None:
        with self._lock:
            now = time.monotonic()
            if total != self._total:  # another phase, whose speed is not known yet
                self._total, self._began, self._first, self._end = total, now, finished, None
            self._description = description
            self._done = f": {finished} of {total}" if total is not None else f": {finished}" if finished else ""
            if total is not None and finished > self._first:
                left = (now - self._began) / (finished - self._first) * (total - finished)
                self._end = now + left
                if left > LONG_RUN_SECONDS and not self._is_estimated:
                    self._say(now)

    def _keep_saying(self) -> None:
        while not self._is_over.wait(max(0.0, self._next - time.monotonic())):
            with self._lock:
                now = time.monotonic()
                if now >= self._next:
                    self._say(now)

    def _say(self, now: float) -> None:
        self._next = now + SECONDS_BETWEEN_LINES
        self._is_estimated = self._is_estimated or self._end is not None
        left = "" if self._end is None else f", ETA {datetime.timedelta(seconds=round(max(0.0, self._end - now)))}"
        say(f"{self._description}{self._done}{left}")


@contextlib.contextmanager
def run_errors(
    how_to_continue: Callable[[], str], how_to_save_memory: Callable[[], str] | None = None
) -> Iterator[None]:
    """Report Ctrl-C, a full disk and too little memory as one line that says how to continue."""
    try:
        yield
    except KeyboardInterrupt as stop:  # `stopping.Stopped` is one
        say(f"{str(stop) or 'interrupted'}; {how_to_continue()}")
        raise typer.Exit(getattr(stop, "exit_code", 130)) from None
    except OSError as error:
        if error.filename is None:
            raise
        say(f"{error.filename}: {error.strerror}; {how_to_continue()}")
        raise typer.Exit(1) from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        say(f"out of memory; {(how_to_save_memory or how_to_continue)()}")
        raise typer.Exit(1) from None


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Report a ValueError and a missing package as one line, with exit code 2."""
    try:
        yield
    except (ImportError, ValueError) as error:
        say(str(error))
        raise typer.Exit(2) from None


def say(message: str) -> None:
    """Print one line on stderr, with unprintable characters escaped."""
    shown = "".join(char if char.isprintable() else " " if char.isspace() else repr(char)[1:-1] for char in message)
    typer.echo(f"muse: {shown}", err=True)
