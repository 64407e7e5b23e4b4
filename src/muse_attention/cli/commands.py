"""All commands of `muse`, each in its file: importing them is what adds them to the application."""

from muse_attention.cli import bench, demo, fidelity, info, loss, prepare, report, tasks, train
from muse_attention.cli.app import app

__all__ = ["app", "bench", "demo", "fidelity", "info", "loss", "prepare", "report", "tasks", "train"]
