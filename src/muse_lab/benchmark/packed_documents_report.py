"""The report of packed documents."""

from __future__ import annotations

from muse_attention.sizes import format_size
from muse_lab.benchmark.packed_documents import DocumentsResults, PackedCase, format_documents
from muse_lab.benchmark.tables import format_error, format_ratio, format_seconds, format_spread
from muse_lab.report.provenance import count, provenance_of
from muse_lab.report.tree import Card, Note, Report, Section, Table, number, text

CAPTION = (
    "All attentions take turns. Times are medians, with the copies that the layout (tokens, heads, head_dim) needs. "
    "RSE compares the output with that of the first row."
)


def documents_report(results: DocumentsResults, file_name: str) -> Report:
    if len(results.packed) < 2:
        raise ValueError("no attention has been measured beside exact attention; measure them again")
    settings, exact, first = results.settings, results.packed[0], results.packed[1]
    speedup = format_ratio(results.speedup(first))
    tokens = format_size(sum(settings.documents))
    heads = f"{settings.heads}:{settings.key_heads}" if settings.heads != settings.key_heads else str(settings.heads)
    data = (
        f"Data: documents {format_documents(settings.documents)}, {tokens} tokens, {heads} heads of "
        f"{settings.head_dim}, {settings.dtype}, {'causal' if settings.causal else 'full'}, medians of "
        f"{settings.repeats}, clustered synthetic data"
    )
    return Report(
        f"Packed documents: {file_name}",
        verdict=[
            f"{first.attention} is {speedup} as fast as {exact.attention}, forward and backward, on "
            f"{count(len(settings.documents), 'document')} with {tokens} tokens in all."
        ],
        cards=[Card("speed-up", speedup, f"over {exact.attention}, forward + backward")],
        sections=[Section("Time and error", documents_table(results), Note(CAPTION))],
        provenance=provenance_of(results, data),
    )


def documents_table(results: DocumentsResults) -> Table:
    def error(case: PackedCase) -> str:
        return "" if case.error is None else format_error(case.error)

    return Table.of(
        results.packed,
        (text("attention"), lambda case: case.attention),
        (number("forward"), lambda case: format_seconds(case.times.forward_median)),
        (number("forward + backward"), lambda case: format_seconds(case.times.forward_backward_median)),
        (number("speed-up"), lambda case: format_ratio(results.speedup(case))),
        (number("spread"), lambda case: format_spread(case.times.spread)),
        (number("RSE"), error),
    )
