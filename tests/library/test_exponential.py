"""Exponentials of a tensor do not depend on where its numbers lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from muse_attention.core.exponential import exp_


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [1, 31, 48, 1000, 32768, 32768 + 17, 65536, 98_400, 200_001])
def test_no_place_rounds_differently(numbers: int, dtype: torch.dtype) -> None:
    exponents = torch.randn(numbers, dtype=dtype, generator=torch.Generator().manual_seed(0)) - 2
    order = torch.randperm(numbers, generator=torch.Generator().manual_seed(1))
    found = exp_(exponents.clone())
    assert torch.equal(exp_(exponents[order]), found[order])
    torch.testing.assert_close(found, exponents.exp())


def test_what_underflows_is_zero() -> None:
    assert torch.equal(exp_(torch.tensor([-torch.inf, -1e4, 0.0])), torch.tensor([0.0, 0.0, 1.0]))
