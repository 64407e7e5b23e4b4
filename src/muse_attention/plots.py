"""Pictures of results. matplotlib is asked for only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muse_attention.extras import how_to_install
from muse_attention.files import replace_file
from muse_attention.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]
"""Points, by increasing x."""

ROUNDING = 1e-9
"""Relative squared errors up to this are rounding, not approximation, and are not drawn."""


class MatplotlibMissingError(ImportError):
    """One line that says what to install."""


class _Look(NamedTuple):
    label: str
    colour: str
    marker: str


_LOOKS = {
    "muse": _Look("MuSe", "#0072B2", "o"),
    "moba": _Look("MoBA", "#D55E00", "s"),
    "block_diagonal": _Look("block-diagonal", "#7F7F7F", "^"),
    "exact": _Look("exact", "#000000", "D"),
}
"""An attention named by its kind alone looks the same in every picture."""

MEAN = "mean"
"""The curve of all layers together."""

_FONT_SIZE = 9
_RUNS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SERIES = ("#9ECAE1", "#6BAED6", "#3182BD", "#08306B", "#D55E00", "#E69F00", "#009E73", "#CC79A7")
"""Four sizes of one thing from light to dark, and what else there is."""
_DISTINCT = ("#0072B2", "#D55E00", *_OTHER_COLOURS)


def plot_speedup(panels: Mapping[str, Mapping[str, Curve]], path: Path, *, against: str = "sequence length") -> None:
    """Speed-up over `scaled_dot_product_attention` against a size: one panel per pass, one curve per attention."""
    figure = _new_figure(width=3.4 * len(panels), height=3.2)
    axes: list[Axes] = []
    for column, (name, curves) in enumerate(panels.items()):
        axis = figure.add_subplot(1, len(panels), column + 1, sharey=axes[0] if axes else None)
        axes.append(axis)
        axis.axhline(1, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        for look, curve in _with_looks(curves):
            sizes, ratios = zip(*curve, strict=True)
            axis.plot(sizes, ratios, color=look.colour, marker=look.marker, markersize=4, label=look.label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = sorted({int(size) for curve in curves.values() for size, _ in curve})
        axis.set_xticks(ticks, [format_size(tick) for tick in ticks])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
        axis.set_xlabel(against)
        axis.set_title(name)
        _tidy(axis)
    lowest, highest = axes[0].get_ylim()
    axes[0].set_ylim(min(lowest, 0.5), max(highest, 2))  # so that there is more than one tick
    axes[0].set_ylabel("speed-up over SDPA")
    _save(figure, axes[0], path)


def plot_error_by_position(curves: Mapping[str, Curve], path: Path, *, length: int, block_size: int) -> None:
    """Relative squared error of each attention against position, with the boundaries of blocks.

    The first block is attended to exactly by all of them.
    """
    figure = _new_figure(width=6.4, height=3.2)
    axis = figure.add_subplot()
    for boundary in range(block_size, length, block_size):
        axis.axvline(boundary, color="#DDDDDD", linewidth=0.7, zorder=0)
    for look, curve in _with_looks(curves):
        positions = [position for position, _ in curve]
        errors = [error if error > ROUNDING else float("nan") for _, error in curve]
        axis.plot(positions, errors, color=look.colour, label=look.label)
    axis.set_yscale("log")
    axis.set_xlim(0, length)
    ticks = range(0, length + 1, -(-length // 8))
    axis.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axis.text(
        block_size / 2,
        0.5,
        "exact",
        transform=axis.get_xaxis_transform(),
        color="#999999",
        fontsize=_FONT_SIZE,
        horizontalalignment="center",
        verticalalignment="center",
    )
    axis.set_xlabel("position of the query (vertical lines: block boundaries)")
    axis.set_ylabel("relative squared error")
    _tidy(axis)
    _save(figure, axis, path)


def plot_loss(curves: Mapping[str, Curve], path: Path, *, exact: str) -> None:
    """Cumulative mean loss of each attention, less the irreducible loss, against position, both on log axes.

    The curve named `exact` is black, and above the others.
    """
    figure = _new_figure(width=8.2, height=4.2)
    from matplotlib.ticker import LogFormatter

    axis = figure.add_subplot()
    others = [name for name in curves if name != exact]
    for name, curve in curves.items():
        positions = [position for position, _ in curve]
        losses = [loss if loss > 0 else float("nan") for _, loss in curve]
        colour = "#000000" if name == exact else _SERIES[others.index(name) % len(_SERIES)]
        axis.plot(positions, losses, color=colour, label=name, zorder=3 if name == exact else 2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda position, _: format_size(round(position)))
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())
    axis.tick_params(which="minor", labelsize=_FONT_SIZE)
    axis.set_xlabel("position")
    axis.set_ylabel("cumulative mean loss less irreducible loss (nats)")
    _tidy(axis)
    _save(figure, axis, path)


def plot_share_by_depth(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]], path: Path, *, measure: str, exact: str
) -> None:
    """Share of right answers against depth, of (depth, share, standard error): one panel per title, three in a row.

    The curve named `exact` is black.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _new_figure(width=max(4.2, 3.0 * columns), height=0.8 + 2.3 * rows)
    others = [name for name in dict.fromkeys(name for curves in panels.values() for name in curves) if name != exact]
    looks: dict[str, Any] = {}
    first: Axes | None = None
    for number, (title, curves) in enumerate(panels.items()):
        axis = figure.add_subplot(rows, columns, number + 1, sharex=first, sharey=first)
        first = first or axis
        for name, curve in curves.items():
            if not curve:
                continue
            depths, shares, errors = zip(*curve, strict=True)
            colour = "#000000" if name == exact else _DISTINCT[others.index(name) % len(_DISTINCT)]
            is_exact = name == exact  # seen around the others where they have the same shares
            drawn = axis.errorbar(
                *(depths, shares, errors),
                color=colour,
                marker="o",
                markersize=5 if is_exact else 3,
                linewidth=2.6 if is_exact else 1.2,
                zorder=1 if is_exact else 2,
                capsize=2,
                label=name,
            )
            looks.setdefault(name, drawn)
        axis.set_xlim(0, 0.9)
        axis.set_ylim(-0.04, 1.04)
        axis.set_xticks([0.05, 0.25, 0.45, 0.65, 0.85])
        axis.set_title(title)
        if number + columns >= len(panels):
            axis.set_xlabel("depth of the definition")
        if number % columns == 0:
            axis.set_ylabel(measure)
        _tidy(axis)
    if first is None:
        raise ValueError("there is no panel to draw")
    _write_with_legend(figure, list(looks.values()), list(looks), path)


