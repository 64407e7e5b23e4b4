"""The kernels compile for a GPU: no machine of the CI has one, and the interpreter checks no types."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, test_cuda.py compiles them")
@pytest.mark.parametrize("config", ["Q4K40R2T0.01B64", "QK4R2SP2B64,clustering=streaming"])
def test_kernels_compile_for_a_gpu(config: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "bfloat16", config],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) > 30
