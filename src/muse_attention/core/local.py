"""Exact attention inside each block, for every backend, through the fused operators that return the lse.

On CUDA that is cuDNN's, or FlashAttention's where cuDNN does not serve.

Their backward operators take the output and the lse as arguments, and are handed those of the *merged* softmax. They
form `delta = sum(dO * O)` from it. A gradient of the lse enters as one more column: with 0 appended to the values, 1 to
`dO` and `-dL` to `O` (or any two factors of `-dL`), they form `sum(dO * O) - dL`, while `dO . v` is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial

_QUERY_CHUNK = 1024
"""Queries at a time where no fused operator exists."""
_MULTIPLE = 8
"""The CUDA operators need head dimensions that are multiples of this."""
_ALIGNMENT = 16
"""Bytes: the same operators need rows that begin at multiples of this in memory."""
_WIDEST_CUDNN, WIDEST_FLASH = 128, 256
_SHORTEST_CUDNN = 128
"""Below this many queries cuDNN is no faster."""


def attend(call: Call) -> Partial:
    """Block-diagonal attention."""
    tensors = _since(call.first_row, call.query, call.key, call.value)
    parts = [
        fused_attention(*rows, is_causal=call.is_causal, scale=call.scale)
        for rows in _blocks(tensors, call.config.block_size)
    ]
    unfold = _unfolder(tensors)
    return Partial(
        _join([unfold(part.out, call.query) for part in parts], call.first_row),
        _join([unfold(part.lse[..., None], call.query)[..., 0] for part in parts], call.first_row),
    )


def attend_backward(
    call: Call, merged: Partial, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `merged` is the softmax over all terms of all stages."""
    query, key, value, out = call.query, call.key, call.value, merged.out
    if grad_lse is not None:
        value, out, grad_out = with_gradient_of_lse(grad_lse, value, out, grad_out)
    tensors = _since(call.first_row, grad_out, query, key, value, out, merged.lse[..., None])
    parts: list[tuple[Tensor, ...]] = []
    for *inputs, lse in _blocks(tensors, call.config.block_size):
        rows = (*inputs, lse[..., 0])
        parts.append(fused_attention_backward(*rows, is_causal=call.is_causal, scale=call.scale))
    unfold = _unfolder((query, key, value))
    grad_query, grad_key, grad_value = (
        _join([unfold(part, like) for part in gradient], call.first_row)
        for gradient, like in zip(zip(*parts, strict=True), (query, key, value), strict=True)
    )
    return grad_query, grad_key, grad_value if grad_lse is None else grad_value[..., :-1].contiguous()


