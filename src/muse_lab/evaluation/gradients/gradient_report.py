"""The report of `muse eval needles --gradients`, by attention and by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muse_attention.sizes import format_size
from muse_lab.evaluation.gradients.results import GradientResults, Gradients, Products
from muse_lab.pretraining.needles.samples import BUCKETS, depth_of
from muse_lab.records.attention_names import short_names
from muse_lab.records.means import Mean
from muse_lab.report.provenance import names_table, provenance_of
from muse_lab.report.tree import Card, Report, Section, Table, number, shown, text

_ABOUT = (
    "The gradient with respect to the model's weights of the loss on the uids that a sample asks for, each token given "
    "the right ones before it: under an attention that reads the whole sample, and under exact attention. No weight is "
    "changed."
)
_KEPT = (
    "The component along exact attention's gradient, as a share of it: the sum of products over the sum of squared "
    "norms, over samples, ± the standard error of that ratio. 1 for exact attention."
)
_COSINE = "The same sum of products over the root of both sums of squared norms: 1 if the gradient is only scaled."
_NORM = "Root mean square over samples of the gradient's norm, as a share of exact attention's."
_SHARE = (
    "Share of the squared norms of exact attention's gradients. Where it is small, needles are found already, and the "
    "part that is kept is noise."
)
_LOSS = "Nats for each token of a uid, the mean over samples, ± its standard error."
_PROJECTIONS = "The same for the projections that make queries and keys (q_proj and k_proj) alone."


@dataclass(frozen=True)
class Pool:
    """Samples under one attention."""

    samples: Sequence[Gradients]

    @property
    def losses(self) -> Mean:
        return Mean.of([sample.loss for sample in self.samples])

    @property
    def exact_losses(self) -> Mean:
        return Mean.of([sample.exact_loss for sample in self.samples])

    @property
    def all_weights(self) -> Compared:
        return Compared([sample.all_weights for sample in self.samples])

    @property
    def queries_and_keys(self) -> Compared:
        return Compared([sample.queries_and_keys for sample in self.samples])


@dataclass(frozen=True)
class Compared:
    """Gradients of the same weights in several samples. Ratios are None if exact attention's are all zero."""

    products: Sequence[Products]

    @property
    def kept(self) -> Mean | None:
        squares = [one.exact_square for one in self.products]
        return Mean.of_ratio([one.product for one in self.products], squares) if self._exact_squares > 0 else None

    @property
    def cosine(self) -> float | None:
        squares = sum(one.square for one in self.products) * self._exact_squares
        return sum(one.product for one in self.products) / math.sqrt(squares) if squares > 0 else None

    @property
    def norm(self) -> float | None:
        squares = self._exact_squares
        return math.sqrt(sum(one.square for one in self.products) / squares) if squares > 0 else None

    @property
    def _exact_squares(self) -> float:
        return sum(one.exact_square for one in self.products)


def pool(results: GradientResults, length: int, attention: str, bucket: int | None = None) -> Pool:
    """The samples of one depth, or of all for None."""
    return Pool(
        [
            gradients
            for task, gradients in results.measured.items()
            if (task.length, task.attention) == (length, attention) and bucket in (None, task.bucket)
        ]
    )


def gradient_report(results: GradientResults, file_name: str) -> Report:
    if not results.measured:
        raise ValueError("no sample has been differentiated yet; run the command again to continue")
    settings, names = results.settings, short_names(results.named)
    lengths = results.lengths
    longest = {name: pool(results, lengths[-1], name) for name in results.attentions(lengths[-1])}
    return Report(
        f"Gradients of lookups: {file_name}",
        verdict=[
            *(_in_words(names[name], lengths[-1], pooled) for name, pooled in longest.items()),
            f"{settings.model}, in {settings.haystack}.",
        ],
        cards=[
            Card(f"kept, {names[name]}", _with_error(pooled.all_weights.kept), "of the gradient of answers")
            for name, pooled in longest.items()
        ][:6],
        sections=[
            Section("Attentions", _ABOUT, summary_table(results)),
            *(Section(f"Kept by depth, {format_size(length)}", depth_table(results, length)) for length in lengths),
        ],
        names=names_table(results.named),
        provenance=provenance_of(results, *settings.facts),
    )


def summary_table(results: GradientResults) -> Table:
    """A row for every length and attention, all kinds together."""
    names = short_names(results.named)
    rows = [
        (length, names[attention], pool(results, length, attention))
        for length in results.lengths
        for attention in results.attentions(length)
    ]
    return Table.of(
        rows,
        (text("attention"), lambda row: row[1]),
        (number("length"), lambda row: format_size(row[0])),
        (number("samples"), lambda row: len(row[2].samples)),
        (number("loss", _LOSS), lambda row: row[2].losses),
        (number("loss, exact", _LOSS), lambda row: row[2].exact_losses),
        (number("kept", _KEPT), lambda row: _with_error(row[2].all_weights.kept)),
        (number("cosine", _COSINE), lambda row: shown(row[2].all_weights.cosine, ".3f")),
        (number("norm", _NORM), lambda row: shown(row[2].all_weights.norm, ".3f")),
        (number("kept, q and k", f"{_PROJECTIONS} {_KEPT}"), lambda row: _with_error(row[2].queries_and_keys.kept)),
        (
            number("cosine, q and k", f"{_PROJECTIONS} {_COSINE}"),
            lambda row: shown(row[2].queries_and_keys.cosine, ".3f"),
        ),
        (number("norm, q and k", f"{_PROJECTIONS} {_NORM}"), lambda row: shown(row[2].queries_and_keys.norm, ".3f")),
    )


def depth_table(results: GradientResults, length: int) -> Table:
    """The kept part of the gradient of all weights, by the depth of the needle."""
    names, attentions = short_names(results.named), results.attentions(length)
    squares = [0.0] * BUCKETS
    for task, gradients in results.measured.items():
        if (task.length, task.attention) == (length, attentions[0]):
            squares[task.bucket] += gradients.all_weights.exact_square
    rows = []
    for bucket in sorted({task.bucket for task in results.measured if task.length == length}):
        pools = (pool(results, length, attention, bucket) for attention in attentions)
        share = f"{100 * squares[bucket] / (sum(squares) or 1):.0f}%"
        rows.append((f"{depth_of(bucket):.2f}", share, *(_with_error(pooled.all_weights.kept) for pooled in pools)))
    columns = (number(names[name], _KEPT) for name in attentions)
    return Table((number("depth"), number("share", _SHARE), *columns), rows)


def _in_words(name: str, length: int, pooled: Pool) -> str:
    projections = pooled.queries_and_keys.kept
    also = "" if projections is None else f", and {projections.mean:.3f} of that of queries' and keys' projections"
    kept = pooled.all_weights.kept
    if kept is None:
        return f"At {format_size(length)}, exact attention has no gradient for the answers that {name} could keep."
    return f"At {format_size(length)}, {name} keeps {_with_error(kept)} of the gradient of answers{also}."


def _with_error(kept: Mean | None) -> str:
    return "" if kept is None else kept.shown(".3f")
