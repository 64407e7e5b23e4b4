"""What every source gives, which files are kept, and archives and datasets that are broken or mean harm."""

from __future__ import annotations

import contextlib
import errno
import gzip
import inspect
import io
import json
import os
import stat
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from muse_lab.pretraining.data import contents
from muse_lab.pretraining.data.archives import ArchiveLimits, read_archive
from muse_lab.pretraining.data.contents import open_contents
from muse_lab.pretraining.data.datasets import dolma_documents, stack_repositories
from muse_lab.pretraining.data.filters import is_python, read_code, read_text
from muse_lab.pretraining.data.repositories import BrokenSourceError, File, Repository, SkippedFileError
from muse_lab.pretraining.data.sources import (
    project_name,
    python_libraries,
    repositories_in,
    standard_library,
    texts_in,
)
from tests.refusals import one_line_error

LARGEST = 10_000
TREE = {"a.py": "import b\n", "package/b.py": "x = 1\n", "README.md": "read me\n"}
PYTHON = {path: text for path, text in TREE.items() if path.endswith(".py")}


def write_tar(path: Path, files: dict[str, str], folder: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(folder + name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def write_zip(path: Path, files: dict[str, str], folder: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(folder + name, text)
    return path


def write_folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def texts(repository: Repository) -> dict[str, str]:
    return {file.path: file.read().decode() for file in repository.files if not file.refused}


def refusals(files: Iterator[File]) -> dict[str, str]:
    return {file.path: file.refused for file in files}


# Folders, archives and texts


def test_folders_and_archives_are_repositories(tmp_path: Path) -> None:
    write_folder(tmp_path / "plain", TREE)
    write_tar(tmp_path / "packed-1.0.tar.gz", TREE, "packed-1.0/")
    write_zip(tmp_path / "zipped-2.1.zip", TREE, "zipped-2.1/")
    write_zip(tmp_path / "wheel-3.0-py3-none-any.whl", {**TREE, "wheel-3.0.dist-info/METADATA": ""})
    (tmp_path / "loose.py").write_text("x")
    found = {repository.name: texts(repository) for repository in repositories_in([tmp_path], largest=LARGEST)}
    assert found == dict.fromkeys(("packed", "plain", "wheel", "zipped"), PYTHON)
    assert list(found) == ["packed", "plain", "wheel", "zipped"]


def test_one_repository_or_archive_can_be_named(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "zipped.zip", TREE)
    folder = write_folder(tmp_path / "project", {**TREE, "pyproject.toml": ""})
    found = list(repositories_in([folder, archive], largest=LARGEST))
    assert [repository.name for repository in found] == ["project", "zipped"]
    assert [texts(repository) for repository in found] == [PYTHON, PYTHON]
    with pytest.raises(ValueError, match="there is no folder or archive"):
        list(repositories_in([tmp_path / "missing"], largest=LARGEST))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("numpy-1.26.4.tar.gz", "numpy"),
        ("zope.interface-7.0.zip", "zope.interface"),
        ("typing_extensions-4.1-py3-none-any.whl", "typing_extensions"),
        ("python-dateutil-2.9.tar.gz", "python-dateutil"),
        ("linux-master.zip", "linux-master"),
    ],
)
def test_versions_of_a_project_are_one_repository(file: str, name: str) -> None:
    assert project_name(file) == name


def test_links_and_hidden_folders_are_not_followed(tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside", {"secret.py": "secret"})
    folder = write_folder(tmp_path / "all" / "project", {**PYTHON, ".git/x.py": "", "__pycache__/y.py": ""})
    (folder / "link.py").symlink_to(outside / "secret.py")
    (folder / "linked").symlink_to(outside)
    os.mkfifo(folder / "pipe.py")
    (repository,) = repositories_in([tmp_path / "all"], largest=LARGEST)
    expected = {"a.py": "", "package/b.py": "", "link.py": "link or device", "pipe.py": "link or device"}
    assert refusals(iter(repository.files)) == expected


def test_texts_are_documents(tmp_path: Path) -> None:
    write_folder(tmp_path / "texts", {"b.txt": "b", "deep/a.md": "a", "c.png": "c"})
    found = list(texts_in([tmp_path / "texts", tmp_path / "texts" / "c.png"]))
    assert [(text.name, text.is_text) for text in found] == [("b.txt", True), ("deep/a.md", True), ("c.png", True)]
    with pytest.raises(ValueError, match="there is no text"):
        list(texts_in([tmp_path / "missing"]))


def test_python_is_there_on_every_machine() -> None:
    found = {repository.name: repository for repository in python_libraries()}
    library = found[next(iter(found))]
    assert library.name.startswith("python-3.")
    assert "json/decoder.py" in {file.path for file in library.files}
    assert "pytest/__init__.py" in {file.path for file in found["pytest"].files}


def test_the_standard_library_is_a_repository_for_each_package_and_module() -> None:
    found = {repository.name: [file.path for file in repository.files] for repository in standard_library()}
    assert found["argparse"] == ["argparse.py"]
    assert {"json/__init__.py", "json/decoder.py"} <= set(found["json"])
    assert not {"site-packages", "pytest"} & found.keys()


NESTED = 200


@pytest.fixture
def deepest(tmp_path: Path) -> Iterator[Path]:
    """A folder in more folders than Python's stack has room for, which is lowered: they must be removed again."""
    folder = tmp_path / "all"
    for _ in range(NESTED):
        folder /= "d"
    os.makedirs(folder)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    yield folder
    sys.setrecursionlimit(limit)


def test_folders_may_be_nested_deeply(deepest: Path, tmp_path: Path) -> None:
    (deepest / "a.py").write_text("x")
    (deepest / "a.txt").write_text("x")
    write_lines(deepest / "a.jsonl", DOLMA)
    (repository,) = repositories_in([tmp_path / "all"], largest=LARGEST)
    assert [file.path.count("/") for file in repository.files] == [NESTED - 1]
    assert [text.name.count("/") for text in texts_in([tmp_path / "all"])] == [NESTED]
    assert len(list(dolma_documents([tmp_path / "all"]))) == len(DOLMA)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open", "closed"):
        write_folder(tmp_path / name, {**PYTHON, "closed/c.py": "x", "a.txt": "x"})
    scandir = os.scandir

    def refuse(folder: Any) -> Any:
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    closed, opened = repositories_in([tmp_path], largest=LARGEST)
    with pytest.raises(BrokenSourceError, match="closed: Permission denied"):
        list(closed.files)
    assert refusals(iter(opened.files)) == {"a.py": "", "closed": "unreadable folder", "package/b.py": ""}
    for read in (repositories_in([tmp_path / "closed"], largest=LARGEST), texts_in([tmp_path / "closed"])):
        with pytest.raises(ValueError, match=r"cannot read the folder .*closed: Permission denied; give one"):
            list(read)
    with pytest.raises(ValueError, match=r"cannot read the folder .*closed; make it readable, or name the files"):
        list(dolma_documents([tmp_path]))


# Filters


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("a/_vendor/b.py", b"x", "vendored"),
        ("third_party/b.py", b"x", "vendored"),
        ("a_pb2.py", b"x", "generated"),
        ("a.py", b"# This file is AUTOGENERATED\nx = 1\n", "generated"),
        ("a.py", b"", "empty"),
        ("a.py", b" \n\t\n", "empty"),
        ("a.py", b"x = '\0'", "binary"),
        ("a.py", b"x = '\xff'", "undecodable"),
        ("a.py", b"# coding: nonsense\nx = '\xff'", "undecodable"),
        ("a.py", b"x" * (LARGEST + 1), "gigantic"),
    ],
)
def test_files_that_are_left_out(path: str, content: bytes, reason: str) -> None:
    with pytest.raises(SkippedFileError, match=f"^{reason}$"):
        read_code(File(path, len(content), lambda: content), LARGEST)


