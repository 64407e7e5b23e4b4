"""Kernels compile for GPUs that are not there, and fit; the command fails if they do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.markdown_pages import ROOT

pytest.importorskip("triton")

from docs_build import compiled_kernels
from docs_build.compiled_kernels import Compiled

FITS = Compiled("_small", 8 * 1024, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "head_dim"), [("sm_80", 64), ("sm_120", 128), ("gfx942", 128)])
def test_every_kernel_compiles_and_has_the_shared_memory_it_needs(architecture: str, head_dim: int) -> None:
    """In a process of its own: the tests' Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "docs_build.compiled_kernels", "--gpu", architecture, "--head-dim", str(head_dim)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert f"{architecture}, heads of {head_dim}: 25 kernels" in finished.stderr
    assert "all compile and fit" in finished.stderr
    assert finished.stdout.count("\n| `_") == 25


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Compiled("_large", 100 * 1024, 255), "_large does NOT fit: 100 KiB of 99 KiB of shared memory"),
        (Compiled("_odd", failure="PTXASError: no"), "_odd does NOT compile: PTXASError: no"),
    ],
)
def test_the_command_fails_if_a_kernel_does(
    kernel: Compiled, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled_kernels, "compile_kernels", lambda *_: [FITS, kernel])
    assert compiled_kernels.main(["--gpu", "sm_80,sm_89", "--head-dim", "64"]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert "do NOT compile or fit" in said.err
    assert f"| `_small` | {FITS} | {FITS} |" in said.out


def test_the_command_succeeds_if_all_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled_kernels, "compile_kernels", lambda *_: [FITS, Compiled("_spills", 2048, 255, 68)])
    assert compiled_kernels.main([]) == 0
    said = capsys.readouterr()
    assert "heads of 128: 2 kernels" in said.err
    assert "most shared memory 8 of 64 KiB, most spilled 68 B" in said.err
    assert "all compile and fit" in said.err
    assert said.out.count("| `_spills` | 255 / 2 +68 |") == 2
