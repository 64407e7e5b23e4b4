"""The report of `muse eval needles --lookups`, by layer and by head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.sizes import format_size
from muse_lab.evaluation.lookups.results import LookupResults
from muse_lab.records.attention_names import short_names
from muse_lab.report.provenance import names_table, provenance_of
from muse_lab.report.tree import Card, Report, Section, Table, number, shown, text

STRONG = 0.1
"""A head that puts at least this much of its weight on the needle looks it up."""
_SHOWN_HEADS = 40
_QUERY = (
    "The model reads each prompt with exact attention. In every head, the query is the last token of the prompt, just "
    "before the first digit of the uid that is asked for, and the needle is the file that defines it."
)
_SUMS = "A sum over all heads, layers and samples over the sum of the weight."
_FOUND = (
    "Share of exact attention's weight on the needle that lies in buckets that the query retrieves or in its own "
    f"block. {_SUMS}"
)
_EXACT = (
    "The same with keys that are alone in their summary, which is then exact; the rest is approximated by summaries. "
    f"{_SUMS}"
)
_STRONG = f"Heads of a sample with a weight of at least {STRONG:g} on the needle, the mean over samples."
_STRONG_FOUND = "Strong heads with more than half of their weight found, the mean over samples."
_STRONG_PAIRS = "Buckets that the query retrieves in a strong head."
_WEIGHT = "Exact attention's weight on the needle, the mean over samples."


@dataclass(frozen=True)
class Pool:
    """Samples under one attention. Each tensor is (samples, layers, heads)."""

    weight: Tensor
    found: Tensor
    exact: Tensor
    pairs: Tensor

    @property
    def samples(self) -> int:
        return len(self.weight)

    @property
    def is_strong(self) -> Tensor:
        return self.weight >= STRONG

    @property
    def strong_heads(self) -> float:
        """Their number in a sample, on average."""
        return float(self.is_strong.sum()) / self.samples

    @property
    def strong_heads_found(self) -> float:
        """The number with more than half of their weight found, in a sample, on average."""
        return float((self.is_strong & (self.found > self.weight / 2)).sum()) / self.samples

    @property
    def strong(self) -> Pool:
        """The strong heads of all samples and layers, in flat tensors."""
        return Pool(*(tensor[self.is_strong] for tensor in vars(self).values()))

    @property
    def share(self) -> float | None:
        """Share of the weight that is found; None if there is no weight."""
        return _share(self.weight, self.found)

    @property
    def exact_share(self) -> float | None:
        return _share(self.weight, self.exact)

    @property
    def mean_pairs(self) -> float | None:
        return float(self.pairs.mean()) if len(self.pairs) else None

    def at(self, *place: int) -> Pool:
        """The same of one layer, or of one head in it."""
        return Pool(*(tensor[:, *place] for tensor in vars(self).values()))


def pool(results: LookupResults, length: int, kind: str | None, attention: str) -> Pool:
    """The samples of one kind, or of all for None."""
    chosen = [
        lookups
        for task, lookups in results.measured.items()
        if (task.length, task.attention) == (length, attention) and kind in (None, task.kind)
    ]
    names = [field.name for field in dataclasses.fields(Pool)]
    return Pool(*(torch.tensor([getattr(sample, name) for sample in chosen], dtype=torch.float64) for name in names))


def lookup_report(results: LookupResults, file_name: str) -> Report:
    if not results.measured:
        raise ValueError("no sample has been read yet; run the command again to continue")
    settings, names = results.settings, short_names(results.named)
    lengths = results.lengths
    longest = _pools(results, lengths[-1])
    best, best_pool = max(longest.items(), key=lambda item: item[1].share or 0)
    heaviest = "Heads with most weight on the needle"
    among = "" if len(longest) == 1 else f", most of {len(longest)} attentions"
    return Report(
        f"Lookups: {file_name}",
        verdict=[
            f"At {format_size(lengths[-1])}, {names[best]} attends token by token to "
            f"{_percent(best_pool.share) or 'none'} of exact attention's weight on the needle{among}.",
            f"{settings.model}, in {settings.haystack}.",
        ],
        cards=[
            Card(f"found, {names[name]}", _percent(pooled.share), f"strong heads: {_percent(pooled.strong.share)}")
            for name, pooled in longest.items()
        ][:6],
        sections=[
            Section("Attentions", _QUERY, summary_table(results)),
            *(Section(f"By layer, {format_size(length)}", layer_table(results, length)) for length in lengths),
            *(Section(f"{heaviest}, {format_size(length)}", head_table(results, length)) for length in lengths),
        ],
        names=names_table(results.named),
        provenance=provenance_of(results, *settings.facts),
    )


def summary_table(results: LookupResults) -> Table:
    """A row for every length, kind and attention."""
    names = short_names(results.named)
    return Table.of(
        [(length, kind, names[name], pool(results, length, kind, name)) for length, kind, name in _groups(results)],
        (text("attention"), lambda row: row[2]),
        (number("length"), lambda row: format_size(row[0])),
        (text("kind"), lambda row: row[1]),
        (number("samples"), lambda row: row[3].samples),
        (number("found", _FOUND), lambda row: _percent(row[3].share)),
        (number("exact", _EXACT), lambda row: _percent(row[3].exact_share)),
        (
            number("pairs", "Buckets that the query retrieves, the mean over heads."),
            lambda row: shown(row[3].mean_pairs, ".2f"),
        ),
        (number("strong heads", _STRONG), lambda row: f"{row[3].strong_heads:.1f}"),
        (number("of them found", _STRONG_FOUND), lambda row: f"{row[3].strong_heads_found:.1f}"),
        (number("found, strong", f"In strong heads. {_FOUND}"), lambda row: _percent(row[3].strong.share)),
        (number("exact, strong", f"In strong heads. {_EXACT}"), lambda row: _percent(row[3].strong.exact_share)),
        (number("pairs, strong", _STRONG_PAIRS), lambda row: shown(row[3].strong.mean_pairs, ".2f")),
    )


def layer_table(results: LookupResults, length: int) -> Table:
    """The mean weight of a head on the needle, and what share of it each attention finds, by layer."""
    pools, names = _pools(results, length), short_names(results.named)
    first = next(iter(pools.values()))
    rows = []
    for place, layer in enumerate(results.layers):
        first_in_layer = first.at(place)
        shares = (_percent(pooled.at(place).share) for pooled in pools.values())
        rows.append(
            (str(layer), f"{float(first_in_layer.weight.mean()):.3f}", f"{first_in_layer.strong_heads:.1f}", *shares)
        )
    columns = (number(names[name], _FOUND) for name in pools)
    return Table((number("layer"), number("weight", _WEIGHT), number("strong", _STRONG), *columns), rows)


def head_table(results: LookupResults, length: int) -> Table:
    """Likewise by head, those with most weight on the needle first."""
    pools, names = _pools(results, length), short_names(results.named)
    weight = next(iter(pools.values())).weight.mean(0)
    order = weight.flatten().argsort(descending=True)[:_SHOWN_HEADS].tolist()
    rows = []
    for place, head in (divmod(index, weight.shape[1]) for index in order):
        shares = (_percent(pooled.at(place, head).share) for pooled in pools.values())
        rows.append((str(results.layers[place]), str(head), f"{float(weight[place, head]):.3f}", *shares))
    columns = (number("layer"), number("head"), number("weight", _WEIGHT))
    return Table((*columns, *(number(names[name], _FOUND) for name in pools)), rows)


def _groups(results: LookupResults) -> list[tuple[int, str, str]]:
    """The (length, kind, attention) there are, by length and kind; attentions in the order they were measured in."""
    groups = dict.fromkeys((task.length, task.kind, task.attention) for task in results.measured)
    return sorted(groups, key=lambda group: group[:2])


def _pools(results: LookupResults, length: int) -> dict[str, Pool]:
    """The samples of all kinds, by attention."""
    return {attention: pool(results, length, None, attention) for attention in results.attentions(length)}


def _share(weight: Tensor, found: Tensor) -> float | None:
    total = float(weight.sum())
    return float(found.sum()) / total if total > 0 else None


def _percent(share: float | None) -> str:
    return shown(share, ".1%")