def test_files_that_are_kept() -> None:
    def read(content: bytes, path: str = "a.py") -> str:
        return read_code(File(path, len(content), lambda: content), LARGEST)

    assert read(b"\xef\xbb\xbfx\r\ny\n") == "x\ny\n"
    assert read(b"# coding: latin-1\n# \xe9\n") == "# coding: latin-1\n# \xe9\n"
    assert read(b"x\n" * 9 + b"# autogenerated\n", "vendors_list.py").startswith("x\n")
    assert read_text(File("", 1, lambda: b"autogenerated")) == "autogenerated"


def test_a_file_that_cannot_be_read_or_grew_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(SkippedFileError, match="unreadable"):
        read_code(File("a.py", 1, (tmp_path / "gone.py").read_bytes))
    with pytest.raises(SkippedFileError, match="gigantic"):
        read_code(File("a.py", 1, lambda: b"x" * 100), 99)


# Archives that mean harm


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_paths_that_lead_elsewhere_are_refused(tmp_path: Path, write: Any) -> None:
    evil = ["../up.py", "a/../../up.py", "/etc/root.py", "C:/windows.py", "a\\b.py", "line\nbreak.py"]
    path = write(
        tmp_path / f"evil{'.tar.gz' if write is write_tar else '.zip'}", dict.fromkeys([*evil, "fine.py"], "x")
    )
    found = refusals(read_archive(path, is_python, largest=LARGEST))
    assert found.pop("fine.py") == ""
    assert list(found.values()) == ["unsafe path"] * 6
    assert [file.name for file in tmp_path.rglob("*")] == [path.name]


