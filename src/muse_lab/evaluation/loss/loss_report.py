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
from muse_lab.evaluation.loss.endings import changes, replaced
from muse_lab.evaluation.loss.positions import LossResults
from muse_lab.records.attention_names import EXACT, in_words, recorded_config, short_names
from muse_lab.records.means import Mean
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

_ENDINGS = Note(
    "Each sample was read a second time with the text after a position replaced by that of the next sample. Losses are "
    "of the tokens before that position, which are the same in both. A rise that the error explains does not come from "
    "the future: clusters of another text may be worse. The rest is an estimate, in nats, of what the model gains from "
    "the future. A model trained with exact attention has not learned to use it: its estimate shows the noise."
)
_RISE = "Loss with another ending less loss, ± the standard error over samples. 0 without decimals is exactly 0."
_UNEXPLAINED = (
    "The rise less what the change of the error explains, if the gap to exact attention is in proportion to the error: "
    "the gap times the relative change of the error, for each sample."
)
_ERROR = (
    "Relative squared error of the attention's outputs, averaged over layers and heads, on what exact attention sees."
)


def loss_report(results: LossResults, file_name: str) -> Report:
    if EXACT not in results.whole:
        raise ValueError("exact attention has not seen all samples yet; run the command again to continue")
    settings, names = results.settings, short_names(results.whole)
    return Report(
        f"Loss against position: {file_name}",
        verdict=[
            *_verdict(results),
            *endings_in_words(results),
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
            Section("Loss against position", _figure(results), _fit_in_words(results)),
            Section("Attentions", summary_table(results), LEAK),
            Section("The paper", paper_table(results), _PAPER),
            Section("Loss by position", bins_table(results), _BINS),
            Section(
                "Another ending",
                *(endings_table(results, *one) for one in replaced(results).items()),
                _ENDINGS,
                is_optional=True,
            ),
        ],
        names=names_table(results.whole),
        provenance=provenance_of(
            results,
            f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
            f"Text: {settings.text}; {settings.samples} x {settings.length - 1:,} positions",
        ),
    )


def has_leak(attention: str) -> bool:
    """Whether a later token can change an earlier output: MuSe without a tolerance."""
    config = recorded_config(attention)
    return config is not None and config.tolerance is None


def summary_table(results: LossResults) -> Table:
    """A row for every attention: mean loss, gap to exact, and gap from the last power of two on."""
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


def endings_in_words(results: LossResults) -> list[str]:
    """A sentence for every position after which the text was replaced, on how the loss before it changes."""
    names, sentences = short_names(results.whole), []
    for position, attentions in replaced(results).items():
        overall = {name: changes(results, name, position)[0] for name in attentions}
        most_changed = max(overall, key=lambda name: abs(overall[name].rise.mean))
        unchanged = [names[name] for name, change in overall.items() if change.loss == change.other_loss]
        parts = [f"is the same under {', '.join(unchanged)}"] if unchanged else []
        change, rest = overall[most_changed], ""
        if change.rise.mean:
            parts.append(f"changes by {_exactly(change.rise)} nats under {names[most_changed]}")
            rest = (
                f" The error of that attention goes from {change.error:.4f} to {change.other_error:.4f}, which leaves "
                f"{_exactly(change.unexplained)} nats unexplained."
            )
        sentences.append(
            f"With another text after position {position:,}, the loss before it {' and '.join(parts)}.{rest}"
        )
    return sentences


def endings_table(results: LossResults, position: int, attentions: list[str]) -> Table:
    """Rows for each attention, first over all positions, and then by position."""
    names = short_names(attentions)
    rows = [
        (
            *(names[name], span(*change.positions), f"{change.loss:.4f}", f"{change.other_loss:.4f}"),
            *(_exactly(change.rise), _exactly(change.unexplained)),
            *(f"{change.error:.4f}", f"{change.other_error:.4f}"),
        )
        for name in attentions
        for change in changes(results, name, position)
    ]
    columns = ("attention", "positions", "loss", "loss, other ending", number("rise", _RISE))
    others = (number("rise, unexplained", _UNEXPLAINED), number("error", _ERROR), "error, other ending")
    return Table((*columns, *others), rows, f"Another text after position {position:,}")


def _exactly(difference: Mean) -> str:
    return "0" if difference.mean == 0 == difference.standard_error else difference.signed()


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def paper_table(results: LossResults) -> Table:
    ratios = ", ".join("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios_per_doubling(results))
    rows = [
        ("irreducible loss, fitted (nats)", f"{fit_exact(results).irreducible:.2f}", "2.30", "1.96"),
        ("gap shrinks per doubling of clusters by", ratios or "-", "~1.8x", "~2x"),
    ]
    return Table(("", "here", "paper, Llama 3.2-1B", "paper, Llama 3.1-8B"), rows)


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
