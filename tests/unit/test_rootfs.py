"""The rootfs: the host's sources, the packages as told by apt, and what mmdebstrap's failures mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import aptconf, mmdebstrap, rootfs
from warmstart.errors import CommandFailed, DiskFull, HostUnsupported, ProfileError, SetupFailed, Unreachable
from warmstart.lock import Package
from warmstart.run import Result

STANZAS = """
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://inline.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
Components: main
"""
LINES = """
#deb http://off.example/ubuntu noble main
deb http://mirror.example/ubuntu noble main restricted universe
deb [arch=amd64 signed-by=/usr/share/keyrings/u.gpg] http://mirror.example/ubuntu noble-updates main
deb-src http://mirror.example/ubuntu noble main
deb https://third.example/linux noble stable
deb http://mirror.example/ubuntu jammy main
"""


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(aptconf.MIRROR, raising=False)


def host(root: Path, release: str, files: dict[str, str]) -> Path:
    for name, text in {"etc/os-release": release, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_stanzas() -> None:
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    assert aptconf.entries(STANZAS, "bookworm") == [
        f"deb {signed} http://mirror.example/debian bookworm main",
        f"deb {signed} http://mirror.example/debian bookworm-updates main",
        "deb http://mirror.example/security bookworm-security main",
    ]


def test_one_line_entries() -> None:
    assert aptconf.entries(LINES, "noble") == [
        "deb http://mirror.example/ubuntu noble main universe",
        "deb [signed-by=/usr/share/keyrings/u.gpg] http://mirror.example/ubuntu noble-updates main",
    ]


def test_a_host_of_the_same_suite_gives_its_own_sources(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        "ID=debian\nVERSION_CODENAME=bookworm\n",
        {
            "etc/apt/sources.list.d/debian.sources": STANZAS,
            "etc/apt/sources.list.d/third.sources": STANZAS.replace("mirror", "third"),
        },
    )
    found = aptconf.sources("bookworm", root)
    assert len(found) == 3
    assert not any("third.example" in line for line in found)
    assert aptconf.sources("trixie", root) == []
    assert aptconf.sources("book", root) == []


def test_a_mirror_that_the_user_names_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(aptconf.MIRROR, "http://a.example/d\n deb http://b.example/d s main \n")
    root = host(tmp_path, "VERSION_CODENAME=bookworm\n", {"etc/apt/sources.list.d/debian.sources": STANZAS})
    assert aptconf.sources("bookworm", root) == ["http://a.example/d", "deb http://b.example/d s main"]


def test_what_of_apts_options_decides_how_servers_are_reached() -> None:
    dumped = (
        'APT::Architecture "amd64";\nAcquire "";\nAcquire::http "";\nAcquire::Languages "none";\n'
        'Acquire::http::Proxy "http://p.example:3142";\nAcquire::https::CaInfo "/etc/ca.crt";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::IndexTargets::deb::Packages::MetaKey "x";\nAcquire::http::Empty "";\n'
    )
    assert aptconf.REACH.findall(dumped) == [
        'Acquire::http::Proxy "http://p.example:3142";',
        'Acquire::https::CaInfo "/etc/ca.crt";',
        'Acquire::Check-Valid-Until "false";',
    ]


def test_locked_versions_are_asked_for() -> None:
    text = aptconf.pins([Package("g++", "4:12.2.0-3", "amd64", "aa"), Package("by-name-only", "", "", "")])
    assert text == "Package: g++\nPin: version 4:12.2.0-3\nPin-Priority: 1001\n"


TOLD = """Package: zlib1g
Source: zlib
Version: 1:1.2.13.dfsg-1
Architecture: amd64
Description: compression library
 Version: of the text, not of the package
SHA256: bb

Package: ca-certificates
Architecture: all
Version: 20230311+deb12u1
SHA256: aa

"""


def test_packages_are_told_with_their_hash_sorted() -> None:
    assert mmdebstrap.packages(TOLD) == (
        Package("ca-certificates", "20230311+deb12u1", "all", "aa"),
        Package("zlib1g", "1:1.2.13.dfsg-1", "amd64", "bb"),
    )


def test_differences() -> None:
    one = {"a": ("1", "amd64", "x"), "b": ("1", "all", "y"), "c": ("1", "all", "z")}
    two = {"a": ("2", "amd64", "w"), "b": ("1", "all", "v"), "d": ("1", "all", "u")}
    before, after = ([Package(name, *rest) for name, rest in given.items()] for given in (one, two))
    assert rootfs.check(before, list(reversed(before))) == []
    assert rootfs.check(before, after) == ["a 1 → 2", "b 1: sha256 y → v", "c 1 → absent", "d absent → 1"]


def test_a_hook_is_safe_with_odd_paths() -> None:
    arguments = ["/tmp/r.json", "os", "/"]
    hooks = mmdebstrap.inside(Path("/srv/my tree/slim.py"), [Path("/tmp/r.json")], arguments, "python3.12")
    assert hooks == [
        "copy-in '/srv/my tree/slim.py' /tmp/r.json /tmp",
        'chroot "$1" python3.12 -I /tmp/slim.py /tmp/r.json os /',
    ]


def failure(told: str) -> CommandFailed:
    failed = CommandFailed("mmdebstrap failed")
    failed.result = Result("", told, 25, 0.1)  # type: ignore[attr-defined]
    return failed


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ("dpkg-deb: error: … No space left on device", DiskFull, "the disk filled up"),
        ("E: Unable to locate package pyhton3", ProfileError, "bookworm has no package pyhton3"),
        ("E: Package 'cowsay' has no installation candidate", ProfileError, "bookworm has no package cowsay"),
        ("W: GPG error: … NO_PUBKEY 0E98404D386FA1D9", SetupFailed, "the keys that bookworm is signed with"),
        ("E: The repository 'http://m s Release' does not have a Release file.", ProfileError, "no suite"),
        (
            "Err:1 … Could not resolve 'mirror.example'",
            Unreachable,
            "^mirror.example, which has the packages",
        ),
        ("Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111)", Unreachable, "^127.0.0.1"),
        (
            "E: Failed to fetch http://m.example/p/x.deb  404  Not Found",
            Unreachable,
            "^m.example lacks x.deb",
        ),
        ("E: Failed to fetch http://m.example/p/x.deb  Connection failed", Unreachable, "^m.example, which"),
        ("E: newuidmap failed", HostUnsupported, "can't be made here: newuidmap failed"),
        ("W: Operation not permitted\nE: no\nE: failed to run", CommandFailed, "^mmdebstrap: no$"),
        ("something else", CommandFailed, "mmdebstrap failed"),
    ],
)
def test_what_a_failure_means(told: str, error: type[Exception], message: str) -> None:
    found = mmdebstrap.explain(failure(told), "bookworm")
    assert type(found) is error
    with pytest.raises(error, match=message):
        raise found
