"""The results of `muse eval needles --lookups` for people: Markdown, CSV and HTML, by layer and by head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.evaluation.attentions import in_words
from muse_attention.evaluation.lookups.results import Results
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

STRONG = 0.1
"""A head that puts at least this much of its weight on the needle looks it up."""
_SHOWN_HEADS = 40
MEANING = (
    "The model reads each prompt with exact attention. In every head, the query is the last token of the prompt, that "
    "before the first digit of the uid that is asked for, and the needle is the file that defines it. Weight is exact "
    "attention's on the needle. Found: the share of it that lies in buckets that the query retrieves or in its own "
    "block. Exact: the same with keys that are the only one of their summary, which is then that key; the rest is "
    "approximated by summaries. Both are sums over all heads, layers and samples over the sum of the weight. Strong: "
    f"heads of a sample with a weight of at least {STRONG:g}; how many of them there are in a sample, and in how many "
    "of them more than half of the weight is found. Pairs: buckets that the query retrieves, the mean over heads."
)


@dataclass(frozen=True)
class Pool:
    """All samples of some kind under one attention, (samples, layers, heads) each."""

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
        """In a sample, on average."""
        return float(self.is_strong.sum()) / self.samples

    @property
    def strong_heads_found(self) -> float:
        """More than half of whose weight is found; in a sample, on average."""
        return float((self.is_strong & (self.found > self.weight / 2)).sum()) / self.samples

    @property
    def share(self) -> float | None:
        """Of the weight that is found; None if there is none."""
        return _share(self.weight, self.found)

    @property
    def strong_share(self) -> float | None:
        """In heads that look the needle up."""
        return _share(self.weight[self.is_strong], self.found[self.is_strong])

    @property
    def exact_share(self) -> float | None:
        return _share(self.weight, self.exact)

    @property
    def strong_exact_share(self) -> float | None:
        return _share(self.weight[self.is_strong], self.exact[self.is_strong])

    @property
    def mean_pairs(self) -> float:
        return float(self.pairs.mean())

    @property
    def strong_pairs(self) -> float | None:
        return float(self.pairs[self.is_strong].mean()) if self.is_strong.any() else None

    def in_layer(self, place: int) -> Pool:
        return Pool(*(tensor[:, [place]] for tensor in vars(self).values()))

    def in_head(self, place: int, head: int) -> Pool:
        return Pool(*(tensor[:, [place]][..., [head]] for tensor in vars(self).values()))


def pool(results: Results, length: int, kind: str | None, attention: str) -> Pool:
    """Of one kind of samples, or of all for None."""
    chosen = [
        found
        for task, found in results.lookups.items()
        if (task.length, task.attention) == (length, attention) and kind in (None, task.kind)
    ]
    names = [field.name for field in dataclasses.fields(Pool)]
    return Pool(*(torch.tensor([getattr(sample, name) for sample in chosen], dtype=torch.float64) for name in names))


def summary_table(results: Results) -> Table:
    """Of every length, kind and attention."""
    header = (
        *("attention", "length", "kind", "samples", "found", "exact", "pairs"),
        *("strong heads", "of them found", "found, strong", "exact, strong", "pairs, strong"),
    )
    rows = []
    for length, kind, attention in _groups(results):
        of_group = pool(results, length, kind, attention)
        rows.append(
            (
                *(attention, format_size(length), kind, str(of_group.samples)),
                *(_percent(of_group.share), _percent(of_group.exact_share), f"{of_group.mean_pairs:.2f}"),
                *(f"{of_group.strong_heads:.1f}", f"{of_group.strong_heads_found:.1f}"),
                *(_percent(of_group.strong_share), _percent(of_group.strong_exact_share)),
                _number(of_group.strong_pairs),
            )
        )
    return header, rows


def layer_table(results: Results, length: int) -> Table:
    """The mean weight of a head on the needle, and what share of it each attention finds, by layer."""
    pools = _pools(results, length)
    first = next(iter(pools.values()))
    rows = [
        (
            str(layer),
            f"{float(first.weight[:, place].mean()):.3f}",
            f"{float(first.is_strong[:, place].sum()) / first.samples:.1f}",
            *(_percent(found.in_layer(place).share) for found in pools.values()),
        )
        for place, layer in enumerate(results.layers)
    ]
    return ("layer", "weight", "strong", *pools), rows


def head_table(results: Results, length: int) -> Table:
    """Likewise by head, those with most weight on the needle first."""
    pools = _pools(results, length)
    first = next(iter(pools.values()))
    weight = first.weight.mean(0)
    order = weight.flatten().argsort(descending=True)[:_SHOWN_HEADS].tolist()
    rows = []
    for place, head in (divmod(index, weight.shape[1]) for index in order):
        shares = (_percent(found.in_head(place, head).share) for found in pools.values())
        rows.append((str(results.layers[place]), str(head), f"{float(weight[place, head]):.3f}", *shares))
    return ("layer", "head", "weight", *pools), rows


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands), MEANING]
    parts += [markdown_table(*summary_table(results)), markdown_table(*_words_table(results))]
    for heading, table in _sections(results):
        parts += [f"## {heading}", markdown_table(*table)]
    return "\n\n".join(parts) + "\n"


def html_report(results: Results, *, title: str) -> str:
    page = Page(title)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))
    page.paragraph(MEANING)
    page.section("Attentions")
    page.table(*summary_table(results))
    page.table(*_words_table(results))
    for heading, table in _sections(results):
        page.section(heading)
        page.table(*table)
    return page.html()


def as_csv(results: Results) -> str:
    """A line for every attention, length, kind, layer and head, with means over samples."""
    header = ("attention", "length", "kind", "layer", "head", "samples", "weight", "found", "exact", "pairs")
    rows: list[Sequence[object]] = []
    for length, kind, attention in _groups(results):
        of_group = pool(results, length, kind, attention)
        means = [tensor.mean(0) for tensor in vars(of_group).values()]
        for place, layer in enumerate(results.layers):
            for head, numbers in enumerate(zip(*(mean[place].tolist() for mean in means), strict=True)):
                cells = [f"{number:.4g}" for number in numbers]
                rows.append([attention, length, kind, layer, head, of_group.samples, *cells])
    return csv_text(header, rows)


def _groups(results: Results) -> list[tuple[int, str, str]]:
    """The (length, kind, attention) there are, by length and kind; attentions in the order they were measured in."""
    found = dict.fromkeys((task.length, task.kind, task.attention) for task in results.lookups)
    return sorted(found, key=lambda group: group[:2])


def _pools(results: Results, length: int) -> dict[str, Pool]:
    """All kinds together, by attention."""
    attentions = dict.fromkeys(task.attention for task in results.lookups if task.length == length)
    return {attention: pool(results, length, None, attention) for attention in attentions}


def _sections(results: Results) -> Iterator[tuple[str, Table]]:
    for length in sorted({task.length for task in results.lookups}):
        yield f"By layer, {format_size(length)}", layer_table(results, length)
        yield f"Heads with most weight on the needle, {format_size(length)}", head_table(results, length)


def _words_table(results: Results) -> Table:
    attentions = dict.fromkeys(task.attention for task in results.lookups)
    return ("attention", "in words"), [(attention, in_words(attention)) for attention in attentions]


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    return [
        f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
        f"Haystack: {settings.haystack}; seed {settings.seed}",
        f"Machine: {hardware}",
        f"Versions: {versions}",
    ]


def _share(weight: Tensor, found: Tensor) -> float | None:
    total = float(weight.sum())
    return float(found.sum()) / total if total > 0 else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