def plot_time_against_error(
    measured: Curve,
    front: Curve,
    path: Path,
    *,
    chosen: tuple[str, tuple[float, float]] | None,
    exact_milliseconds: float | None,
    error: float,
) -> None:
    """Relative squared error against milliseconds, both on log axes: all that was measured, and the front as a line.

    The chosen one is marked by its name. Errors of nothing but rounding are not drawn.
    """
    figure = _new_figure(width=6.4, height=4.4)
    axis = figure.add_subplot()
    others, best = ([point for point in curve if point[1] > ROUNDING] for curve in (measured, front))
    axis.scatter(*_columns(others), s=12, color="#BBBBBB", label="measured", zorder=2)
    axis.plot(*_columns(best), color="#0072B2", marker="o", markersize=4, linewidth=1.2, label="front", zorder=3)
    axis.axhline(error, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), label=f"error {error:g}", zorder=1)
    if exact_milliseconds is not None:
        axis.axvline(exact_milliseconds, color="#000000", linewidth=0.8, label="exact attention", zorder=1)
    if chosen is not None and chosen[1][1] > ROUNDING:
        name, (milliseconds, its_error) = chosen
        label = name.removeprefix("muse:").partition(",")[0]
        axis.scatter([milliseconds], [its_error], s=90, marker="*", color="#D55E00", label=label, zorder=4)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("forward + backward (ms)")
    axis.set_ylabel("relative squared error")
    _tidy(axis)
    _save(figure, axis, path)


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def plot_error_against_clusters(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Relative squared error against the number of clusters, both on log axes: one panel per model."""
    figure = _new_figure(width=3.6 * len(panels), height=3.4)
    first: Axes | None = None
    for column, (name, curves) in enumerate(panels.items()):
        axis = figure.add_subplot(1, len(panels), column + 1, sharey=first)
        first = first or axis
        for (label, curve), colour, marker in zip(curves.items(), ("#0072B2", "#D55E00"), "os", strict=False):
            clusters, errors = zip(*curve, strict=True)
            axis.plot(clusters, errors, color=colour, marker=marker, markersize=4, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda clusters, _: f"{clusters:g}")
        axis.set_xlabel("clusters of queries and of keys")
        axis.set_title(name)
        _tidy(axis)
    if first is None:
        raise ValueError("there is no panel to draw")
    first.set_ylabel("relative squared error")
    _save(figure, first, path)


def plot_error_against_keys(curves: Mapping[str, Curve], path: Path) -> None:
    """Relative squared error against retrieved keys per query, both on log axes: one line per family.

    The first two, which the others are compared with, are dashed.
    """
    figure = _new_figure(width=6.4, height=4.2)
    axis = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        axis.plot(
            *zip(*curve, strict=True),
            color=_RUNS[number % len(_RUNS)],
            linestyle="--" if number < 2 else "-",
            linewidth=1.2,
            marker="s" if number < 2 else "o",
            markersize=4,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda keys, _: f"{keys:g}")
    axis.set_xlabel("retrieved keys per query")
    axis.set_ylabel("relative squared error")
    _tidy(axis)
    _save(figure, axis, path)


def plot_training(by_tokens: Mapping[str, Curve], by_seconds: Mapping[str, Curve], path: Path) -> None:
    """Training loss of each run, against tokens and against seconds, with the same scale of losses."""
    figure = _new_figure(width=8.2, height=3.6)
    panels = {"tokens (millions)": by_tokens, "seconds of updates": by_seconds}
    axes = _panels_beside(figure, list(panels))
    for axis, (against, curves) in zip(axes, panels.items(), strict=True):
        for number, (name, curve) in enumerate(curves.items()):
            x, losses = zip(*curve, strict=True) if curve else ((), ())
            axis.plot(x, losses, color=_RUNS[number % len(_RUNS)], linewidth=1.2, label=name)
        axis.set_title("")
        axis.set_xlabel(against)
    axes[0].set_ylabel("training loss (nats)")
    _save(figure, axes[0], path)


def plot_answers(curves: Mapping[str, Curve], path: Path) -> None:
    """Loss of the answers in needle documents against millions of tokens, one curve per run and attention."""
    figure = _new_figure(width=6.4, height=3.2)
    axis = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        axis.plot(
            *zip(*curve, strict=True),
            color=_RUNS[number % len(_RUNS)],
            linewidth=1.2,
            marker=".",
            label=name,
            clip_on=False,
        )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens (millions)")
    axis.set_ylabel("nats for a token of the answer")
    _tidy(axis)
    _save(figure, axis, path)


def plot_loss_by_position(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Loss against position: one panel per run, one curve per checkpoint of it, the last one the darkest."""
    figure = _new_figure(width=max(5.0, 3.3 * len(panels)), height=3.6)
    axes = _panels_beside(figure, list(panels))
    for axis, curves in zip(axes, panels.values(), strict=True):
        for (label, curve), shade in zip(curves.items(), _shades(len(curves)), strict=True):
            positions, losses = zip(*curve, strict=True)
            axis.plot(positions, losses, color=shade, marker=".", label=label)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda position, _: format_size(round(position)))
        axis.set_xlabel("position, up to")
        axis.legend(frameon=False, fontsize=_FONT_SIZE)
    axes[0].set_ylabel("held-out loss (nats)")
    _write(figure, path)


