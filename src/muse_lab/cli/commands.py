"""All commands of `muse`: their lines in `muse --help`, and their modules, imported when a command is called."""

from __future__ import annotations

from muse_lab.cli.app import app, list_command

__all__ = ["app"]

list_command("demo", "See MuSe at work: one long attention call, and a tiny model trained with and without it.")
list_command("info", "Show versions, hardware, backends and default configurations.")
list_command("bench", "Measure time, memory and error of attentions on this machine.")
list_command("prepare", "Make a corpus of tokens for pretraining from source code and texts.")
list_command("train", "Pretrain a language model with any attention.")
list_command("recipes", "List the recipes of muse train, and what their fields mean.")
list_command("compare", "Compare training runs: loss, speed, error of the attention.")
list_command("fidelity", "Measure the error of attentions on the heads of a language model.")
list_command("loss", "Measure a language model's loss at every position of long texts.")
list_command("tune", "Find the fastest configuration below a given error, for a model on this device.")
list_command("eval", "Evaluate a language model: code needle-in-a-haystack.", "needles")
list_command("report", "Regenerate reports from existing results.")
