"""Schedules: a function that only allocates tensors and launches kernels, turned into a list of launches.

The kernels, their grids and the places of their arguments depend on the shapes of the inputs and on the settings, never
on data. So the function runs once for each combination, on tensors without memory, and its launches are recorded. They
show how long each intermediate result is needed, so that all can share one workspace. A call then allocates its outputs
and the workspace, and runs the list: no argument is bound or classified again, and the host computes only addresses.

The first run of a list goes through Triton, which compiles new kernels. Later ones pass addresses to the compiled
kernels, in one CUDA graph if the same addresses recur (`replaying`). If this version of Triton is not known to accept
them, or launches are observed (profilers of Triton, its hooks), every launch goes through Triton's public interface.
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
"""Alignment of intermediate results in bytes, as in PyTorch."""
_MOST_KEPT = 1024
"""Lists kept, one for each combination of shapes and settings; training at one length needs three. The oldest are
dropped first. Making one takes a few milliseconds."""
_DIRECT = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton whose compiled kernels `_entry_point` can call."""

Function = Callable[..., tuple[Tensor, ...]]


def run(function: Function, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]) -> tuple[Tensor, ...]:
    """`function(*tensors, *settings)`: new tensors, each with its own memory. It may also write to its inputs.

    All `tensors` are contiguous and `aligned`, and the first is not None.
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
    """Contiguous, at an address that kernels expect: for other addresses Triton compiles other kernels, which may sum
    in another order."""
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


_schedules: dict[tuple[Hashable, ...], Schedule] = {}
_lock = threading.Lock()


def _find(
    function: Function, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...], device: torch.device
) -> Schedule:
    shapes = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]
    key = (function, settings, device, *shapes)
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
    """index among inputs, outputs and the workspace"""
    offset: int
    """in bytes"""
    dtype: torch.dtype


class _Direct(NamedTuple):
    """A launch that bypasses Triton's launcher."""

    kernel: CompiledKernel
    """kept alive, or its code would be unloaded"""
    run: Callable[..., None]
    grid: tuple[int, ...]
    leading: tuple[Any, ...]
    """what `run` takes between the stream and the arguments of the kernel"""
    pick: Callable[[list[Any]], tuple[Any, ...]]
    """selects its arguments from those of all launches"""


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
        inputs = [None if tensor is None else torch.empty_like(tensor, device="meta") for tensor in tensors]
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
    """The offset in the workspace of each memory that is not `given`, and the size of the workspace. The largest memory
    goes first, each as low as those in use at the same time allow.

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
        overlapping = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if lives[other][0] <= end and begin <= lives[other][1]
        )
        offset = 0
        for low, high in overlapping:
            if offset + sizes[memory] <= low:
                break
            offset = max(offset, -(-high // _STEP) * _STEP)
        offsets[memory] = offset
    return offsets, max((offsets[memory] + size for memory, size in sizes.items()), default=0)


def _with(launch: Launch, kind: type, become: Callable[[Any], Any]) -> Launch:
    """The launch with its arguments of type `kind` replaced by `become(argument)`."""
    return launch._replace(
        arguments=tuple(become(argument) if isinstance(argument, kind) else argument for argument in launch.arguments)
    )


class _OnlyTensors(TorchDispatchMode):
    """Allows tensors to be allocated and viewed; raises if anything is computed outside of a kernel."""

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
    """Each output must own its whole memory, as a call allocates it."""
    identities = [_identity(tensor) for tensor in (*inputs, *outputs) if tensor is not None]
    for output in outputs:
        if identities.count(_identity(output)) > 1:
            raise AssertionError("an output shares its memory with an input or another output")
        if not output.is_contiguous() or output.untyped_storage().nbytes() != output.nbytes:
            raise AssertionError("an output is a part of something else")


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current: Triton launches on the current device, and launch settings depend on it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _is_listened_to() -> bool:
    """Whether a hook observes launches. (A hook is a function, None, or a chain of functions.)"""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    return any(bool(getattr(hook, "calls", hook)) for hook in hooks)


def _tensor_at(memories: Sequence[Tensor | None], place: _Place) -> Tensor:
    """A tensor from the place to the end of the memory; a view of an empty tensor may begin beyond it."""
    memory = memories[place.memory]
    assert memory is not None
    storage = memory.untyped_storage()
    end = storage.nbytes() // place.dtype.itemsize
    begin = min((memory.storage_offset() * memory.itemsize + place.offset) // place.dtype.itemsize, end)
    return torch.empty(0, dtype=place.dtype, device=memory.device).set_(storage, begin, (end - begin,), (1,))


def _direct(launches: Sequence[Launch], compiled: Sequence[CompiledKernel | None]) -> _DirectLaunches | None:
    """Direct launches of these compiled kernels; None if this version of Triton does not support them."""
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
        run, leading = _entry_point(kernel)
        direct.append(_Direct(kernel, run, launch.grid, leading, itemgetter(*picked)))
    return _DirectLaunches(direct, places, numbers)


def _launch_directly(direct: _DirectLaunches, addresses: tuple[int, ...], device: torch.device) -> None:
    arguments = [addresses[memory] + offset for memory, offset, _ in direct.places] + direct.numbers
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    for _, run, (x, y, z), leading, pick in direct.launches:
        run(x, y, z, stream, *leading, *pick(arguments))


def _entry_point(kernel: CompiledKernel) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that launches a kernel without hooks, and its arguments between the stream and the kernel's."""
    run, nothing = kernel.run, (None, None, None)
    is_cuda = torch.version.hip is None
    if triton.__version__.startswith("3.6.") and is_cuda and not run.global_scratch_size + run.profile_scratch_size:
        # (The C function behind Triton's Python wrapper, which only allocates scratch memory.)
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (kernel.function, *flags, None, None, kernel.packed_metadata, *nothing)
    return run, (kernel.function, kernel.packed_metadata, *nothing)
