"""A function of tensors that only makes tensors and launches kernels, turned into a list of launches.

Which kernels run, on what grids, and where their arguments lie depends on the shapes of the inputs and on the settings,
never on data. So the function is run once for each of these, on tensors without memory, and its launches are noted.
They tell how long each intermediate result is needed, and all of them share one workspace. A call then allocates its
outputs and the workspace, and goes through the list: no argument is bound or classified again, and nothing is computed
on the host but addresses.

The first pass through a list goes through Triton, which compiles what is new. Later ones hand addresses to the compiled
kernels, all at once where the same addresses come again (`replaying`). Where a Triton is not known to take them, or
someone listens to launches (profilers of Triton, its hooks), every launch goes the public way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel

from muse_attention.backends.triton.runtime.launching import ALIGNMENT, Launch, noted
from muse_attention.backends.triton.runtime.replaying import Replays

_STEP = 512
"""Bytes at multiples of which intermediate results begin, as PyTorch's own do."""
_MOST_KEPT = 1024
"""Lists kept: for so many combinations of shapes and settings, three for a length that is trained on. The oldest go
first. To make one takes some milliseconds."""
_DIRECT = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton whose compiled kernels are called as in `_way_in`."""

Function = Callable[..., tuple[Tensor, ...]]


def run(function: Function, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]) -> tuple[Tensor, ...]:
    """`function(*tensors, *settings)`: new tensors, each with memory of its own. It may write to its inputs, too.

    All `tensors` are contiguous and `aligned`, and the first is one.
    """
    assert tensors[0] is not None
    device = tensors[0].device
    with _current(device):
        schedule = _find(function, tensors, settings, device)
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in schedule.outputs]
        if schedule.direct is None or _is_listened_to():
            memories = [*tensors, *outputs, torch.empty(schedule.workspace, dtype=torch.uint8, device=device)]
            tensor_at = functools.partial(_tensor_at, memories)
            compiled = []
            for launch in schedule.launches:
                compiled.append(_with(launch, _Place, tensor_at).now())
            schedule.direct = schedule.direct or _direct(schedule.launches, compiled)
        else:
            # (Not a tensor, which PyTorch would fill under deterministic algorithms.)
            workspace = torch.UntypedStorage(schedule.workspace, device=device)
            known = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *outputs)]
            addresses = (*known, workspace.data_ptr())
            launch_all = functools.partial(_launch_directly, schedule.direct, addresses, device)
            (schedule.replays.find(addresses, launch_all) or launch_all)()
    return tuple(outputs)


def aligned(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, and where kernels expect memory to begin: for other addresses Triton compiles other kernels, which
    may sum in another order."""
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


_schedules: dict[tuple[Hashable, ...], Schedule] = {}
_lock = threading.Lock()


def _find(
    function: Function, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...], device: torch.device
) -> Schedule:
    key = (function, settings, device, *(None if some is None else (some.shape, some.dtype) for some in tensors))
    schedule = _schedules.get(key)
    if schedule is None:
        schedule = Schedule.of(function, tensors, settings)
        with _lock:
            while len(_schedules) >= _MOST_KEPT:
                del _schedules[next(iter(_schedules))]
            _schedules[key] = schedule
    return schedule


class _Place(NamedTuple):
    """Where a tensor begins."""

    memory: int
    """among inputs, outputs and the workspace"""
    offset: int
    """in bytes"""
    dtype: torch.dtype


class _Direct(NamedTuple):
    """A launch without Triton's part of it."""

    kernel: CompiledKernel
    """not to be forgotten: its code would be unloaded"""
    run: Callable[..., None]
    grid: tuple[int, ...]
    what: tuple[Any, ...]
    """what it is told after the grid and the stream, and before the arguments"""
    pick: Callable[[list[Any]], tuple[Any, ...]]
    """its arguments, out of those of all launches"""


class _DirectLaunches(NamedTuple):
    launches: list[_Direct]
    places: list[_Place]
    """of all tensors among the arguments"""
    numbers: list[Any]
    """all other arguments; they come after the places"""


class Schedule:
    def __init__(self, launches: list[Launch], outputs: Sequence[Tensor], workspace: int) -> None:
        """The tensors among the arguments of `launches` are places."""
        self.launches = launches
        self.outputs = [(output.shape, output.dtype) for output in outputs]
        self.workspace = workspace
        """bytes"""
        self.direct: _DirectLaunches | None = None
        self.replays = Replays()

    @classmethod
    def of(cls, function: Function, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]) -> Schedule:
        inputs = [None if some is None else torch.empty_like(some, device="meta") for some in tensors]
        with noted() as launches, _OnlyTensors():
            outputs = function(*inputs, *settings)
        _check_outputs(inputs, outputs)
        given = {_identity(tensor): number for number, tensor in enumerate((*inputs, *outputs)) if tensor is not None}
        offsets, workspace = _arranged(launches, given)

        def place(tensor: Tensor) -> _Place:
            memory, inside = _identity(tensor), int(tensor.storage_offset()) * tensor.itemsize
            if memory in given:
                return _Place(given[memory], inside, tensor.dtype)
            return _Place(len(inputs) + len(outputs), offsets[memory] + inside, tensor.dtype)

        return cls([_with(launch, Tensor, place) for launch in launches], outputs, workspace)


