"""Training runs of several processes on a mesh, all runs of one number of ranks in the same processes.

`run` is one rank: it starts the process group once, trains one run after the other, and reports what went wrong.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from muse_lab.pretraining.data.corpus import Corpus, read_corpus
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.interruptions.stopping import Request, Stopped, Stopping
from muse_lab.pretraining.mesh_shape import read_mesh
from muse_lab.pretraining.model import decoder
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.model.sequence_parts import own_part
from muse_lab.pretraining.monitoring import held_out
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.parallel import World, open_world, share_sequences
from muse_lab.pretraining.recipes import Recipe, override
from muse_lab.pretraining.training import train
from tests.processes import send_reports
from tests.training_runs import SMALL

UPDATES = 8
WINDOW = 24
"""Of the local layers: it crosses the edge of a part, and is longer than half of the shortest sequences."""
PLAIN, PACKED, NEEDLES = "plain", "packed", "needles"
"""Folders of corpora."""

_BASE = override(
    SMALL,
    [
        *("batch=2", "micro_batch=1", "head_dim=32", "checkpoint_every=5", "probe_every=0"),
        *("seed=1", "peak_rate=1e-3"),  # no two clusters of MuSe are so close that rounding decides
    ],
)
_EVALUATED = ["evaluate_samples=2", "evaluate_needles=0"]
EXACT = override(_BASE, [f"steps={UPDATES}", "attention=exact", "exact_tail=0"])
MUSE = override(_BASE, [f"steps={UPDATES}", f"probe_every={UPDATES}", f"evaluate_every={UPDATES}", *_EVALUATED])
SHORT = override(_BASE, ["steps=3", "length=128", "exact_tail=0", "recompute=true"])
SEPARATE = override(
    _BASE, ["steps=2", "length=128", "document_mask=true", "recompute=true", "evaluate_every=2", *_EVALUATED]
)
PACKED_UPDATES = 20
DOCUMENTS = override(
    _BASE,
    [
        *(f"steps={PACKED_UPDATES}", "length=128", "document_mask=true", "exact_tail=0"),
        f"checkpoint_every={PACKED_UPDATES}",
    ],
)
LIMITED = override(
    _BASE,
    [
        *("steps=2", "length=32", "probe_every=1", "error_limit=1e-5", "exact_tail=0"),
        "attention=muse:Q4K4T0.5B8,first_order=false",
    ],
)
ASKED = override(
    _BASE,
    [
        *("steps=2", "length=256", "mixture=niah", "attention=exact", "exact_tail=0", "probe_every=2"),
        *("evaluate_every=2", "evaluate_samples=3", "evaluate_needles=3"),
    ],
)
ALONE = {
    "exact": (EXACT, PLAIN),
    "muse": (MUSE, PLAIN),
    "short": (SHORT, PLAIN),
    "separate": (SEPARATE, PACKED),
    "documents": (DOCUMENTS, PACKED),
    "documents exactly": (override(DOCUMENTS, ["attention=exact"]), PACKED),
    "limited": (LIMITED, PLAIN),
    "asked": (ASKED, NEEDLES),
}
"""Runs, each with the folder of its corpus, that one process makes for comparison."""
HEADS = {kind: 4 if kind in ("short", "documents", "documents exactly") else 2 for kind in ALONE}
STOPPED_AFTER = 2


@contextmanager
def small_model(heads: int) -> Iterator[None]:
    """The tiny model with half of its layers, with shorter windows, and with so many heads of 32.

    Without ReLU, whose slope jumps: where a hidden unit is almost 0, rounding would decide whether it learns.
    """
    sizes = {"hidden_size": 32 * heads, "num_hidden_layers": 2, "sliding_window": WINDOW}
    tiny = functools.partial(DecoderConfig.tiny, **sizes)
    with mock.patch.object(DecoderConfig, "tiny", tiny), mock.patch.object(decoder, "relu", silu):
        yield


class Ranks:
    """The processes that train together, as one of them sees it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder

    def corpus(self, name: str) -> Corpus:
        return read_corpus(self.folder / name)

    def train(self, kind: str, mesh: str, *changes: str, name: str | None = None, **others: Any) -> None:
        """Into the folder `kind-mesh`, or `name`."""
        recipe, corpus = ALONE[kind]
        output = self.folder / (name or f"{kind}-{mesh}")
        recipe = override(recipe, [f"mesh={mesh}", *changes])
        with small_model(HEADS[kind]):
            train(self.corpus(corpus), recipe, output, world=self.world, **others)

    def copy(self, name: str, other: str, *, without_step: int) -> None:
        """A run without a checkpoint and its model."""
        if self.world.is_first:
            shutil.copytree(self.folder / name, self.folder / other)
            shutil.rmtree(self.folder / other / "model")
            shutil.rmtree(self.folder / other / "checkpoints" / f"step-{without_step:08}")
        assert self.world.all_succeed(True)


