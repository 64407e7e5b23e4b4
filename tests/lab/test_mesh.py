"""`muse train` on a mesh learns what one process does. `tests/mesh_runs.py` has the runs of several processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muse_lab.pretraining.data.corpus import Corpus, read_corpus
from muse_lab.pretraining.mesh_shape import MeshShape, choose_shape
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import get_recipe, override, tiny
from muse_lab.pretraining.training import train
from tests.lab.test_document_mask import make_packed
from tests.lab.test_prepare import make
from tests.mesh_runs import (
    ALONE,
    HEADS,
    NEEDLES,
    PACKED,
    PACKED_UPDATES,
    PLAIN,
    STOPPED_AFTER,
    UPDATES,
    run,
    small_model,
)
from tests.needle_models import needle_corpus, needle_tokenizer
from tests.refusals import one_line_error
from tests.reports_of_ranks import Reports, assert_nothing_went_wrong, gather_reports
from tests.training_runs import assert_same_run, losses

pytestmark = pytest.mark.filterwarnings("ignore::muse_attention.huggingface.ExactAttentionWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the corpora of all runs."""
    folder = tmp_path_factory.mktemp("mesh")
    make(folder / PLAIN)
    make_packed(folder / PACKED, 128)
    (folder / "needle-files").mkdir()
    needle_corpus(needle_tokenizer(), folder / "needle-files").folder.rename(folder / NEEDLES)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], Path]:
    """The folder of a run of one process."""

    @functools.cache
    def make_run(kind: str) -> Path:
        recipe, corpus = ALONE[kind]
        with small_model(HEADS[kind]):
            train(read_corpus(folder / corpus), override(recipe, ["mesh=1x1"]), folder / kind)
        return folder / kind

    return make_run


@pytest.fixture(scope="module")
def together(folder: Path) -> Callable[[int, str], Path]:
    """The folder of runs, after the ranks have made those of a check, and found nothing wrong."""

    def check(ranks: int, name: str) -> Path:
        assert_nothing_went_wrong(_reports(folder, ranks), name, ranks)
        return folder

    return check


@functools.cache
def _reports(folder: Path, ranks: int) -> Reports:
    """All checks in the same processes."""
    return gather_reports(run, ranks, folder)


Alone = Callable[[str], Path]
Together = Callable[[int, str], Path]


ROUNDING = 16 * torch.finfo(torch.float32).eps


def close_to(run: Path, expected: Path) -> None:
    for found, other in zip(read_metrics(run), read_metrics(expected), strict=True):
        for name in ("loss", "gradient_norm"):
            assert found[name] == pytest.approx(other[name], rel=ROUNDING), (found["step"], name)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "mesh"), [(2, "2x1"), (2, "1x2"), (4, "2x2")])
@pytest.mark.parametrize("kind", ["exact", "muse"])
def test_a_mesh_learns_what_one_process_does(
    kind: str, ranks: int, mesh: str, alone: Alone, together: Together
) -> None:
    run = together(ranks, kind) / f"{kind}-{mesh}"
    assert len(losses(run)) == UPDATES
    close_to(run, alone(kind))


@pytest.mark.long
def test_the_tiny_recipe_on_eight_ranks(alone: Alone, together: Together) -> None:
    run = together(8, "short") / "short-2x4"
    assert len(losses(run)) == 3
    close_to(run, alone("short"))


@pytest.mark.long
def test_a_part_of_the_heads_is_probed_by_each_rank(alone: Alone, together: Together) -> None:
    """And the held-out loss is that of all parts."""
    run = together(2, "muse")
    found, expected = (read_metrics(folder) for folder in (run / "muse-1x2", alone("muse")))
    assert [line["step"] for line in found if "rse" in line] == [UPDATES]
    last, of_one = found[-1], expected[-1]
    assert last["rse"] == pytest.approx(of_one["rse"], rel=1e-4)
    means = last["attention_means"]
    assert means == pytest.approx(of_one["attention_means"], rel=1e-4, abs=ROUNDING)  # a gap of lse cancels digits
    assert last["evaluation"] == pytest.approx(of_one["evaluation"], rel=ROUNDING)