def with_gradient_of_lse(
    grad_lse: Tensor, value: Tensor, out: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, output and its gradient with one more column, by which the gradient of the lse enters."""
    grad_lse = grad_lse[..., None]
    # Half of the exponent on either side keeps a large `dL` inside the range of float16.
    root = torch.exp2((grad_lse.abs().amax().clamp(min=1).log2() / 2).ceil())
    out = torch.cat([out, (-grad_lse / root).to(out.dtype)], dim=-1)
    grad_out = torch.cat([grad_out, root.to(out.dtype).expand_as(grad_lse)], dim=-1)
    return pad(value, (0, 1)), out, grad_out


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Partial:
    """Exact attention and its lse by the fused operator of the device; head dimensions may differ."""
    value_dim = value.shape[-1]
    operator = _operator(query, key, value)
    query, key, value = equal_dims((query, key, value), operator)
    if operator == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=None, scale=scale
        )
    elif operator == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        lse = lse[..., 0]
    elif operator == "flash":
        key, value = _repeat_heads((key, value), query.shape[1])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        key, value = _repeat_heads((key, value), query.shape[1])
        out, lse = _chunked_attention(query, key, value, is_causal=is_causal, scale=scale)
    return Partial(_narrowed(out, value_dim), lse)


def fused_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim, value_dim, key_heads = query.shape[-1], value.shape[-1], key.shape[1]
    operator = _operator(query, key, value)
    query, key, value, out, grad_out = equal_dims((query, key, value, out, grad_out), operator)
    if operator == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=None, scale=scale
        )
    else:
        if operator != "cudnn":
            key, value = _repeat_heads((key, value), query.shape[1])
        length = query.shape[2]
        no_lengths, no_dropout = None, torch.empty(0, dtype=torch.int64, device=query.device)
        if operator == "cudnn":
            gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad_out, query, key, value, out, lse.contiguous()[..., None], no_dropout, no_dropout, None,
                no_lengths, no_lengths, length, length, 0.0, is_causal, scale=scale,
            )  # fmt: skip
        elif operator == "flash":
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out, query, key, value, out, lse.contiguous(), no_lengths, no_lengths, length, length, 0.0,
                is_causal, no_dropout, no_dropout, scale=scale,
            )  # fmt: skip
        else:
            gradients = _chunked_attention_backward(
                grad_out, query, key, value, out, lse, is_causal=is_causal, scale=scale
            )
    grad_query, grad_key, grad_value = gradients
    return (
        _narrowed(grad_query, head_dim),
        _narrowed(_sum_heads(grad_key, key_heads), head_dim),
        _narrowed(_sum_heads(grad_value, key_heads), value_dim),
    )


def _operator(query: Tensor, key: Tensor, value: Tensor) -> str:
    if query.device.type == "cpu":
        # In blocks of a few keys that operator loses a NaN among the logits.
        return "cpu" if _is_finite(query) and _is_finite(key) else "chunked"
    widest = -(-max(query.shape[-1], value.shape[-1]) // _MULTIPLE) * _MULTIPLE
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        if widest <= _WIDEST_CUDNN and query.shape[2] >= _SHORTEST_CUDNN and _has_cudnn(query.device):
            return "cudnn"
        if widest <= WIDEST_FLASH:
            return "flash"
    return "chunked"


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention serves this GPU, and may be used.

    It can be switched off (`torch.backends.cuda.enable_cudnn_sdp`), and its backward sums the gradient of queries in
    any order, so that `torch.use_deterministic_algorithms` excludes it.
    """
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and torch.backends.cudnn.is_available()
        and _generation(device) >= (9, 0)
    )


