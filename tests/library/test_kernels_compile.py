"""The kernels compile for a GPU: no machine of the CI has one, and the interpreter checks no types."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper GPU."""


ATTENTIONS = {
    "muse:Q4K40R2B64": (64, 30),
    "muse:QK4R2SP2B64,clustering=streaming": (64, 30),
    "muse:Q16K600R2B64,clustering=streaming": (128, 30),
    "muse:Q16K64T0.1B64": (64, 15),
    "muse:Q4K40T0.1B64,tile=8": (128, 15),
    "moba:L128B32R3": (64, 15),
}
"""The head dimension of each, and a number of kernels that it exceeds."""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, test_cuda.py compiles them")
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [f"{name}:{head_dim}" for name, (head_dim, _) in ATTENTIONS.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "bfloat16", *cases],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    for name, (_, kernels) in ATTENTIONS.items():
        shared = {kernel: int(size) for of_name, kernel, size in lines if of_name == name}
        assert len(shared) > kernels
        assert not {kernel: size for kernel, size in shared.items() if size > MOST_SHARED}
