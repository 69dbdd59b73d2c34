"""A real, small rootfs: the same bytes each time, nothing of the host in it, nothing left of a broken run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import aptconf, cuts, lock, mmdebstrap, plan, profile, rootfs
from warmstart.errors import ProfileError, Unreachable
from warmstart.lock import Package
from warmstart.plan import Plan

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_000
MEMORY = Path("/dev/shm")
net = pytest.mark.net  # the distribution's packages


def small(**base: Any) -> Plan:
    """The plan of `cpu`, its base the essential packages and one more, and no cuts."""
    loaded = profile.load(ROOT, "cpu")
    found = lock.parse(lock.committed(ROOT, "cpu"))
    made = plan.make(ROOT, loaded, found, cuts.load(ROOT, loaded.profile))
    changed = msgspec.structs.replace(loaded.profile.base, **({"packages": ("libnuma1",)} | base))
    unlocked = msgspec.structs.replace(made.base.locked, packages=())
    return msgspec.structs.replace(
        made,
        epoch=EPOCH,
        profile=msgspec.structs.replace(loaded.profile, base=changed),
        base=msgspec.structs.replace(made.base, locked=unlocked),
        cuts=cuts.Cuts(versions=made.cuts.versions),
    )


def leftovers() -> set[Path]:
    """Working folders in all the places where one can be."""
    return {p for top in (MEMORY, Path(tempfile.gettempdir())) for p in top.glob(f"{mmdebstrap.SCRATCH}*")}


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    (folder / "bases").mkdir()
    return folder


Made = tuple[Path, tuple[Package, ...]]


@pytest.fixture(scope="module")
def made(state: Path) -> Made:
    before = leftovers()
    out = state / "bases" / "one.tar"
    found = rootfs.make(ROOT, small(), out, state / "one.log")
    assert leftovers() == before
    return out, found


@net
def test_the_same_bytes_again_without_a_download(
    made: Made, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, found = made
    # On disk this time, with the packages of the first run.
    monkeypatch.setattr(mmdebstrap, "_available_memory", lambda: 0)
    again = state / "bases" / "two.tar"
    assert rootfs.make(ROOT, small(), again, state / "two.log") == found
    assert digest(again) == digest(out)
    told = (state / "two.log").read_text(encoding="utf-8")
    assert re.findall(r"Need to get ([\d,]+)", told) in ([], ["0"] * told.count("Need to get"))
    assert (state / "cache" / "CACHEDIR.TAG").read_text(encoding="utf-8").startswith("Signature: 8a477f59")
    assert sorted(p.name for p in (state / "bases").iterdir()) == ["one.tar", "two.tar"]


@net
def test_the_packages_are_those_inside_with_their_hashes(made: Made) -> None:
    out, found = made
    with tarfile.open(out) as tar:
        status = tar.extractfile("./var/lib/dpkg/status")
        assert status
        text = status.read().decode()
    stanzas = [dict(re.findall(r"^(\S+): (.*)$", s, re.MULTILINE)) for s in text.strip().split("\n\n")]
    assert {s["Status"] for s in stanzas} == {"install ok installed"}
    inside = {(s["Package"], s["Architecture"], s["Version"]) for s in stanzas}
    assert {(p.name, p.architecture, p.version) for p in found} == inside
    assert all(re.fullmatch(r"[0-9a-f]{64}", p.sha256) for p in found)
    assert [p.name for p in found] == sorted(p.name for p in found)
    names = {p.name for p in found}
    assert "libnuma1" in names
    assert not names & {"perl", "usrmerge", "apt"}
    # The hash is the one of the package file itself.
    kept = mmdebstrap.cache(out.parent.parent, "bookworm")
    numa = next(p for p in found if p.name == "libnuma1")
    assert digest(next(kept.glob("libnuma1_*.deb"))) == numa.sha256


@net
def test_nothing_of_the_host_or_the_making_is_inside(made: Made) -> None:
    out, _ = made
    host = socket.gethostname().encode()
    mirrors = {line.split("://")[1].split("/")[0].encode() for line in aptconf.sources("bookworm")}
    with tarfile.open(out) as tar:
        members = tar.getmembers()
        for member in members:
            assert member.mtime <= EPOCH, member.name
            assert not member.isdev() or member.isfifo(), member.name
            if member.isfile() and member.name.startswith("./etc/"):
                content = tar.extractfile(member)
                assert content
                text = content.read()
                assert not any(mirror in text for mirror in mirrors), member.name
                if len(host) > 5:
                    assert host not in text, member.name
    files = {m.name: m for m in members if m.isfile()}
    assert files["./etc/hostname"].size == 0
    assert files["./etc/resolv.conf"].size == 0
    unwanted = (
        r"\./(etc/apt/sources|var/log/.|var/lib/apt/lists/.|var/cache/apt/.|tmp/.|run/.|dev/.)|.*-$|.*-old$"
    )
    assert [name for name in files if re.match(unwanted, name)] == []
    links = {m.name: m.linkname for m in members if m.issym()}
    assert links["./bin"] == "usr/bin"
    assert links["./lib"] == "usr/lib"


@net
def test_an_unknown_package(state: Path) -> None:
    with pytest.raises(ProfileError, match="bookworm has no package pyhton3"):
        rootfs.make(ROOT, small(packages=("pyhton3",)), state / "bases" / "x.tar", state / "x.log")
    assert not list((state / "bases").glob("*x.tar*"))


@net
def test_an_unknown_suite(state: Path) -> None:
    with pytest.raises(ProfileError, match="no suite bookwurm"):
        rootfs.make(ROOT, small(suite="bookwurm"), state / "bases" / "x.tar", state / "x.log")


@net
def test_a_silent_mirror(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = leftovers()
    monkeypatch.setenv(aptconf.MIRROR, "deb [trusted=yes] http://127.0.0.1:9/debian bookworm main")
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1") as caught:
        rootfs.make(ROOT, small(), state / "bases" / "x.tar", state / "x.log")
    assert aptconf.MIRROR in caught.value.hint
    assert leftovers() == before


# argv: the tar file, the log. Makes the small base as the command line would, into a pipe that nobody reads: without a
# signal it never ends.
MAKE = """
import os, sys
from pathlib import Path
from tests.engine.test_rootfs import ROOT, small
from warmstart import log, rootfs, signals
from warmstart.errors import WarmstartError
log.configure(quiet=True)
out = Path(sys.argv[1])
pipe = out.with_name(f".{out.name}.{os.getpid()}")
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDWR)
signals.catch()
try:
    rootfs.make(ROOT, small(), out, Path(sys.argv[2]))
except WarmstartError as failure:
    sys.exit(failure.code)
"""


@net
@pytest.mark.parametrize(
    ("when", "number", "code"),
    [
        ("downloading packages", signal.SIGINT, 130),
        ("installing essential packages", signal.SIGTERM, 143),
        ("creating tarball", signal.SIGINT, 130),
    ],
)
def test_broken_off(state: Path, when: str, number: signal.Signals, code: int) -> None:
    before = leftovers()
    out, log_file = state / "bases" / "broken.tar", state / f"broken-{code}-{when[:5]}.log"
    child = subprocess.Popen([sys.executable, "-c", MAKE, out, log_file], cwd=ROOT)
    await_(
        lambda: log_file.is_file() and f"I: {when}" in log_file.read_text(encoding="utf-8", errors="replace")
    )
    os.kill(child.pid, number)
    assert child.wait(120) == code
    assert leftovers() == before
    assert not list((state / "bases").glob("*broken*"))
    mounts = json.loads(subprocess.run(["findmnt", "-J", "-l"], check=True, capture_output=True).stdout)
    assert not [m["target"] for m in mounts["filesystems"] if "mmdebstrap" in m["target"]]


def await_(done: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
