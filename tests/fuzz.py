"""Random calls of every attention: hostile layouts, values, configurations and arguments, each checked.

    python -m tests.fuzz --minutes 5            # from case 0 on
    python -m tests.fuzz --seed 3 --first 1000 --cases 500
    python -m tests.fuzz --seed 3 --case 1042   # one case again, with what it was

A case is a pure function of the seed and its number. It passes if

- inputs of any strides give bit for bit what their contiguous copies give, and so does a second call;
- memory beside the inputs, which is NaN, is not read, and the inputs are not written to;
- output, lse and gradients are as near to the reference in float64 as plain PyTorch is in the same precision;
- what is not finite in exact attention is not finite here, and queries that do not see it stay finite;
- a bad argument is a ValueError of one line; nothing else is raised, and nothing warns.

On a GPU (`--device cuda`) most cases go through the kernels. Triton's interpreter would take a minute for one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from muse_attention import MuSeConfig, find_clusters, get_attention, operator
from muse_attention.large_logits import LARGEST_LSE
from muse_attention.reference import Reference, reference_attention
from muse_attention.signature import check_arguments
from muse_attention.structures import Clusters, Selection
from tests.closeness import ROUNDING

FACTOR = 4
"""Errors may be so many times those of plain PyTorch in the same precision."""
UNITS = 4
"""And so many units in the last place more, of the largest result and of the largest term of the sums behind it. Plain
PyTorch may happen to be exact: it keeps the weights, so that `dO . v` and `delta` cancel to the last bit where a query
sees one key; here they are rounded separately. And it uses the logits it has, while here weights are found again, from
logits that float32 may round another way: that is allowed too, but on a CPU not where `large_logits` takes over."""
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


# --- What is drawn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    kind: str
    """`numbers`, `poison` (something is not finite) or `arguments` (something is wrong)"""
    attention: str
    backend: str
    dtype: str
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    value_dim: int
    is_causal: bool
    scale: float | None
    values: str
    """what the numbers are like: a name in `VALUES`"""
    layouts: tuple[str, str, str]
    """of query, key and value: names in `LAYOUTS`"""
    gradient_layout: str
    autocast: bool

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)


def draw(seed: int, number: int, device: str = "cpu") -> Case:
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(["numbers", "poison", "arguments"], [8, 1, 1])[0]
    key_heads = rng.choice([1, 1, 2, 3])
    heads = key_heads * rng.choice([1, 1, 2, 3])
    head_dim = rng.choice([1, 2, 3, 7, 8, 16, 16, 31, 40])
    length = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 90), rng.randint(20, 90)])
    block = rng.choice([1, rng.randint(2, 15), rng.randint(16, 40), max(1, length // 3), 200])
    backend, dtype = "torch", rng.choice(["float32", "float32", "float32", "float64", "bfloat16", "float16"])
    if device == "cuda":
        backend = "torch" if dtype == "float64" else rng.choice(["triton", "triton", "torch"])
        # Kernels are compiled for each head dimension and number of clusters, which takes seconds: few of them.
        length, head_dim, block = length * rng.choice([1, 5, 17]), rng.choice([16, 64]), rng.choice([16, 128, 200])
    attention = rng.choice(["muse"] * 6 + ["exact", "block_diagonal", "moba"])
    length = min(length, 25 * block)  # the reference walks over all blocks for each query
    if attention == "muse":
        config = _draw_config(rng, block, backend)
        if device == "cuda":
            few, many = rng.choice([(4, 4), (3, 20)])
            config = config.replace(
                query_clusters=few, key_clusters=many, retrieved_clusters=min(2, config.retrieved_clusters)
            )
        attention = f"muse:{config}"
    elif attention == "block_diagonal":
        attention = f"block_diagonal:{block}"
    elif attention == "moba":
        attention = f"moba:L{block * rng.choice([1, 2, 4])}B{block}R{rng.randint(1, 4)}"
    values = "normal" if kind == "arguments" else rng.choice(["normal", "normal", *VALUES])
    if "dipole" in attention and values.startswith("logits of"):
        values = "normal"  # residuals of that size are far outside of a first order: it amplifies every rounding
    kinds = list(LAYOUTS)
    layouts = [rng.choice(["contiguous", *kinds]) for _ in range(3)]
    if rng.random() < 0.15:
        layouts = ["interleaved"] * 3
    return Case(
        seed=seed,
        number=number,
        kind=kind,
        attention=attention,
        backend=backend,
        dtype=dtype,
        batch=rng.choice([1, 1, 2, 3]),
        heads=heads,
        key_heads=key_heads,
        length=length,
        head_dim=head_dim,
        value_dim=rng.choice([head_dim, head_dim, rng.choice([1, 5, 8, 24]) if device == "cpu" else 24]),
        is_causal=rng.random() < 0.6,
        scale=rng.choice([None, None, None, None, 0.5, 1.0, -0.3, 0.0, 3, 1e-50, -1e-3] if device == "cpu" else _FEW),
        values=values,
        layouts=(layouts[0], layouts[1], layouts[2]),
        gradient_layout=rng.choice(["contiguous", *kinds]),
        autocast=dtype == "float32" and backend != "triton" and rng.random() < 0.05,
    )


_FEW = [None, None, None, -0.3, 0.0]
"""Scales on a GPU."""


def _draw_config(rng: random.Random, block: int, backend: str) -> MuSeConfig:
    dipole = rng.choice(["none"] * 5 + ["tilted", "shared", "centred"]) if backend == "torch" else "none"
    tolerances = [None, None, 0.1, 0.01, 0.001, 0.0, math.inf]
    tolerance = rng.choice(tolerances) if backend == "torch" and dipole == "none" else None
    return MuSeConfig(
        query_clusters=rng.randint(1, 6),
        key_clusters=rng.choice([rng.randint(1, 6), rng.randint(1, 6), 40]),
        retrieved_clusters=0 if dipole != "none" else rng.randint(0, 7),
        retrieved_blocks=1 if tolerance is not None else rng.randint(1, 3),
        tolerance=tolerance,
        second_order=rng.choice([None, None, True, False]) if backend == "torch" and dipole == "none" else None,
        block_size=block,
        tilt=rng.random() < 0.8,
        monopole=dipole != "none" or tolerance is not None or rng.random() < 0.8,
        dipole=dipole,
        differentiable_aggregation=rng.random() < 0.6,
        clustering=rng.choice(["auto", "streaming", "lloyd"]),
        cap_factor=rng.choice([None, 1.0, 1.5, 4.0]),
        query_cap_factor=rng.choice([None, None, 1.0, 4.0]),
        seed=rng.randint(0, 3),
    )


def _sharp(size: float) -> Callable[..., None]:
    """Logits of about this size, each query with another favourite."""

    def change(query: Tensor, key: Tensor, value: Tensor) -> None:
        query *= math.sqrt(size)
        key *= math.sqrt(size)

    return change


def _offset_keys(query: Tensor, key: Tensor, value: Tensor) -> None:
    key += 30 * key[:1, :1, :1]


def _equal_keys(query: Tensor, key: Tensor, value: Tensor) -> None:
    key[:] = key[:, :, :1].clone()


def _few_distinct(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor[:] = tensor[:, :, torch.arange(tensor.shape[2]) % min(3, tensor.shape[2])].clone()


def _zeros(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor.zero_()


def _outlying_key(query: Tensor, key: Tensor, value: Tensor) -> None:
    key[:, :, key.shape[2] // 3] *= 300


def _outlying_query(query: Tensor, key: Tensor, value: Tensor) -> None:
    query[:, :, -1] *= -300


def _tiny(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor *= 1e-30


def _large_values(query: Tensor, key: Tensor, value: Tensor) -> None:
    value *= 1e3


VALUES: dict[str, Callable[..., None]] = {
    "normal": lambda query, key, value: None,
    "logits of 20": _sharp(20),
    "logits of 600": _sharp(600),
    "logits of 2000": _sharp(2000),
    "offset keys": _offset_keys,
    "equal keys": _equal_keys,
    "few distinct": _few_distinct,
    "zeros": _zeros,
    "outlying key": _outlying_key,
    "outlying query": _outlying_query,
    "tiny": _tiny,
    "large values": _large_values,
}


def _beside_nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_full(shape, math.nan)


def _inside(tensor: Tensor) -> Tensor:
    around = _beside_nan(tuple(size + 2 for size in tensor.shape), tensor)
    view = around[1:-1, 1:-1, 1:-1, 1:-1]
    view.copy_(tensor)
    return view


def _every_other(dim: int) -> Callable[[Tensor], Tensor]:
    def lay_out(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = 2 * shape[dim] + 1
        around = _beside_nan(tuple(shape), tensor)
        view = around.narrow(dim, 1, 2 * tensor.shape[dim]).unfold(dim, 1, 2).squeeze(-1)
        view.copy_(tensor)
        return view

    return lay_out


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(dim, 0, 1).contiguous().expand(tensor.shape)


def _windows(tensor: Tensor) -> Tensor:
    """Rows that overlap: each begins one number after the one before."""
    line = tensor.new_empty(tensor.shape[0], tensor.shape[1], tensor.shape[2] + tensor.shape[3] - 1)
    line.copy_(torch.cat([tensor[..., 0], tensor[:, :, -1, 1:]], dim=-1))
    return line.unfold(2, tensor.shape[3], 1)


def _one_number_off(tensor: Tensor) -> Tensor:
    """Contiguous, but not where wide loads of a GPU can begin."""
    view = _beside_nan((tensor.numel() + 1,), tensor)[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "one number off": _one_number_off,
    "length before heads": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "columns before rows": lambda tensor: tensor.mT.contiguous().mT,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "batch last": lambda tensor: tensor.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
    "inside a larger tensor": _inside,
    "every other column": _every_other(3),
    "every other token": _every_other(2),
    "every other head": _every_other(1),
    "one column expanded": _expanded(3),
    "one token expanded": _expanded(2),
    "one head expanded": _expanded(1),
    "overlapping windows": _windows,
}


def _interleaved(tensors: list[Tensor]) -> list[Tensor]:
    """As one projection to queries, keys and values gives them: rows of one table."""
    rows = [tensor.transpose(1, 2).flatten(2) for tensor in tensors]
    table = torch.cat([*rows, _beside_nan((*rows[0].shape[:2], 1), rows[0])], dim=-1)
    views = table.split([row.shape[-1] for row in rows] + [1], dim=-1)
    return [
        view.unflatten(2, (tensor.shape[1], tensor.shape[3])).transpose(1, 2)
        for view, tensor in zip(views, tensors, strict=False)
    ]


def _inputs(case: Case, device: str) -> list[Tensor]:
    """Query, key and value in their layouts."""
    shapes = [(case.heads, case.head_dim), (case.key_heads, case.head_dim), (case.key_heads, case.value_dim)]
    generator = case.generator
    tensors = [
        torch.randn(case.batch, heads, case.length, dim, generator=generator, dtype=torch.float64)
        for heads, dim in shapes
    ]
    VALUES[case.values](*tensors)
    if case.kind == "poison":
        rng = random.Random(f"{case.seed}/{case.number}/poison")
        target, at = tensors[rng.randrange(3)], rng.randrange(case.length)
        target[..., at, rng.randrange(target.shape[-1])] = rng.choice([math.nan, math.inf, -math.inf])
    tensors = [tensor.to(FLOATS[case.dtype]).to(device) for tensor in tensors]
    if case.layouts[0] == "interleaved":
        return _interleaved(tensors)
    return [LAYOUTS[layout](tensor) for layout, tensor in zip(case.layouts, tensors, strict=True)]


# --- What is checked -------------------------------------------------------------------------------------------------


class WrongError(AssertionError):
    """What a case found, in one line."""


def check(case: Case, device: str = "cpu") -> None:
    """Raise if anything about the case is wrong, a warning included."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        {"numbers": _check_numbers, "poison": _check_poison, "arguments": _check_arguments}[case.kind](case, device)