@functools.cache
def _generation(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def equal_dims(tensors: tuple[Tensor, ...], operator: str) -> tuple[Tensor, ...]:
    """Rows of one length, each contiguous, as the operators read them.

    Zero columns fill them up: they change neither logits nor outputs.
    """
    dim = max(tensor.shape[-1] for tensor in tensors)
    if operator in ("cudnn", "flash"):
        dim = -(-dim // _MULTIPLE) * _MULTIPLE
    return tuple(
        pad(tensor, (0, dim - tensor.shape[-1])) if tensor.shape[-1] < dim else _with_contiguous_rows(tensor)
        for tensor in tensors
    )


def _narrowed(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` columns. (Every view takes the host some microseconds.)"""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim]


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Copy a tensor if its columns are strided or its rows overlap, as when transposed or expanded.

    On CUDA also copy one that begins where a wide load cannot, as a slice may.
    """
    if tensor.device.type == "cuda" and tensor.data_ptr() % _ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    follows = tensor.stride(-1) == 1 and tensor.stride(-2) >= tensor.shape[-1]
    return tensor if follows else tensor.contiguous()


def _repeat_heads(tensors: tuple[Tensor, ...], heads: int) -> list[Tensor]:
    return [
        tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
        for tensor in tensors
    ]


def _sum_heads(gradient: Tensor, heads: int) -> Tensor:
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _chunked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    wide_key, wide_value = (_widened(tensor) for tensor in (key, value))
    for begin, queries in _query_chunks(query):
        logits = _logits(_widened(queries), wide_key, begin, is_causal=is_causal, scale=scale)
        lse = logits.logsumexp(-1)
        lses.append(lse)
        outs.append(((logits - lse[..., None]).exp_() @ wide_value).to(value.dtype))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _chunked_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_key, wide_value, wide_grad = (_widened(tensor) for tensor in (key, value, grad_out))
    grad_queries, grad_key, grad_value = [], torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    delta = (wide_grad * out).sum(-1)
    for begin, queries in _query_chunks(query):
        rows = slice(begin, begin + queries.shape[2])
        wide_queries = _widened(queries)
        logits = _logits(wide_queries, wide_key, begin, is_causal=is_causal, scale=scale)
        weights = (logits - lse[:, :, rows, None]).clamp_(max=0).exp_()
        response = wide_grad[:, :, rows] @ wide_value.mT - delta[:, :, rows, None]
        d_logits = weights * response * scale
        grad_queries.append((d_logits @ wide_key).to(query.dtype))
        grad_key += d_logits.mT @ wide_queries
        grad_value += weights.mT @ wide_grad[:, :, rows]
    return torch.cat(grad_queries, dim=2), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _widened(tensor: Tensor) -> Tensor:
    """In float32 or better. (On a CPU, a product of bfloat16 matrices may spread NaN to the row before.)"""
    return tensor.to(compute_dtype(tensor.dtype))


def _query_chunks(query: Tensor) -> list[tuple[int, Tensor]]:
    return [(index * _QUERY_CHUNK, chunk) for index, chunk in enumerate(query.split(_QUERY_CHUNK, dim=2))]


def _logits(queries: Tensor, key: Tensor, begin: int, *, is_causal: bool, scale: float) -> Tensor:
    logits = scale * queries @ key.mT
    if is_causal:
        position = torch.arange(key.shape[2], device=key.device)
        logits = logits.masked_fill(position[begin : begin + queries.shape[2], None] < position, -torch.inf)
    return logits


def _blocks(tensors: tuple[Tensor, ...], block_size: int) -> list[list[Tensor]]:
    """Cut (batch, heads, N, X) tensors into blocks that attend by themselves; a short last block comes by itself.

    Where all have the same heads, blocks take the place of heads, which needs no copy: (batch heads, nb, B, X). Else
    they go into the batch: (batch nb, heads, B, X).
    """
    length, same_heads = tensors[0].shape[2], _same_heads(tensors)
    if length % block_size == 0 and same_heads:
        return [[tensor.reshape(-1, length // block_size, block_size, tensor.shape[3]) for tensor in tensors]]
    in_blocks = length // block_size * block_size
    cuts = [(0, in_blocks, block_size), (in_blocks, length, length - in_blocks)]

    def cut(tensor: Tensor, begin: int, end: int, size: int) -> Tensor:
        blocks = tensor[:, :, begin:end].unflatten(2, (-1, size))
        return blocks.flatten(0, 1) if same_heads else blocks.transpose(1, 2).flatten(0, 1)

    return [[cut(tensor, begin, end, size) for tensor in tensors] for begin, end, size in cuts if end > begin]


def _unfolder(tensors: tuple[Tensor, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """The inverse of `_blocks`: a function of the blocks and of a tensor with the batch and heads they came from."""

    def from_heads(blocks: Tensor, like: Tensor) -> Tensor:
        return blocks.reshape(*like.shape[:2], -1, blocks.shape[3])

    def from_batch(blocks: Tensor, like: Tensor) -> Tensor:
        return blocks.unflatten(0, (like.shape[0], -1)).transpose(1, 2).flatten(2, 3)

    return from_heads if _same_heads(tensors) else from_batch


def _same_heads(tensors: tuple[Tensor, ...]) -> bool:
    return len({tensor.shape[1] for tensor in tensors}) == 1


def _since(first_row: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows from `first_row` on."""
    return tensors if first_row == 0 else tuple(tensor[:, :, first_row:] for tensor in tensors)


def _join(parts: list[Tensor], first_row: int) -> Tensor:
    """`torch.cat` along the sequence, without the copy it makes of a single contiguous part; 0 before `first_row`."""
    joined = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 2)
    if first_row == 0:
        return joined
    return torch.cat([joined.new_zeros(*joined.shape[:2], first_row, *joined.shape[3:]), joined], 2)