def test_links_and_devices_in_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind in [("s.py", tarfile.SYMTYPE), ("h.py", tarfile.LNKTYPE), ("d.py", tarfile.CHRTYPE)]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    assert set(refusals(read_archive(path, is_python, largest=LARGEST)).values()) == {"link or device"}
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("s.py")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert refusals(read_archive(path, is_python, largest=LARGEST)) == {"s.py": "link or device"}


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_bombs_do_not_go_off(tmp_path: Path, write: Any) -> None:
    path = tmp_path / f"bomb{'.tar.gz' if write is write_tar else '.zip'}"
    write(path, {f"{number}.py": "0" * 9000 for number in range(100)})
    assert len(list(read_archive(path, is_python, largest=LARGEST))) == 100
    for limits, message in [
        (ArchiveLimits(free_bytes=1000, ratio=10), "unpacks to more than"),
        (ArchiveLimits(unpacked=100_000), "unpacks to more than 100000 bytes"),
        (ArchiveLimits(members=99), "has more than 99 members"),
    ]:
        with pytest.raises(BrokenSourceError, match=message):
            list(read_archive(path, is_python, largest=LARGEST, limits=limits))


def test_a_gigantic_member_is_not_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "big.zip", {"big.py": "0" * 10**6})
    (file,) = read_archive(path, is_python, largest=LARGEST, limits=ArchiveLimits(unpacked=LARGEST))
    with pytest.raises(SkippedFileError, match="gigantic"):
        read_code(file, LARGEST)


def test_a_header_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "header.tar.gz"
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2**29
    with gzip.open(path, "wb") as packed:
        packed.write(member.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(BrokenSourceError, match="a header of 536870912 bytes"):
        list(read_archive(path, is_python, largest=LARGEST))


def test_a_directory_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "directory.zip", PYTHON)
    end = bytearray(path.read_bytes()[-22:])
    end[12:16] = (2**27).to_bytes(4, "little")
    with open(path, "r+b") as file:
        file.seek(2**28)  # a hole
        file.write(end)
    with pytest.raises(BrokenSourceError, match="a directory of 134217728 bytes"):
        list(read_archive(path, is_python, largest=LARGEST))


def outcome(path: Path) -> dict[str, bytes] | str:
    """What an archive gives, or why it gives nothing."""
    try:
        return {file.path: file.read() for file in read_archive(path, is_python, largest=LARGEST) if not file.refused}
    except BrokenSourceError as error:
        return str(error)


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_damage_anywhere_never_changes_what_an_archive_gives(tmp_path: Path, write: Any) -> None:
    """One bit of every byte: it is found, or it does not matter, as in the date of a member. Every end is missed."""
    path = tmp_path / f"x{'.tar.gz' if write is write_tar else '.zip'}"
    content = write(path, {**{f"{n}.py": f"x = {n}\n" for n in range(3)}, "README.md": "read me"}, "x-1/").read_bytes()
    whole = outcome(path)
    assert isinstance(whole, dict)
    for position, byte in enumerate(content):
        path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
        found = outcome(path)
        assert isinstance(found, str) or found == whole, position
        path.write_bytes(content[:position])
        assert isinstance(outcome(path), str), position
    path.write_bytes(b"no archive" * 99)
    assert isinstance(outcome(path), str)


@pytest.mark.parametrize(
    "form", ["with sizes behind", "of large sizes", "behind a program", "with a comment", "of umlauts"]
)
def test_zips_of_every_form_are_sound(tmp_path: Path, form: str) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return form != "with sizes behind"

    stream = Pipe(b"program" if form == "behind a program" else b"")
    stream.seek(0, io.SEEK_END)
    name = "\u00fc.py" if form == "of umlauts" else "a.py"
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open(name, "w", force_zip64=form == "of large sizes") as member:
            member.write(b"x = 1\n")
        archive.comment = b"comment" if form == "with a comment" else b""
    (tmp_path / "x.zip").write_bytes(stream.getvalue())
    assert outcome(tmp_path / "x.zip") == {name: b"x = 1\n"}


