"""What an attention did on a GPU, counted there as on a CPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from muse_attention import exact_attention, get_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.fidelity import measure
from muse_attention.fidelity.gradients import measure_gradients
from muse_attention.fidelity.lookups import found_weight
from muse_attention.fidelity.retrieved import measure_retrieval
from muse_lab.synthetic import clustered_qkv

pytestmark = pytest.mark.gpu

NAMES = ("muse:QK16R2SP2B128", "muse:Q8K40T0.1B128", "moba:L128B16R3")


def on_cpu(found: Any) -> Any:
    """A dataclass, with all tensors in it and in dataclasses of it on the CPU."""
    if isinstance(found, torch.Tensor):
        return found.cpu()
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        parts = {field.name: on_cpu(getattr(found, field.name)) for field in dataclasses.fields(found)}
        return dataclasses.replace(found, **parts)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_counts_on_a_gpu_are_those_on_a_cpu(name: str) -> None:
    query, key, value = clustered_qkv(2, 4, 1000, 32, device="cuda")
    with recorded_calls() as calls, torch.no_grad():
        get_attention(name)(query, key[:, :2], value[:, :2], is_causal=True, enable_gqa=True)
    (call,) = calls
    here = dataclasses.replace(on_cpu(call), backend="torch")
    exact_lse = exact_attention(query, key[:, :2], value[:, :2], is_causal=True, enable_gqa=True, return_lse=True)[1]
    found, expected = measure_retrieval(call, exact_lse), measure_retrieval(here, exact_lse.cpu())
    for measure_name in ("pairs_per_query", "keys_per_query", "share_retrieving", "found_share"):
        torch.testing.assert_close(getattr(found, measure_name).cpu(), getattr(expected, measure_name))
    arguments = (999, range(100, 500))
    there, again = found_weight(call, *arguments), found_weight(here, *arguments)
    for part, other in zip(vars(there).values(), vars(again).values(), strict=True):
        torch.testing.assert_close(part.cpu(), other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_measured_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    query, key, value = clustered_qkv(1, 4, 1000, 32, dtype=dtype, device="cuda")
    pooled = measure(get_attention(name), query, key, value, is_causal=True).pooled()
    assert pooled["error_p999"] >= pooled["error_p99"] > 0
    assert pooled["keys_per_query"] > 0
    errors = measure_gradients(get_attention(name), query, key, value, is_causal=True)
    assert all(bool((error > 0).all()) for error in vars(errors).values())
