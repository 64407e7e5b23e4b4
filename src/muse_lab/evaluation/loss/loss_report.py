"""The report of `muse loss`, with the paper's numbers beside."""

from __future__ import annotations

from muse_attention.sizes import format_size
from muse_lab.evaluation.loss.curves import (
    binned,
    cumulative_mean,
    fit_exact,
    gap,
    ratios_per_doubling,
    reducible_curve,
)
from muse_lab.evaluation.loss.positions import LossResults
from muse_lab.records.attention_names import EXACT, in_words, short_names
from muse_lab.report.markup import csv_text
from muse_lab.report.plots import BLACK, SIZES, Axis, Line, line_figure
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Figure, Note, Report, Section, Table, number, text

LEAK = Note(
    "MuSe without a tolerance, the paper's method, clusters the whole sequence, so a later token can move a centroid, "
    "and with it the approximation error of an earlier output. No value passes that way, but it is a path from the "
    "future, and every loss under that method is measured with this leak. MuSe with a tolerance and exact attention "
    "have none."
)
_LOSS = "Cross-entropy of the next token in nats, without any retraining, averaged over all positions."
_GAP = (
    "Mean loss less that of exact attention on the same samples, ± its standard error over samples where there are at "
    "least two. Every attention is exact inside the first block, which dilutes the gap."
)
_LATE_GAP = "The same over the positions from the last power of two on."
_PAPER = Note(
    "The paper's figure is of 100 chunks of 64k tokens of PG-19, with 64 to 512 clusters. The values of its curves are "
    "not printed in the paper, nor are the number of clusters opened, the size of the blocks, and how the irreducible "
    "loss was fitted. It also says that without tilt (No tilt K128) the loss explodes immediately, and that QK64 "
    "outperforms Q1 K128, one tilted query cluster."
)
_BINS = Note("Not cumulative: the loss of exact attention between two positions, and what the others add to it.")


def loss_report(results: LossResults, file_name: str) -> Report:
    if EXACT not in results.whole:
        raise ValueError("exact attention has not seen all samples yet; run the command again to continue")
    settings, names = results.settings, short_names(results.whole)
    return Report(
        f"Loss against position: {file_name}",
        verdict=[
            *_verdict(results),
            f"{settings.model}: {count(settings.samples, 'sample')} of {format_size(settings.length)} tokens of "
            f"{settings.text}, in {settings.dtype} on {settings.device}.",
        ],
        cards=[
            Card("mean loss, exact", f"{_mean(results, EXACT):.4f}", "nats per token"),
            *(
                Card("gap to exact", gap(results, name).signed(), names[name])
                for name in results.whole
                if name != EXACT
            ),
        ][:6],
        sections=[
            Section.of("Loss against position", _figure(results), _fit_in_words(results)),
            Section.of("Attentions", summary_table(results), LEAK),
            Section.of("The paper", paper_table(results), _PAPER),
            Section.of("Loss by position", bins_table(results), _BINS),
        ],
        names=names_table(results.whole),
        provenance=provenance_of(
            results,
            f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
            f"Text: {settings.text}; {settings.samples} x {settings.length - 1:,} positions",
        ),
        csv=as_csv(results),
    )


def summary_table(results: LossResults) -> Table:
    """Of every attention: mean loss, gap to exact, and gap from the last power of two on."""
    last, names = binned(results, EXACT)[-1], short_names(results.whole)
    late = number(f"gap from position {format_size(last.first)} on", _LATE_GAP)
    return Table.of(
        results.whole,
        (text("attention"), names.__getitem__),
        (number("mean loss", _LOSS), lambda name: f"{_mean(results, name):.4f}"),
        (number("gap to exact", _GAP), lambda name: "" if name == EXACT else gap(results, name).signed()),
        (late, lambda name: "" if name == EXACT else f"{binned(results, name)[-1].loss - last.loss:+.4f}"),
    )


def bins_table(results: LossResults) -> Table:
    """The loss itself between powers of two of the position; gaps to exact for the other attentions."""
    others, names = [name for name in results.whole if name != EXACT], short_names(results.whole)
    columns = [binned(results, name) for name in others]
    rows = []
    for place, exact in enumerate(binned(results, EXACT)):
        gaps = (f"{column[place].loss - exact.loss:+.4f}" for column in columns)
        rows.append((span(exact.first, exact.last), f"{exact.loss:.4f}", *gaps))
    return Table((number("positions"), number(EXACT), *(number(names[name], in_words(name)) for name in others)), rows)


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def paper_table(results: LossResults) -> Table:
    ratios = ", ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios_per_doubling(results))
    rows = [
        ("irreducible loss, fitted (nats)", f"{fit_exact(results).irreducible:.2f}", "2.30", "1.96"),
        ("gap shrinks per doubling of clusters by", ratios or "-", "~1.8x", "~2x"),
    ]
    return Table(("", "here", "paper, Llama 3.2-1B", "paper, Llama 3.1-8B"), rows)


def as_csv(results: LossResults) -> str:
    """A line for every position: the loss of the token after it under each attention, averaged over samples."""
    columns = [results.losses[name].by_position.tolist() for name in results.whole]
    rows = ([index + 1, *(f"{loss:.6g}" for loss in losses)] for index, losses in enumerate(zip(*columns, strict=True)))
    return csv_text(["position", *results.whole], rows)


def _mean(results: LossResults, attention: str) -> float:
    return float(cumulative_mean(results, attention)[-1])


def _verdict(results: LossResults) -> list[str]:
    """The attention that adds least to the loss."""
    others = [name for name in results.whole if name != EXACT]
    if not others:
        return [f"The mean loss under exact attention is {_mean(results, EXACT):.4f} nats."]
    best = min(others, key=lambda name: abs(gap(results, name).mean))
    smallest = "" if len(others) == 1 else f", the smallest gap of {len(others)} attentions"
    return [
        f"{short_names(results.whole)[best]} changes the mean loss by {gap(results, best).signed()} nats, from "
        f"{_mean(results, EXACT):.4f} under exact attention{smallest}."
    ]


def _figure(results: LossResults) -> Figure:
    irreducible, names = fit_exact(results).irreducible, short_names(results.whole)
    others = [name for name in results.whole if name != EXACT]
    lines = [
        Line(names[name], reducible_curve(results, name, irreducible), SIZES[place % len(SIZES)])
        for place, name in enumerate(others)
    ]
    lines.append(Line(EXACT, reducible_curve(results, EXACT, irreducible), BLACK))
    x, y = Axis("position", log=2, is_size=True), Axis("loss less irreducible loss (nats)", log=10)
    return line_figure("", "Cumulative mean loss minus irreducible loss, by position", lines, x, y, above=0.0)


def _fit_in_words(results: LossResults) -> Note:
    fit = fit_exact(results)
    return Note(
        "The irreducible loss is fitted to the curve of exact attention alone, from position 32 on, as the first term "
        f"of {fit.irreducible:.3f} + {fit.factor:.3g} x position^-{fit.exponent:.3g}; it is subtracted from every "
        "curve of the picture. No gap depends on it."
    )
