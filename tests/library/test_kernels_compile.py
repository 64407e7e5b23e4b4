"""The kernels compile for a GPU: no machine of the CI has one, and the interpreter checks no types."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from muse_attention import MuSeConfig

pytest.importorskip("triton")


MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper GPU."""


CONFIGURATIONS = {
    "Q4K40R2B64": 64,
    "QK4R2SP2B64,clustering=streaming": 64,
    "Q16K600R2B64,clustering=streaming": 128,
    "Q16K64T0.1B64": 64,
    "Q4K40T0.1B64,tile=8": 128,
}
"""The head dimension of each configuration."""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, test_cuda.py compiles them")
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [f"{config}:{head_dim}" for config, head_dim in CONFIGURATIONS.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "bfloat16", *cases],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    for config in CONFIGURATIONS:
        shared = {name: int(size) for of_config, name, size in lines if of_config == config}
        assert len(shared) > (15 if MuSeConfig.parse(config).tolerance is not None else 30)
        assert not {name: size for name, size in shared.items() if size > MOST_SHARED}
