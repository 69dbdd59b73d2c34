"""Fetching what a plan names, before the build: the base and the wheels, checked against the lock.

The build itself has no network, so whatever the machine needs to reach an index (mirrors, proxies, passwords,
certificates) stays outside the image by construction.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import msgspec

from warmstart import context, debs, engine, gittree, lock, log, mmdebstrap, plan, rootfs, run, wheels
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
        moved = _debs(root, state, loaded, planned)
        gittree.fetch(state, gittree.of(planned.profile))
        fetching.result()
    if found is None and not moved:
        return planned
    return _relock(root, state, loaded, planned, found, moved, caps, frozen)


def wheelhouse(state: Path) -> Path:
    """Folder of all fetched wheels, shared by the arches."""
    return state / "wheels"


def contexts(state: Path, planned: Plan) -> dict[str, Path]:
    """Named build contexts: the wheels, the installer, and the distribution packages of layers."""
    found = {"wheels": wheelhouse(state), "tools": context.uv().parent}
    if planned.packages:
        found["debs"] = mmdebstrap.cache(state, planned.base.locked.suite)
    if gittree.of(planned.profile):
        found["trees"] = gittree.store(state)
    return found


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


def _debs(root: Path, state: Path, loaded: Loaded, planned: Plan) -> dict[str, tuple[Package, ...]]:
    """Fetch the packages of layers; returns what moved."""
    if run.recorder.on or not planned.packages:
        return {}
    with log.step(f"distribution packages of {', '.join(planned.packages)}"):
        return debs.fetch(root, state, loaded.profile, planned.base.locked.packages, planned.packages)


def _relock(
    root: Path,
    state: Path,
    loaded: Loaded,
    planned: Plan,
    found: tuple[Package, ...] | None,
    layers: dict[str, tuple[Package, ...]],
    caps: Capabilities,
    frozen: bool,
) -> Plan:
    moved = rootfs.check(planned.base.locked.packages, found) if found else []
    for layer, packages in layers.items():
        moved += rootfs.check(planned.packages.get(layer, ()), packages)
    shown = "; ".join(moved[:3]) + (" …" if len(moved) > 3 else "")
    told = f"{len(moved)} distribution packages moved since the lock was made ({shown})"
    if frozen:
        raise LockMoved(told, hint=f"make lock ARCH={planned.arch}, or build without --frozen")
    committed = lock.parse(lock.committed(root, loaded.profile.slug))
    again = lock.read(root, state, loaded.profile, planned.cuts.dropped)
    again = msgspec.structs.replace(
        again,
        base=msgspec.structs.replace(again.base, packages=found or again.base.packages),
        packages=again.packages | layers,
        of=lock.digest(msgspec.to_builtins(committed)),
    )
    path = lock.relocked(state, loaded.profile.slug)
    lock.write(path, again)
    log.warn(f"{told}: relocked in {path}")
    new = plan.make(root, loaded, again, planned.cuts)
    if not found:
        return new
    tar = state / "bases" / f"{planned.base.key}.tar"
    engine.import_rootfs(caps, tar, new.base.ref, new.epoch, state / planned.arch / "base.log")
    tar.unlink()
    return new