def _arranged(launches: Sequence[Launch], given: Collection[int]) -> tuple[dict[int, int], int]:
    """Where in the workspace each memory begins that is not `given`, and the size of it all: the largest first, each as
    low as those that are in use at the same time allow.

    As long as the tensors of the launches live, each memory has an identity of its own.
    """
    lives: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for time, launch in enumerate(launches):
        for argument in launch.arguments:
            if isinstance(argument, Tensor) and (memory := _identity(argument)) not in given:
                sizes[memory] = argument.untyped_storage().nbytes()
                lives.setdefault(memory, [time, time])[1] = time
    offsets: dict[int, int] = {}
    for memory in sorted(sizes, key=lambda memory: -sizes[memory]):
        begin, end = lives[memory]
        beside = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if lives[other][0] <= end and begin <= lives[other][1]
        )
        offset = 0
        for low, high in beside:
            if offset + sizes[memory] <= low:
                break
            offset = max(offset, -(-high // _STEP) * _STEP)
        offsets[memory] = offset
    return offsets, max((offsets[memory] + size for memory, size in sizes.items()), default=0)


def _with(launch: Launch, kind: type, become: Callable[[Any], Any]) -> Launch:
    """The launch with other arguments in place of those of a kind."""
    return launch._replace(
        arguments=tuple(become(argument) if isinstance(argument, kind) else argument for argument in launch.arguments)
    )


class _OnlyTensors(TorchDispatchMode):
    """Lets tensors be made and looked at, and nothing be computed that no kernel would compute again."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        makes = func.overloadpacket.__name__ in ("empty", "empty_like", "new_empty", "empty_strided")
        tensors = [output for output in func._schema.returns if "Tensor" in str(output.type)]
        views = all(output.alias_info is not None and not output.alias_info.is_write for output in tensors)
        if not makes and not views:
            raise AssertionError(f"{func} computes something outside of a kernel")
        return func(*args, **(kwargs or {}))


def _check_outputs(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
    """Each is a whole memory of its own: that is what a call allocates."""
    identities = [_identity(tensor) for tensor in (*inputs, *outputs) if tensor is not None]
    for output in outputs:
        if identities.count(_identity(output)) > 1:
            raise AssertionError("an output shares its memory with an input or another output")
        if not output.is_contiguous() or output.untyped_storage().nbytes() != output.nbytes:
            raise AssertionError("an output is a part of something else")


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, and settings of launches depend on it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _is_listened_to() -> bool:
    """Whether anyone wants to know of launches. (A hook is a function, None, or a chain of functions.)"""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return any(bool(getattr(hook, "calls", hook)) for hook in hooks)


def _tensor_at(memories: Sequence[Tensor | None], place: _Place) -> Tensor:
    """From the place to the end of the memory; a part of an empty tensor may begin beyond it."""
    memory = memories[place.memory]
    assert memory is not None
    storage = memory.untyped_storage()
    end = storage.nbytes() // place.dtype.itemsize
    begin = min((memory.storage_offset() * memory.itemsize + place.offset) // place.dtype.itemsize, end)
    return torch.empty(0, dtype=place.dtype, device=memory.device).set_(storage, begin, (end - begin,), (1,))


def _direct(launches: Sequence[Launch], compiled: Sequence[CompiledKernel | None]) -> _DirectLaunches | None:
    """The launches of these compiled kernels, if this Triton's can be called so."""
    if not triton.__version__.startswith(_DIRECT):
        return None
    every = [argument for launch in launches for argument in launch.arguments]
    places = list(dict.fromkeys(argument for argument in every if isinstance(argument, _Place)))
    index = {place: number for number, place in enumerate(places)}
    numbers: list[Any] = []
    direct = []
    for launch, kernel in zip(launches, compiled, strict=True):
        if kernel is None:
            return None
        picked = []
        for argument in launch.arguments:
            if isinstance(argument, _Place):
                picked.append(index[argument])
            else:
                picked.append(len(places) + len(numbers))
                numbers.append(argument)
        run, what = _way_in(kernel)
        direct.append(_Direct(kernel, run, launch.grid, what, itemgetter(*picked)))
    return _DirectLaunches(direct, places, numbers)


def _launch_directly(direct: _DirectLaunches, addresses: tuple[int, ...], device: torch.device) -> None:
    arguments = [addresses[memory] + offset for memory, offset, _ in direct.places] + direct.numbers
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    for _, run, (x, y, z), what, pick in direct.launches:
        run(x, y, z, stream, *what, *pick(arguments))


def _way_in(kernel: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a kernel without metadata and hooks, and what it wants to be told after the grid and the stream."""
    run, nothing = kernel.run, (None, None, None)
    is_cuda = torch.version.hip is None
    if triton.__version__.startswith("3.6.") and is_cuda and not run.global_scratch_size + run.profile_scratch_size:
        # (What is behind Python's part of it, which makes scratch memory.)
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (kernel.function, *flags, None, None, kernel.packed_metadata, *nothing)
    return run, (kernel.function, kernel.packed_metadata, *nothing)