@pytest.mark.parametrize("damage", ["checksum", "length", "no length", "no trailer"])
def test_the_checksum_behind_a_tar_is_read_before_a_file_is_given(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "x.tar.gz", PYTHON)
    content = path.read_bytes()
    checksum, length = content[-8:-4], content[-4:]
    trailer = {"checksum": b"????" + length, "length": checksum + b"????", "no length": checksum, "no trailer": b""}
    path.write_bytes(content[:-8] + trailer[damage])
    with pytest.raises(BrokenSourceError):
        next(read_archive(path, is_python, largest=LARGEST))


@pytest.mark.parametrize("damage", ["header", "no end", "bomb behind the end"])
def test_a_tar_that_was_damaged_before_it_was_packed_says_so(tmp_path: Path, damage: str) -> None:
    path = write_tar(tmp_path / "x.tar.gz", {"a.py": "a", "b.py": "b"})
    content = bytearray(gzip.decompress(path.read_bytes()))
    second = 2 * tarfile.BLOCKSIZE
    if damage == "header":
        content[second] ^= 1
    elif damage == "no end":
        del content[second:]
    else:
        content += bytes(10**6)
    path.write_bytes(gzip.compress(bytes(content)))
    limits = ArchiveLimits(unpacked=100_000)
    with pytest.raises(BrokenSourceError, match="unpacks to more" if damage.startswith("bomb") else "at byte 1024"):
        list(read_archive(path, is_python, largest=LARGEST, limits=limits))


# Datasets


def write_lines(path: Path, rows: list[Any]) -> Path:
    content = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2
        pack = zstandard.ZstdCompressor().compress
        content = pack(content[:half]) + pack(content[half:])
    path.write_bytes(content)
    return path


DOLMA = [{"id": f"doc-{n}", "text": f"text {n} \u00e9" * 1000, "source": "s", "metadata": {}} for n in range(20)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_dolma_documents(tmp_path: Path, suffix: str) -> None:
    path = write_lines(tmp_path / f"part{suffix}", DOLMA)
    for paths in ([path], [tmp_path]):
        found = list(dolma_documents(paths))
        assert [document.name for document in found] == [row["id"] for row in DOLMA]
        assert [texts(document)[""] for document in found] == [row["text"] for row in DOLMA]
        assert all(document.is_text for document in found)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_dataset_that_is_cut_short_says_so(tmp_path: Path, suffix: str) -> None:
    path = write_lines(tmp_path / f"part{suffix}", DOLMA)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"part\.jsonl\..* is cut short or damaged .*; get it again"):
        list(dolma_documents([path]))
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(ValueError, match="is cut short or damaged"):
        list(dolma_documents([path]))


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file that was read: the error of a read has no name by itself."""
    path = write_lines(tmp_path / "part.jsonl.gz", DOLMA)
    monkeypatch.setattr(gzip.GzipFile, "readline", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error") as raised:
        list(dolma_documents([path]))
    assert raised.value.filename == str(path)


def test_rows_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "part.jsonl", ["{", "[]", {"id": 1}, {"text": "\ud800"}, "[" * 10**5, DOLMA[0]])
    broken = []
    for document in dolma_documents([path]):
        try:
            [read_text(file) for file in document.files]
        except (BrokenSourceError, SkippedFileError) as error:
            broken.append((document.name, str(error)[:11]))
    assert broken == [(f"part.jsonl:{n}", "undecodable" if n == 4 else "not a row o") for n in range(1, 6)]
    with pytest.raises(ValueError, match="there is no dataset"):
        list(dolma_documents([tmp_path / "missing.jsonl"]))


def blob(number: int) -> str:
    return f"{number:040x}"


def stack_row(name: str, *files: dict[str, Any]) -> dict[str, Any]:
    usual = {
        "language": "Python",
        "src_encoding": "UTF-8",
        "length_bytes": 6,
        "is_vendor": False,
        "is_generated": False,
    }
    return {"repo_name": name, "files": [{**usual, **file} for file in files]}


STACK = stack_row(
    "owner/project",
    {"path": "/a.py", "blob_id": blob(1)},
    {"path": "/b.py", "blob_id": blob(2), "src_encoding": "ISO-8859-1"},
    {"path": "/c.py", "blob_id": blob(1), "is_vendor": True},
    {"path": "/d.py", "blob_id": blob(1), "is_generated": True},
    {"path": "/e.c", "blob_id": blob(1), "language": "C"},
    {"path": "/missing.py", "blob_id": blob(9)},
    {"path": "/../up.py", "blob_id": blob(1)},
    {"path": "/evil.py", "blob_id": "../../etc/passwd"},
    {"path": "/broken.py", "blob_id": blob(3)},
    {"path": "/big.py", "blob_id": blob(4)},
    {"path": "/two.py", "blob_id": blob(5)},
    {"path": "/last.py", "blob_id": blob(1)},
)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror" / "content"
    folder.mkdir(parents=True)
    for number, content in {1: b"x = 1\n", 2: b"# \xe9\n", 4: b"0" * 10**6}.items():
        (folder / blob(number)).write_bytes(gzip.compress(content))
    (folder / blob(3)).write_bytes(gzip.compress(b"x = 1\n" * 99)[:-10])
    (folder / blob(5)).write_bytes(gzip.compress(b"x = 1\n") + gzip.compress(b"y = 1\n"))
    return folder.parent


class _Server(BaseHTTPRequestHandler):
    """The mirror; it fails at first."""

    folder: Path
    failures = 2

    def do_GET(self) -> None:
        file = self.folder / self.path.lstrip("/")
        if type(self).failures > 0:
            type(self).failures -= 1
            self.send_error(503)
        elif not file.is_file():
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file.read_bytes())

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address."""
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def server(mirror: Path) -> Iterator[str]:
    _Server.folder, _Server.failures = mirror, 2
    with serving(_Server) as address:
        yield address


