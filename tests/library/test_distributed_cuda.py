"""Ulysses on one GPU: a mesh of one rank costs nothing, and a head alone has the bits that it has among others.

No machine of the continuous integration has a GPU: run with `pytest -m gpu`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muse_attention import get_attention
from muse_attention.distributed import ulysses

pytestmark = pytest.mark.gpu

LENGTH, HEADS = 16384, 8
ROUNDS, CALLS = 15, 4
ROUNDING = 2.0**-16
"""of bfloat16, squared"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    os.environ["LOCAL_RANK"] = "0"
    # (Without a port, which another process that runs these tests might hold.)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("sequence",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shape = (1, HEADS, LENGTH, 64)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))


def with_gradients(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = attend()
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def check_same(one: list[Tensor], other: list[Tensor]) -> None:
    """Outputs have the same bits; gradients need not: cuDNN's backward pass has no fixed order of sums."""
    assert torch.equal(one[0], other[0])
    for gradient, expected in zip(one[1:], other[1:], strict=True):
        error = (gradient - expected).float().square().sum() / expected.float().square().sum()
        assert error < ROUNDING


@pytest.mark.parametrize("name", ["exact", "muse"])
def test_one_rank_costs_nothing(
    name: str, mesh: DeviceMesh, inputs: tuple[Tensor, ...], record_property: Callable[[str, object], None]
) -> None:
    """`pytest --junitxml FILE` writes what was measured."""
    attention = get_attention(name)
    ways = {
        "alone": lambda: with_gradients(lambda: attention(*inputs, is_causal=True), inputs),
        "ulysses": lambda: with_gradients(lambda: ulysses(attention, *inputs, mesh, is_causal=True), inputs),
        "alone again": lambda: with_gradients(lambda: attention(*inputs, is_causal=True), inputs),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks = {}
    for way, call in ways.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks[way] = torch.cuda.max_memory_allocated()
    check_same(ways["alone"](), ways["ulysses"]())
    for turn in range(ROUNDS):
        for way, call in sorted(ways.items(), reverse=bool(turn % 2)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            seconds[way].append(start.elapsed_time(end) / CALLS)
    alone, through, again = (statistics.median(seconds[way]) for way in ways)
    record_property("milliseconds", f"{alone:.3f} alone, {through:.3f} through ulysses, {again:.3f} alone again")
    record_property("bytes at the peak", str(peaks))
    assert peaks["ulysses"] == peaks["alone"]
    assert through < 1.03 * max(alone, again)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_has_the_same_bits_on_its_rank_as_among_all_heads(ranks: int, inputs: tuple[Tensor, ...]) -> None:
    """What ulysses gives a rank is whole sequences of some of the heads."""
    attention = get_attention("muse")
    whole = with_gradients(lambda: attention(*inputs, is_causal=True), inputs)
    for rank in range(ranks):
        mine = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        share = tuple(tensor.detach()[:, mine].contiguous().requires_grad_() for tensor in inputs)
        part = with_gradients(lambda share=share: attention(*share, is_causal=True), share)  # type: ignore[misc]
        check_same(part, [tensor[:, mine] for tensor in whole])
