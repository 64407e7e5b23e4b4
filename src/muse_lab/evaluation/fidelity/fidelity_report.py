"""The report of `muse fidelity`: the tables of the presets beside the paper's, fits, and every head."""

from __future__ import annotations

from collections.abc import Sequence

from muse_attention.config import MuSeConfig
from muse_attention.registry import config_at
from muse_attention.sizes import format_size
from muse_lab.evaluation.fidelity.layers import FidelityRequest, FidelityResults
from muse_lab.evaluation.fidelity.paper import TABLES
from muse_lab.evaluation.fidelity.presets import ERROR_CONTROL, NO_TILT, Preset, find_presets
from muse_lab.evaluation.fits import PowerLaw
from muse_lab.records.attention_names import short_names
from muse_lab.report import fidelity_columns
from muse_lab.report.fidelity_columns import measure_columns
from muse_lab.report.plots import BLACK, PALETTE, ROUNDING, Axis, Line, heat_map, line_figure
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Column, Figure, Note, Report, Section, Table, number, text

MEANING = Note(
    "Means are over all queries, those of the first block included, which is exact, then over heads, layers and "
    "samples. The paper does not say how it pools; its correlation is taken to be the cosine."
)
FARTHEST = 16
"""A power law is followed to this many times the largest count that was measured."""
_WITHOUT_TILT = (
    "Clusters that plain means would need for the error with tilt, by the power law through the errors without tilt. "
    f"* is beyond the largest measured count; the law is followed to {FARTHEST} times that."
)
_PAPER_COUNTS = Note(
    "The paper's own counts in its Table 2 do not follow from its exponents -0.89 and -0.59: those give 1714 for its "
    "128 clusters, where it prints 1179."
)
_ERROR = "relative squared error"
_WORDS = ("attention", "summaries", "centroids", "added", "family", "rule", "what is attended to")
"""Columns of presets and of the paper that hold words."""


def fidelity_report(results: FidelityResults, file_name: str) -> Report:
    presets, first = shown_presets(results), headline(results)
    name = short_names(results.named)[first.attention]
    errors = results.by_head(first, "relative_squared_error")
    worst = max(zip(results.layers, errors.mean(1).tolist(), strict=True), key=lambda layer: layer[1])
    pooled = results.pooled(first)
    shown = fidelity_columns.known((*fidelity_columns.ERROR[:2], *fidelity_columns.TAIL), [pooled])
    heads = heat_map(
        *("error-of-every-head", f"Relative squared error of {name} in every head", errors.tolist()),
        *([str(layer) for layer in results.layers], [str(head) for head in range(errors.shape[1])]),
        description=f"{_ERROR} of every head of every layer",
        x="head",
        y="layer",
        label=_ERROR,
    )
    return Report(
        f"Fidelity: {file_name}",
        verdict=[
            f"{name} has a relative squared error of {pooled['relative_squared_error']:.3g} against exact attention; "
            f"layer {worst[0]} has the largest, {worst[1]:.3g}.",
            subject(results),
        ],
        cards=[Card(column.title, column.cell(pooled), name) for column in shown],
        sections=[
            Section("Attentions", table_of_requests(results, _named(results, presets)), is_optional=True),
            *(_preset_section(results, preset) for preset in presets),
            Section("Every head", heads, table_of_layers(results, first), MEANING),
        ],
        names=names_table(results.named),
        provenance=provenance_of(results, subject(results)),
    )


def _preset_section(results: FidelityResults, preset: Preset) -> Section:
    content: list[str | Figure | Table] = [
        preset.question,
        table_of_preset(results, preset, f"Measured here, {_number(results)}"),
    ]
    if preset.name == "joint" and (clusters := table_of_clusters(results, preset)) is not None:
        content += [_fits_in_words(results, preset), clusters, table_of_clusters_with_tilt(results, preset)]
        panels = {"here": cluster_curves(results, preset), "the paper's 1B model, 64k": paper_curves()}
        content += [_PAPER_COUNTS, *(_cluster_figure(place, curves) for place, curves in panels.items())]
    if preset.name == ERROR_CONTROL and (curves := key_curves(results, preset)):
        content.append(_key_figure(curves))
    for printed in preset.paper:
        title = f"The paper's {printed.number} ({printed.setting})"
        content.append(Table(map(_labels, printed.header), printed.rows, title))
    return Section(preset.title, *content)


