"""The table in evidence/pretraining.md of models trained with the default: `python -m docs_build.trained_table`."""

from __future__ import annotations

from docs_build.marked_tables import with_table
from docs_build.records import RECORDS
from docs_build.trained_runs import LENGTHS, Trained, read_trained
from muse_attention.sizes import format_size

PAGE = RECORDS.parent / "docs" / "evidence" / "pretraining.md"
BEGIN = "<!-- table: python -m docs_build.trained_table -->"


def make_page(page: str) -> str:
    """The page with its table."""
    return with_table(page, make_table([read_trained(length) for length in LENGTHS]), BEGIN)


def make_table(trained: list[Trained]) -> str:
    """A column for each length."""
    rows = [
        ("held-out loss, exact training", lambda one: f"{one.losses[0]:.4f}"),
        ("MuSe training, the default", lambda one: f"{one.losses[1]:.4f}"),
        ("MuSe minus exact", lambda one: f"**{one.gap.shown('+.2f')}%**"),
        ("by seed", lambda one: ", ".join(f"{gap:+.2f}%" for gap in one.gaps)),
        ("MuSe training: loss under MuSe minus loss under exact attention, in nats", lambda one: f"{one.own:+.4f}"),
        ("gain from far context in nats, exact training", lambda one: f"{one.far_context[0]:.3f}"),
        ("and MuSe training", lambda one: f"{one.far_context[1]:.3f}"),
        ("tokens/s, exact training", lambda one: f"{round(one.speeds[0], -3):,.0f}"),
        ("MuSe training", lambda one: f"{round(one.speeds[1], -3):,.0f}"),
        ("speed-up of training", lambda one: f"**{one.speeds[1] / one.speeds[0]:.2f}x**"),
    ]
    heads = [f"{format_size(one.length)}, seeds {', '.join(map(str, one.seeds))}" for one in trained]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    lines += [f"| {name} | {' | '.join(map(show, trained))} |" for name, show in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
    print(f"wrote the table of {PAGE.name}")
