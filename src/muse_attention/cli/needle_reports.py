"""The files that needles become for people, from their results alone: of one model, or of several beside each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import typer

from muse_attention.cli.app import draw_picture, say
from muse_attention.evaluation.needles import comparison as needle_comparison
from muse_attention.evaluation.needles import report as needle_report
from muse_attention.evaluation.needles.comparison import column_of, have_same_questions
from muse_attention.evaluation.needles.report import MEASURES
from muse_attention.evaluation.needles.results import Results
from muse_attention.evaluation.needles.statistics import Measure, failures
from muse_attention.files import replace_file
from muse_attention.plots import plot_share_by_depth

COMPARED = "needles-compared"
"""Name of the files that compare the models in a folder."""

_Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float, float]]]]


def write_needle_reports(results: Results, path: Path) -> None:
    """Beside the file of the results."""
    if len(failures(results)) == len(results.outcomes):
        raise ValueError("no sample has been answered yet; continue the run with --resume")
    title = f"Needles: {path.stem}"
    texts = {".md": needle_report.markdown_report(results, title=title), ".csv": needle_report.as_csv(results)}
    pictures = _draw(path, functools.partial(needle_report.depth_curves, results), exact="exact")
    page = needle_report.html_report(results, title=title, pictures=_contents(pictures))
    _write(path, texts | {".html": page}, [path, *pictures.values()])


def write_needle_comparisons(found: Mapping[str, Results], folder: Path) -> list[Path]:
    """The pages that compare the models of a folder: one for those that were asked the same, if they are several."""
    if COMPARED in found:
        say(f"{folder / COMPARED}.json has the name of a comparison; rename it, and the models are compared")
        return []
    alike: list[dict[str, Results]] = []
    for name, results in found.items():
        group = next((group for group in alike if have_same_questions(next(iter(group.values())), results)), None)
        if group is None:
            alike.append({name: results})
        else:
            group[name] = results
    several = [group for group in alike if len(group) > 1]
    for name in (name for group in alike if len(group) == 1 and several for name in group):
        say(f"{folder / name}.json is compared with none: no other model in the folder was asked the same")
    paths = [folder / (COMPARED if number == 1 else f"{COMPARED}-{number}") for number in range(1, 1 + len(several))]
    return [_write_comparison(models, path) for models, path in zip(several, paths, strict=True)]


def _write_comparison(models: Mapping[str, Results], path: Path) -> Path:
    title = f"Needles compared: {', '.join(models)}"
    texts = {".md": needle_comparison.markdown_report(models, title=title), ".csv": needle_comparison.as_csv(models)}
    curves = functools.partial(needle_comparison.depth_curves, models)
    pictures = _draw(path, curves, exact=column_of(next(iter(models)), "exact"))
    page = needle_comparison.html_report(models, title=title, pictures=_contents(pictures))
    _write(path, texts | {".html": page}, pictures.values())
    return path.with_suffix(".html")


def _write(path: Path, texts: Mapping[str, str], others: Iterable[Path]) -> None:
    """Texts by their endings, and tell of them and of what else is there."""
    for suffix, text in texts.items():
        replace_file(path.with_suffix(suffix), text)
    typer.echo(f"wrote {', '.join(map(str, [*others, *map(path.with_suffix, texts)]))}")


def _draw(path: Path, curves: Callable[[Measure], _Curves], *, exact: str) -> dict[str, Path]:
    """The pictures that could be drawn, by the name of the measure."""
    pictures = {}
    for suffix, (name, measure) in zip((".png", "-of-8.png"), MEASURES.items(), strict=True):
        draw = functools.partial(plot_share_by_depth, curves(measure), measure=name, exact=exact)
        picture = path.with_name(f"{path.stem}{suffix}")
        if draw_picture(picture, draw):
            pictures[name] = picture
    return pictures


def _contents(pictures: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: picture.read_bytes() for name, picture in pictures.items()}