def _call(case: Case, tensors: list[Tensor], **changes: Any) -> Any:
    name = case.attention.partition(":")[0]
    arguments: dict[str, Any] = {
        "is_causal": case.is_causal,
        "scale": case.scale,
        "enable_gqa": True,
        "return_lse": True,
        **({"backend": case.backend} if name in ("muse", "moba") else {}),
        **changes,
    }
    with torch.autocast(tensors[0].device.type, torch.bfloat16, enabled=case.autocast):
        return get_attention(case.attention)(*tensors, **arguments)


def _results(case: Case, tensors: list[Tensor], weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Output, lse and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = _call(case, leaves)
    gradients = torch.autograd.grad([out, lse], leaves, [weights[0].to(out.dtype), weights[1].to(lse.dtype)])
    return [out.detach(), lse.detach(), *gradients]


_NAMES = ("output", "lse", "gradient of query", "gradient of key", "gradient of value")


def _weights(case: Case, device: str) -> tuple[Tensor, Tensor]:
    generator = case.generator
    shape = (case.batch, case.heads, case.length)
    of_out = torch.randn(*shape, case.value_dim, generator=generator).to(FLOATS[case.dtype]).to(device)
    of_lse = torch.randn(*shape, generator=generator).to(device)
    return LAYOUTS[case.gradient_layout](of_out), of_lse


def _run_thrice(case: Case, device: str) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]:
    """Contiguous inputs, what comes of them, and the weights of its gradients; layouts and repetitions agree."""
    views = _inputs(case, device)
    dense = [view.contiguous().clone() for view in views]
    before = [torch.as_strided(view, (view.untyped_storage().size() // view.element_size(),), (1,), 0).clone()
              for view in views]  # fmt: skip
    weights = _weights(case, device)
    plain_weights = (weights[0].contiguous().clone(), weights[1])
    found = _results(case, dense, plain_weights)
    for what, tensors, some_weights in (
        ("a second call", dense, plain_weights),
        ("another layout", views, weights),
    ):
        for name, ours, other in zip(_NAMES, found, _results(case, tensors, some_weights), strict=True):
            in_any_order = name == "gradient of query" or case.backend == "torch"  # by cuDNN; by PyTorch
            if device == "cuda" and name.startswith("gradient") and in_any_order:
                difference, size = (ours - other).nan_to_num(0), ours.nan_to_num(0, 0, 0)
                if _largest(difference) <= 2**-6 * _largest(size):
                    continue
            if not torch.equal(ours.nan_to_num(1e30), other.nan_to_num(1e30)):
                raise WrongError(f"{name}: {what} differs by {_largest(ours.double() - other.double()):.3g}")
    for view, storage in zip(views, before, strict=True):
        after = torch.as_strided(view, storage.shape, (1,), 0)
        if not torch.equal(after.nan_to_num(1e30), storage.nan_to_num(1e30)):
            raise WrongError("an input was written to")
    with torch.inference_mode():
        out, lse = _call(case, dense)
    if not (_same(out, found[0]) and _same(lse, found[1])):
        raise WrongError("inference mode gives another result")
    return dense, found, weights


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(1e30), second.nan_to_num(1e30))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def _check_numbers(case: Case, device: str) -> None:
    dense, found, weights = _run_thrice(case, device)
    dtype = torch.bfloat16 if case.autocast else FLOATS[case.dtype]
    dense = [tensor.to(dtype) for tensor in dense]
    for name, tensor in zip(_NAMES, found, strict=True):
        wanted = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        if name.startswith("gradient"):
            wanted = FLOATS[case.dtype]
        if tensor.dtype != wanted:
            raise WrongError(f"{name} has dtype {tensor.dtype}, not {wanted}")
    definition, rows = _definition(case, dense)
    weights = (weights[0] * rows[..., None], weights[1] * rows)
    if not rows.all():
        found = _results(case, dense, weights)

    def evaluate(precision: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(precision).requires_grad_() for tensor in dense]
        result = definition(leaves, precision)
        gradients = torch.autograd.grad(
            [result.out, result.lse], leaves, [weights[0].to(precision), weights[1].to(precision)], allow_unused=True
        )
        gradients = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]
        return [result.out.detach(), result.lse.detach(), *gradients]

    exact, plain = evaluate(torch.float64), evaluate(dtype)
    sizes = _Sizes.of(case, dense, exact, weights)
    for name, ours, theirs, wanted in zip(_NAMES, found, plain, exact, strict=True):
        if name in ("output", "lse"):
            ours, theirs, wanted = (tensor[rows] for tensor in (ours, theirs, wanted))
        _check_error(name, ours, theirs, wanted, dtype, sizes)


