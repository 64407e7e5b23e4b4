"""The results of `muse loss` for people: one HTML page, Markdown, and CSV, with the paper's numbers beside."""

from __future__ import annotations

from muse_attention.evaluation.attentions import in_words
from muse_attention.evaluation.loss.curves import (
    binned,
    cumulative_mean,
    doublings,
    fit_exact,
    gap,
    ratio_per_doubling,
)
from muse_attention.evaluation.loss.positions import Results
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

_MEASURED = (
    "Loss is the cross-entropy of the next token, in nats, without any retraining; its mean is over all positions. The "
    "gap is the mean loss less that of exact attention on the same samples, ± its standard error over samples where "
    "there are at least two. Every attention is exact inside the first block, which dilutes the gap: it is given for "
    "the positions from the last power of two on as well."
)
LEAK = (
    "MuSe clusters the whole sequence, so a later token can move a centroid, and with it the approximation error of an "
    "earlier output. No value passes that way, but it is a path from the future, and every loss under MuSe is measured "
    "with that leak. Exact attention has none."
)
_PAPER = (
    "The paper's figure is of 100 chunks of 64k tokens of PG-19, with 64 to 512 clusters. The values of its curves are "
    "not printed in the paper, nor are the number of clusters opened, the size of the blocks, and how the irreducible "
    "loss was fitted. It also says that without tilt (No tilt K128) the loss explodes immediately, and that QK64 "
    "outperforms Q1 K128, one tilted query cluster."
)


def summary_table(results: Results) -> Table:
    """Of every attention: mean loss, gap to exact, gap from the last power of two on, and what its name says."""
    last = binned(results, "exact")[-1]
    header = ("attention", "mean loss", "gap to exact", f"gap from position {format_size(last.first)} on", "in words")
    rows = [
        (
            name,
            f"{float(cumulative_mean(results, name)[-1]):.4f}",
            "" if name == "exact" else gap(results, name).signed(),
            "" if name == "exact" else f"{binned(results, name)[-1].loss - last.loss:+.4f}",
            in_words(name),
        )
        for name in results.whole
    ]
    return header, rows


def doubling_table(results: Results) -> Table:
    rows = [
        (pair.attention, pair.doubled, "-" if pair.ratio is None else f"{pair.ratio:.2f}x")
        for pair in doublings(results)
    ]
    return ("attention", "clusters doubled", "gap shrinks by"), rows


def bins_table(results: Results) -> Table:
    """The loss itself between powers of two of the position; gaps to exact for the other attentions."""
    others = [name for name in results.whole if name != "exact"]
    columns = [binned(results, name) for name in others]
    rows = []
    for number, exact in enumerate(binned(results, "exact")):
        positions = f"{exact.first}" if exact.first == exact.last else f"{exact.first} to {exact.last}"
        gaps = (f"{column[number].loss - exact.loss:+.4f}" for column in columns)
        rows.append((positions, f"{exact.loss:.4f}", *gaps))
    return ("positions", "exact", *others), rows


def paper_table(results: Results) -> Table:
    ratio = ratio_per_doubling(results)
    header = ("", "here", "paper, Llama 3.2-1B", "paper, Llama 3.1-8B")
    rows = [
        ("irreducible loss, fitted (nats)", f"{fit_exact(results).irreducible:.2f}", "2.30", "1.96"),
        ("gap shrinks per doubling of clusters by", "-" if ratio is None else f"{ratio:.2f}x", "~1.8x", "~2x"),
    ]
    return header, rows


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands)]
    parts += [markdown_table(*summary_table(results)), _MEASURED, _fit_in_words(results), LEAK]
    if doublings(results):
        parts += ["## Clusters doubled", markdown_table(*doubling_table(results))]
    parts += ["## The paper", markdown_table(*paper_table(results)), _PAPER]
    parts += ["## Loss by position", markdown_table(*bins_table(results)), _bins_in_words()]
    return "\n\n".join(parts) + "\n"


def html_report(results: Results, *, title: str, picture: bytes | None) -> str:
    page = Page(title)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))
    page.section("Loss against position")
    if picture is not None:
        page.picture(picture, "Cumulative mean loss less irreducible loss against position, one curve per attention")
    page.paragraph(_fit_in_words(results), is_note=True)
    page.section("Attentions")
    page.table(*summary_table(results))
    for note in (_MEASURED, LEAK):
        page.paragraph(note, is_note=True)
    if doublings(results):
        page.section("Clusters doubled")
        page.table(*doubling_table(results))
    page.section("The paper")
    page.table(*paper_table(results))
    page.paragraph(_PAPER, is_note=True)
    page.section("Loss by position")
    page.table(*bins_table(results))
    page.paragraph(_bins_in_words(), is_note=True)
    return page.html()


def as_csv(results: Results) -> str:
    """A line for every position: the loss of the token after it under each attention, averaged over samples."""
    columns = [results.losses[name].by_position.tolist() for name in results.whole]
    rows = ([index + 1, *(f"{loss:.6g}" for loss in losses)] for index, losses in enumerate(zip(*columns, strict=True)))
    return csv_text(["position", *results.whole], rows)


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    return [
        f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
        f"Text: {settings.text}; {settings.samples} x {settings.length - 1:,} positions",
        f"Machine: {hardware}",
        f"Versions: {versions}",
    ]


def _fit_in_words(results: Results) -> str:
    fit = fit_exact(results)
    return (
        "The irreducible loss is fitted to the curve of exact attention alone, from position 32 on, as the first term "
        f"of {fit.irreducible:.3f} + {fit.factor:.3g} x position^-{fit.exponent:.3g}; it is subtracted from every "
        "curve of the picture. No gap depends on it."
    )


def _bins_in_words() -> str:
    return "Not cumulative: the loss of exact attention between two positions, and what the others add to it."
