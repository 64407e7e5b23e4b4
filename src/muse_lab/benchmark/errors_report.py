"""The report of `muse errors`."""

from __future__ import annotations

from muse_attention.sizes import format_size
from muse_lab.benchmark.synthetic_errors import Errors
from muse_lab.benchmark.tables import format_error, format_ratio, format_seconds
from muse_lab.records.attention_names import short_names
from muse_lab.report.fidelity_columns import ERROR
from muse_lab.report.figures import line_figure
from muse_lab.report.markup import csv_text
from muse_lab.report.plots import GREY, PALETTE, ROUNDING, Axis, Line, Rule
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Figure, Report, Section, Table, number, text

_FUTURE = "Relative squared change of the outputs in the first three quarters when all tokens after them are replaced."


def errors_report(found: Errors, file_name: str = "errors") -> Report:
    muse = next(line for line in found.lines if line.kind == "muse")
    columns = [found.bin_centres, *(line.error_by_position for line in found.lines)]
    return Report(
        f"Errors on synthetic data: {file_name}",
        verdict=[
            f"MuSe has a relative squared error of {format_error(muse.relative_squared_error)} and is "
            f"{format_ratio(muse.speedup)} as fast as exact attention.",
            f"{about(found)}; the paper's sizes, and baselines that are as sparse.",
        ],
        cards=[
            Card(
                f"RSE, {line.kind}", format_error(line.relative_squared_error), f"{format_ratio(line.speedup)} as fast"
            )
            for line in found.lines[1:]
        ],
        sections=[Section("Attentions", figures=[_figure(found)], tables=[errors_table(found)])],
        names=names_table(line.attention for line in found.lines),
        provenance=provenance_of(found, about(found)),
        csv=csv_text(["position", *(line.kind for line in found.lines)], list(zip(*columns, strict=True))),
    )


def about(found: Errors) -> str:
    settings = found.settings
    return f"causal, length {format_size(settings.length)}, {count(settings.heads, 'head')}, on {settings.device}"


def errors_table(found: Errors) -> Table:
    names = short_names(line.attention for line in found.lines)
    return Table.of(
        found.lines,
        (text("attention"), lambda line: names[line.attention]),
        (number("forward + backward"), lambda line: format_seconds(line.forward_backward_seconds)),
        (number("speed-up", "Over scaled_dot_product_attention."), lambda line: format_ratio(line.speedup)),
        (number("RSE", ERROR[0].definition), lambda line: format_error(line.relative_squared_error)),
        (number("cosine", ERROR[1].definition), lambda line: f"{line.cosine:.4f}"),
        (number("future influence", _FUTURE), lambda line: format_error(line.future_influence)),
    )


def _figure(found: Errors) -> Figure:
    """The first block is attended to exactly by all of them."""
    settings = found.settings
    lines = [
        Line(line.kind, list(zip(found.bin_centres, line.error_by_position, strict=True)), colour)
        for line, colour in zip(found.lines[1:], PALETTE, strict=False)
    ]
    blocks = range(settings.block_size, settings.length, settings.block_size)
    x, y = Axis("position of the query", is_size=True), Axis("relative squared error", log=10)
    rules = [Rule("", boundary, GREY, is_vertical=True) for boundary in blocks]
    title = "Error by position; vertical lines are block boundaries, and the first block is exact"
    return line_figure("by-position", title, lines, x, y, above=ROUNDING, rules=rules)
