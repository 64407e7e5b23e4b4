"""`examples/train_llama_with_trainer.py`: the Trainer of transformers trains a Llama with MuSe."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.markdown_pages import ROOT

EXAMPLE = ROOT / "examples" / "train_llama_with_trainer.py"
RECORDED = """
import runpy, sys
from muse_attention.core.recording import recorded_calls
with recorded_calls() as calls:
    runpy.run_path(sys.argv[1])
configurations = {str(call.config) for call in calls}
print("configurations:", configurations, "longest:", max(call.query.shape[2] for call in calls))
"""
WITHOUT_ACCELERATE = """
import importlib.util, runpy, sys
importlib.util.find_spec = lambda name: None
runpy.run_path(sys.argv[1])
"""


def run_example(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code, str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the other core is the other worker's
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_loss_falls_with_muse_and_exact_attention_reads_the_weights() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
    finished = run_example(RECORDED, "-W", "error::UserWarning")  # as where exact attention runs instead
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", finished.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.5
    assert re.search(r"configurations: \{'Q16K16R2SP1B128,clustering=lloyd'\} longest: 640", finished.stdout)
    muse, exact = (float(loss) for loss in re.findall(r"loss with \w+: ([\d.]+)", finished.stdout))
    assert abs(muse - exact) < 0.01


def test_without_accelerate_it_says_what_to_install() -> None:
    finished = run_example(WITHOUT_ACCELERATE, "-S")
    assert finished.returncode == 1
    assert finished.stderr.strip() == "the Trainer of transformers needs accelerate: pip install accelerate"
