"""What holds for MuSe in every trainer: a model's loss and gradients against those of another attention."""

from __future__ import annotations

import multiprocessing
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.closeness import assert_equal_to_rounding
from tests.markdown_pages import ROOT
from tests.patience import PATIENCE
from tests.processes import free_port, running

LENGTHS = (300, 1, 130, 81)
"""Of documents in one row: longer than a block of `CONFIG`, of one token, of a block and two, shorter than a block."""
CONFIG = "QK16R4B128"
UPDATES = 20


class Training(NamedTuple):
    """The result of one forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor]


def train(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Training:
    """`loss` gives the losses of tokens, whose sum is differentiated."""
    model.zero_grad(set_to_none=True)
    value = loss(model).sum()
    value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients
    return Training(value.detach(), gradients)


def assert_same(found: Training, expected: Training) -> None:
    """To rounding of float64, relative to the largest entry of a gradient."""
    assert_equal_to_rounding(found.loss / expected.loss, torch.ones_like(found.loss), "loss")
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        size = gradient.abs().max()
        assert_equal_to_rounding(found.gradients[name] / size, gradient / size, name)


def assert_close_but_not_same(found: Training, exact: Training) -> None:
    """As an approximation is: the loss within 1%, the gradient of all parameters within 5% of its norm, not equal."""
    assert 0 < abs(float(found.loss / exact.loss) - 1) < 0.01
    ours, theirs = (
        torch.cat([training.gradients[name].flatten() for name in exact.gradients]) for training in (found, exact)
    )
    assert 1e-6 < float((ours - theirs).norm() / theirs.norm()) < 0.05


def sum_of(trainings: list[Training]) -> Training:
    names = trainings[0].gradients
    return Training(
        torch.stack([training.loss for training in trainings]).sum(),
        {name: torch.stack([training.gradients[name] for training in trainings]).sum(0) for name in names},
    )


def documented(trainer: str) -> str:
    """The section of `docs/trainers.md` about it."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    (section,) = re.findall(rf"^## {trainer}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return section


def documented_code(trainer: str) -> str:
    """The one block of Python in that section."""
    (code,) = re.findall(r"^```py\n(.*?)^```$", documented(trainer), re.DOTALL | re.MULTILINE)
    return code


def on_two_processes(check: Callable[[int], None]) -> None:
    """Call `check`, a function of a module, with the rank in each of two processes that gloo connects."""
    on_processes(2, check)


def on_processes(ranks: int, check: Callable[[int], None]) -> None:
    port, context = free_port(), multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_run_rank, args=(rank, ranks, port, check, sending))
        for rank, (_, sending) in enumerate(pipes)
    ]
    with running(*processes):
        failures = [
            receiving.recv() if receiving.poll(PATIENCE) else "it did not come to the end" for receiving, _ in pipes
        ]
    assert failures == [None] * ranks, "\n".join(filter(None, failures))


def assert_same_losses(found: list[float], expected: list[float]) -> None:
    """Of float32: each update changes the weights, so a difference would grow."""
    assert len(found) == len(expected) == UPDATES
    assert expected[-1] < expected[0]
    for update, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert abs(ours / theirs - 1) < 1e-6, (update, ours, theirs)


def _run_rank(rank: int, ranks: int, port: int, check: Callable[[int], None], report: Any) -> None:
    """Sends what went wrong, or None."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        check(rank)
        report.send(None)
    except BaseException:  # what pytest raises is no Exception
        report.send(traceback.format_exc())
