"""Pictures of error control, from seeded data, and of the leak, from records: `python -m docs_build.error_pictures`."""

from __future__ import annotations

import torch
from matplotlib import pyplot
from torch import Tensor

from docs_build.records import DEFAULTS_OF_0_3, RECORDS, classify
from docs_build.style import BLUE, GREEN, GREY, ORANGE, WIDTH, save
from muse_attention import get_attention, muse_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.fidelity import measure
from muse_attention.fidelity.single_keys import SingleKeys
from muse_attention.sizes import format_size
from muse_lab.benchmark.tuning import TuningResults
from muse_lab.synthetic import clustered_qkv

LENGTH = 4096
SIZES = "QK32{}B256"
PAPER_RULE = tuple(SIZES.format(f"R{clusters}") for clusters in (0, 1, 2, 4, 8))
TOLERANCES = tuple(SIZES.format(f"T{tolerance}") for tolerance in ("0.4", "0.2", "0.1", "0.05", "0.02"))
LEAK_RECORDS = ("leak-16k", "leak-32k")
LEAK_BARS = (
    ("first_half_error", "error (RSE) of the first half", GREY),
    ("future_influence", "leak: its change with another second half", ORANGE),
)


def make_data() -> tuple[Tensor, Tensor, Tensor]:
    """Two heads: one that looks for little, one that looks for much."""
    flat = clustered_qkv(1, 1, LENGTH, 64, sharpness=0.5, seed=0)
    sharp = clustered_qkv(1, 1, LENGTH, 64, sharpness=1.5, seed=1)
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(flat, sharp, strict=True))
    return query, key, value


def draw_error_control(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """Buckets that queries retrieve under both rules, and the error for the keys that this costs."""
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(WIDTH, 5.6))
    shown = ((PAPER_RULE[3], BLUE, "the paper's rule, R = 4"), (TOLERANCES[2], GREEN, "tolerance 0.1"))
    counts = [_buckets_per_query(text, data) for text, _, _ in shown]
    bins = torch.arange(int(max(count.max() for count in counts)) + 2) - 0.5
    for count, (_, colour, label) in zip(counts, shown, strict=True):
        upper.hist(count, bins=bins, color=colour, alpha=0.6, label=label)
    upper.set_xlabel("buckets that a query retrieves")
    upper.set_ylabel("queries")
    upper.legend(frameon=False, fontsize=10, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    for texts, colour, label in ((PAPER_RULE, BLUE, "the paper's rule"), (TOLERANCES, GREEN, "a tolerance")):
        measured = [measure(get_attention(f"muse:{text}"), *data, is_causal=True).pooled() for text in texts]
        keys = [pooled["keys_per_query"] for pooled in measured]
        lower.plot(keys, [pooled["relative_squared_error"] for pooled in measured], "o-", color=colour, label=label)
    lower.set_yscale("log")
    lower.set_xlabel("retrieved keys per query")
    lower.set_ylabel("error (RSE)")
    lower.legend(frameon=False, fontsize=10)
    figure.tight_layout()
    save(figure, "error-control.svg")


def draw_leak() -> None:
    """How much outputs change with another future, beside their error, on heads of a trained model: of the paper's
    method and of the default of 0.3.0, whose clusters are those of the whole sequence."""
    figure, axes = pyplot.subplots(figsize=(0.9 * WIDTH, 3.6))
    bars = {}
    for record in LEAK_RECORDS:
        results = TuningResults.read(RECORDS / "error-control" / f"{record}.json")
        length = results.settings.length
        for candidate in results.tuned:
            is_earlier = candidate.attention == DEFAULTS_OF_0_3[length]
            method = "default of 0.3.0" if is_earlier else str(classify(candidate.attention, length))
            name = method.removeprefix("MuSe, ").replace(" method", "\nmethod").replace(" of ", "\nof ")
            bars[f"{name},\n{format_size(length)}"] = candidate.fidelity
    for place, (name, label, colour) in enumerate(LEAK_BARS):
        at = [number + 0.38 * (place - 0.5) for number in range(len(bars))]
        drawn = axes.barh(at, [fidelity[name] for fidelity in bars.values()], height=0.36, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.2g", fontsize=10, padding=3)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("relative squared change")
    axes.legend(frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.35, 1.0))
    save(figure, "leak.svg")


def _buckets_per_query(text: str, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Of every query of both heads."""
    with torch.no_grad(), recorded_calls() as calls:
        muse_attention(*data, is_causal=True, config=text)
    (call,) = calls
    keys = SingleKeys(call)
    return torch.stack([keys.pairs(position) for position in range(LENGTH)]).flatten()


if __name__ == "__main__":
    tensors = make_data()
    draw_error_control(tensors)
    draw_leak()
    print("wrote docs/images/error-control.svg and leak.svg")
