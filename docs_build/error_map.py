"""Where the error of MuSe is, by head and by position: the paper's method and the default, on a real model.

`python -m docs_build.error_map` draws docs/images/error-map.svg from benchmarks/error-control/error-map.json. With
`--measure` it makes that record first, from SmolLM2 or `--model FOLDER`; on a CPU that takes minutes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.colors import LogNorm
from torch import Tensor

from docs_build.records import RECORDS
from docs_build.style import BLUE, GREEN, WIDTH, save
from muse_attention import exact_attention
from muse_attention.fidelity import position_error
from muse_attention.huggingface.capture import visit_layers
from muse_attention.registry import full_name, get_attention
from muse_lab.models import load_model
from muse_lab.records.machine import describe_machine

RECORD = RECORDS / "error-control" / "error-map.json"
LENGTH, BINS = 4096, 64
ATTENTIONS = {"the paper's method": "muse:paper", "the default": "muse"}
_COLOURS = {"the paper's method": BLUE, "the default": GREEN}


def measure(name: str) -> dict[str, Any]:
    """RSE of every head, and of every stretch of positions as a mean over all heads; the same tokens for both."""
    model, tokenizer = load_model(name)
    text = "".join(inspect.getsource(module) for module in (inspect, logging, argparse))
    tokens = torch.tensor(tokenizer(text)["input_ids"][:LENGTH])[None]
    if tokens.shape[1] < LENGTH:
        raise ValueError(f"the text has {tokens.shape[1]} tokens; {LENGTH} are needed")
    by_head: dict[str, list[list[float]]] = {label: [] for label in ATTENTIONS}
    by_position = {label: torch.zeros(BINS, dtype=torch.float64) for label in ATTENTIONS}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        exact = exact_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        for label, attention in ATTENTIONS.items():
            out = get_attention(attention)(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            errors = position_error(out, exact)[0].double()  # (heads, length)
            by_head[label].append([float(f"{error:.4g}") for error in errors.mean(-1).tolist()])
            by_position[label] += errors.mean(0).view(BINS, -1).mean(-1)
        print(
            f"layer {layer}: " + ", ".join(f"{label} {max(rows[-1]):.4f}" for label, rows in by_head.items()),
            flush=True,
        )

    visit_layers(model, tokens, visit)
    return {
        "machine": describe_machine(),
        "settings": {
            "model": name,
            "text": "inspect.py, logging/__init__.py and argparse.py of Python's standard library",
            "length": LENGTH,
            "dtype": "float32",
            "attentions": {label: full_name(attention, LENGTH) for label, attention in ATTENTIONS.items()},
        },
        "by_head": by_head,
        "by_position": {
            label: [float(f"{error / len(by_head[label]):.4g}") for error in errors.tolist()]
            for label, errors in by_position.items()
        },
    }


def draw(document: dict[str, Any]) -> None:
    """Two maps of layers and heads with one scale of colours, and below them the error against position."""
    figure = pyplot.figure(figsize=(WIDTH, 6.6), layout="constrained")
    left, right, below = figure.subplot_mosaic([["left", "right"], ["below", "below"]], height_ratios=(5, 4)).values()
    maps = {label: torch.tensor(document["by_head"][label]) for label in ATTENTIONS}
    every = torch.cat([errors.flatten() for errors in maps.values()])
    norm = LogNorm(max(float(every.min()), 1e-5), float(every.max()))
    for axes, (label, errors) in zip((left, right), maps.items(), strict=True):
        image = axes.imshow(errors, norm=norm, cmap="magma_r", aspect="auto", origin="lower")
        axes.set_title(f"{label}\nmean {float(errors.mean()):.2g}", fontsize=11)
        axes.set_xlabel("head")
        axes.set_xticks(range(0, errors.shape[1], 2))
    left.set_ylabel("layer")
    right.set_yticks([])
    figure.colorbar(image, ax=[left, right], label="RSE", format="{x:g}")
    length = document["settings"]["length"]
    at = (torch.arange(BINS) + 0.5) * length / BINS
    for label, errors in document["by_position"].items():
        seen = torch.tensor(errors)
        below.plot(at[seen > 0], seen[seen > 0], color=_COLOURS[label], label=label, linewidth=2)
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.set_xlim(0, length)
    below.set_xlabel("position; the first block is exact")
    below.set_ylabel("RSE, mean over all heads")
    below.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    save(figure, "error-map.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the error of MuSe is, by head and by position.")
    parser.add_argument("--measure", action="store_true", help="make the record first")
    parser.add_argument("--model", default="smollm2", help="smollm2, or the folder of a model")
    arguments = parser.parse_args()
    if arguments.measure:
        RECORD.write_text(json.dumps(measure(arguments.model), indent=1) + "\n")
        print(f"wrote {RECORD}")
    draw(json.loads(RECORD.read_text()))
    print("wrote docs/images/error-map.svg")


if __name__ == "__main__":
    main()