class _StopOf(Stopping):
    """Asks one rank to stop when it is asked for the so-many-th time."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.left = STOPPED_AFTER + 1 if asks else 10**9

    @property
    def request(self) -> Request | None:
        self.left -= 1
        return Request("asked", 143) if self.left <= 0 else None


def exact(ranks: Ranks) -> None:
    for mesh in MESHES[ranks.world.ranks]:
        ranks.train("exact", mesh)


def muse(ranks: Ranks) -> None:
    for mesh in MESHES[ranks.world.ranks]:
        ranks.train("muse", mesh, f"micro_batch={2 if mesh == '1x2' else 1}")


def short(ranks: Ranks) -> None:
    for mesh in MESHES[ranks.world.ranks]:
        ranks.train("short", mesh)


def separate(ranks: Ranks) -> None:
    ranks.train("separate", "1x2")


def documents(ranks: Ranks) -> None:
    for kind in ("documents", "documents exactly"):
        ranks.train(kind, f"1x{ranks.world.ranks}")


def limited(ranks: Ranks) -> None:
    ranks.train("limited", "1x2")


def asked(ranks: Ranks) -> None:
    for mesh in MESHES[ranks.world.ranks]:
        ranks.train("asked", mesh)


def another_mesh(ranks: Ranks) -> None:
    """A run goes on where one of another mesh was, and on the same mesh."""
    ranks.copy("exact-2x1", "moved", without_step=UPDATES)
    ranks.train("exact", "1x2", name="moved")
    ranks.copy("exact-1x2", "again", without_step=UPDATES)
    ranks.train("exact", "1x2", name="again")


def stopped(ranks: Ranks) -> None:
    """By a request to the last rank alone."""
    with pytest.raises(Stopped, match=f"after step {STOPPED_AFTER}$"):
        ranks.train("exact", "1x2", name="stopped", stopping=_StopOf(ranks.world.rank == ranks.world.ranks - 1))


def answers_across_edges(ranks: Ranks) -> None:
    """Answers that are right and wrong are counted as by one process, those in two parts among them."""
    corpus = ranks.corpus(NEEDLES)
    shape = read_mesh("1x2")
    assert shape is not None
    world = share_sequences(ranks.world, shape)
    recipe = override(ASKED, ["length=32", "evaluate_needles=8"])
    found = []
    for of_world in (World(world.device), world):
        model = make_model(corpus, recipe)
        model.share_sequences(of_world.sequence)
        with (
            mock.patch.object(held_out, "NeedleDocuments", _AnswersAtTheEdge),
            mock.patch.object(DecoderForCausalLM, "forward", _know_some(DecoderForCausalLM.forward)),
        ):
            found.append(Evaluation(corpus, recipe, of_world).run(model, lambda: None))
    alone, together = found
    assert together == pytest.approx(alone, rel=1e-5)
    assert 0.1 < alone["needles_right"] < 0.9


def refusals(ranks: Ranks) -> None:
    """What a model that shares sequences cannot do; nothing is exchanged before it says so."""
    model = _sharing_model(ranks, SHORT)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="have no KV cache; pass use_cache=False"):
        model(tokens, use_cache=True)
    with pytest.raises(ValueError, match="have no attention_mask; leave it out"):
        model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    with pytest.raises(ValueError, match="2 ranks along the sequence do not divide its 7 tokens"):
        model(tokens[:, :7], use_cache=False)


def logits(ranks: Ranks) -> None:
    """Those of this rank's part, with positions and windows of the whole; without a mesh, of the whole again."""
    model = _sharing_model(ranks, SHORT)
    tokens = torch.randint(model.config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(tokens, use_cache=False).logits
        mesh = model.model.sequence_mesh
        model.share_sequences(None)
        whole = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, own_part(whole, mesh), atol=1e-5, rtol=1e-5)


def _sharing_model(ranks: Ranks, recipe: Recipe) -> DecoderForCausalLM:
    shape = read_mesh("1x2")
    assert shape is not None
    with small_model(2):
        model = make_model(ranks.corpus(PLAIN), recipe)
    model.share_sequences(share_sequences(ranks.world, shape).sequence)
    return model


class _AnswersAtTheEdge:
    """Documents of which the targets in the middle, in both parts, are one answer, and some at the end another."""

    def __init__(self, corpus: Corpus, length: int, **others: Any) -> None:
        self.length = length

    def make_with_answers(self, number: int) -> tuple[Tensor, Tensor]:
        distances = torch.zeros(self.length + 1, dtype=torch.int64)
        distances[self.length // 2 - 1 : self.length // 2 + 3] = 1
        distances[-2:] = 1
        return torch.randint(400, (self.length + 1,), generator=torch.Generator().manual_seed(number)), distances


def _know_some(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model whose most probable token is right, but for some targets."""

    def know(model: DecoderForCausalLM, input_ids: Tensor, *, shift_labels: Tensor, **others: Any) -> Any:
        out = forward(model, input_ids, shift_labels=shift_labels, **others)
        if out.logits is not None:
            targets = own_part(shift_labels, model.model.sequence_mesh)[0]
            known = targets[targets >= 0]
            answers = torch.where(known % 8 == 0, (known + 1) % out.logits.shape[-1], known)
            out.logits = torch.nn.functional.one_hot(answers, out.logits.shape[-1])[None].float()
        return out

    return know


MESHES = {2: ["2x1", "1x2"], 4: ["2x2"], 8: ["2x4"]}
CHECKS: dict[int, list[Callable[[Ranks], None]]] = {
    2: [
        exact,
        muse,
        separate,
        documents,
        limited,
        asked,
        another_mesh,
        stopped,
        answers_across_edges,
        refusals,
        logits,
    ],
    4: [exact, muse, documents],
    8: [short],
}
"""By number of ranks."""


def run(rank: int, ranks: int, port: int, folder: Path, report: Any) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    with open_world("cpu") as world:
        send_reports(CHECKS[ranks], Ranks(world, folder), report)
