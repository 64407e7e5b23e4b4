"""`muse prepare`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from muse_attention.sizes import format_size, parse_size
from muse_lab.cli.app import Output, Overwrite, app, console, new_table, phases_bar, run_errors, say, user_errors
from muse_lab.cli.options import option
from muse_lab.pretraining.data.contents import open_contents
from muse_lab.pretraining.data.corpus import HELD_OUT, MANIFEST, TRAIN, Manifest, read_corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.data.datasets import dolma_documents, stack_repositories
from muse_lab.pretraining.data.filters import LARGEST_CODE, LARGEST_TEXT
from muse_lab.pretraining.data.prepare import CorpusSettings, recorded_settings
from muse_lab.pretraining.data.prepare import prepare as prepare_corpus
from muse_lab.pretraining.data.repositories import Repository, printable
from muse_lab.pretraining.data.sources import python_libraries, repositories_in, texts_in
from muse_lab.records.earlier_results import find_earlier

KINDS = ("python", "repositories", "stack", "dolma", "text")
CODE, PROSE = "code", "prose"
_PAPER_KINDS = ("stack", "dolma")
"""Kinds of the paper's data, whose largest documents the paper leaves out."""


@app.command()
def prepare(
    source: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files and directories, all of one kind.",
            show_default="Python's standard library and installed packages",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        option(
            "repositories: folders and .tar.gz, .zip, .whl archives; stack: rows of The Stack v2, .parquet or .jsonl; "
            "dolma: .jsonl.zst; text: plain texts; python: what is installed.",
            "repositories, or python without a source",
        ),
    ] = None,
    content: Annotated[str, option("What to read from repositories: code, or prose (documentation and texts).")] = CODE,
    topic: Annotated[str | None, option("LongMino topic, such as science_tech.", "all")] = None,
    length_bucket: Annotated[str | None, option("LongMino length bucket, such as 2e16 for 64k tokens.", "all")] = None,
    output: Output = Path("out/corpus"),
    vocabulary: Annotated[str, option("Vocabulary size; k means 1024.")] = "32k",
    tokenizer: Annotated[
        Path | None, option("tokenizer.json, or its directory. By default a tokenizer is trained.")
    ] = None,
    held_out: Annotated[float, option("Fraction of the repositories that is held out.")] = 0.01,
    smallest: Annotated[
        str | None, option("Minimum document length in tokens, at 3.5 bytes per token.", "16k, or 1 with --pack")
    ] = None,
    largest: Annotated[str, option("Exclusive upper limit of the document length, in tokens.")] = "256k",
    skip_large: Annotated[
        bool | None,
        option(
            "Skip documents that are too large, or cut them.",
            "skipped in stack and dolma, as in the paper, else cut",
            "--skip-large/--cut-large",
        ),
    ] = None,
    pack: Annotated[
        str | None,
        option(
            "Pack whole documents into rows of this many tokens, for muse train document_mask=true length=SAME.",
            "no rows: documents follow one another",
        ),
    ] = None,
    largest_file: Annotated[str | None, option("Maximum size of a file in bytes.", "1024k, 16384k of text")] = None,
    contents: Annotated[
        str | None, option("Directory or URL with gzipped content/ID, for the ids of The Stack v2.")
    ] = None,
    seed: Annotated[int, option("Random seed of the split and of the document order.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Prepare texts for pretraining: filter, join, split and tokenize them.

    Writes shards of tokens, an index of documents, the tokenizer, and at the end manifest.json. An existing
    corpus is kept if the names of its sources and its settings are the same.
    """
    paths = source or []
    with user_errors():
        kind = _kind(kind, paths)
        largest_bytes = None if largest_file is None else parse_size(largest_file)
        settings = CorpusSettings(
            vocabulary=parse_size(vocabulary),
            tokenizer=tokenizer,
            buckets=Buckets(parse_size(smallest or ("16k" if pack is None else "1")), parse_size(largest)),
            skip_large=kind in _PAPER_KINDS if skip_large is None else skip_large,
            held_out=held_out,
            seed=seed,
            pack=None if pack is None else parse_size(pack),
            largest_code=largest_bytes or LARGEST_CODE,
            largest_text=largest_bytes or LARGEST_TEXT,
        )
        part = _Part(content, topic, length_bucket)
        part.check(kind)
        repositories = _repositories(kind, paths, contents, settings, part)
        words = _in_words(kind, paths, part)
        earlier = find_earlier(
            output / MANIFEST,
            lambda path: read_corpus(path.parent, hashes=False),
            lambda corpus: {"source": corpus.manifest.source, **corpus.manifest.settings},
            {"source": printable(words), **recorded_settings(settings)},
            overwrite=overwrite,
        )
    if earlier is not None:
        _show(earlier.manifest)
        typer.echo(f"{output} is there already; --overwrite prepares it again, if the sources have changed")
        return
    with run_errors(lambda: "no new corpus was written; run the same command again"), user_errors():
        with phases_bar() as on_step:
            corpus = prepare_corpus(
                repositories,
                output,
                settings,
                source=words,
                overwrite=overwrite,
                on_step=on_step,
            )
        _show(corpus.manifest)
        typer.echo(f"wrote {output}")


def _kind(kind: str | None, paths: Sequence[Path]) -> str:
    kind = kind or ("repositories" if paths else "python")
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(KINDS)}")
    if (kind == "python") == bool(paths):
        raise ValueError(
            "the kind python reads what is installed: leave out SOURCE" if paths else f"the kind {kind} needs a SOURCE"
        )
    return kind


class _Part(NamedTuple):
    """The part of the sources that is read."""

    content: str
    topic: str | None
    length_bucket: str | None

    def check(self, kind: str) -> None:
        if self.content not in (CODE, PROSE):
            raise ValueError(f"unknown content {self.content!r}; use {CODE} or {PROSE}")
        if self.content == PROSE and kind != "repositories":
            raise ValueError(f"--content {PROSE} is read from repositories only; leave it out for the kind {kind}")
        if (self.topic or self.length_bucket) and kind != "dolma":
            raise ValueError(f"--topic and --length-bucket are for LongMino (kind dolma), not {kind}; leave them out")

    def in_words(self) -> str:
        """Empty if everything is read."""
        named = [*([self.content] if self.content != CODE else []), *filter(None, (self.topic, self.length_bucket))]
        return f" ({', '.join(named)})" if named else ""


def _repositories(
    kind: str,
    paths: Sequence[Path],
    contents: str | None,
    settings: CorpusSettings,
    part: _Part,
) -> Iterable[Repository]:
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"there is no source {str(missing[0])!r}; give files or folders that exist")
    if kind == "python":
        return python_libraries()
    if kind == "repositories":
        return repositories_in(paths, largest=settings.largest_code, prose=part.content == PROSE)
    if kind == "text":
        return texts_in(paths)
    if kind == "dolma":
        return dolma_documents(paths, topic=part.topic, length_bucket=part.length_bucket)
    if contents is None:
        raise ValueError("The Stack v2 has only ids: give the folder or URL of the contents with --contents")
    return stack_repositories(paths, open_contents(contents, largest=settings.largest_code))


def _in_words(kind: str, paths: Sequence[Path], part: _Part) -> str:
    if kind == "python":
        return f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library and installed packages"
    return f"{kind}: {', '.join(path.resolve().name for path in paths)}{part.in_words()}"


def _show(manifest: Manifest) -> None:
    table = new_table(manifest.source, "split", "bucket", "documents", "tokens")
    for stream in manifest.streams:
        table.add_row(stream.split, format_size(stream.bucket), f"{stream.documents:,}", f"{stream.tokens:,}")
    console.print(table)
    counts = manifest.counts
    typer.echo(
        f"{manifest.tokens(TRAIN):,} tokens to train on, {manifest.tokens(HELD_OUT):,} held out; "
        f"{counts['documents']:,} documents, {counts['files']:,} files, {counts['repositories']:,} repositories; "
        f"{manifest.vocabulary:,} tokens in the vocabulary"
    )
    for noun, skipped in (("documents", manifest.skipped_documents), ("files", manifest.skipped_files)):
        if skipped:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
            typer.echo(f"left out, {noun}: {reasons}")
    for name, reason in manifest.broken.items():
        say(f"left out {name}: {reason}")
