"""The arguments of `scaled_dot_product_attention`, checked once for every attention in the library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muse_attention.core.precision import compute_dtype

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: object,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, float]:
    """The queries and the softmax scale, which is above 0; raises ValueError for arguments that are not supported.

    A scale below 0, or too small for the precision, is folded into the queries. The fused operators mask logits with
    -inf before they multiply them by the scale: a negative one would give masked keys the largest weight, and one that
    is rounded to 0 makes them NaN. A scale of 0 is refused: it is an argument in the wrong place.
    """
    for name, switch in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(switch, bool | torch.SymBool):
            raise ValueError(f"{name} is a {type(switch).__name__}; it must be True or False")
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not None: only is_causal=True or full attention is supported; pass attn_mask=None; "
            "muse_attn_varlen_func keeps packed documents apart"
        )
    if not isinstance(dropout_p, int | float) or dropout_p != 0:
        raise ValueError(f"dropout_p={one_line(dropout_p)}: attention dropout is not supported; pass dropout_p=0.0")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ValueError(f"{name} is a {kind} tensor; it must be dense: use to_dense(), or pad to one length")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have four axes: (batch, heads, length, head_dim)"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every axis must be at least 1")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}; use float16, bfloat16, float32 or float64")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}; move them to one device")
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise ValueError(f"{name} has dtype {tensor.dtype}, query {query.dtype}; convert them to one dtype")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} has batch size {tensor.shape[0]}, query {query.shape[0]}; they must be equal")
        if tensor.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name} has length {tensor.shape[2]}, query {query.shape[2]}: only self-attention of equal lengths is "
                "supported; use torch.nn.functional.scaled_dot_product_attention for decoding and cross-attention"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key has head_dim {key.shape[3]}, query {query.shape[3]}; they must be equal")
    query_heads, key_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    if key_heads != value_heads:
        raise ValueError(f"key has {key_heads} heads, value {value_heads}; they must be equal")
    if query_heads != key_heads and not enable_gqa:
        raise ValueError(
            f"query has {query_heads} heads, key {key_heads}; pass enable_gqa=True to share key heads among query heads"
        )
    if query_heads % key_heads:
        raise ValueError(f"query has {query_heads} heads, not a multiple of the {key_heads} heads of key")
    if len({tensor.dtype == torch.float64 for tensor in (query, key, value)}) > 1:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}: autocast leaves float64 "
            "as it is; convert them to one dtype"
        )
    if scale is None:
        return query, 1 / math.sqrt(query.shape[3])
    if isinstance(scale, bool) or not isinstance(scale, int | float | torch.SymFloat):
        raise ValueError(f"scale={one_line(scale)} must be a number, or None for 1/sqrt(head_dim)")
    if scale == 0:
        raise ValueError(f"scale={one_line(scale)} makes all logits equal; pass another number, or None")
    limits = torch.finfo(compute_dtype(query.dtype))
    if not abs(scale) <= limits.max:
        raise ValueError(f"scale={one_line(scale)} must be a number from {limits.min:.3g} to {limits.max:.3g}, or None")
    if abs(scale) < limits.tiny:
        return query * float(scale), 1.0
    return (query, float(scale)) if scale > 0 else (-query, -float(scale))


def one_line(argument: object) -> str:
    """A bad argument as it stands in a message: `repr`, unless that is long."""
    text = " ".join(repr(argument).split()) if not isinstance(argument, Tensor) else "a tensor"
    return text if len(text) <= 40 else f"{text[:40]}..."
