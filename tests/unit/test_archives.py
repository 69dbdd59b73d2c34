"""Wheels and source archives from memory."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from warmstart import archives
from warmstart.archives import Entry, Metadata

TOLD = Metadata(
    name="some-thing",
    version="1.0+rocm10",
    tag="cp312-cp312-linux_x86_64",
    requires=("numpy>=1",),
    extras={"device-gfx1151": ("some-thing-gfx1151==1.0",)},
    scripts={"thing": "thing:main"},
)
FILES = {"thing/__init__.py": Entry(b"x = 1\n"), "thing/bin/run": Entry(b"#!/bin/sh\n", program=True)}


def test_a_wheel_says_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / TOLD.file
    assert path.name == "some_thing-1.0+rocm10-cp312-cp312-linux_x86_64.whl"
    archives.write_wheel(path, TOLD, FILES)
    info = "some_thing-1.0+rocm10.dist-info"
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode()))}
        assert set(rows) == set(wheel.namelist())
        for name, (digest, size) in rows.items():
            if digest:
                content = wheel.read(name)
                hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={hashed}", len(content))
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert wheel.getinfo("thing/bin/run").external_attr >> 16 & 0o111
        assert b"thing = thing:main" in wheel.read(f"{info}/entry_points.txt")
    assert 'Requires-Dist: some-thing-gfx1151==1.0 ; extra == "device-gfx1151"' in metadata
    assert "Provides-Extra: device-gfx1151" in metadata


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        archives.write_wheel(tmp_path / f"{name}.whl", TOLD, FILES)
        archives.write_sdist(tmp_path / f"{name}.tar.gz", TOLD, dict(reversed(FILES.items())))
    assert (tmp_path / "one.whl").read_bytes() == (tmp_path / "two.whl").read_bytes()
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


def test_a_source_archive_lies_in_one_folder(tmp_path: Path) -> None:
    archives.write_sdist(tmp_path / "a.tar.gz", TOLD, FILES)
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        names = archive.getnames()
    assert {name.partition("/")[0] for name in names} == {"some_thing-1.0+rocm10"}
    assert "some_thing-1.0+rocm10/PKG-INFO" in names


def test_members_of_another_archive_are_copied(tmp_path: Path) -> None:
    archives.write_wheel(tmp_path / "one.whl", TOLD, FILES)
    there = {name: entry for name, entry in archives.members(tmp_path / "one.whl").items() if name in FILES}
    assert archives.size(there["thing/__init__.py"]) == 6
    archives.write_wheel(tmp_path / "two.whl", TOLD, there)
    assert (tmp_path / "one.whl").read_bytes() == (tmp_path / "two.whl").read_bytes()
