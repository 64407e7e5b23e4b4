"""The results of `muse fidelity` for people: the tables of the presets beside the paper's, fits, and every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muse_attention import fidelity_columns
from muse_attention.config import Clustering, MuSeConfig
from muse_attention.evaluation.attentions import in_words, muse_config
from muse_attention.evaluation.fidelity.layers import Request, Results
from muse_attention.evaluation.fidelity.paper import JOINT_1B, JOINT_1B_NO_TILT, PaperTable
from muse_attention.evaluation.fidelity.presets import ERROR_CONTROL, NO_TILT, Preset, find_presets
from muse_attention.evaluation.fits import PowerLaw
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

MEANING = (
    "RSE is |o - o_exact|^2 / |o_exact|^2 of each query, cosine that of o and o_exact, both averaged over all queries "
    "(those of the first block included, which is exact), then over heads, layers and samples. Energy error is the "
    "ratio of the sums over queries: unlike the RSE it is not ruled by queries with a small output. The lse gap is "
    "lse_exact - lse. The paper does not say how it pools; its correlation is taken to be the cosine."
)

_CLUSTERINGS: tuple[Clustering, ...] = ("lloyd", "streaming")
"""Results from before there was one default for all devices have the second in place of the first."""


def shown_presets(results: Results) -> list[Preset]:
    """The tables that there are numbers for, in most of their rows, around the clustering that has most of them."""
    length = results.settings.length
    shown = [
        [
            preset
            for preset in find_presets(["all"], length, clustering)
            if 2 * sum(map(results.is_whole, preset.requests)) > len(preset.rows)
        ]
        for clustering in _CLUSTERINGS
    ]
    return max(shown, key=len)


def html_report(results: Results, pictures: Mapping[str, bytes], *, title: str) -> str:
    """`pictures` are PNG files by what they show."""
    presets = shown_presets(results)
    page = Page(title)
    page.paragraph(subject(results))
    page.paragraph(meaning(results), is_note=True)
    page.code("\n".join(results.commands))
    page.paragraph("; ".join(machine_lines(results.machine)), is_note=True)
    if named := _named(results, presets):
        page.section("Attentions")
        page.table(*table_of_requests(results, named))
    for preset in presets:
        page.section(preset.title)
        page.paragraph(preset.question)
        ours = (f"Measured here, {_number(results)}", *table_of_preset(results, preset))
        page.tables_beside(ours, *(_beside(table) for table in preset.paper))
        if preset.name == "joint" and (clusters := table_of_clusters(results, preset)) is not None:
            page.paragraph(_fits_in_words(results, preset))
            page.table(*clusters)
            page.paragraph(EFFECTIVE, is_note=True)
            _add_picture(page, pictures, "error against clusters")
        if preset.name == ERROR_CONTROL:
            _add_picture(page, pictures, "error against retrieved keys")
    first = headline(results)
    page.section("Every head")
    page.paragraph(f"Relative squared error of {first.attention} in every head of every layer.")
    _add_picture(page, pictures, "error of every head")
    page.table(*table_of_layers(results, first))
    return page.html()


def headline(results: Results) -> Request:
    """The request whose heads are shown: that of the paper's sizes, or else the first that was measured."""
    length = results.settings.length
    configs = [MuSeConfig.paper_sizes(length).replace(clustering=clustering) for clustering in _CLUSTERINGS]
    bases = [Request(f"muse:{config}", length) for config in configs]
    found = [request for request in (*bases, *results.measured) if results.is_whole(request)]
    if not found:
        raise ValueError("no attention has been measured in all layers and samples; continue the run with --resume")
    return found[0]


def markdown_report(results: Results, *, title: str) -> str:
    presets = shown_presets(results)
    hardware, versions = machine_lines(results.machine)
    lines = [f"# {markdown_line(title)}", "", markdown_line(subject(results)), ""]
    lines += [markdown_list([f"Machine: {hardware}", f"Versions: {versions}"]), "", fenced(results.commands), ""]
    lines += [meaning(results), ""]
    if named := _named(results, presets):
        lines += ["## Attentions", "", markdown_table(*table_of_requests(results, named)), ""]
    for preset in presets:
        lines += [f"## {preset.title}", "", preset.question, "", markdown_table(*table_of_preset(results, preset)), ""]
        if preset.name == "joint" and (clusters := table_of_clusters(results, preset)) is not None:
            lines += [_fits_in_words(results, preset), "", markdown_table(*clusters), "", EFFECTIVE, ""]
        for table in preset.paper:
            heading, header, rows = _beside(table)
            lines += [f"{heading}:", "", markdown_table(header, rows), ""]
    return "\n".join(lines)


def meaning(results: Results) -> str:
    """Of the columns that there are."""
    pooled = [results.pooled(request) for request in results.measured if results.is_whole(request)]
    return " ".join(filter(None, (MEANING, fidelity_columns.meaning(pooled))))


def subject(results: Results) -> str:
    """What was measured, in words."""
    settings = results.settings
    samples = "one sample" if settings.samples == 1 else f"{settings.samples} samples"
    return (
        f"{settings.model}, on {samples} of {settings.length} tokens of {settings.text}, without training for it: "
        f"queries, keys and values of {len(results.layers)} layers after RoPE, causal attention in {settings.dtype} on "
        f"{settings.device}. Every number is a mean over {_number(results)}."
    )