@dataclass(frozen=True)
class _Sizes:
    """How large the numbers are whose rounding a result suffers from."""

    lse: float
    product: float
    """bound of a logit, from the norms of queries and keys: its terms may be as large even if it is not"""
    terms: dict[str, float]
    """of the output: values; of gradients: `dO . v` and `dL`, times a key, or times the queries that see one"""

    @classmethod
    def of(cls, case: Case, dense: list[Tensor], exact: list[Tensor], weights: tuple[Tensor, Tensor]) -> _Sizes:
        scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
        tensors = (*dense, exact[0], weights[0])
        queries = case.length * case.heads // case.key_heads
        query, key, value, out, of_out = (float(tensor.detach().double().norm(dim=-1).max()) for tensor in tensors)
        product = scale * query * key
        if "dipole" in case.attention:  # values are moved by a covariance of values and keys, times a residual
            value *= max(1, product)
        response = scale * (of_out * max(value, out) + _largest(weights[1]))
        terms = {
            "output": value,
            "gradient of query": response * key,
            "gradient of key": response * query * math.sqrt(queries),
        }
        return cls(_largest(exact[1]), product, terms)


def _check_error(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype, sizes: _Sizes) -> None:
    range_ = torch.finfo(ours.dtype).max / 4
    fits = exact.abs() < range_
    ours, theirs, exact = ours.double()[fits], theirs.double()[fits], exact.double()[fits]
    if not exact.numel():
        return
    if not ours.isfinite().all():
        raise WrongError(f"{name} is not finite")
    units, eps = float(UNITS), torch.finfo(dtype).eps
    if dtype == torch.float64:
        units = max(ROUNDING / eps, UNITS * sizes.product)
    elif dtype == torch.float32 and (sizes.lse <= LARGEST_LSE or ours.device.type == "cuda"):
        units = max(UNITS, sizes.product)
    slack = units * eps * _largest(exact) + UNITS * eps * sizes.terms.get(name, 0) + torch.finfo(dtype).tiny
    error, allowed = _largest(ours - exact), FACTOR * _largest((theirs - exact).nan_to_num(math.inf)) + slack
    if not error <= allowed:
        raise WrongError(
            f"{name}: error {error:.3g}, allowed {allowed:.3g}, largest {_largest(exact):.3g}, lse to {sizes.lse:.3g}"
        )


