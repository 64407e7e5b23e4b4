"""The pipeline as operators of PyTorch: `muse_attention::cluster`, `::forward` and `::backward`.

To autograd, `torch.compile` and activation checkpointing each is one opaque operator with a shape rule. Clusters and
selection are outputs of the forward operators, so that a backward pass never depends on finding them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from muse_attention import large_logits, pipeline
from muse_attention.config import MuSeConfig
from muse_attention.kernels.plan import pairs_per_query
from muse_attention.precision import compute_dtype
from muse_attention.recording import Call, record
from muse_attention.structures import Clusters, Partial, Selection

NAMESPACE = "muse_attention"


def as_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As the operators read them. Here a copy is made once, and `torch.compile` makes it part of what comes before."""
    return tuple(tensor.contiguous() for tensor in tensors)


def cluster(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float, backend: str) -> Clusters:
    centroids, assignment, key_centroids, key_assignment, spread = _cluster(
        query.detach(), key.detach(), str(config), scale, backend
    )
    is_found = spread.dim() == 3  # what the configuration says, which the compiler cannot ask for a property
    return Clusters(centroids, assignment, key_centroids, key_assignment, spread if is_found else None)


def single_cluster(query: Tensor, key: Tensor) -> Clusters:
    """One cluster for all, centred at the origin: enough where summaries are not used, and free to find."""

    def side(tensor: Tensor) -> tuple[Tensor, Tensor]:
        centroid = tensor.new_zeros(*tensor.shape[:2], 1, tensor.shape[3], dtype=compute_dtype(tensor.dtype))
        return centroid, tensor.new_zeros(tensor.shape[:3], dtype=torch.int32)

    return Clusters(*side(query), *side(key))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
    backend: str,
    selection: Selection | None = None,
) -> tuple[Partial, Selection]:
    """Output and lse, differentiable, and the selection behind them."""
    _refuse_other_derivatives(query, key, value)
    query, key, value = as_contiguous(query, key, value)
    out, lse, opened, retrieved, _ = _forward(
        query,
        key,
        value,
        clusters.query_centroids,
        clusters.query_assignment,
        clusters.key_assignment,
        clusters.key_spread,
        None if selection is None else selection.opened,
        None if selection is None else selection.retrieved,
        str(config),
        is_causal,
        scale,
        backend,
    )
    selected = Selection(opened, retrieved)
    if not torch.compiler.is_compiling():
        record(Call(query, key, value, clusters, config, is_causal, scale, backend, selected))
    return Partial(out, lse.to(compute_dtype(query.dtype))), selected


