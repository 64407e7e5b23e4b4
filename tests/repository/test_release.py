"""What is released: the wheel and the sdist, installed where there is nothing but what the package requires."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import muse_attention

ROOT = Path(__file__).parents[2]

FIRST_CALL = """
import sys, torch, muse_attention
from muse_attention import MuSeConfig, muse_attention as attend
assert "site-packages" in muse_attention.__file__, muse_attention.__file__
query = torch.randn(1, 1, 600, 8, requires_grad=True)
out = attend(query, query, query, is_causal=True)
out.sum().backward()
assert not [name for name in sys.modules if name.startswith("muse_lab")]
print(muse_attention.__version__, tuple(out.shape), MuSeConfig.for_length(600))
"""

TYPED = """
from torch import Tensor
from muse_attention import MuSeConfig, muse_attention

def attend(x: Tensor) -> Tensor:
    return muse_attention(x, x, x, is_causal=True, config=MuSeConfig.for_length(4096))

MuSeConfig(block_size="large")
"""


def test_the_version_is_said_everywhere_and_has_a_changelog() -> None:
    assert f"version: {muse_attention.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    expected = "Unreleased" if ".dev" in muse_attention.__version__ else muse_attention.__version__
    assert sections[0].split()[0] == expected


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, built from the sdist, and the sdist."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    _build("sdist", ROOT, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _build("wheel", unpacked, folder)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, and of all else only what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, str(distributions["wheel"])], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in _required_entries("torch", "numpy"):
        if not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return python


@pytest.mark.long
def test_the_sdist_is_the_sources_without_records(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        parts = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"src", "tests", "docs", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= parts
    assert "benchmarks" not in parts
    assert distributions["sdist"].stat().st_size < 5 * 2**20


@pytest.mark.long
def test_the_wheel_has_the_two_packages_alone(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        names = archive.namelist()
    assert {Path(name).parts[0].partition("-")[0] for name in names} == {"muse_attention", "muse_lab"}
    assert {"muse_attention/py.typed", "muse_lab/py.typed", "muse_lab/report/page.html"} <= set(names)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


@pytest.mark.long
def test_an_index_can_read_the_metadata(distributions: dict[str, Path]) -> None:
    metadata, trove = pytest.importorskip("packaging.metadata"), pytest.importorskip("trove_classifiers")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (_metadata_of_wheel(distributions["wheel"]), _metadata_of_sdist(distributions["sdist"])):
        found = metadata.Metadata.from_email(text, validate=True)
        assert (found.name, str(found.version)) == ("muse-attention", muse_attention.__version__)
        assert (found.license_expression, str(found.requires_python)) == ("Apache-2.0", declared["requires-python"])
        assert set(found.provides_extra) == set(declared["optional-dependencies"])
        assert set(found.classifiers) <= trove.classifiers
        assert found.description_content_type == "text/markdown"
        assert found.description.strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.long
def test_the_first_call_needs_no_extra(installed: Path, tmp_path: Path) -> None:
    finished = _run([installed, "-c", FIRST_CALL], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"{muse_attention.__version__} (1, 1, 600, 8) ")


@pytest.mark.long
def test_the_command_says_which_extra_it_needs(installed: Path, tmp_path: Path) -> None:
    finished = _run([installed.with_name("muse"), "--help"], tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.startswith("muse: typer is not installed: pip install 'muse-attention[cli]', in a clone ")


@pytest.mark.slow
def test_types_are_seen_from_outside(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    finished = _run([sys.executable, "-m", "mypy", "--strict", "--python-executable", installed, "user.py"], tmp_path)
    assert 'user.py:8: error: Argument "block_size" to "MuSeConfig" has incompatible type "str"' in finished.stdout
    assert "Found 1 error in 1 file" in finished.stdout


def _build(target: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


def _metadata_of_wheel(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


def _metadata_of_sdist(sdist: Path) -> bytes:
    with tarfile.open(sdist) as archive:
        (name,) = (name for name in archive.getnames() if Path(name).parts[1:] == ("PKG-INFO",))
        return archive.extractfile(name).read()


def _run(command: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _required_entries(*names: str) -> Iterator[Path]:
    """Files and folders in `site-packages` of some distributions and of all that they require."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # one that another platform needs
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            yield Path(str(distribution.locate_file(entry)))
        requirements = [text for text in distribution.requires or () if "extra ==" not in text]
        waiting += [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0].lower() for text in requirements]