def _definition(case: Case, dense: list[Tensor]) -> tuple[Callable[[list[Tensor], torch.dtype], Reference], Tensor]:
    """The attention in plain PyTorch, in any precision, and the (batch, heads, N) queries it is certain about."""
    name, _, settings = case.attention.partition(":")
    folded, scale = check_arguments(*dense, None, 0.0, case.is_causal, case.scale, True)
    rows = torch.ones(dense[0].shape[:3], dtype=torch.bool, device=dense[0].device)
    arguments = {"is_causal": case.is_causal, "scale": case.scale}
    if name == "muse":
        config = MuSeConfig.parse(settings)
        clusters = find_clusters(folded, dense[1], config=config, scale=scale, backend=case.backend)
        _, selection = operator.attend(
            folded, *dense[1:], clusters, config, is_causal=case.is_causal, scale=scale, backend=case.backend
        )
        return (
            lambda tensors, precision: reference_attention(
                *tensors, config, **arguments, clusters=_in(clusters, precision), selection=selection
            )
        ), rows
    if name == "moba":
        own, block, count = (int(size) for size in settings[1:].replace("B", "R").split("R"))
        chosen, rows = _moba_choice(scale * folded.double(), dense[1], own, block, count, is_causal=case.is_causal)
        config = MuSeConfig(
            query_clusters=1, key_clusters=own // block, retrieved_clusters=count, block_size=own, monopole=False
        )
        place = torch.arange(case.length, device=chosen.device) % own // block
        assignment = place.expand(case.batch, case.key_heads, -1)
        selection = Selection(
            torch.where(chosen < 0, -1, chosen % (own // block)),
            torch.where(chosen < 0, -1, chosen // (own // block))[..., None],
        )
    else:
        own = case.length if name == "exact" else int(settings)
        config = MuSeConfig(query_clusters=1, key_clusters=1, retrieved_clusters=0, monopole=False, block_size=own)
        assignment = torch.zeros(case.batch, case.key_heads, case.length, dtype=torch.int64, device=rows.device)
        nothing = assignment.new_zeros(case.batch, case.heads, case.length, 0)
        selection = Selection(nothing, nothing[..., None])
    clusters = Clusters(
        torch.zeros_like(dense[0][:, :, :1]),
        torch.zeros_like(rows, dtype=torch.int32),
        torch.zeros_like(dense[1][:, :, :1]),
        assignment,
    )
    return (
        lambda tensors, precision: reference_attention(
            *tensors, config, **arguments, clusters=_in(clusters, precision), selection=selection
        )
    ), rows


def _in(clusters: Clusters, precision: torch.dtype) -> Clusters:
    return replace(clusters, query_centroids=clusters.query_centroids.to(precision))


def _moba_choice(
    query: Tensor, key: Tensor, own: int, block: int, count: int, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(batch, heads, N, count) blocks of largest score, and the queries where no other choice is nearly as good."""
    length = key.shape[2]
    number = torch.arange(length, device=key.device) // block
    member = one_hot(number).double()  # (m, blocks)
    means = member.mT @ key.double() / member.sum(0)[:, None]
    means = means.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ means.mT
    of_block = torch.arange(member.shape[1], device=key.device) * block // own
    of_query = torch.arange(length, device=key.device)[:, None] // own
    candidate = of_block < of_query if is_causal else of_block != of_query
    scores = scores.masked_fill(~candidate, -math.inf)
    top = torch.cat([scores, torch.full_like(scores[..., :1], -math.inf)], -1).topk(min(count, scores.shape[-1]) + 1)
    gap = (top.values[..., -2] - top.values[..., -1]).nan_to_num(math.inf)
    size = query.norm(dim=-1) * key.double().norm(dim=-1).max()
    chosen = torch.where(top.values[..., :-1] == -math.inf, -1, top.indices[..., :-1])
    certain = (gap > 0.02 * size.clamp(min=1e-6)) | (top.values[..., -1] == -math.inf)
    return chosen, certain


def _check_poison(case: Case, device: str) -> None:
    """Where exact attention is not finite, neither is this; a query that sees nothing of it stays finite."""
    dense, found, _ = _run_thrice(case, device)
    query, key, value = dense
    name, _, settings = case.attention.partition(":")
    visible = torch.ones(case.length, case.length, dtype=torch.bool, device=device)
    if case.is_causal:
        visible = visible.tril()
    block = case.length
    if name in ("block_diagonal", "moba"):
        block = int(settings) if name == "block_diagonal" else int(settings[1:].partition("B")[0])
    elif name == "muse":
        block = MuSeConfig.parse(settings).block_size
    own = torch.arange(case.length, device=device) // block
    sees_all = name == "exact" or (name == "muse" and MuSeConfig.parse(settings).monopole)
    group = case.heads // case.key_heads
    bad_query = ~query.isfinite().all(-1)
    bad_key = (~key.isfinite().all(-1) | ~value.isfinite().all(-1)).repeat_interleave(group, dim=1)
    certain = visible if sees_all else visible & (own[:, None] == own)
    reached = own[:, None] == own  # a masked product of matrices may spread NaN inside a block
    reached = reached | visible
    bad_scale = case.scale is not None and abs(case.scale) < 1e-30
    out, lse = found[0].isfinite(), found[1].isfinite()
    clean = ~(bad_query | (bad_key[:, :, None] & reached).any(-1))
    if not (out[clean].all() and lse[clean].all()):
        raise WrongError("a query that sees nothing but finite numbers is not finite")
    bad_value = (~value.isfinite()).repeat_interleave(group, dim=1)
    touched = (bad_value[:, :, None] & certain[..., None]).any(-2)  # (batch, heads, n, Dv)
    nan_query = query.isnan().any(-1)
    nan_key = (key.isnan().any(-1).repeat_interleave(group, dim=1)[:, :, None] & certain).any(-1)
    if out[nan_query].any() or out[nan_key].any() or lse[nan_query | nan_key].any():
        raise WrongError("NaN in a query or key became finite")
    if touched.any() and case.values in ("normal", "zeros", "equal keys") and not bad_scale and out[touched].any():
        raise WrongError("what is not finite in a value became finite")


_BAD: dict[str, Callable[[list[Tensor]], dict[str, Any]]] = {
    "mask": lambda tensors: {"attn_mask": torch.ones(2, 2)},
    "dropout": lambda tensors: {"dropout_p": 0.5},
    "dropout that is a text": lambda tensors: {"dropout_p": "none"},
    "causal text": lambda tensors: {"is_causal": "x"},
    "causal None": lambda tensors: {"is_causal": None},
    "causal tensor": lambda tensors: {"is_causal": torch.ones(2, dtype=torch.bool)},
    "grouped text": lambda tensors: {"enable_gqa": "yes"},
    "scale nan": lambda tensors: {"scale": math.nan},
    "scale inf": lambda tensors: {"scale": -math.inf},
    "scale 10**400": lambda tensors: {"scale": 10**400},
    "scale 1e300": lambda tensors: {"scale": 1e300} if tensors[0].dtype != torch.float64 else {"scale": None, "x": 1},
    "scale bool": lambda tensors: {"scale": True},
    "scale text": lambda tensors: {"scale": "0.5"},
    "scale tensor": lambda tensors: {"scale": torch.ones(3)},
    "sparse query": lambda tensors: {"query": tensors[0].to_sparse()},
    "sparse value": lambda tensors: {"value": tensors[2].to_sparse()},
    "nested key": lambda tensors: {"key": torch.nested.as_nested_tensor([tensors[1][0]], layout=torch.jagged)},
    "complex": lambda tensors: {"query": tensors[0].float() + 0j},
    "integer": lambda tensors: {"key": tensors[1].int()},
    "no tensor": lambda tensors: {"value": None},
    "three axes": lambda tensors: {"query": tensors[0][0]},
    "five axes": lambda tensors: {"key": tensors[1][None]},
    "no tokens": lambda tensors: {"query": tensors[0][:, :, :0]},
    "longer keys": lambda tensors: {"key": torch.cat([tensors[1], tensors[1]], 2)},
    "wider keys": lambda tensors: {"key": torch.cat([tensors[1], tensors[1]], 3)},
    "more batches": lambda tensors: {"value": torch.cat([tensors[2], tensors[2]], 0)},
    "more value heads": lambda tensors: {"value": torch.cat([tensors[2], tensors[2]], 1)},
    "other device": lambda tensors: {"value": tensors[2].to("meta")},
    "other dtype": lambda tensors: {
        "value": tensors[2].double() if tensors[2].dtype != torch.float64 else tensors[2].float()
    },
}


def _check_arguments(case: Case, device: str) -> None:
    tensors = _inputs(case, device)
    what = random.Random(f"{case.seed}/{case.number}/bad").choice(list(_BAD))
    changes = _BAD[what](tensors)
    if "x" in changes:
        return
    arguments = dict(zip(("query", "key", "value"), tensors, strict=True)) | changes
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    try:
        with torch.device(device):
            get_attention(case.attention)(
                *tensors, **{"is_causal": case.is_causal, "scale": case.scale, "enable_gqa": True, **arguments}
            )
    except ValueError as error:
        if "\n" in str(error) or not str(error):
            raise WrongError(f"{what}: a message of several lines, or of none: {error}") from error
        return
    raise WrongError(f"{what}: accepted")


# --- Running it ------------------------------------------------------------------------------------------------------


def describe(case: Case) -> str:
    parts = {name: value for name, value in asdict(case).items() if name not in ("seed", "number")}
    return " ".join(f"{name}={value!r}" for name, value in parts.items())


def _run(case: Case, device: str) -> str | None:
    """None, or what is wrong, in one line."""
    try:
        check(case, device)
    except KeyboardInterrupt:
        raise
    except WrongError as failure:
        return str(failure)
    except BaseException as error:  # whatever it is, it is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {' '.join(str(error).split())}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random calls of every attention, each checked.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case: go on where a run stopped")
    parser.add_argument("--cases", type=int, help="how many; without it, as many as fit into --minutes")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--case", type=int, help="run this one alone, and show its traceback")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--failures", type=Path, default=Path("out/fuzz.jsonl"), help="where failures are added")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say: Callable[..., None] = lambda text, end="\n": print(text, end=end, flush=True)  # noqa: E731, T201
    if options.case is not None:
        case = draw(options.seed, options.case, options.device)
        say(describe(case))
        check(case, options.device)
        say("passed")
        return
    begin, failures, number = time.monotonic(), 0, options.first
    try:
        while True:
            seconds = time.monotonic() - begin
            if number - options.first == options.cases or (options.cases is None and seconds > 60 * options.minutes):
                break
            case = draw(options.seed, number, options.device)
            wrong = _run(case, options.device)
            number += 1
            if wrong is not None:
                failures += 1
                say(f"\ncase {case.number} of seed {case.seed}: {wrong}\n    {describe(case)}")
                options.failures.parent.mkdir(parents=True, exist_ok=True)
                with options.failures.open("a") as file:
                    file.write(json.dumps({"device": options.device, "wrong": wrong, **asdict(case)}) + "\n")
            if number % 20 == 0:
                say(f"\r{number - options.first} cases, {failures} failures, {seconds:.0f} s", end="")
    except KeyboardInterrupt:
        say(f"\nstopped: go on with --first {number}")
    say(
        f"\n{number - options.first} cases of seed {options.seed} from {options.first} on {options.device}, "
        f"{failures} failures, {time.monotonic() - begin:.0f} s, torch {torch.__version__}"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
