"""Every test starts from the same seed, and leaves the other core to the other worker."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