@torch.library.custom_op(f"{NAMESPACE}::cluster", mutates_args=())
def _cluster(
    query: Tensor, key: Tensor, config: str, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _no_autocast(query):
        found = pipeline.find_clusters(query, key, MuSeConfig.parse(config), scale=scale, backend=backend)
    spread = query.new_empty(0) if found.key_spread is None else found.key_spread
    return found.query_centroids, found.query_assignment, found.key_centroids, found.key_assignment, spread


@_cluster.register_fake
def _(
    query: Tensor, key: Tensor, config: str, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parsed = MuSeConfig.parse(config)
    dtype = compute_dtype(query.dtype)
    query_clusters = parsed.query_clusters if parsed.tilt else 1
    return (
        query.new_empty(*query.shape[:2], query_clusters, query.shape[3], dtype=dtype),
        query.new_empty(query.shape[:3], dtype=torch.int32),
        key.new_empty(*key.shape[:2], parsed.key_clusters, key.shape[3], dtype=dtype),
        key.new_empty(key.shape[:3], dtype=torch.int32),
        key.new_empty(*key.shape[:2], key.shape[3], dtype=dtype) if parsed.needs_spread else query.new_empty(0),
    )


@torch.library.custom_op(f"{NAMESPACE}::forward", mutates_args=())
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    chosen = None if opened is None or retrieved is None else Selection(opened, retrieved)
    with _no_autocast(query):
        merged, selected, memory = large_logits.forward(
            query,
            key,
            value,
            _clusters(query_centroids, query_assignment, key_assignment, key_spread),
            chosen,
            MuSeConfig.parse(config),
            is_causal=is_causal,
            scale=scale,
            backend=backend,
        )
    if chosen is not None:  # an operator's output may not be its input
        selected = Selection(chosen.opened.clone(), chosen.retrieved.clone())
    return merged.out, merged.lse, selected.opened, selected.retrieved, memory


@_forward.register_fake
def _(
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parsed = MuSeConfig.parse(config)
    batch, heads, length, _ = query.shape
    rows = (batch, heads, length)
    of_opened, of_retrieved, _ = pipeline.selection_shapes(parsed, length)
    picks = pairs_per_query(parsed, of_retrieved if retrieved is None else tuple(retrieved.shape[-2:]))
    memory = pipeline.memory_size(
        parsed, batch * heads, batch * key.shape[1], length, query_centroids.shape[2], picks, backend
    )
    return (
        query.new_empty(*rows, value.shape[3]),
        query.new_empty(rows, dtype=large_logits.lse_dtype(query, backend)),
        query.new_empty(*rows, *of_opened, dtype=torch.int32) if opened is None else torch.empty_like(opened),
        query.new_empty(*rows, *of_retrieved, dtype=torch.int32) if retrieved is None else torch.empty_like(retrieved),
        query.new_empty(memory, dtype=torch.int32),
    )


@torch.library.custom_op(f"{NAMESPACE}::backward", mutates_args=())
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with _no_autocast(query):
        gradients = large_logits.backward(
            grad_out,
            grad_lse,
            query,
            key,
            value,
            _clusters(query_centroids, query_assignment, key_assignment, key_spread),
            Selection(opened, retrieved),
            Partial(out, lse),
            memory,
            MuSeConfig.parse(config),
            is_causal=is_causal,
            scale=scale,
            backend=backend,
        )
    grad_query, grad_key, grad_value = (gradient.to(query.dtype) for gradient in gradients)
    return grad_query, grad_key, grad_value


@_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))  # type: ignore[return-value]


def _no_autocast(query: Tensor) -> torch.autocast:
    """Autocast is for the operator's inputs. Inside it, everything runs in the dtype it is written in."""
    return torch.autocast(query.device.type, enabled=False)


def _clusters(
    query_centroids: Tensor, query_assignment: Tensor, key_assignment: Tensor, key_spread: Tensor | None
) -> Clusters:
    """Attention reads the assignment of keys alone, never their centroids."""
    return Clusters(query_centroids, query_assignment, query_centroids.new_empty(0), key_assignment, key_spread)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, _, config, is_causal, scale, backend = inputs
    out, lse, opened, retrieved, memory = output
    ctx.mark_non_differentiable(opened, retrieved, memory)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, opened, retrieved, out, lse, memory)
    ctx.settings = (config, is_causal, scale, backend)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them then, and only then
    if grad_out is None:
        grad_out = torch.zeros_like(saved[-3])
    (grad_out,) = as_contiguous(grad_out)
    return *_backward(grad_out, grad_lse, *saved, *ctx.settings), *([None] * 10)


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def _refuse_other_derivatives(*tensors: Tensor) -> None:
    """PyTorch would take the tangent of an operator it knows no forward derivative of for zero."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if torch._C._functorch.is_gradtrackingtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "MuSe attention has no forward-mode or torch.func derivative: "
                "use backward() or torch.autograd.grad, or backend='reference'"
            )


def _refuse_double_backward(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "MuSe attention can be differentiated once only: for second derivatives use backend='reference'"
    )


_backward.register_autograd(_refuse_double_backward)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the inputs of attention: floating point, except float64, in the autocast dtype."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _autocast_rule(name: str, inputs: int, dispatch_key: torch._C.DispatchKey) -> Callable[..., Any]:
    """Cast the first `inputs` arguments, query and key or query, key and value, and call the operator again."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    keys = torch._C.DispatchKeySet(dispatch_key)

    def run(*arguments: Any) -> Any:
        cast = cast_for_autocast(*arguments[:inputs])
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*cast, *arguments[inputs:])

    return run


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
    for _name, _inputs in (("cluster", 2), ("forward", 3)):
        _library.impl(_name, _autocast_rule(_name, _inputs, _key), _key.name)
