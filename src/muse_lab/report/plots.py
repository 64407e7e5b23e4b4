"""Pictures of results, as PNG files for reports: one panel each, readable on a phone.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muse_attention.core.extras import how_to_install
from muse_attention.sizes import format_size
from muse_lab.report import tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]
"""Points, by increasing x."""

ROUNDING = 1e-9
"""Relative squared errors up to this are rounding, not approximation, and are not drawn."""


class MatplotlibMissingError(ImportError):
    """The message is one line that says what to install."""


PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
BLACK, GREY = "#000000", "#BBBBBB"
SIZES = ("#9ECAE1", "#6BAED6", "#3182BD", "#08306B", "#D55E00", "#E69F00", "#009E73", "#CC79A7")
"""Four sizes of one method from light to dark, then other methods."""

_FONT_SIZE = 9
_COLOURS = 128
"""Colours of a picture, including the shades between a line and the background."""
_PANEL = (4.8, 3.5)
"""Inches."""
_MOST_NUMBERS = 8
"""Largest number of columns of a heat map with room for numbers."""


@dataclass(frozen=True)
class Line:
    """A curve; or marks alone, if its style is empty."""

    name: str
    points: Curve
    colour: str
    marker: str = ""
    style: str = "-"
    width: float = 1.4
    marker_size: float = 4


@dataclass(frozen=True)
class Axis:
    label: str
    log: int = 0
    """base of its logarithm; linear if 0"""
    is_size: bool = False
    """whether 8192 is written as 8k"""
    from_zero: bool = False


@dataclass(frozen=True)
class Rule:
    """A straight line through the whole panel."""

    name: str
    value: float
    colour: str
    is_vertical: bool = False


def line_figure(
    name: str,
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    description: str = "",
    above: float | None = None,
    rules: Sequence[Rule] = (),
) -> tree.Figure:
    """Curves; the description is the title unless there is more to say.

    Values of y that are not `above` a number are left out: what is below is rounding, or has no logarithm.
    """

    def draw() -> bytes:
        figure = _new_figure(*_PANEL)
        axis = figure.add_subplot()
        for line in lines:
            positions = [at for at, _ in line.points]
            values = [value if above is None or value > above else float("nan") for _, value in line.points]
            axis.plot(
                *(positions, values), color=line.colour, marker=line.marker, markersize=line.marker_size,
                linestyle=line.style, linewidth=line.width, label=line.name,
            )  # fmt: skip
        for rule in rules:
            draw = axis.axvline if rule.is_vertical else axis.axhline
            draw(rule.value, color=rule.colour, linewidth=0.8, linestyle=(0, (4, 3)), label=rule.name, zorder=1)
        for described, scale, own, limit in (
            (x, axis.set_xscale, axis.xaxis, axis.set_xlim),
            (y, axis.set_yscale, axis.yaxis, axis.set_ylim),
        ):
            if described.log:
                scale("log", base=described.log)
            if described.is_size:
                own.set_major_formatter(lambda size, _: format_size(round(size)))
            elif described.log:
                own.set_major_formatter(lambda value, _: f"{value:g}")
                _label_between_powers(own, described.log)
            if described.from_zero:
                limit(0, None)
            own.set_label_text(described.label)
        axis.tick_params(which="minor", labelsize=_FONT_SIZE)
        _tidy(axis)
        _add_legend(figure, *axis.get_legend_handles_labels())
        return _png(figure)

    return tree.Figure(name, title, description or title, draw)


def heat_map(
    name: str,
    title: str,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    description: str,
    x: str,
    y: str,
    label: str,
    is_share: bool = False,
) -> tree.Figure:
    """A colour for every row and column, on a logarithmic scale, or from 0 to 1 for shares, which are written too."""

    def draw() -> bytes:
        figure = _new_figure(_PANEL[0], min(9.0, max(_PANEL[1], 1.4 + 0.17 * len(rows))))
        from matplotlib.colors import LogNorm, Normalize

        axis = figure.add_subplot()
        lowest = 0.0 if is_share else ROUNDING
        shown = [[float("nan") if value is None else max(value, lowest) for value in row] for row in values]
        norm = Normalize(0, 1) if is_share else LogNorm()
        image = axis.imshow(shown, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
        for ticks, labels in ((axis.set_yticks, rows), (axis.set_xticks, columns)):
            every = -(-len(labels) // 16)
            ticks(range(0, len(labels), every), labels[::every])
        if is_share and len(columns) <= _MOST_NUMBERS:
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    if value is not None:
                        colour = BLACK if value > 0.6 else "#FFFFFF"
                        axis.text(
                            column, row, f"{value:.0%}", color=colour, fontsize=_FONT_SIZE, ha="center", va="center"
                        )
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        _tidy(axis)
        bar = figure.colorbar(image, ax=axis)
        bar.set_label(label, fontsize=_FONT_SIZE)
        bar.ax.tick_params(labelsize=_FONT_SIZE)
        return _png(figure)

    return tree.Figure(name, title, description, draw)


def colours() -> Iterator[str]:
    """Colours of successive lines: black for the reference, then the palette, repeated."""
    return itertools.cycle((BLACK, *PALETTE))


def coloured(curves: Iterable[tuple[str, Curve]], marker: str = "") -> list[Line]:
    """A line for each named curve, in the order of `colours`."""
    return [Line(name, curve, colour, marker) for (name, curve), colour in zip(curves, colours(), strict=False)]


def shades(number: int) -> list[str]:
    """Blues, from light to dark."""
    light, dark = (158, 202, 225), (8, 48, 107)
    parts = [index / (number - 1) for index in range(number)] if number > 1 else [1.0] * number
    return [
        "#" + "".join(f"{round(low + part * (high - low)):02X}" for low, high in zip(light, dark, strict=True))
        for part in parts
    ]


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissingError(f"a picture needs matplotlib: {how_to_install('cli')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=_FONT_SIZE)
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        text.set_fontsize(_FONT_SIZE)


def _label_between_powers(own: Any, base: int) -> None:
    """Add numbers to an axis that shows little more than one power of ten."""

    def label(value: float, _: object) -> str:
        low, high = own.get_view_interval()
        digit = round(value / 10 ** math.floor(math.log10(value)))
        return f"{value:g}" if high < 15 * low and digit in (2, 3, 5) else ""

    if base == 10:
        own.set_minor_formatter(label)


def _add_legend(figure: Figure, curves: Sequence[Any], labels: Sequence[str]) -> None:
    widest = 0.6 + max((len(label) for label in labels), default=0) * _FONT_SIZE / 120  # inches, with its line
    columns = max(1, min(4, len(curves), int(figure.get_figwidth() / widest)))
    further_rows = -(-len(curves) // columns) - 1
    figure.set_figheight(figure.get_figheight() + 0.19 * max(0, further_rows))  # the panel keeps its size
    figure.legend(curves, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=_FONT_SIZE)


def _png(figure: Figure) -> bytes:
    """Render a figure. Names of runs and attentions are not formulas, which matplotlib reads between $."""
    for text in [*(axis.title for axis in figure.axes), *(text for one in figure.legends for text in one.get_texts())]:
        text.set_parse_math(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200)
    return _with_few_colours(drawn.getvalue())


def _with_few_colours(png: bytes) -> bytes:
    """The same picture with a palette, in half the bytes. (Pillow comes with matplotlib.)"""
    from PIL import Image

    smaller = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    picture.save(smaller, "PNG", optimize=True)
    return smaller.getvalue()