@pytest.mark.parametrize("place", ["mirror", "server"])
def test_the_stack_from_a_mirror_and_from_a_server(
    tmp_path: Path, place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents.time, "sleep", lambda seconds: None)
    fetch = open_contents(str(request.getfixturevalue(place)), largest=LARGEST)
    path = write_lines(tmp_path / "ids.jsonl", [STACK, {"repo_name": "no files"}])
    project, nothing = stack_repositories([path], fetch)
    assert (project.name, project.size) == ("owner/project", 8 * 6)
    kept, left_out = {}, {}
    for file in project.files:
        try:
            kept[file.path] = read_code(file, LARGEST)
        except SkippedFileError as error:
            left_out[file.path] = str(error)
    assert kept == {"a.py": "x = 1\n", "b.py": "# \u00e9\n", "last.py": "x = 1\n"}
    assert left_out == {
        "c.py": "vendored",
        "d.py": "generated",
        "missing.py": "missing content",
        "../up.py": "unsafe path",
        "evil.py": "missing content",
        "broken.py": "unreadable",
        "big.py": "gigantic",
        "two.py": "unreadable",
    }
    with pytest.raises(BrokenSourceError, match="it needs repo_name and files"):
        list(nothing.files)


def test_many_contents_come_in_order(tmp_path: Path) -> None:
    rows = [stack_row("many", *[{"path": f"/{n}.py", "blob_id": blob(n)} for n in range(1000)])]
    del rows[0]["files"][0]["length_bytes"]
    (project,) = stack_repositories(
        [write_lines(tmp_path / "ids.jsonl", rows)], lambda blob_id: f"x = {int(blob_id, 16)}".encode()
    )
    assert project.size is None
    assert [read_code(file) for file in project.files] == [f"x = {n}" for n in range(1000)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\ncut", "it ends after 3 of 99 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n63\r\ncut", "IncompleteRead"),
    ],
)
def test_a_server_that_makes_no_sense_is_asked_again(
    answer: bytes, reason: str, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is one line if that does not help: nothing is left out for a fault of the network."""
    monkeypatch.setattr(contents.time, "sleep", lambda seconds: None)
    packed = (mirror / "content" / blob(1)).read_bytes()
    sound = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)
    answers = [answer, answer, sound, answer, answer, answer, answer]

    class Server(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answers.pop(0))

    with serving(Server) as address:
        fetch = open_contents(address, largest=LARGEST)
        assert fetch(blob(1)) == b"x = 1\n"
        with one_line_error(rf"cannot fetch http.*: .*{reason}.*; check --contents and"):
            fetch(blob(1))
    assert not answers


@pytest.mark.parametrize("place", ["http://[", "http://a b", "http://\u4e2d/\u4e2d"])
def test_what_is_no_url_is_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents.time, "sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"^cannot fetch http.*; check --contents"):
        open_contents(place, largest=LARGEST)(blob(1))


def test_a_server_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents.time, "sleep", lambda seconds: None)
    with HTTPServer(("127.0.0.1", 0), _Server) as http:
        port = http.server_port
    with pytest.raises(ValueError, match=r"cannot fetch http.*; check --contents and the network"):
        open_contents(f"http://127.0.0.1:{port}", largest=LARGEST)(blob(1))
    with pytest.raises(ValueError, match="there are no contents in"):
        open_contents(str(tmp_path), largest=LARGEST)
