"""From sources to a corpus: read, join, split, train a tokenizer, encode, write.

Files are written to a folder inside the output, and moved out of it when they are complete, the manifest last: a run
that was stopped leaves nothing that looks like a corpus, and can be repeated. The same sources and settings give the
same bytes in every file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import muse_attention
from muse_attention.sizes import format_size
from muse_lab.pretraining.data.corpus import HELD_OUT, MANIFEST, TRAIN, Corpus, Manifest, read_corpus, write_manifest
from muse_lab.pretraining.data.corpus_documents import Buckets, Document, cut_text, join_files
from muse_lab.pretraining.data.filters import LARGEST_CODE, LARGEST_TEXT, read_code, read_prose, read_text
from muse_lab.pretraining.data.repositories import BrokenSourceError, Repository, SkippedFileError, printable
from muse_lab.pretraining.data.rows import RowPacker
from muse_lab.pretraining.data.shards import TOKENS_PER_SHARD, Stream, StreamWriter, smallest_dtype
from muse_lab.pretraining.data.spool import Spool, Spooled
from muse_lab.pretraining.data.tokenizer import (
    Encoder,
    check_vocabulary,
    import_tokenizers,
    read_tokenizer,
    tokenizer_files,
    train_tokenizer,
)
from muse_lab.records.files import alone_in, new_folder, remove_tree, replace_file

UNFINISHED = "unfinished"
OnStep = Callable[[str, int, int | None], None]
"""Called with the current phase, the number done, and the total if it is known."""
_BROKEN_NAMED = 100
_BYTES_AT_ONCE = 2**22
"""Bytes of text that are encoded together."""


@dataclass(frozen=True)
class CorpusSettings:
    vocabulary: int = 32768
    tokenizer: Path | None = None
    """an existing one; None: one is trained"""
    buckets: Buckets = field(default_factory=Buckets)
    skip_large: bool = False
    """leave out what is larger than the largest bucket, as the paper does; otherwise it is cut into parts"""
    held_out: float = 0.01
    """share of the repositories, by a hash of their names"""
    seed: int = 0
    """random seed of the split and of the order of documents"""
    sample_bytes: int = 2**25
    """bytes of text to train the tokenizer on"""
    largest_code: int = LARGEST_CODE
    largest_text: int = LARGEST_TEXT
    tokens_per_shard: int = TOKENS_PER_SHARD
    pack: int | None = None
    """tokens of a row, where whole documents are packed into rows; None: documents follow one another by bucket"""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it is a share of the repositories, at least 0 and below 1")
        check_vocabulary(self.vocabulary)


def prepare(
    repositories: Iterable[Repository],
    folder: Path,
    settings: CorpusSettings,
    *,
    source: str,
    overwrite: bool = True,
    on_step: OnStep | None = None,
) -> Corpus:
    """Write a corpus to `folder`, and with `overwrite` replace the one that is there.

    Raises ValueError if nothing is left to write, or if another process is at work in the folder.
    """
    import_tokenizers()  # before anything is read
    report = on_step or (lambda description, finished, total: None)
    given_encoder = None if settings.tokenizer is None else Encoder(read_tokenizer(settings.tokenizer))
    with alone_in(folder):  # before anything in it is read
        if (folder / MANIFEST).exists() and not overwrite:
            raise ValueError(f"there is a corpus in {folder} already; choose another --output, or --overwrite it")
        return _write_corpus(repositories, folder, settings, given_encoder, source, report)


def recorded_settings(settings: CorpusSettings) -> dict[str, Any]:
    """Settings as the manifest has them: a tokenizer by its name, without its folder."""
    return {**asdict(settings), "tokenizer": settings.tokenizer and printable(settings.tokenizer.name)}


def hash_of(*parts: object) -> int:
    """A hash of 64 bits."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _write_corpus(
    repositories: Iterable[Repository],
    folder: Path,
    settings: CorpusSettings,
    given: Encoder | None,
    source: str,
    report: OnStep,
) -> Corpus:
    unfinished = folder / UNFINISHED
    new_folder(unfinished)
    try:
        with Spool(unfinished / "documents") as spool:
            reading = _Reading(settings)
            documents = [spool.add(document) for document in reading.documents(repositories, report)]
            splits = _split(_without_copies(documents, reading), settings)
            encoder = given or _train(spool, splits[TRAIN], settings, report)
            files = _write_tokenizer(encoder, unfinished)
            streams = _write_streams(spool, splits, encoder, unfinished, settings, report)
        (unfinished / "documents").unlink()
        manifest = Manifest(
            source=printable(source),
            settings=recorded_settings(settings),
            vocabulary=encoder.vocabulary,
            end=encoder.end,
            dtype=smallest_dtype(encoder.vocabulary),
            counts=dict(sorted(reading.counts.items())),
            skipped_files=dict(sorted(reading.skipped_files.items())),
            skipped_documents=dict(sorted(reading.skipped_documents.items())),
            broken=dict(sorted(reading.broken.items())),
            files=files,
            streams=tuple(streams),
            muse_attention=muse_attention.__version__,
        )
        _publish(manifest, unfinished, folder)
    finally:
        remove_tree(unfinished)
    return read_corpus(folder, hashes=False)


