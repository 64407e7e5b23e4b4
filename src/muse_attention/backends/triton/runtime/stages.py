"""The stages of the method that kernels belong to. (Without Triton: results are read where it is not installed.)"""

from __future__ import annotations

from typing import Literal, get_args

Stage = Literal[
    "clustering", "sorting", "summaries", "selection", "attention to summaries", "retrieval", "merging"
]  # fmt: skip
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order of the method."""