def _cluster_figure(place: str, curves: dict[str, list[tuple[float, float]]]) -> Figure:
    lines = [
        Line(label, curve, colour, marker)
        for (label, curve), colour, marker in zip(curves.items(), PALETTE, "os", strict=False)
    ]
    x, y = Axis("clusters of queries and of keys", log=2), Axis(_ERROR, log=10)
    name = f"error-against-clusters{'' if place == 'here' else '-paper'}"
    return line_figure(name, f"Error against clusters: {place}", lines, x, y)


def _key_figure(curves: dict[str, list[tuple[float, float]]]) -> Figure:
    """The first two families, which the others are compared with, are dashed."""
    lines = [
        Line(name, curve, (BLACK, *PALETTE)[place % 8], "s" if place < 2 else "o", "--" if place < 2 else "-")
        for place, (name, curve) in enumerate(curves.items())
    ]
    x, y = Axis("retrieved keys per query", log=2), Axis(_ERROR, log=10)
    return line_figure("error-against-retrieved-keys", "Error against retrieved keys", lines, x, y, above=ROUNDING)


def shown_presets(results: FidelityResults) -> list[Preset]:
    """The presets of which most rows were measured."""
    return [
        preset
        for preset in find_presets(["all"], results.settings.length)
        if 2 * sum(map(results.is_whole, preset.requests)) > len(preset.rows)
    ]


def headline(results: FidelityResults) -> FidelityRequest:
    """The request whose heads are shown: that of the paper's sizes, or else the first that was measured."""
    length = results.settings.length
    base = FidelityRequest(f"muse:{MuSeConfig.paper_sizes(length)}", length)
    whole = [request for request in (base, *results.measured) if results.is_whole(request)]
    if not whole:
        raise ValueError("no attention has been measured in all layers and samples; run the command again to continue")
    return whole[0]


def subject(results: FidelityResults) -> str:
    """What was measured, in words."""
    settings = results.settings
    return (
        f"{settings.model}, on {count(settings.samples, 'sample')} of {settings.length} tokens of {settings.text}, not "
        f"trained with these attentions: queries, keys and values of {len(results.layers)} layers after RoPE, causal "
        f"attention in {settings.dtype} on {settings.device}. Every number is a mean over {_number(results)}."
    )


def _number(results: FidelityResults) -> str:
    return f"n = {results.heads} heads x {count(results.settings.samples, 'sample')}"


def table_of_requests(results: FidelityResults, requests: Sequence[FidelityRequest]) -> Table:
    """The measures of the requests that are whole."""
    whole = [request for request in requests if results.is_whole(request)]
    names = short_names(results.named)
    return Table.of(
        whole,
        (text("attention"), lambda request: names[request.attention]),
        (number("length"), lambda request: format_size(request.length)),
        *measure_columns(fidelity_columns.COLUMNS, whole, results.pooled),
    )


def table_of_preset(results: FidelityResults, preset: Preset, title: str = "") -> Table:
    """The rows of a preset that were measured."""
    whole = [row for row in preset.rows if results.is_whole(row.request)]
    names = short_names(results.named)
    return Table.of(
        whole,
        *((_labels(label), lambda row, place=place: row.labels[place]) for place, label in enumerate(preset.columns)),
        *measure_columns(fidelity_columns.COLUMNS, whole, lambda row: results.pooled(row.request)),
        (text("configuration"), lambda row: names[row.request.attention]),
        title=title,
    )


def _labels(title: str) -> Column:
    """A column of a setting that a table varies."""
    return Column(title, is_number=title not in _WORDS)


def cluster_curves(results: FidelityResults, preset: Preset) -> dict[str, list[tuple[float, float]]]:
    """RSE against clusters, with tilt and without."""
    curves: dict[str, list[tuple[float, float]]] = {"tilt": [], NO_TILT: []}
    for row in preset.rows:
        config = config_at(row.request.attention)
        if config is not None and results.is_whole(row.request):
            error = results.pooled(row.request)["relative_squared_error"]
            if error > 0:  # else everything fits into one block
                curves["tilt" if config.tilt else NO_TILT].append((config.key_clusters, error))
    return curves


