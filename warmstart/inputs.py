"""Fetching what a plan names, before the build: the base and the wheels, checked against the lock.

The build itself has no network, so whatever the machine needs to reach an index (mirrors, proxies, passwords,
certificates) stays outside the image by construction.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import msgspec

from warmstart import engine, lock, log, plan, rootfs, run, wheels
from warmstart.engine import Capabilities
from warmstart.errors import LockMoved
from warmstart.lock import Package
from warmstart.plan import Plan
from warmstart.profile import Loaded


def fetch(root: Path, state: Path, loaded: Loaded, planned: Plan, caps: Capabilities, *, frozen: bool = False) -> Plan:
    """Make sure that the base lies in the engine's storage and every wheel in the wheelhouse.

    Returns the plan to build: the given one, or a new one when distribution packages moved since the lock was
    made (the relock then lies under .warmstart/<arch>/). Raises LockMoved instead with `frozen`, Unreachable,
    WheelMismatch, BaseMismatch, DiskFull.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(wheels.fetch, loaded.profile, planned.wheels, wheelhouse(state))
        found = base(root, state, planned, caps)
        fetching.result()
    if found is None:
        return planned
    return _relock(root, state, loaded, planned, found, caps, frozen)


def wheelhouse(state: Path) -> Path:
    """Folder of all fetched wheels, shared by the arches."""
    return state / "wheels"


def base(root: Path, state: Path, planned: Plan, caps: Capabilities) -> tuple[Package, ...] | None:
    """Bring the base into the engine's storage. Returns the packages found if they are not the locked ones."""
    wanted = planned.base
    if wanted.locked.kind == "image":
        engine.pull(caps, wanted.ref, wanted.locked.digest)
        return None
    if engine.exists(caps, wanted.ref):
        return None
    if run.recorder.on:
        log.info(f"would make {wanted.ref} from distribution packages")
        return None
    folder = state / "bases"
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / f"{wanted.key}.tar"
    with log.step(f"base: {wanted.locked.suite} from distribution packages"):
        found = rootfs.make(root, planned, tar, state / planned.arch / "rootfs.log")
    if rootfs.check(wanted.locked.packages, found):
        return found
    engine.import_rootfs(caps, tar, wanted.ref, planned.epoch, state / planned.arch / "base.log")
    tar.unlink()
    return None


def _relock(
    root: Path, state: Path, loaded: Loaded, planned: Plan, found: tuple[Package, ...], caps: Capabilities, frozen: bool
) -> Plan:
    moved = rootfs.check(planned.base.locked.packages, found)
    shown = "; ".join(moved[:3]) + (" …" if len(moved) > 3 else "")
    told = f"{len(moved)} distribution packages moved since the lock was made ({shown})"
    if frozen:
        raise LockMoved(told, hint=f"make lock ARCH={planned.arch}, or build without --frozen")
    committed = lock.parse(lock.committed(root, planned.arch))
    again = lock.read(root, state, loaded.profile, planned.cuts.dropped)
    again = msgspec.structs.replace(
        again,
        base=msgspec.structs.replace(again.base, packages=found),
        of=lock.digest(msgspec.to_builtins(committed)),
    )
    path = lock.relocked(state, planned.arch)
    lock.write(path, again)
    log.warn(f"{told}: relocked in {path}")
    new = plan.make(root, loaded, again, planned.cuts)
    tar = state / "bases" / f"{planned.base.key}.tar"
    engine.import_rootfs(caps, tar, new.base.ref, new.epoch, state / planned.arch / "base.log")
    tar.unlink()
    return new
