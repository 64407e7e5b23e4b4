"""MuSe attention as operators of PyTorch: `muse_attention::cluster`, `::forward` and `::backward`.

MoBA's choice of blocks is one too, `::choose_blocks`.

To autograd, `torch.compile` and activation checkpointing each is one opaque operator with a shape rule. Clusters and
selection are outputs of the forward operators, so that a backward pass never depends on finding them again.

They are registered with the dispatcher key by key, not through `torch.library.custom_op`: what that does for every call
(default arguments, a check for aliases, a guard against the compiler) takes longer on the host than short sequences
take on the GPU. `torch.library.opcheck` tests shapes, aliases and gradients, and `_opaque` is the guard. Where nothing
listens to operators (`_is_plain`), a call leaves the dispatcher out altogether.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from muse_attention.backends.choice import backend_named
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Attended, Call
from muse_attention.core.cluster_shapes import ClusterShapes
from muse_attention.core.precision import compute_dtype
from muse_attention.core.recording import record
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Clusters, Partial, Selection

NAMESPACE = "muse_attention"
_watcher = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Says whether the compiler watches this thread. Asking is cheaper than switching it off and on."""


def as_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors, as the operators read them. Here `torch.compile` can fuse the copy with what comes before."""
    return tuple(tensor.contiguous() for tensor in tensors)


def cluster(query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float, backend: str) -> Clusters:
    query, key = query.detach(), key.detach()
    if _is_plain(query, key):
        query, key = cast_for_autocast(query, key)
        tables = _cluster(query, key, config.text, is_causal, scale, backend)
    else:
        tables = CLUSTER(query, key, config.text, is_causal, scale, backend)
    centroids, assignment, key_centroids, key_assignment, spread = tables
    has_spread = spread.dim() > 1  # as the configuration says, whose properties the compiler cannot read
    return Clusters(centroids, assignment, key_centroids, key_assignment, spread if has_spread else None)


def choose_blocks(query: Tensor, means: Tensor, config: MuSeConfig, *, is_causal: bool, backend: str) -> Selection:
    """As `Backend.choose_blocks`."""
    query, means = query.detach(), means.detach()
    choose = _choose_blocks if _is_plain(query, means) else CHOOSE_BLOCKS
    return Selection(*choose(query, means, config.text, is_causal, backend))


_config = functools.lru_cache(maxsize=256)(MuSeConfig.parse)


def attend(call: Call, backend: str, selection: Selection | None = None) -> tuple[Partial, Selection]:
    """Output and lse, differentiable, and the selection behind them."""
    _refuse_other_derivatives(call.query, call.key, call.value)
    query, key, value = as_contiguous(call.query, call.key, call.value)
    clusters = call.clusters
    rest: tuple[Any, ...] = (
        clusters.query_centroids,
        clusters.query_assignment,
        clusters.key_assignment,
        clusters.key_spread,
        None if selection is None else selection.opened,
        None if selection is None else selection.retrieved,
        call.config.text,
        call.is_causal,
        call.scale,
        call.first_block,
        backend,
    )
    outputs: tuple[Tensor, ...]
    if not _is_plain(query, key, value):
        outputs = FORWARD(query, key, value, *rest)
    elif torch.is_grad_enabled() and torch._C._any_requires_grad(query, key, value):
        outputs = _Attention.apply(None, *cast_for_autocast(query, key, value), *rest)
    else:
        with torch.no_grad():
            outputs = _forward(*cast_for_autocast(query, key, value), *rest)
    out, lse, opened, retrieved, _ = outputs
    selected = Selection(opened, retrieved)
    if not torch.compiler.is_compiling():
        record(call, backend, selected)
    wide = compute_dtype(query.dtype)
    return Partial(out, lse if lse.dtype == wide else lse.to(wide)), selected


def _is_plain(*tensors: Tensor) -> bool:
    """Whether calling an operator would do no more than call its implementation.

    False for the compiler and tracing, modes and subclasses that see operators (checkpointing by policy, fake tensors,
    DTensor), `torch.func`, profilers, which name them, and tensors without data or with a sign yet to be applied.
    """
    return (
        not torch.compiler.is_compiling()
        and _watcher() is None
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._autograd._profiler_enabled()
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
        and not any(tensor.is_meta or tensor.is_neg() for tensor in tensors)
    )


def _cluster(
    query: Tensor, key: Tensor, config: str, is_causal: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _no_autocast(query):
        clusters = backend_named(backend).find_clusters(query, key, _config(config), is_causal=is_causal, scale=scale)
    spread = query.new_empty(0) if clusters.key_spread is None else clusters.key_spread
    return clusters.query_centroids, clusters.query_assignment, clusters.key_centroids, clusters.key_assignment, spread


def _shapes_of_cluster(
    query: Tensor, key: Tensor, config: str, is_causal: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(query.dtype)
    shapes = ClusterShapes.of(_config(config), query.shape[2], query.shape[3], is_causal=is_causal)
    spread = shapes.key_spread
    return (
        query.new_empty(*query.shape[:2], *shapes.query_centroids, dtype=dtype),
        query.new_empty(query.shape[:3], dtype=torch.int32),
        key.new_empty(*key.shape[:2], *shapes.key_centroids, dtype=dtype),
        key.new_empty(key.shape[:3], dtype=torch.int32),
        query.new_empty(0) if spread is None else key.new_empty(*key.shape[:2], *spread, dtype=dtype),
    )


def _choose_blocks(query: Tensor, means: Tensor, config: str, is_causal: bool, backend: str) -> tuple[Tensor, Tensor]:
    with _no_autocast(query):
        chosen = backend_named(backend).choose_blocks(query, means, _config(config), is_causal=is_causal)
    return chosen.opened, chosen.retrieved


def _shapes_of_choice(
    query: Tensor, means: Tensor, config: str, is_causal: bool, backend: str
) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:3], min(_config(config).retrieved_clusters, means.shape[2]))
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(*shape, 1, dtype=torch.int32)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_centroids: Tensor,
    query_assignment: Tensor,
    key_assignment: Tensor,
    key_spread: Tensor | None,
    opened: Tensor | None,
    retrieved: Tensor | None,
    config: str,
    is_causal: bool,
    scale: float,
    first_block: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    clusters = _clusters(query_centroids, query_assignment, key_assignment, key_spread)
    call = Call(query, key, value, clusters, _config(config), is_causal, scale, first_block)
    chosen = None if opened is None or retrieved is None else Selection(opened, retrieved)
    with _no_autocast(query):
        merged, selected, memory = backend_named(backend).forward(call, chosen)
    if chosen is not None:  # an operator's output may not be its input
        selected = Selection(chosen.opened.clone(), chosen.retrieved.clone())
    return _no_view(merged.out), _no_view(merged.lse), selected.opened, selected.retrieved, memory


def _clusters(
    query_centroids: Tensor, query_assignment: Tensor, key_assignment: Tensor, key_spread: Tensor | None
) -> Clusters:
    """Clusters for attention, which never reads the centroids of keys."""
    return Clusters(query_centroids, query_assignment, query_centroids.new_empty(0), key_assignment, key_spread)


def _no_view(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: autograd forbids changes in place to a view that a function returns."""
    if not tensor._is_view():
        return tensor
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *place)


