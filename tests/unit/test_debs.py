"""Distribution packages of single layers: which are asked for, and how their files are named and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import debs, lock, mmdebstrap, profile
from warmstart.errors import LockMismatch
from warmstart.lock import Package

ROOT = Path(__file__).parents[2]
BASE = (Package("libc6", "2.39", "amd64", "0" * 64),)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The packages that mmdebstrap is asked for; it answers with the base and one more for each asked."""
    found: list[tuple[str, ...]] = []

    def make(job: mmdebstrap.Job, hooks: Any = (), locked: Any = ()) -> tuple[Package, ...]:
        found.append(job.profile.base.packages)
        names = [n for n in job.profile.base.packages if n.startswith(("lib", "ibv"))]
        return (*BASE, *(Package(n, "1:1.0-2", "amd64", hashlib.sha256(n.encode()).hexdigest()) for n in names))

    monkeypatch.setattr(mmdebstrap, "make", make)
    return found


def test_only_what_the_base_lacks(tmp_path: Path, asked: list[tuple[str, ...]]) -> None:
    own = profile.load(ROOT, "gfx942").profile
    base = (*BASE, *(Package(n, "1", "amd64", "") for n in own.base.packages))
    found = debs.resolve(ROOT, tmp_path, own, base)
    assert set(found) == {"rdma", "mori"}
    assert {p.name for p in found["rdma"]} == set(own.features["rdma"].packages)
    assert asked[0] == (*own.base.packages, *own.features["rdma"].packages)


def test_files_that_are_there_are_not_asked_for(tmp_path: Path, asked: list[tuple[str, ...]]) -> None:
    own = profile.load(ROOT, "gfx942").profile
    own = msgspec.structs.replace(own, features={"rdma": own.features["rdma"]})
    content = b"a package"
    package = Package("libnl-3-200", "1:3.7", "amd64", hashlib.sha256(content).hexdigest())
    folder = mmdebstrap.cache(tmp_path, "noble")
    (folder / "libnl-3-200_1%3a3.7_amd64.deb").write_bytes(content)
    assert debs.fetch(ROOT, tmp_path, own, BASE, {"rdma": (package,)}) == {}
    assert asked == []
    (folder / "libnl-3-200_1%3a3.7_amd64.deb").write_bytes(b"altered")
    moved = debs.fetch(ROOT, tmp_path, own, BASE, {"rdma": (package,)})
    assert asked
    assert {p.name for p in moved["rdma"]} >= set(own.features["rdma"].packages)


def test_the_listing_is_what_sha256sum_reads() -> None:
    packages = [Package("b", "2:1", "all", "b" * 64), Package("a", "1", "amd64", "a" * 64)]
    sums, names = debs.listing(packages, "/ws/debs")
    assert sums == f"{'a' * 64}  /ws/debs/a_1_amd64.deb\n{'b' * 64}  /ws/debs/b_2%3a1_all.deb\n"
    assert names == "/ws/debs/a_1_amd64.deb\n/ws/debs/b_2%3a1_all.deb\n"


def test_the_source_lane_has_a_builder_and_others_have_not() -> None:
    assert set(profile.packages(profile.load(ROOT, "gfx1102").profile)) == {"builder"}
    assert set(profile.packages(profile.load(ROOT, "gfx942", "source").profile)) == {"builder", "rdma", "mori"}
    assert profile.packages(profile.load(ROOT, "gfx1151").profile) == {}


def test_a_lock_with_packages_of_a_layer_that_has_none_is_refused() -> None:
    own = profile.load(ROOT, "gfx1151").profile
    found = lock.parse(lock.committed(ROOT, "gfx942"))
    assert found.packages["rdma"]

    wrong = msgspec.structs.replace(lock.parse(lock.committed(ROOT, "gfx1151")), packages=found.packages)
    with pytest.raises(LockMismatch, match="packages of 'rdma'"):
        lock.validate(wrong, own)
