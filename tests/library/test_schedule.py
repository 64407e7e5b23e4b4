"""Lists of launches: what a function does when it is run from one, and how its intermediate results share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_cuda.py")

from muse_attention import muse_attention  # noqa: E402
from muse_attention.backends.triton.filling import fill  # noqa: E402
from muse_attention.backends.triton.runtime import launching, schedule  # noqa: E402
from tests.shapes import Shape  # noqa: E402

SIZE = 300
WIDTH = 128


@launching.kernel(stage="sorting", do_not_specialize=["number"])
def _copy(source_ptr, target_ptr, number, WIDTH: tl.constexpr):  # noqa: N803
    """Copy `number` entries. Grid: (number / WIDTH,)."""
    offs = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=offs < number), mask=offs < number)


def copied(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor, in memory of its own."""
    copy = tensor.new_empty(tensor.shape)
    grid = (-(-tensor.numel() // WIDTH),)
    _copy[grid](source_ptr=tensor, target_ptr=copy, number=tensor.numel(), WIDTH=WIDTH)
    return copy


def _copies_of_copies(source: Tensor, number: int) -> tuple[Tensor, ...]:
    for _ in range(number):
        source = copied(source)
    return (source,)


def test_a_scheduled_function_gives_what_it_gives_directly() -> None:
    source = torch.arange(SIZE, dtype=torch.float32)
    for _ in range(2):
        (result,) = schedule.run(_copies_of_copies, (source,), (4,))
        assert torch.equal(result, source)
        assert result.data_ptr() != source.data_ptr()


@pytest.mark.parametrize(
    "arguments", [{"number": 1}, {"number": 1, "source_ptr": None, "target_ptr": None, "WIDTH": 1, "D": 1}]
)
def test_a_launch_names_the_parameters_of_its_kernel(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"_copy lacks these arguments, or has no such parameters: \['(WIDTH|D)'"):
        _copy[(1,)](**arguments)


def test_arguments_go_in_the_order_of_the_kernel() -> None:
    with launching.noted() as launches:
        tensor = torch.empty(8, device="meta")
        _copy[(2,)](WIDTH=4, num_warps=2, number=8, target_ptr=tensor, source_ptr=tensor)
    (launch,) = launches
    assert launch.grid == (2, 1, 1)
    assert launch.arguments[2:] == (8, 4)
    assert launch.options == {"num_warps": 2}


def test_no_two_kernels_have_one_name() -> None:
    def _fill(number: int) -> None: ...

    with pytest.raises(ValueError, match="two kernels _fill"):
        launching.kernel(stage="sorting", do_not_specialize=[])(_fill)


def test_outputs_of_two_calls_are_different_memory() -> None:
    first, second = (schedule.run(_copies_of_copies, (torch.full((SIZE,), float(n)),), (2,))[0] for n in (1, 2))
    assert first.unique().tolist() == [1]
    assert second.unique().tolist() == [2]


def test_what_is_no_longer_needed_makes_room() -> None:
    source = torch.zeros(1 << 16)
    plan = schedule.Schedule.of(_copies_of_copies, (source,), (10,))
    assert plan.workspace == 2 * source.nbytes  # one copy is read while the next is written


def test_what_is_needed_to_the_end_is_kept() -> None:
    def all_at_once(source: Tensor) -> tuple[Tensor, ...]:
        several = [fill(torch.empty_like(source), number) for number in range(4)]
        return tuple(copied(some) for some in reversed(several))

    results = schedule.run(all_at_once, (torch.zeros(SIZE),), ())
    assert [result.unique().tolist() for result in results] == [[3], [2], [1], [0]]


def test_inputs_may_be_absent_and_written_to() -> None:
    def overwrite(target: Tensor, absent: Tensor | None) -> tuple[Tensor, ...]:
        assert absent is None
        fill(target[1], 7)
        return ()

    target = torch.zeros(3, 64)
    assert schedule.run(overwrite, (target, None), ()) == ()
    assert target.sum(1).tolist() == [0, 7 * 64, 0]


OUTSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 1,
    "copy": lambda x: x.clone(),
    "in place": lambda x: x.zero_(),
    "conversion": lambda x: x.double(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_no_kernel_computes_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match="outside of a kernel"):
        schedule.Schedule.of(lambda x: (OUTSIDE[name](x),), (torch.zeros(8),), ())


WRONG: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], str]] = {
    "two of one": (lambda x: copied(x).split(4), "shares its memory"),
    "an input": (lambda x: (x,), "shares its memory"),
    "a part": (lambda x: (copied(x)[2:],), "part of something else"),
}


@pytest.mark.parametrize("name", WRONG)
def test_outputs_are_memory_of_their_own(name: str) -> None:
    function, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        schedule.Schedule.of(function, (torch.zeros(8),), ())


def test_no_more_lists_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[object, ...], schedule.Schedule] = {}
    monkeypatch.setattr(schedule, "_schedules", kept)
    monkeypatch.setattr(schedule, "_MOST_KEPT", 3)
    for size in range(1, 9):
        schedule.run(_copies_of_copies, (torch.zeros(size),), (1,))
    assert len(kept) == 3


@pytest.mark.long
def test_nothing_depends_on_what_memory_held_before() -> None:
    """Under deterministic algorithms PyTorch fills new memory, bytes with ones in every bit."""
    inputs = Shape("", "", length=40, heads=2, key_heads=1).tensors(torch.float32)
    results = []
    for fills in (False, True):
        torch.use_deterministic_algorithms(fills)
        try:
            out = muse_attention(*inputs, is_causal=True, enable_gqa=True, config="Q3K4R2B16", backend="triton")
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(*results, rtol=0, atol=0)
