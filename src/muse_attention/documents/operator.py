"""Attention inside documents as operators of PyTorch, for `torch.compile`: `packed_forward` and `packed_backward`.

Which kernels run depends on the boundaries, which differ in every batch. So the boundaries are a tensor, which only the
operators read: one graph serves all batches.

What a forward pass would keep for its backward pass has a size that depends on the boundaries too, and a graph must
know the sizes of its tensors. `packed_backward` therefore keeps the inputs and the outputs alone, and attends to long
documents once more. Short documents that share one call need no more than these. It keeps a copy of the boundaries,
which `packed_forward` returns: a caller may reuse the tensor for the next batch before the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muse_attention.core.precision import compute_dtype
from muse_attention.core.recording import unrecorded_calls
from muse_attention.core.structures import Partial
from muse_attention.documents.boundaries import DocumentBoundaries, read_boundaries
from muse_attention.documents.rows import attend_to_documents
from muse_attention.ops import NAMESPACE

_READS_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op(f"{NAMESPACE}::packed_forward", mutates_args=(), tags=_READS_ON_THE_HOST)
def packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    ends_of_keys: Tensor,
    longest: int,
    longest_of_keys: int,
    config: str | None,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (tokens, heads, value_dim) and lse (heads, tokens), differentiable, and a copy of the boundaries.

    Boundaries are tensors: int32 as `DocumentBoundaries.read` takes them, or a `DocumentBoundaries.table`. They are
    checked where the graph runs.
    """
    of_queries = _as_boundaries(ends)
    of_keys = of_queries if ends_of_keys is ends else _as_boundaries(ends_of_keys)
    boundaries = read_boundaries(query.shape[0], of_queries, of_keys, longest, longest_of_keys)
    with unrecorded_calls(), torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        out, lse = attend_to_documents(
            query, key, value, boundaries, config, is_causal=is_causal, scale=scale, backend=backend, return_lse=True
        )
    assert lse is not None
    return out, lse.contiguous(), ends.clone()


@packed_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _dim = query.shape
    return (
        query.new_empty(tokens, heads, value.shape[2]),
        query.new_empty(heads, tokens, dtype=compute_dtype(query.dtype)),
        torch.empty_like(ends),
    )


@torch.library.custom_op(f"{NAMESPACE}::packed_backward", mutates_args=(), tags=_READS_ON_THE_HOST)
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    config: str | None,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    boundaries = DocumentBoundaries.read(_as_boundaries(ends))
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    # An operator runs below autograd. What it calls is differentiated here all the same.
    with_autograd = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with unrecorded_calls(), with_autograd, torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        attended = attend_to_documents(
            query,
            key,
            value,
            boundaries,
            config,
            is_causal=is_causal,
            scale=scale,
            backend=backend,
            return_lse=grad_lse is not None,
            known=Partial(out, lse),
        )
        outputs = [output for output in attended if output is not None]
        gradients = torch.autograd.grad(outputs, (query, key, value), (grad_out, grad_lse)[: len(outputs)])
    grad_query, grad_key, grad_value = (gradient.contiguous() for gradient in gradients)
    return grad_query, grad_key, grad_value


@_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _as_boundaries(ends: Tensor) -> DocumentBoundaries | Tensor:
    """Boundaries from a table; ends of documents stay as they are."""
    return DocumentBoundaries.from_table(ends) if ends.dtype == torch.int64 else ends


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, _, _, _, *settings = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        grad_out = torch.zeros_like(ctx.saved_tensors[3])
    return *_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.settings), *([None] * 8)


packed_forward.register_autograd(_differentiate, setup_context=_keep)
FORWARD = torch.ops.muse_attention.packed_forward.default
"""Selective checkpointing may keep its outputs."""
