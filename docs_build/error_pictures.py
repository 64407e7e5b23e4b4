"""The pictures of error control and of the leak, computed from seeded data: `python -m docs_build.error_pictures`."""

from __future__ import annotations

from functools import partial

import torch
from matplotlib import pyplot
from torch import Tensor

from docs_build.style import BLUE, GREEN, GREY, ORANGE, save
from muse_attention import MuSeConfig, find_clusters, get_attention, muse_attention
from muse_attention.fidelity import future_influence, measure
from muse_attention.recording import recorded_calls
from muse_attention.retrieved import retrieved_buckets
from muse_attention.synthetic import clustered_qkv

LENGTH = 4096
SIZES = "QK32{}B256"
PAPER_RULE = tuple(SIZES.format(f"R{clusters}") for clusters in (0, 1, 2, 4, 8))
TOLERANCES = tuple(SIZES.format(f"R32T{tolerance}") for tolerance in ("0.1", "0.03", "0.01", "0.003", "0.001"))
LEAK = ("QK16R1B512", "QK32R2B512", "QK64R4B512", "QK64R8T0.01B512")


def make_data() -> tuple[Tensor, Tensor, Tensor]:
    """Two heads: one that looks for little, one that looks for much."""
    flat = clustered_qkv(1, 1, LENGTH, 64, sharpness=0.5, seed=0)
    sharp = clustered_qkv(1, 1, LENGTH, 64, sharpness=1.5, seed=1)
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(flat, sharp, strict=True))
    return query, key, value


def draw_error_control(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """Buckets that queries retrieve under both rules, and the error for the keys that this costs."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    shown = ((PAPER_RULE[3], BLUE, "the paper's rule, R = 4"), (TOLERANCES[2], GREEN, "tolerance 0.01"))
    counts = [_buckets_per_query(text, data) for text, _, _ in shown]
    bins = torch.arange(int(max(count.max() for count in counts)) + 2) - 0.5
    for count, (_, colour, label) in zip(counts, shown, strict=True):
        left.hist(count, bins=bins, color=colour, alpha=0.6, label=label)
    left.set_xlabel("buckets that a query retrieves")
    left.set_ylabel("queries")
    left.legend(frameon=False, fontsize=10)
    for texts, colour, label in ((PAPER_RULE, BLUE, "the paper's rule"), (TOLERANCES, GREEN, "a tolerance")):
        measured = [measure(get_attention(f"muse:{text}"), *data, is_causal=True).pooled() for text in texts]
        keys = [pooled["keys_per_query"] for pooled in measured]
        right.plot(keys, [pooled["relative_squared_error"] for pooled in measured], "o-", color=colour, label=label)
    right.set_yscale("log")
    right.set_xlabel("retrieved keys per query")
    right.set_ylabel("error (RSE)")
    right.legend(frameon=False, fontsize=10)
    figure.tight_layout()
    save(figure, "error-control.svg")


def draw_leak(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """How much outputs change when the future changes, beside the approximation error."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    position = 3 * LENGTH // 4
    rows = []
    for text in LEAK:
        attention = get_attention(f"muse:{text}")
        error = measure(attention, *data, is_causal=True).pooled()["relative_squared_error"]
        clusters = find_clusters(data[0], data[1], config=text)
        fixed = partial(muse_attention, config=MuSeConfig.parse(text), clusters=clusters)
        rows.append((error, future_influence(attention, *data, position), future_influence(fixed, *data, position)))
    labels = ("approximation error (RSE)", "leak", "leak, clusters held fixed")
    for place, (label, colour) in enumerate(zip(labels, (GREY, ORANGE, BLUE), strict=True)):
        at = [row + 0.25 * (place - 1) for row in range(len(LEAK))]
        axes.bar(at, [row[place] for row in rows], width=0.24, color=colour, label=label)
    for number, row in enumerate(rows):
        axes.text(number + 0.25, 0, f"{row[2]:.0e}" if row[2] else "0", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(LEAK)), LEAK)
    axes.set_ylabel("relative squared change")
    axes.legend(frameon=False, fontsize=10)
    save(figure, "leak.svg")


def _buckets_per_query(text: str, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Of every query of both heads."""
    with torch.no_grad(), recorded_calls() as calls:
        muse_attention(*data, is_causal=True, config=text)
    (call,) = calls
    return retrieved_buckets(call.selection, call.config, LENGTH).sum((-2, -1)).flatten()


if __name__ == "__main__":
    tensors = make_data()
    draw_error_control(tensors)
    draw_leak(tensors)
    print("wrote docs/images/error-control.svg and leak.svg")