def plot_error_in_training(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Relative squared error against millions of tokens: one panel per run, one curve per layer, and their mean."""
    figure = _new_figure(width=max(5.0, 3.3 * len(panels)), height=3.6)
    axes = _panels_beside(figure, list(panels))
    for axis, curves in zip(axes, panels.values(), strict=True):
        layers = [label for label in curves if label != MEAN]
        colours = dict(zip(layers, _shades(len(layers)), strict=True)) | {MEAN: "#D55E00"}
        for label, curve in curves.items():
            tokens, errors = zip(*curve, strict=True)
            floored = [error if error > ROUNDING else float("nan") for error in errors]
            axis.plot(
                tokens, floored, color=colours[label], linewidth=2 if label == MEAN else 1, marker=".", label=label
            )
        axis.set_yscale("log")
        axis.set_xlabel("tokens (millions)")
        axis.legend(frameon=False, fontsize=_FONT_SIZE)
    axes[0].set_ylabel("relative squared error")
    _write(figure, path)


def plot_scaling(points: Mapping[str, Curve], laws: Mapping[str, Curve], path: Path) -> None:
    """Loss against parameters, both on log axes: a mark for each model, and a line for the law of each attention."""
    figure = _new_figure(width=6.4, height=3.6)
    axis = figure.add_subplot()
    for number, (name, curve) in enumerate(points.items()):
        colour = _RUNS[number % len(_RUNS)]
        axis.plot(*zip(*curve, strict=True), color=colour, marker="o", linestyle="", label=name)
        if name in laws:
            axis.plot(*zip(*laws[name], strict=True), color=colour, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("parameters")
    axis.set_ylabel("held-out loss (nats)")
    _tidy(axis)
    _save(figure, axis, path)


def plot_heat_map(errors: Sequence[Sequence[float]], rows: Sequence[int], path: Path) -> None:
    """Relative squared error of every head, on a logarithmic scale: a line for each of the layers `rows`."""
    from matplotlib.colors import LogNorm

    floored = [[max(error, ROUNDING) for error in line] for line in errors]
    figure = _new_figure(width=min(9.0, 2.6 + 0.3 * len(floored[0])), height=min(9.0, 1.6 + 0.17 * len(floored)))
    axis = figure.add_subplot()
    image = axis.imshow(floored, aspect="auto", cmap="viridis", norm=LogNorm(), interpolation="nearest")
    every = -(-len(rows) // 16)
    axis.set_yticks(range(0, len(rows), every), [str(row) for row in rows[::every]])
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    _tidy(axis)
    bar = figure.colorbar(image, ax=axis)
    bar.set_label("relative squared error", fontsize=_FONT_SIZE)
    bar.ax.tick_params(labelsize=_FONT_SIZE)
    _write(figure, path)


def _new_figure(*, width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissingError(f"a picture needs matplotlib: {how_to_install('cli')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def _panels_beside(figure: Figure, titles: Sequence[str]) -> list[Axes]:
    """Which share their y axis."""
    axes: list[Axes] = []
    for column, title in enumerate(titles):
        axes.append(figure.add_subplot(1, len(titles), column + 1, sharey=axes[0] if axes else None))
        axes[-1].set_title(title)
        _tidy(axes[-1])
    return axes


def _shades(number: int) -> list[tuple[float, ...]]:
    """From light to dark."""
    from matplotlib import colormaps

    return [colormaps["Blues"](0.35 + 0.65 * (index + 1) / number) for index in range(number)]


def _with_looks(curves: Mapping[str, Curve]) -> list[tuple[_Look, Curve]]:
    others = [name for name in curves if name not in _LOOKS]
    looks = _LOOKS | {
        name: _Look(name, _OTHER_COLOURS[number % len(_OTHER_COLOURS)], "v") for number, name in enumerate(others)
    }
    return [(looks[name], curve) for name, curve in curves.items()]


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=_FONT_SIZE)
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        text.set_fontsize(_FONT_SIZE)


def _save(figure: Figure, axis: Axes, path: Path) -> None:
    """With one legend for all panels, outside of them, from the curves of one."""
    _write_with_legend(figure, *axis.get_legend_handles_labels(), path)


def _write_with_legend(figure: Figure, curves: Sequence[Any], labels: Sequence[str], path: Path) -> None:
    widest = 0.6 + max((len(label) for label in labels), default=0) * _FONT_SIZE / 120  # inches, with its line
    columns = max(1, min(4, len(curves), int(figure.get_figwidth() / widest)))
    figure.legend(curves, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=_FONT_SIZE)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    """Names of runs and attentions are no formulas: those of matplotlib are between $."""
    legends = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
    for text in [*(axis.title for axis in figure.axes), *(text for found in legends for text in found.get_texts())]:
        text.set_parse_math(False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=200)
    replace_file(path, picture.getvalue())
