"""docs/start/tutorial.md: examples/tutorial.py with what it prints. `python -m docs_build.tutorial_output` runs it."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muse_lab.records.machine import describe_machine

ROOT = Path(__file__).parent.parent
SCRIPT, PAGE = ROOT / "examples" / "tutorial.py", ROOT / "docs" / "start" / "tutorial.md"
_HEAD = re.compile(r"(?P<title>[^\[\n]+?)(?: \[tests: (?P<sizes>[^\]]+)\])?\n")
_PROSE = re.compile(r"(?:# .*\n)+")


@dataclass(frozen=True)
class Step:
    title: str
    prose: str
    code: str
    sizes_in_tests: str | None
    """what tests put in place of an assignment, such as `length = 2048`"""


def read_steps() -> list[Step]:
    """The steps of the script, from `# %%` to `# %%`."""
    _, *steps = SCRIPT.read_text().split("# %% ")
    return [_read_step(step) for step in steps]


def write_page(steps: list[Step], outputs: list[str], machine: str) -> str:
    """The page, with the output of each step below it."""
    parts = [
        "# Ten minutes on a CPU",
        f"This page is [tutorial.py](../../examples/tutorial.py) and its output on: {machine}.",
        "Run it yourself with `python examples/tutorial.py`. Its times are the best of three on a shared machine: "
        "[speed](../evidence/speed.md) has careful measurements.",
    ]
    for step, output in zip(steps, outputs, strict=True):
        marker = [] if step.sizes_in_tests is None else [f"<!-- test: {step.sizes_in_tests} -->"]
        parts += [f"## {step.title}", step.prose, *marker, f"```python\n{step.code}\n```", f"```text\n{output}\n```"]
    return "\n\n".join(parts) + "\n"


def run(steps: list[Step]) -> list[str]:
    """What each step prints; all of them share their names, as in the script."""
    names: dict[str, Any] = {}
    outputs = []
    for step in steps:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(step.code, SCRIPT.name, "exec"), names)
        outputs.append(printed.getvalue().strip())
    return outputs


def _read_step(text: str) -> Step:
    head = _HEAD.match(text)
    assert head is not None
    prose = _PROSE.match(text, head.end())
    assert prose is not None
    sentences = prose.group().replace("# ", "").strip()
    return Step(head["title"], sentences, text[prose.end() :].strip(), head["sizes"])


if __name__ == "__main__":
    found = read_steps()
    machine = describe_machine()
    where = f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, {machine['date']}"
    PAGE.write_text(write_page(found, run(found), where))
    print(f"wrote {PAGE}")
