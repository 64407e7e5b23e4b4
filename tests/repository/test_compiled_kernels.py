"""Kernels compile for GPUs that are not there, and fit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.markdown_pages import ROOT

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120", "gfx942"])
def test_every_kernel_compiles_and_has_the_shared_memory_it_needs(architecture: str) -> None:
    """In a process of its own: the tests' Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "docs_build.compiled_kernels", "--gpu", architecture, "--head-dim", "64"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert f"{architecture}, heads of 64: 25 kernels" in finished.stderr
    assert "KiB of shared memory and fits" in finished.stderr
    assert finished.stdout.count("\n| `_") == 25