class _Reading:
    """Documents of repositories, and counts of all that is left out."""

    def __init__(self, settings: CorpusSettings) -> None:
        self._settings = settings
        self._buckets = settings.buckets
        self.counts: Counter[str] = Counter()
        self.skipped_files: Counter[str] = Counter()
        self.skipped_documents: Counter[str] = Counter()
        self.broken: dict[str, str] = {}

    def documents(self, repositories: Iterable[Repository], report: OnStep) -> Iterator[Document]:
        for number, repository in enumerate(repositories):
            name = printable(repository.name)
            report(f"reading {name}", number, None)
            self.counts["repositories"] += 1
            misfit = "" if repository.size is None else self._misfit(repository.size)
            if misfit:
                self.skipped_documents[misfit] += 1
                continue
            skipped: Counter[str] = Counter()
            try:
                texts = list(self._texts(repository, skipped))
            except BrokenSourceError as error:
                self.skipped_documents["broken"] += 1
                if len(self.broken) < _BROKEN_NAMED:  # several versions of a project have one name
                    self.broken[name] = f"{self.broken[name]}; {error}" if name in self.broken else str(error)
                continue
            self.skipped_files += skipped
            self.counts["files"] += len(texts)
            if not texts:
                self.skipped_documents["without a file that is kept"] += 1
            for document in self._join(name, texts, repository.is_text):
                misfit = self._misfit(document.size, is_whole=False)
                if misfit:
                    self.skipped_documents[misfit] += 1
                else:
                    yield document

    def _texts(self, repository: Repository, skipped: Counter[str]) -> Iterator[tuple[str, str]]:
        seen: set[str] = set()
        for file in repository.files:
            try:
                if file.path in seen:
                    raise SkippedFileError("second of its path")
                seen.add(file.path)
                if repository.is_text:
                    yield file.path, read_text(file, self._settings.largest_text)
                elif repository.is_prose:
                    yield file.path, read_prose(file, self._settings.largest_code)
                else:
                    yield file.path, read_code(file, self._settings.largest_code)
            except SkippedFileError as error:
                skipped[str(error)] += 1

    def _join(self, name: str, texts: Sequence[tuple[str, str]], is_text: bool) -> list[Document]:
        limit = sum(len(text.encode()) for _, text in texts) if self._settings.skip_large else self._buckets.most_bytes
        if is_text:
            return [document for _, text in texts for document in cut_text(name, text, limit)]
        return join_files(name, texts, limit)

    def _misfit(self, size: int, *, is_whole: bool = True) -> str:
        """Why no bucket takes this many bytes; empty if one does, or if a whole repository can be cut into parts."""
        if self._buckets.is_too_small(size):
            return f"below {format_size(self._buckets.smallest)} tokens"
        if self._buckets.is_too_large(size) and (self._settings.skip_large or not is_whole):
            return f"from {format_size(self._buckets.largest)} tokens on"
        return ""


def _without_copies(documents: Sequence[Spooled], reading: _Reading) -> list[Spooled]:
    """Documents without copies: of those with the same files, the one whose repository's name sorts first."""
    firsts: dict[bytes, Spooled] = {}
    for document in sorted(documents, key=lambda document: (document.repository, document.part)):
        firsts.setdefault(document.digest, document)
    if len(firsts) < len(documents):
        reading.skipped_documents["copy of another"] += len(documents) - len(firsts)
    if not firsts:
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(reading.skipped_documents.items()))
        raise ValueError(
            f"no document is left of {reading.counts['repositories']} repositories ({reasons or 'there are none'}); "
            "give other sources, or other bounds with --smallest and --largest"
        )
    reading.counts["documents"] = len(firsts)
    return list(firsts.values())


