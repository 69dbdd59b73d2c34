"""Wheels and source archives written from files in memory: the same files give the same bytes, on any machine.

Nothing is compressed, so that unpacking costs no more than copying. Form of a wheel: PEP 427 and PEP 376.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

EARLIEST = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file can hold
CHUNK = 1 << 20  # bytes


class Entry(msgspec.Struct, frozen=True):
    """One file of an archive: what is in it, or where that lies."""

    content: bytes | tuple[Path, str]  # the latter: a member of a zip file, too large for memory
    program: bool = False


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a distribution says about itself."""

    name: str
    version: str
    tag: str = "py3-none-any"
    requires: tuple[str, ...] = ()
    extras: dict[str, tuple[str, ...]] = {}
    scripts: dict[str, str] = {}
    points: dict[str, dict[str, str]] = {}  # other groups of entry points

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return f"{_stem(self)}-{self.tag}.whl"

    @property
    def text(self) -> str:
        """The content of METADATA."""
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {self.version}"]
        lines += [f"Requires-Dist: {r}" for r in self.requires]
        for extra, requires in self.extras.items():
            lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {r} ; extra == "{extra}"' for r in requires)]
        return "\n".join(lines) + "\n"


def write_wheel(path: Path, told: Metadata, files: Mapping[str, Entry]) -> None:
    """Write a wheel of `files`, by their paths below site-packages, with its metadata and RECORD."""
    info = f"{_stem(told)}.dist-info"
    own = {
        f"{info}/METADATA": told.text,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: warmstart\nRoot-Is-Purelib: false\nTag: {told.tag}\n",
        f"{info}/entry_points.txt": _entry_points({"console_scripts": told.scripts} | told.points),
    }
    whole = {**files, **{name: Entry(text.encode()) for name, text in own.items() if text}}
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, entry in sorted(whole.items()):
            digest = hashlib.sha256()
            head = zipfile.ZipInfo(name, EARLIEST)
            head.external_attr = (0o100755 if entry.program else 0o100644) << 16
            head.file_size = size(entry)
            with archive.open(head, "w") as sink:
                for chunk in _chunks(entry):
                    sink.write(chunk)
                    digest.update(chunk)
            hashed = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
            rows.append(f"{_quoted(name)},sha256={hashed},{head.file_size}\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", EARLIEST), "".join([*rows, f"{info}/RECORD,,\n"]))


def write_sdist(path: Path, told: Metadata, files: Mapping[str, Entry]) -> None:
    """Write a source archive of `files` and PKG-INFO below a folder of the usual name."""
    whole = {**files, "PKG-INFO": Entry(told.text.encode())}
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,  # neither name nor time in it
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, entry in sorted(whole.items()):
            assert isinstance(entry.content, bytes)
            member = tarfile.TarInfo(f"{_stem(told)}/{name}")
            member.size, member.mode = len(entry.content), 0o755 if entry.program else 0o644
            archive.addfile(member, io.BytesIO(entry.content))


def members(file: Path) -> dict[str, Entry]:
    """The files of a zip archive, left where they lie."""
    with zipfile.ZipFile(file) as archive:
        found = [i for i in archive.infolist() if not i.is_dir()]
        return {i.filename: Entry((file, i.filename), bool(i.external_attr >> 16 & 0o100)) for i in found}


def read(entry: Entry) -> bytes:
    """The content of a file."""
    return b"".join(_chunks(entry))


def size(entry: Entry) -> int:
    """The size of a file, in bytes."""
    if isinstance(entry.content, bytes):
        return len(entry.content)
    file, name = entry.content
    with zipfile.ZipFile(file) as archive:
        return archive.getinfo(name).file_size


def _chunks(entry: Entry) -> Iterator[bytes]:
    if isinstance(entry.content, bytes):
        yield entry.content
        return
    file, name = entry.content
    with zipfile.ZipFile(file) as archive, archive.open(name) as source:
        while chunk := source.read(CHUNK):
            yield chunk


def _stem(told: Metadata) -> str:
    return f"{re.sub(r'[-_.]+', '_', told.name)}-{told.version}"


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    sections: Iterable[str] = (
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(points.items()))
        for group, points in sorted(groups.items())
        if points
    )
    return "\n".join(sections)


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name
