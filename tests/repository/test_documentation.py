"""README and docs: links lead somewhere, code runs, commands exist, numbers are those of the records."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.markdown_pages import (
    ROOT,
    anchors,
    links,
    make_targets,
    markdown_files,
    muse_commands,
    named_files,
    python_blocks,
)

PAGES = [
    path
    for path in markdown_files()
    if "benchmarks" not in path.parts and path.name not in ("CHANGELOG.md", "lab-log.md")
]
RECORDS = ROOT / "benchmarks"
needs_records = pytest.mark.skipif(not RECORDS.exists(), reason="the records are not in source distributions")
MEGABYTES = 5


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@needs_records
@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target, anchor in links(path):
        place = path.parent / target if target else path
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert not broken


OF_USERS = ("out/", "checkpoints/", "model/", "DIR/")
"""Folders that pages name and that commands write."""
SRC, LAB = ROOT / "src" / "muse_attention", ROOT / "src" / "muse_lab"


@needs_records
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_that_pages_name_exist(path: Path) -> None:
    """Named from the repository, `src` or one of the packages. The changelog and the lab log tell of former files."""
    named = {name for name in named_files(path.read_text()) if not name.startswith(OF_USERS)}
    assert not [
        name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "src", SRC, LAB))
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("__init__.py")), ids=name_of)
def test_files_that_packages_name_exist(path: Path) -> None:
    """Named from the package, from the one at its root, or from the repository."""
    named = named_files(ast.get_docstring(ast.parse(path.read_text())) or "")
    assert not [name for name in named if not any((folder / name).exists() for folder in (path.parent, SRC, LAB, ROOT))]


def test_modules_of_the_import_contract_exist() -> None:
    def exists(module: str) -> bool:
        place = ROOT / "src" / module.replace(".", "/")
        return place.is_dir() or place.with_suffix(".py").exists()

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        named = [*contract.get("containers", ()), *contract.get("source_modules", ())]
        named += contract.get("forbidden_modules", ())
        inside = [f"{container}." for container in contract.get("containers", ())] or [""]
        layers = [name for layer in contract.get("layers", ()) for name in re.findall(r"\w+", layer)]
        named += [f"{container}{name}" for container in inside for name in layers]
        assert not [module for module in named if not exists(module)], contract["name"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a corpus where `muse train` and `muse prepare` write them."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    from tests.lab.test_prepare import make
    from tests.models import write_model_folder

    folder = tmp_path_factory.mktemp("workplace")
    write_model_folder(folder / "out" / "train" / "model")
    make(folder / "out" / "corpus")
    return folder


@pytest.mark.parametrize("path", [path for path in PAGES if python_blocks(path)], ids=name_of)
def test_python_runs(path: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(path):
        exec(compile("\n" * (block.line - 1) + block.for_tests(), str(path), "exec"), names)


@functools.cache
def command_of(*names: str) -> Any:
    """The command `muse` with these names after it, or None. It takes long to make."""
    import typer

    from muse_lab.cli.app import app

    if not names:
        return typer.main.get_command(app)
    group = command_of(*names[:-1])
    return group.get_command(typer.Context(group), names[-1])


@pytest.mark.parametrize("path", [path for path in PAGES if any(muse_commands(path))], ids=name_of)
def test_commands_exist(path: Path) -> None:
    pytest.importorskip("typer")
    for words in muse_commands(path):
        names, rest = [], words[1:]
        while hasattr(command := command_of(*names), "get_command") and rest and not rest[0].startswith("-"):
            names, rest = [*names, rest[0]], rest[1:]
            assert command_of(*names) is not None, f"{' '.join(words)}: no such command"
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - options - {"--help"}
        assert not unknown, f"{' '.join(words)}: no option {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("path", [path for path in PAGES if make_targets(path)], ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert make_targets(path) <= targets


@needs_records
def test_records_are_small() -> None:
    files = [path for path in RECORDS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 2**20
    assert {path.suffix for path in files} <= {".md", ".json", ".jsonl", ".png", ".svg", ".txt"}
    assert all(path.stat().st_size < 8 * 1024 for path in files if path.suffix == ".jsonl"), "metrics of a few updates"
    assert max(path.stat().st_size for path in files if path.suffix == ".json") < 220 * 1024


@needs_records
def test_pictures_of_records_are_shown() -> None:
    shown = {(path.parent / target).resolve() for path in RECORDS.rglob("*.md") for target, _ in links(path)}
    assert not [name_of(path) for path in RECORDS.rglob("*.png") if path.resolve() not in shown]


@needs_records
def test_readme_has_the_numbers_of_the_records() -> None:
    from docs_build.marked_tables import with_table
    from docs_build.readme_table import BEGIN, README, make_claims, make_table, read_rows

    text, rows = README.read_text(), read_rows()
    assert text == with_table(text, make_table(rows), BEGIN)
    prose = text.replace("\n", " ")
    assert not [claim for claim in make_claims(rows) if claim not in prose]


@needs_records
def test_context_extension_has_the_numbers_of_the_records() -> None:
    from docs_build.extension_table import PAGE, make_page

    assert PAGE.read_text() == make_page(PAGE.read_text())


@needs_records
def test_pretraining_has_the_numbers_of_the_records() -> None:
    from docs_build.trained_table import PAGE, make_page

    assert PAGE.read_text() == make_page(PAGE.read_text())


@needs_records
def test_pages_describe_the_pictures_of_the_records() -> None:
    from docs_build import extension_runs, far_gain_picture, quality_picture, speed_picture

    described = speed_picture.describe(speed_picture.read_speeds(), extension_runs.read_compared()[:2])
    assert f"![{described}](docs/images/{speed_picture.PICTURE})" in (ROOT / "README.md").read_text()
    training = (ROOT / "docs" / "evidence" / "pretraining.md").read_text()
    assert f"![{quality_picture.describe()}](../images/{quality_picture.LOSSES})" in training
    described = far_gain_picture.describe(far_gain_picture.read_models())
    assert f"![{described}](../images/{far_gain_picture.PICTURE})" in training


def test_descriptions_of_pictures_are_short() -> None:
    """A screen reader reads one out at one go."""
    texts = [text for path in PAGES for text in re.findall(r"!\[([^\]]*)\]\(", path.read_text())]
    assert texts
    assert not [text for text in texts if not 0 < len(text) < 200]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=name_of)
def test_pictures_can_be_read_on_a_phone_and_in_the_dark(path: Path) -> None:
    """On a screen of 390 pixels, where a page has 343, the smallest letters have 9."""
    drawn = path.read_text()
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', drawn)
    letters = [float(size) * 100 for size in re.findall(r"scale\(([\d.]+) -", drawn)]
    assert min(letters) * min(1, 343 / (float(width[1]) / 0.75)) / 0.75 >= 9
    assert "prefers-color-scheme: dark" in drawn


def test_readme_is_short() -> None:
    """Words as a reader sees them: without addresses of links, descriptions of pictures and comments."""
    markdown_it = pytest.importorskip("markdown_it")
    text = (ROOT / "README.md").read_text()
    shown = markdown_it.MarkdownIt("commonmark").enable("table").render(text)
    assert len(re.sub(r"<!--.*?-->|<[^>]+>", " ", shown, flags=re.DOTALL).split()) <= 700
    table = re.search(r"<!-- table.*?<!-- end", text, re.DOTALL)
    assert 3 <= table[0].count("\n|") - 2 <= 5


def test_tutorial_shows_the_script() -> None:
    from docs_build.tutorial_output import PAGE, read_steps

    assert [block.code.strip() for block in python_blocks(PAGE)] == [step.code for step in read_steps()]


@pytest.mark.long
def test_every_command_is_described() -> None:
    typer = pytest.importorskip("typer")
    from docs_build.command_reference import describe_commands

    from muse_lab.cli.app import app

    described = describe_commands()
    group = typer.main.get_command(app)
    names = group.list_commands(typer.Context(group))
    assert names
    for name in names:
        assert f"## `muse {name}`" in described
        command = group.get_command(typer.Context(group), name)
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        options = [option for parameter in shown for option in parameter.opts if option.startswith("--")]
        assert not [option for option in options if option not in described]


@needs_records
def test_scaling_page_has_the_numbers_of_the_records() -> None:
    from docs_build.records import read_timings
    from docs_build.scaling_tables import HEAD_DIM, PAGE, RECORDED_HEADS, make_tables, with_tables

    tables = make_tables(read_timings(heads=RECORDED_HEADS, head_dim=HEAD_DIM))
    assert PAGE.read_text() == with_tables(PAGE.read_text(), tables)


def test_the_page_of_configurations_names_every_field() -> None:
    import dataclasses

    from muse_attention import MuSeConfig

    text, _, _ = (ROOT / "docs" / "reference" / "configuration.md").read_text().partition("## Fields")
    assert not [field.name for field in dataclasses.fields(MuSeConfig) if f"`{field.name}`" not in text]


def test_backward_keeps_little_more_than_exact_attention() -> None:
    from docs_build.kept_tensors import Heads, kept_bytes, share_of_exact

    pytest.importorskip("triton")
    for heads in (Heads(8, 8, 64), Heads(32, 8, 128)):
        assert share_of_exact(kept_bytes(1 << 14, heads)) <= 1.06
        assert share_of_exact(kept_bytes(1 << 16, heads)) <= 1.10