def _shapes_of_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, *of_clusters, opened, retrieved, config, is_causal, scale, first_block, name = inputs
    call = Call(query, key, value, _clusters(*of_clusters), _config(config), is_causal, scale, first_block)
    backend, rows = backend_named(name), query.shape[:3]
    if opened is None or retrieved is None:
        empty = SelectionShapes.of(call.config, rows[2], is_causal=is_causal).new(query)
        opened, retrieved = empty.opened, empty.retrieved
    else:
        opened, retrieved = torch.empty_like(opened), torch.empty_like(retrieved)
    return (
        query.new_empty(*rows, value.shape[3]),
        query.new_empty(rows, dtype=backend.lse_dtype(query)),
        opened,
        retrieved,
        query.new_empty(backend.memory_size(call, retrieved), dtype=torch.int32),
    )


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_centroids: Tensor,
    query_assignment: Tensor,
    key_assignment: Tensor,
    key_spread: Tensor | None,
    opened: Tensor,
    retrieved: Tensor,
    out: Tensor,
    lse: Tensor,
    memory: Tensor,
    config: str,
    is_causal: bool,
    scale: float,
    first_block: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    clusters = _clusters(query_centroids, query_assignment, key_assignment, key_spread)
    call = Call(query, key, value, clusters, _config(config), is_causal, scale, first_block)
    attended = Attended(Partial(out, lse), Selection(opened, retrieved), memory)
    with _no_autocast(query):
        return backend_named(backend).backward(call, attended, grad_out, grad_lse)


def _shapes_of_backward(grad_out: Tensor, grad_lse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])


