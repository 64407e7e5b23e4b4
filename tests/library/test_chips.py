"""Settings of launches follow the chip: what was measured on Hopper stays there as it is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from muse_attention.backends.triton import filling, numbers
from muse_attention.backends.triton.runtime import chips, launching
from muse_attention.backends.triton.runtime.chips import MEASURED, Chip, chip_of

TUNED = {
    128: {"KEYS": 128, "num_warps": 4, "maxnreg": 168},
    256: {"KEYS": 32, "num_warps": 4},
}
BY_REGISTERS = {128: {"KEYS": 64}, 256: {"num_warps": 8}}
CHIPS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def _be(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (numbers, launching):
        monkeypatch.setattr(module, "current_chip", lambda: chip)


@pytest.mark.parametrize("name", CHIPS)
def test_which_chips_are_as_hopper(name: str) -> None:
    assert (chip_of(CHIPS[name]) == MEASURED) == (name in ("sm_90", "sm_100"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled")
def test_the_interpreter_takes_what_was_measured() -> None:
    assert chips.current_chip() == MEASURED


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [
        ("sm_90", 64, TUNED[128]),
        ("sm_90", 128, TUNED[256]),
        ("sm_120", 64, {"KEYS": 64, "num_warps": 4, "maxnreg": 168}),
        ("sm_80", 128, {"KEYS": 32, "num_warps": 8}),
        ("gfx942", 128, {"KEYS": 32, "num_warps": 4}),
    ],
)
def test_tiles_follow_the_chip(
    name: str, head_dim: int, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _be(chip_of(CHIPS[name]), monkeypatch)
    assert numbers.fitting(TUNED, head_dim, head_dim, torch.bfloat16, BY_REGISTERS) == expected
    assert numbers.fitting(TUNED, head_dim, head_dim, torch.bfloat16) == TUNED[2 * head_dim]


@pytest.mark.parametrize("name", CHIPS)
def test_limits_on_registers_stay_where_they_were_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _be(chip_of(CHIPS[name]), monkeypatch)
    tensor = torch.empty(8, device="meta")
    with launching.noted() as launches:
        filling._fill[(2,)](WIDTH=4, num_warps=2, maxnreg=96, number=8, VALUE=0.0, tensor_ptr=tensor)
    limit = {"maxnreg": 96} if name in ("sm_90", "sm_100") else {}
    assert launches[0].options == {"num_warps": 2, **limit}
