"""What rehearsals take over: files that builds fetched, and what an earlier one found out about moved packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from warmstart import gittree, inputs
from warmstart import lock as locks
from warmstart.lock import PIP, Lock, Package
from warmstart.plan import Plan
from warmstart.standins import Made


def share(state: Path, own: Path, planned: Plan, made: Sequence[Made]) -> dict[str, str]:
    """Let a rehearsal in the folder `own` have the real files that builds fetched, never the other way round.

    Puts those of `made` there too that no index offers, and a package with nothing in it in place of each source
    tree that a build fetches from its repository; returns these, by address.
    """
    target = inputs.wheelhouse(own)
    target.mkdir(parents=True, exist_ok=True)
    for one in (m for m in made if not m.index):
        (target / Path(one.path).name).unlink(missing_ok=True)
        _link(Path(one.path), target / Path(one.path).name)
    for wheel in planned.wheels:
        there = inputs.wheelhouse(state) / wheel.file
        if wheel.source == PIP and there.is_file() and not (target / wheel.file).exists():
            _link(there, target / wheel.file)
    packages = state / "cache" / "apt"
    link = own / "cache" / "apt"
    if packages.is_dir() and not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # it leads nowhere: the folder has moved
        link.symlink_to(packages.resolve())
    trees = {}
    for tree in gittree.of(planned.profile):
        place = gittree.store(own) / gittree.folder(tree)
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text('"""A stand-in of a rehearsal."""\n', encoding="utf-8")
        trees[f"{tree.repository}@{tree.commit}"] = "an empty package in its place"
    return trees


def _link(there: Path, here: Path) -> None:
    try:
        os.link(there, here)
    except OSError:
        shutil.copyfile(there, here)


class _Moved(msgspec.Struct, frozen=True):
    """Distribution packages that are others by now than a committed lock says."""

    base: tuple[Package, ...]
    packages: dict[str, tuple[Package, ...]]


def note_moved(own: Path, committed: Lock, found: Lock) -> None:
    """Keep what a rehearsal found the packages of a committed lock to be by now."""
    known = _moved(own)
    known[_distribution(committed)] = _Moved(found.base.packages, found.packages)
    (own / "moved.json").write_bytes(msgspec.json.encode(known))


def as_moved(own: Path, committed: Lock, locked: Lock) -> Lock:
    """The lock with the packages that an earlier rehearsal found for the same committed ones: no base is made twice."""
    if not (known := _moved(own).get(_distribution(committed))):
        return locked
    base = msgspec.structs.replace(locked.base, packages=known.base)
    return msgspec.structs.replace(locked, base=base, packages=known.packages)


def _moved(own: Path) -> dict[str, _Moved]:
    try:
        return msgspec.json.decode((own / "moved.json").read_bytes(), type=dict[str, _Moved])
    except (OSError, msgspec.MsgspecError):
        return {}


def _distribution(committed: Lock) -> str:
    parts = (committed.base, committed.packages, committed.epoch)
    return locks.digest(msgspec.to_builtins(parts))
