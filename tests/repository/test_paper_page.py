"""docs/paper.md: complete, as its source says, with files that exist and commands that the real parser takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from docs_build.paper_elements import EQUATIONS, FIGURES, PASSAGES, TABLES
from docs_build.paper_page import PAGE, ROOT, all_commands, all_paths, make_page

from muse_attention.registry import get_attention, split_names
from muse_lab.benchmark.sweeps import find_sweep
from muse_lab.cli.app import app
from muse_lab.evaluation.fidelity.presets import find_presets
from muse_lab.pretraining.recipes import get_recipe, override
from tests.markdown_pages import muse_commands

needs_records = pytest.mark.skipif(
    not (ROOT / "benchmarks").exists(), reason="the records are not in source distributions"
)


@needs_records
def test_the_page_is_what_its_source_says() -> None:
    assert PAGE.read_text() == make_page(), "run python -m docs_build.paper_page"


def test_every_element_of_the_paper_is_there() -> None:
    assert [equation.number for equation in EQUATIONS] == list(range(1, 16))
    assert [figure.name for figure in FIGURES] == [f"Figure {number}" for number in range(1, 7)]
    assert [table.name for table in TABLES] == [f"Table {number}" for number in range(1, 34)]
    for element in (*FIGURES, *TABLES):
        assert element.files
        assert element.recorded or element.presets, "a result, or the reason why there is none"
        assert element.commands or element.name in ("Figure 1", "Figure 2")
    assert all(equation.files or equation.remark for equation in EQUATIONS)


@needs_records
@pytest.mark.parametrize("path", all_paths())
def test_files_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of a command and its parameters, by the parser of the command line, without running it."""
    command, context, rest, names = typer.main.get_command(app), None, words[1:], []
    while hasattr(command, "get_command"):
        context = typer.Context(command, parent=context)
        name, command, rest = command.resolve_command(context, rest)
        names.append(name)
    return " ".join(names), command.make_context(names[-1], list(rest), parent=context).params


def commands_of_the_page() -> list[str]:
    inline = [passage.says for passage in PASSAGES]
    assert any("`muse " in text for text in inline)
    return [line for line in dict.fromkeys(all_commands()) if line.startswith("muse ")]


@pytest.mark.parametrize("line", commands_of_the_page())
def test_commands_parse(line: str) -> None:
    name, found = parse(shlex.split(line))
    given = {key: value for key, value in found.items() if value}
    if name == "train":
        recipe = get_recipe(given.get("recipe") or "tiny")
        changes = [change for change in given.get("changes", []) if not change.startswith("tokens=")]
        override(recipe, [*changes, "warmup=0"])
        assert ("recipe" in given) != ("continue_from" in given)
    for attention in split_names(given.get("attention") or []):
        get_attention(attention)
    if name in ("fidelity", "loss"):
        presets = [part for text in given.get("preset", []) for part in text.split(",")]
        assert len(find_presets(presets, 65536)) == len(presets)
    if name == "bench" and "sweep" in given:
        find_sweep(given["sweep"])


@pytest.mark.parametrize("line", [line for line in all_commands() if not line.startswith("muse ")])
def test_examples_have_the_options_of_their_commands(line: str) -> None:
    program, path, *words = shlex.split(line)
    assert program == "python"
    declared = (ROOT / path).read_text()
    assert not [word for word in words if word.startswith("--") and f'"{word}"' not in declared]


@pytest.mark.long
def test_commands_in_sentences_parse() -> None:
    lines = list(muse_commands(PAGE))
    assert len(lines) > len(commands_of_the_page())
    for words in lines:
        parse(words)


def test_a_wrong_command_does_not_parse() -> None:
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parse(shlex.split("muse train out/code --recipee s3"))
    with pytest.raises(Exception, match="there is no command"):
        parse(shlex.split("muse trian out/code"))


def test_the_page_is_part_of_the_site() -> None:
    assert "paper.md" in (Path(ROOT) / "mkdocs.yml").read_text()
