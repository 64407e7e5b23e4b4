"""All commands of `muse`, each in its file: importing them is what adds them to the application."""

from muse_attention.cli import (
    bench,
    compare,
    demo,
    errors,
    evaluate,
    fidelity,
    info,
    loss,
    needles,
    prepare,
    report,
    tasks,
    train,
    tune,
)
from muse_attention.cli.app import app

__all__ = [
    "app",
    "bench",
    "compare",
    "demo",
    "errors",
    "evaluate",
    "fidelity",
    "info",
    "loss",
    "needles",
    "prepare",
    "report",
    "tasks",
    "train",
    "tune",
]
