"""The lock verb: resolve a profile into a lock, or check the committed one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from warmstart import debs, log, madewheels, pins, rootfs, run, solve
from warmstart import lock as locks
from warmstart.cuts import Cuts
from warmstart.errors import LockMismatch, UsageError
from warmstart.lock import Lock, LockedBase
from warmstart.profile import Profile, choose

DAY = 86_400  # seconds


class Told(msgspec.Struct, frozen=True):
    """What `lock` did or found."""

    path: str
    state: str
    changes: tuple[str, ...]


def lock(
    root: Path,
    state: Path,
    profile: Profile,
    cuts: Cuts,
    *,
    without_indexes: Collection[str] = (),
    pin: bool = False,
    choice: str = "",
    made: Sequence[Path] = (),
) -> Told:
    """Resolve base and wheels and write `arch/<arch>.lock.json`.

    With `pin` the vendors' indexes are not asked: their wheels get a version and no hash (state `pins`). `made` are
    wheels that builds from sources left, to be installed instead of made again. The epoch is kept when nothing else
    changed, so that locking twice changes no byte. Raises Unreachable, UsageError, InputError.
    """
    wanted = locks.wanted(profile, cuts.dropped)
    profile = choose(profile, choice)
    names = {index.name for index in profile.wheels.indexes}
    if other := sorted(set(without_indexes) - names):
        raise UsageError(f"{profile.arch} has no index {other[0]}", hint=f"it has {', '.join(sorted(names)) or 'none'}")
    madewheels.require(profile, made)
    path = locks.committed(root, profile.slug)
    if run.recorder.on:
        log.info(f"would resolve {profile.arch} and write arch/{path.name}")
        return Told(f"arch/{path.name}", "not written", ())
    old = locks.parse(path) if path.is_file() else None
    if pin:
        base = _base(root, state, profile, cuts)
        new = pins.pins(profile, cuts.dropped, base.packages, _epoch(root, base))
        new = msgspec.structs.replace(new, packages=debs.resolve(root, state, profile, base.packages))
    else:
        wheels = solve.resolve(profile, cuts.dropped, without_indexes=without_indexes)
        base = _base(root, state, profile, cuts)
        new = Lock(
            schema=1,
            arch=profile.arch,
            state="resolved",
            epoch=_epoch(root, base),
            profile=wanted,
            base=base,
            wheels=wheels,
            packages=debs.resolve(root, state, profile, base.packages),
            choice=choice,
        )
    if made:
        new = msgspec.structs.replace(new, wheels=madewheels.adopt(state, profile, new.wheels, made))
    if old and msgspec.structs.replace(new, epoch=old.epoch) == old:
        new = old
    locks.write(path, new)
    return Told(f"arch/{path.name}", new.state, _changes(old, new))


def settle(root: Path, state: Path, profile: Profile, cuts: Cuts, locked: Lock) -> Lock:
    """A resolved lock from one that holds pins, kept under .warmstart/<arch>/ for next time.

    Raises Unreachable where the vendors' indexes don't answer.
    """
    if run.recorder.on:
        log.info(f"would resolve the pins of {profile.arch}")
        return locked
    log.info(f"arch/{profile.slug}.lock.json holds versions without hashes: resolving them")
    wheels = solve.resolve(choose(profile, locked.choice), cuts.dropped)
    of = locks.digest(msgspec.to_builtins(locks.parse(locks.committed(root, profile.slug))))
    settled = msgspec.structs.replace(locked, state="resolved", wheels=wheels, of=of)
    locks.write(locks.relocked(state, profile.slug), settled)
    return settled


def check(root: Path, profile: Profile, cuts: Cuts) -> Told:
    """Whether the committed lock fits the profile. Raises LockMissing or LockMismatch."""
    found = locks.read(root, root / "no-relock", profile, cuts.dropped)
    return Told(f"arch/{profile.slug}.lock.json", found.state, ())


STATES = {"resolved": "resolved", "pins": "some versions have no hash yet, `image` or `lock` resolves them"}


def text(told: Told) -> str:
    """For people."""
    return "\n".join([*told.changes, f"{told.path}: {STATES.get(told.state, told.state)}"])


def _base(root: Path, state: Path, profile: Profile, cuts: Cuts) -> LockedBase:
    if profile.base.kind == "image":
        return LockedBase(
            kind="image", image=profile.base.image, digest=rootfs.resolve_image_digest(profile.base.image)
        )
    with log.step(f"base: {profile.base.suite} from distribution packages"):
        packages = rootfs.resolve(root, state, profile, cuts)
    return LockedBase(kind="rootfs", suite=profile.base.suite, packages=packages)


def _epoch(root: Path, base: LockedBase) -> int:
    """The time stamp of an image: that of other archs with the same base, else the beginning of today.

    It is in every file of every layer, so that archs which are to share layers need the same one.
    """
    found = []
    for file in (root / "arch").glob("*.lock.json"):
        with contextlib.suppress(LockMismatch):  # its own verb will say so
            other = locks.parse(file)
            found += [other.epoch] if other.base == base else []
    return max(found, default=int(time.time()) // DAY * DAY)


def _changes(old: Lock | None, new: Lock) -> tuple[str, ...]:
    if old is None:
        return (f"{len(new.base.packages)} packages, {len(new.wheels)} wheels",)
    rows = locks.changed(old.base, old.wheels, new.base, new.wheels)
    return tuple(f"{name}: {before} → {after}" for name, before, after in rows)
