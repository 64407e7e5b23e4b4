"""Random calls of every attention: hostile layouts, values and configurations, each checked.

    python -m tests.fuzz --minutes 5            # from case 0 on
    python -m tests.fuzz --seed 3 --first 1000 --cases 500
    python -m tests.fuzz --seed 3 --case 1042   # one case again, with what it was

A case is a pure function of the seed and its number. It passes if

- inputs of any strides give bit for bit what their contiguous copies give, and so does a second call (on a GPU, what
  PyTorch sums in any order may differ);
- memory beside the inputs, which is NaN, is not read, and the inputs are not written to;
- output, lse and gradients are as near to the reference in float64 as plain PyTorch is in the same precision;
- what is not finite in exact attention is not finite here, and queries that do not see it stay finite;
- nothing is raised, and nothing warns.

On a GPU (`--device cuda`) most cases go through the kernels. Triton's interpreter would take a minute for one.
"""

from __future__ import annotations

import argparse
import json
import math
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

from muse_attention import MuSeConfig, find_clusters, get_attention, ops
from muse_attention.backends.reference import Reference, reference_attention
from muse_attention.backends.torch.backend import LARGEST_LSE
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.structures import Clusters, Selection
from tests.closeness import ROUNDING
from tests.fuzz_cases import FLOATS, Case, draw, make_inputs, make_weights

FACTOR = 4
"""Errors may be so many times those of plain PyTorch in the same precision."""
UNITS = 4
"""And so many units in the last place more, of the largest result and of the largest term of the sums behind it. Plain
PyTorch may happen to be exact: it keeps the weights, so that `dO . v` and `delta` cancel to the last bit where a query
sees one key; here they are rounded separately. And it uses the logits it has, while here weights are found again, from
logits that float32 may round another way: that is allowed too, but on a CPU not where float64 takes over."""


class WrongError(AssertionError):
    """What a case found, in one line."""


def check(case: Case, device: str = "cpu") -> None:
    """Raise if anything about the case is wrong, a warning included."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # as in pyproject.toml
        {"numbers": _check_numbers, "poison": _check_poison}[case.kind](case, device)


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


def _run_thrice(case: Case, device: str) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]:
    """Contiguous inputs, what comes of them, and the weights of its gradients; layouts and repetitions agree."""
    views = make_inputs(case, device)
    dense = [view.contiguous().clone() for view in views]
    before = [torch.as_strided(view, (view.untyped_storage().size() // view.element_size(),), (1,), 0).clone()
              for view in views]  # fmt: skip
    weights = make_weights(case, device)
    plain_weights = (weights[0].contiguous().clone(), weights[1])
    results = _results(case, dense, plain_weights)
    for what, tensors, some_weights in (
        ("a second call", dense, plain_weights),
        ("another layout", views, weights),
    ):
        for name, ours, other in zip(_NAMES, results, _results(case, tensors, some_weights), strict=True):
            if not _agree(case, device, name, ours, other):
                raise WrongError(f"{name}: {what} differs by {_largest(ours.double() - other.double()):.3g}")
    for view, storage in zip(views, before, strict=True):
        if not _same(torch.as_strided(view, storage.shape, (1,), 0), storage):
            raise WrongError("an input was written to")
    with torch.inference_mode():
        out, lse = _call(case, dense)
    for name, ours, other in zip(_NAMES, results, (out, lse), strict=False):
        if not _agree(case, device, name, ours, other):
            raise WrongError(f"{name}: inference mode gives another result")
    return dense, results, weights


def _agree(case: Case, device: str, name: str, first: Tensor, second: Tensor) -> bool:
    """To the last bit, but for what is summed in any order on a GPU: by cuDNN, or by all of PyTorch, where rounding may
    put a key into another cluster."""
    if device == "cuda" and (case.backend == "torch" or name == "gradient of query"):
        if first.shape != second.shape or not torch.equal(first.isnan(), second.isnan()):
            return False
        difference, size = (first - second).nan_to_num(0), first.nan_to_num(0, 0, 0)
        return _largest(difference) <= 2**-6 * _largest(size)
    return _same(first, second)


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(1e30), second.nan_to_num(1e30))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def _check_numbers(case: Case, device: str) -> None:
    dense, results, weights = _run_thrice(case, device)
    dtype = torch.bfloat16 if case.autocast else FLOATS[case.dtype]
    dense = [tensor.to(dtype) for tensor in dense]
    for name, tensor in zip(_NAMES, results, strict=True):
        wanted = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        if name.startswith("gradient"):
            wanted = FLOATS[case.dtype]
        if tensor.dtype != wanted:
            raise WrongError(f"{name} has dtype {tensor.dtype}, not {wanted}")
    definition, rows = _definition(case, dense)
    weights = (weights[0] * rows[..., None], weights[1] * rows)
    if not rows.all():
        results = _results(case, dense, weights)

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
    for name, ours, theirs, wanted in zip(_NAMES, results, plain, exact, strict=True):
        if name in ("output", "lse"):
            ours, theirs, wanted = (tensor[rows] for tensor in (ours, theirs, wanted))
        _check_error(name, ours, theirs, wanted, dtype, sizes)


@dataclass(frozen=True)
class _Sizes:
    """How large the numbers are whose rounding a result suffers from."""

    lse: float
    in_float64: bool
    """whether float64 takes over for all rows"""
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
        lse = _largest(exact[1])
        # Where nothing may depend on a later token, it does so from the first large lse of a head on.
        is_strict = case.is_causal and case.attention.startswith("muse:") and "T" in case.attention
        in_float64 = lse > LARGEST_LSE and not is_strict and dense[0].device.type == "cpu"
        return cls(lse, in_float64, product, terms)


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
    elif dtype == torch.float32 and not sizes.in_float64:
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
        clusters = find_clusters(
            folded, dense[1], config=config, is_causal=case.is_causal, scale=scale, backend=case.backend
        )
        call = Call(folded, *dense[1:], clusters, config, case.is_causal, scale)
        _, selection = ops.attend(call, case.backend)
    elif name == "moba":
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
    if name != "muse":
        of_queries, of_keys = (torch.zeros_like(tensor[:, :, :1]) for tensor in dense[:2])
        clusters = Clusters(of_queries, torch.zeros_like(rows, dtype=torch.int32), of_keys, assignment)
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
    dense, results, _ = _run_thrice(case, device)
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
    out, lse = results[0].isfinite(), results[1].isfinite()
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