def _no_autocast(query: Tensor) -> AbstractContextManager[Any]:
    """Autocast is for the operator's inputs. Inside it, everything runs in the dtype it is written in."""
    device_type = query.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


class _Attention(torch.autograd.Function):
    """`FORWARD`, differentiable. It calls the implementation if it is handed None as the dispatcher's keys."""

    @staticmethod
    def forward(ctx: Any, keys: torch._C.DispatchKeySet | None, *inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        if keys is None:
            outputs = _forward(*inputs)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = FORWARD.redispatch(keys & torch._C._after_autograd_keyset, *inputs)
        *tensors, _, _, config, is_causal, scale, first_block, backend = inputs
        out, lse, opened, retrieved, memory = outputs
        ctx.mark_non_differentiable(opened, retrieved, memory)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, opened, retrieved, out, lse, memory)
        ctx.settings = (config, is_causal, scale, first_block, backend)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        grad_out, grad_lse, *_ = gradients
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them then, and only then
        if grad_out is None:
            grad_out = torch.zeros_like(saved[-3])
        (grad_out,) = as_contiguous(grad_out)
        is_plain = not torch.is_grad_enabled() and _is_plain(grad_out, *saved[:3])
        to_inputs = (_backward if is_plain else BACKWARD)(grad_out, grad_lse, *saved, *ctx.settings)
        return None, *to_inputs, *([None] * 11)


class _OnceOnly(torch.autograd.Function):
    """`BACKWARD`, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, keys: torch._C.DispatchKeySet, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs: tuple[Tensor, ...] = BACKWARD.redispatch(keys & torch._C._after_autograd_keyset, *inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(
            "MuSe attention can be differentiated only once: for second derivatives use backend='reference'"
        )


def _refuse_other_derivatives(*tensors: Tensor) -> None:
    """Refuse derivatives that the operators lack: PyTorch would take the tangents for zero."""
    if torch.compiler.is_compiling():
        return
    has_tangents = forward_ad._current_level >= 0  # (Asking a tensor takes the host microseconds.)
    for tensor in tensors:
        if torch._C._functorch.is_gradtrackingtensor(tensor) or (
            has_tangents and forward_ad.unpack_dual(tensor).tangent is not None
        ):
            raise NotImplementedError(
                "MuSe attention has no forward-mode or torch.func derivative: "
                "use backward() or torch.autograd.grad, or backend='reference'"
            )


def cast_for_autocast(*tensors: Tensor) -> tuple[Any, ...]:
    """Cast the inputs of attention as autocast does: floating point, except float64, to the autocast dtype."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _opaque(run: Callable[..., Any]) -> Callable[..., Any]:
    """Hide `run` from the compiler, even where it traces the caller."""
    unwatched: Callable[..., Any] = _disable_dynamo(run)

    def call(*arguments: Any) -> Any:
        return run(*arguments) if _watcher() is None else unwatched(*arguments)

    return call


def _register(name: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """The operator of that name and its shape rule."""
    schema = name + torch.library.infer_schema(run, mutates_args=())
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _opaque(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _register_autograd(operator: Any, function: type[torch.autograd.Function] | None) -> None:
    """`function` differentiates the operator; None if no gradient passes through it."""

    def run(keys: torch._C.DispatchKeySet, *inputs: Any) -> Any:
        if function is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function.apply(keys, *inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    _library.impl(operator.overloadpacket.__name__, run, "Autograd", with_keyset=True)


def _register_autocast(operator: Any, inputs: int, key: torch._C.DispatchKey) -> None:
    """Cast the first `inputs` arguments, query and key or query, key and value, and call the operator again."""
    keys = torch._C.DispatchKeySet(key)

    def run(*arguments: Any) -> Any:
        cast = cast_for_autocast(*arguments[:inputs])
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*cast, *arguments[inputs:])

    _library.impl(operator.overloadpacket.__name__, run, key.name)


CLUSTER = _register("cluster", _cluster, _shapes_of_cluster)
CHOOSE_BLOCKS = _register("choose_blocks", _choose_blocks, _shapes_of_choice)
FORWARD = _register("forward", _forward, _shapes_of_forward)
BACKWARD = _register("backward", _backward, _shapes_of_backward)
_register_autograd(CLUSTER, None)
_register_autograd(CHOOSE_BLOCKS, None)
_register_autograd(FORWARD, _Attention)
_register_autograd(BACKWARD, _OnceOnly)
for _key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
    _register_autocast(CLUSTER, 2, _key)
    _register_autocast(FORWARD, 3, _key)