def _split(documents: Sequence[Spooled], settings: CorpusSettings) -> dict[str, list[Spooled]]:
    """Documents by split, chosen by repository, in an order that only names and the seed decide.

    If no hash is below the share, the repository with the lowest one is held out.
    """
    hashes = {document.repository: hash_of("held out", settings.seed, document.repository) for document in documents}
    held_out = {name for name, number in hashes.items() if number < settings.held_out * 2**64}
    if settings.held_out and not held_out and len(hashes) > 1:
        held_out = {min(hashes, key=lambda name: (hashes[name], name))}
    if len(held_out) == len(hashes):
        raise ValueError(f"all of {len(hashes)} repositories are held out; give more, or a lower --held-out")

    def order(document: Spooled) -> tuple[int, bytes]:
        return hash_of("order", settings.seed, document.part, document.repository), document.digest

    ordered = sorted(documents, key=order)
    return {
        TRAIN: [document for document in ordered if document.repository not in held_out],
        HELD_OUT: [document for document in ordered if document.repository in held_out],
    }


def _train(spool: Spool, documents: Sequence[Spooled], settings: CorpusSettings, report: OnStep) -> Encoder:
    """Train a tokenizer on the first documents, whose order is random."""

    def texts() -> Iterator[str]:
        taken = 0
        for number, document in enumerate(documents):
            if taken >= settings.sample_bytes:
                break
            report("reading a sample for the tokenizer", number, None)
            yield from (text for _, text in spool.read(document).pieces)
            taken += document.size
        report("training the tokenizer", 0, None)

    return Encoder(train_tokenizer(texts(), settings.vocabulary))


def _write_tokenizer(encoder: Encoder, folder: Path) -> dict[str, str]:
    """Write the tokenizer's files, and return their hashes by name."""
    files = tokenizer_files(encoder.tokenizer)
    for name, content in files.items():
        replace_file(folder / name, content)
    return {name: hashlib.sha256(content.encode()).hexdigest() for name, content in files.items()}


def _write_streams(
    spool: Spool,
    splits: dict[str, list[Spooled]],
    encoder: Encoder,
    folder: Path,
    settings: CorpusSettings,
    report: OnStep,
) -> list[Stream]:
    streams = []
    total = sum(map(len, splits.values()))
    finished = 0
    dtype = smallest_dtype(encoder.vocabulary)
    for split, documents in splits.items():
        by_bucket: dict[int, list[Spooled]] = {}
        for document in documents:
            bucket = settings.buckets.find(document.size) if settings.pack is None else settings.pack
            by_bucket.setdefault(bucket, []).append(document)
        for bucket in sorted(by_bucket):
            writer = StreamWriter(folder, split, bucket, dtype=dtype, tokens_per_shard=settings.tokens_per_shard)
            packer = None if settings.pack is None else RowPacker(writer, settings.pack, encoder.end)
            with contextlib.closing(writer):
                for group in _groups(by_bucket[bucket]):
                    for document, tokens in zip(group, encoder.encode([*map(spool.read, group)]), strict=True):
                        facts = {name: getattr(document, name) for name in ("repository", "part", "files", "size")}
                        (packer or writer).add(tokens, **facts)
                    finished += len(group)
                    report(f"encoding {split} documents of {format_size(bucket)} tokens", finished, total)
                if packer is not None:
                    packer.finish()
                streams.append(writer.finish())
    return streams


def _groups(documents: Sequence[Spooled]) -> Iterator[list[Spooled]]:
    """Groups of documents that are encoded together."""
    group: list[Spooled] = []
    for document in documents:
        group.append(document)
        if sum(member.size for member in group) >= _BYTES_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _publish(manifest: Manifest, unfinished: Path, folder: Path) -> None:
    """Move all files into place. The old corpus is removed only when all files are written."""
    write_manifest(manifest, unfinished)
    (folder / MANIFEST).unlink(missing_ok=True)
    for split in (TRAIN, HELD_OUT):
        for old in [*folder.glob(f"{split}-*.tokens"), *folder.glob(f"{split}-*.documents.jsonl")]:
            old.unlink()
    for name in (*manifest.file_names(), MANIFEST):
        os.replace(unfinished / name, folder / name)