def key_curves(results: FidelityResults, preset: Preset) -> dict[str, list[tuple[float, float]]]:
    """RSE against retrieved keys per query, by the first label of a row: a family of configurations."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in preset.rows:
        if results.is_whole(row.request):
            pooled = results.pooled(row.request)
            keys, error = pooled.get("keys_per_query", 0.0), pooled["relative_squared_error"]
            if keys > 0 and error > 0:
                curves.setdefault(row.labels[0], []).append((keys, error))
    return {family: sorted(curve) for family, curve in curves.items()}


def paper_curves() -> dict[str, list[tuple[float, float]]]:
    """The same curves of the paper's 1B model."""
    tables = {"tilt": TABLES["Table 2"], NO_TILT: TABLES["Table 29"]}
    return {name: [(float(row[0]), float(row[1])) for row in table.rows] for name, table in tables.items()}


def table_of_clusters(results: FidelityResults, preset: Preset) -> Table | None:
    """Clusters without tilt that are as accurate as those with it; None if there are not enough numbers."""
    curves = cluster_curves(results, preset)
    if min(map(len, curves.values())) < 2:
        return None
    plain, without = PowerLaw.fit(curves[NO_TILT]), dict(curves[NO_TILT])
    rows = []
    for clusters, error in curves["tilt"]:
        if clusters in without:
            plainly = without[clusters]
            needed = _needed(plain.where(error), clusters, max(without))
            rows.append((f"{clusters:.0f}", f"{error:.3g}", f"{plainly:.3g}", f"{plainly / error:.1f}x", *needed))
    titles = ("clusters", "RSE", "RSE, no tilt", "ratio of RSE")
    columns = (*map(number, titles), number("clusters without tilt", _WITHOUT_TILT), number("ratio of clusters"))
    return Table(columns, rows, "What the tilt is worth")


def table_of_clusters_with_tilt(results: FidelityResults, preset: Preset) -> Table:
    """The reverse, as in the paper's Table 29: clusters with tilt that are as accurate as those without."""
    curves = cluster_curves(results, preset)
    tilted = PowerLaw.fit(curves["tilt"])
    rows = []
    for clusters, error in curves[NO_TILT]:
        needed = tilted.where(error)
        rows.append((f"{clusters:.0f}", f"{error:.3g}", f"{needed:.3g}", f"{clusters / needed:.1f}x"))
    titles = ("clusters without tilt", "RSE", "clusters with tilt", "ratio of clusters")
    return Table(map(number, titles), rows, "What clusters without tilt are worth")


def _needed(needed: float, clusters: float, largest: float) -> tuple[str, str]:
    """The clusters needed, and their ratio. A power law is not trusted far beyond what it was fitted to."""
    if needed > FARTHEST * largest:
        return f"more than {FARTHEST * largest:.0f}*", f"more than {FARTHEST * largest / clusters:.0f}x"
    return f"{needed:.0f}{'*' if needed > largest else ''}", f"{needed / clusters:.1f}x"


def table_of_layers(results: FidelityResults, request: FidelityRequest) -> Table:
    errors = results.by_head(request, "relative_squared_error")
    rows = [
        (str(layer), f"{line.mean():.3g}", f"{line.median():.3g}", f"{line.max():.3g}", str(int(line.argmax())))
        for layer, line in zip(results.layers, errors, strict=True)
    ]
    return Table(map(number, ("layer", "mean RSE", "median", "largest", "in head")), rows)


def _fits_in_words(results: FidelityResults, preset: Preset) -> str:
    laws = {name: PowerLaw.fit(curve) for name, curve in cluster_curves(results, preset).items()}
    return (
        f"Power laws through the errors: clusters^{laws['tilt'].exponent:.2f} with tilt, "
        f"clusters^{laws[NO_TILT].exponent:.2f} without (the paper's 1B model: -0.89 and -0.59)."
    )


def _named(results: FidelityResults, presets: Sequence[Preset]) -> list[FidelityRequest]:
    """Requests that were measured and are in none of the presets."""
    in_presets = {request for preset in presets for request in preset.requests}
    return [request for request in results.measured if results.is_whole(request) and request not in in_presets]