def _number(results: Results) -> str:
    samples = "one sample" if results.settings.samples == 1 else f"{results.settings.samples} samples"
    return f"n = {results.heads} heads x {samples}"


def table_of_requests(results: Results, requests: Sequence[Request]) -> Table:
    whole = [request for request in requests if results.is_whole(request)]
    titles, cells = _columns(results, whole)
    rows = [
        (request.attention, format_size(request.length), in_words(request.attention), *numbers)
        for request, numbers in zip(whole, cells, strict=True)
    ]
    return ("attention", "length", "in words", *titles), rows


def table_of_preset(results: Results, preset: Preset) -> Table:
    """What was not measured is absent."""
    whole = [row for row in preset.rows if results.is_whole(row.request)]
    titles, cells = _columns(results, [row.request for row in whole])
    rows = [
        (*row.labels, *numbers, row.request.attention.removeprefix("muse:"))
        for row, numbers in zip(whole, cells, strict=True)
    ]
    return (*preset.columns, *titles, "configuration"), rows


def _columns(results: Results, requests: Sequence[Request]) -> tuple[list[str], list[list[str]]]:
    """The titles of what is known of any of the requests, and the cells of each."""
    pooled = [results.pooled(request) for request in requests]
    columns = fidelity_columns.known(fidelity_columns.COLUMNS, pooled)
    return [column.title for column in columns], [[column.cell(row) for column in columns] for row in pooled]


FARTHEST = 16
"""So many times the largest count that was measured are as far as a power law is followed."""
EFFECTIVE = (
    "Clusters without tilt: how many clusters plain means would need for the error that the tilt has, by the power law "
    "through the errors without tilt; * is beyond what was measured, to 16 times of which it is followed. (The paper's "
    "own counts in its Table 2 do not follow from its exponents -0.89 and -0.59: those give 1714 for its 128 clusters, "
    "where it prints 1179.)"
)


def cluster_curves(results: Results, preset: Preset) -> dict[str, list[tuple[float, float]]]:
    """RSE against clusters, with tilt and without."""
    curves: dict[str, list[tuple[float, float]]] = {"tilt": [], NO_TILT: []}
    for row in preset.rows:
        config = muse_config(row.request.attention)
        if config is not None and results.is_whole(row.request):
            error = results.pooled(row.request)["relative_squared_error"]
            if error > 0:  # else everything fits into one block
                curves["tilt" if config.tilt else NO_TILT].append((config.key_clusters, error))
    return curves


def key_curves(results: Results, preset: Preset) -> dict[str, list[tuple[float, float]]]:
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
    """The same of the paper's 1B model."""
    tables = {"tilt": JOINT_1B, NO_TILT: JOINT_1B_NO_TILT}
    return {name: [(float(row[0]), float(row[1])) for row in table.rows] for name, table in tables.items()}


def table_of_clusters(results: Results, preset: Preset) -> Table | None:
    """How many clusters without tilt are worth as much; None if there are not enough numbers."""
    curves = cluster_curves(results, preset)
    if min(map(len, curves.values())) < 2:
        return None
    plain, without = PowerLaw.fit(curves[NO_TILT]), dict(curves[NO_TILT])
    rows = []
    for clusters, error in curves["tilt"]:
        if clusters not in without:
            continue
        plainly = without[clusters]
        needed = _needed(plain.where(error), clusters, max(without))
        rows.append((f"{clusters:.0f}", f"{error:.3g}", f"{plainly:.3g}", f"{plainly / error:.1f}x", *needed))
    return ("clusters", "RSE", "RSE, no tilt", "ratio", "clusters without tilt", "ratio"), rows


def _needed(needed: float, clusters: float, most: float) -> tuple[str, str]:
    """How many clusters, and how many times as many. A power law is not believed far beyond what it was fitted to."""
    if needed > FARTHEST * most:
        return f"more than {FARTHEST * most:.0f}*", f"more than {FARTHEST * most / clusters:.0f}x"
    return f"{needed:.0f}{'*' if needed > most else ''}", f"{needed / clusters:.1f}x"


def table_of_layers(results: Results, request: Request) -> Table:
    errors = results.by_head(request, "relative_squared_error")
    rows = [
        (str(layer), f"{line.mean():.3g}", f"{line.median():.3g}", f"{line.max():.3g}", str(int(line.argmax())))
        for layer, line in zip(results.layers, errors, strict=True)
    ]
    return ("layer", "mean RSE", "median", "largest", "in head"), rows


def _fits_in_words(results: Results, preset: Preset) -> str:
    laws = {name: PowerLaw.fit(curve) for name, curve in cluster_curves(results, preset).items()}
    return (
        f"Power laws through the errors: clusters^{laws['tilt'].exponent:.2f} with tilt, "
        f"clusters^{laws[NO_TILT].exponent:.2f} without (the paper's 1B model: -0.89 and -0.59)."
    )


def _named(results: Results, presets: Sequence[Preset]) -> list[Request]:
    """What was measured, and is in none of the tables."""
    of_presets = {request for preset in presets for request in preset.requests}
    return [request for request in results.measured if results.is_whole(request) and request not in of_presets]


def _beside(table: PaperTable) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    return f"The paper's {table.number} ({table.setting})", table.header, table.rows


def _add_picture(page: Page, pictures: Mapping[str, bytes], what: str) -> None:
    if what in pictures:
        page.picture(pictures[what], what)
