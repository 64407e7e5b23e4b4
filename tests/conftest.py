"""Every test starts from one seed, and leaves the other core to the other worker; what is slow to make is shared."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from tests.interpreter import hasten_interpreter

if TYPE_CHECKING:
    from muse_lab.pretraining.data.corpus import Corpus

torch.set_num_threads(1)
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True
)
hypothesis.settings.load_profile("busy")
if importlib.util.find_spec("typer") and importlib.util.find_spec("rich"):
    import muse_lab.cli.app

    muse_lab.cli.app.SECONDS_BEFORE_FIRST_LINE = 3600.0  # or what a command prints says how busy the machine is
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    if importlib.util.find_spec("triton"):
        hasten_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case of each test, without those marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A small one, which nobody may change."""
    from tests.lab.test_prepare import make

    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def whole_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `tests.training_runs.SMALL` that nothing has disturbed, and nobody may."""
    from muse_lab.pretraining.training import train
    from tests.training_runs import SMALL

    output = tmp_path_factory.mktemp("whole")
    train(corpus, SMALL, output)
    return output


@pytest.fixture
def run_copy(whole_run: Path, tmp_path: Path) -> Path:
    """Of this run, in the folder `out`, to be changed."""
    shutil.copytree(whole_run, tmp_path / "out")
    return tmp_path / "out"
