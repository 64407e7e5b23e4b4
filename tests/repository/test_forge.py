"""Workflows and templates of a public forge: they run what the Makefile has, and name files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.markdown_pages import named_files

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORGE = ROOT / ".github"
pytestmark = pytest.mark.skipif(not FORGE.exists(), reason="the workflows are not in source distributions")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def targets_of_makefile() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def targets_of_workflows() -> set[str]:
    jobs = [job for path in FORGE.glob("workflows/*.yml") for job in read(path)["jobs"].values()]
    return {target for job in jobs for target in job["strategy"]["matrix"]["target"]}


def test_workflows_run_targets_of_the_makefile() -> None:
    assert targets_of_workflows() <= targets_of_makefile()


def test_workflows_run_what_every_change_must_pass() -> None:
    asked_for = set(re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert {"lint", "check", "docs", "wheel", "test-oldest", "test-newest", *asked_for} <= targets_of_workflows()


def test_workflows_may_only_read() -> None:
    assert all(read(path)["permissions"] == {"contents": "read"} for path in FORGE.glob("workflows/*.yml"))


@pytest.mark.parametrize(
    "path",
    sorted(set(FORGE.glob("ISSUE_TEMPLATE/*.yml")) - {FORGE / "ISSUE_TEMPLATE" / "config.yml"}),
    ids=lambda path: path.stem,
)
def test_issue_templates_have_what_a_forge_asks_for(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    identifiers = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(identifiers) == len(set(identifiers))


def test_files_that_templates_name_exist() -> None:
    named = {name for path in FORGE.rglob("*.*") for name in named_files(path.read_text())}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