@pytest.mark.long
def test_documents_have_the_boundaries_of_the_whole_row(alone: Alone, together: Together) -> None:
    run = together(2, "separate") / "separate-1x2"
    close_to(run, alone("separate"))
    found, expected = (read_metrics(folder)[-1]["evaluation"] for folder in (run, alone("separate")))
    assert found == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["documents", "documents exactly"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_on_packed_documents_are_those_of_one_process(
    ranks: int, kind: str, alone: Alone, together: Together
) -> None:
    found, expected = losses(together(ranks, "documents") / f"{kind}-1x{ranks}"), losses(alone(kind))
    assert len(found) == len(expected) == PACKED_UPDATES
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_all_ranks_limit_errors_alike(alone: Alone, together: Together) -> None:
    """With parts that are shorter than the window of the local layers."""
    run = together(2, "limited") / "limited-1x2"
    close_to(run, alone("limited"))
    found, expected = ([line["tightened"] for line in read_metrics(folder)] for folder in (run, alone("limited")))
    assert found == expected
    assert any(found)


@pytest.mark.long
def test_needles_are_learnt_and_asked_for(alone: Alone, together: Together) -> None:
    """Ranks with data of their own measure what was learnt of answers on documents of their own."""
    run = together(2, "asked") / "asked-1x2"
    apart = run.with_name("asked-2x1")
    found, of_others, expected = (read_metrics(folder)[-1] for folder in (run, apart, alone("asked")))
    for folder, last in ((run, found), (apart, of_others)):
        close_to(folder, alone("asked"))
        assert last["evaluation"] == pytest.approx(expected["evaluation"], rel=ROUNDING)
    assert ["answers_loss" in step for step in read_metrics(apart)] == [False, True]
    assert found["answers_loss"] == pytest.approx(expected["answers_loss"], rel=ROUNDING)
    assert found["answers"] == pytest.approx(expected["answers"], rel=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("check", ["answers_across_edges", "logits", "refusals"])
def test_a_model_that_shares_sequences(check: str, together: Together) -> None:
    together(2, check)


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(alone: Alone, together: Together) -> None:
    """On the same one, bit for bit."""
    folder = together(2, "another_mesh")
    close_to(folder / "moved", alone("exact"))
    assert_same_run(folder / "again", folder / "exact-1x2")


@pytest.mark.long
def test_a_request_to_one_rank_stops_all(together: Together) -> None:
    assert len(losses(together(2, "stopped") / "stopped")) == STOPPED_AFTER


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("2x4", "mesh=2x4 has 8 ranks, but 1 process runs: start 8 with torchrun, or use mesh=1x1"),
        ("2", "mesh='2' must be auto, or data x sequence ranks, like 2x4"),
        ("0x1", "mesh='0x1' must be auto"),
        ("2x-1", "mesh='2x-1' must be auto"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_line(mesh: str, message: str, corpus: Corpus, tmp_path: Path) -> None:
    with one_line_error(f"^{re.escape(message)}"):
        train(corpus, override(tiny(), ["length=64", f"mesh={mesh}"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mesh", "sizes", "message"),
    [
        (
            "auto",
            {},
            "batch=2 cannot be shared by 8 ranks along data; choose a multiple, like batch=8, or use mesh=2x4",
        ),
        ("8x1", {"heads": 3}, "batch=2 cannot be shared by 8 ranks along data; choose a multiple, like batch=8"),
        ("4x2", {}, "batch=2 cannot be shared by 4 ranks along data; choose a multiple, like batch=4, or use mesh=2x4"),
        (
            "2x4",
            {"heads": 6},
            "mesh=2x4: 4 ranks along the sequence do not divide the 6 heads of the model; 1, 2, 3 or 6 do",
        ),
        (
            "2x4",
            {"length": 66},
            "mesh=2x4: 4 ranks along the sequence do not divide length=66; choose a multiple, like length=68",
        ),
        (
            "2x2",
            {},
            "mesh=2x2 has 4 ranks, but 8 run: start 4 with torchrun, or use mesh=2x4",
        ),
    ],
)
def test_ranks_that_cannot_share_the_work(mesh: str, sizes: dict[str, int], message: str) -> None:
    arguments = {"ranks": 8, "batch": 2, "heads": 4, "length": 64} | sizes
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_shape(mesh, **arguments)


def test_the_recipe_of_the_paper_on_eight_ranks() -> None:
    recipe = get_recipe("s8")
    sizes = {"batch": recipe.batch, "heads": 32, "length": recipe.length}
    assert choose_shape("2x4", ranks=8, **sizes) == MeshShape(2, 4)
    with pytest.raises(ValueError, match=r"or use mesh=2x4 or mesh=1x8$"):
        choose_shape(recipe.mesh, ranks=8, **sizes)


def test_one_rank_of_a_sequence_is_as_before() -> None:
    world = World(torch.device("cpu"), rank=3, ranks=4)
    assert (world.sequence_ranks, world.data_ranks, world.data_rank) == (1, 4, 3)
