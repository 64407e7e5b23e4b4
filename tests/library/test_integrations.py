"""What integrations with other trainers share; each trainer has tests of its own, for `make test-integrations`."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from muse_attention import DocumentBoundaries, muse_attention
from muse_attention.integrations.rows import attend_to_rows, check_config
from tests.closeness import assert_equal_to_rounding

CONFIG = "QK4R1B16"


@pytest.mark.parametrize("lengths", [None, [[40, 1, 23], [64]]], ids=["rows", "documents"])
def test_rows_are_attended_to_one_document_after_another(lengths: list[list[int]] | None) -> None:
    tensors = [torch.randn(2, 64, heads, dim, dtype=torch.float64) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    in_order = [length for documents in lengths or [] for length in documents]
    ends = torch.tensor([0, *in_order]).cumsum(0).to(torch.int32) if in_order else None
    out, lse = attend_to_rows(*tensors, ends, CONFIG, is_causal=True, scale=0.3)
    for row, documents in enumerate(lengths or [[64], [64]]):
        at = 0
        for length in documents:
            own = [tensor[row, None, at : at + length].transpose(1, 2) for tensor in tensors]
            expected, expected_lse = muse_attention(
                *own, is_causal=True, scale=0.3, enable_gqa=True, config=CONFIG, return_lse=True
            )
            assert_equal_to_rounding(out[row, at : at + length], expected[0].transpose(0, 1), "out")
            assert_equal_to_rounding(lse[row, :, at : at + length], expected_lse[0], "lse")
            at += length


def test_boundaries_that_do_not_end_with_the_rows_are_refused() -> None:
    rows = torch.randn(2, 8, 1, 4)
    with pytest.raises(ValueError, match="ends at 12, q has 16 tokens"):
        attend_to_rows(rows, rows, rows, DocumentBoundaries.from_lengths([12]), None, is_causal=True, scale=None)


def test_what_is_no_configuration_is_refused() -> None:
    check_config("QK16R2B128")
    check_config(None)
    with pytest.raises(ValueError, match="nonsense"):
        check_config("nonsense")


@pytest.mark.parametrize("trainer", ["torchtitan", "olmo_core", "megatron"])
def test_a_missing_trainer_is_named(trainer: str) -> None:
    if importlib.util.find_spec(trainer) is not None:
        pytest.skip(f"{trainer} is installed")
    with pytest.raises(ModuleNotFoundError, match=trainer):
        importlib.import_module(f"muse_attention.integrations.{trainer}")
