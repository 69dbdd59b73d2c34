"""The base: a rootfs of distribution packages, made without a registry, or the digest of an image in one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from warmstart import mmdebstrap, run
from warmstart.cuts import Cuts
from warmstart.errors import CommandFailed, Unreachable
from warmstart.lock import Package
from warmstart.plan import Plan
from warmstart.profile import Profile


def make(root: Path, planned: Plan, out: Path, log_file: Path) -> tuple[Package, ...]:
    """Make the base of a plan, slim, as tar file `out`. Returns the packages in it, sorted.

    Where the locked packages are still offered it is they that are taken. `out` is there whole or not at all.
    Raises Unreachable, DiskFull, SetupFailed (keys missing), HostUnsupported (no way to make one here),
    ProfileError (no such suite or package), CommandFailed.
    """
    kept = mmdebstrap.cache(out.parent.parent, planned.profile.base.suite)
    with mmdebstrap.scratch() as scratch:
        rules, file = planned.cuts.rules("os"), scratch / "rules.json"
        file.write_bytes(msgspec.json.encode(rules, order="sorted"))
        python = f"python{planned.profile.versions.python}"
        slim = mmdebstrap.inside(root / "image" / "slim.py", [file], ["/tmp/rules.json", "os", "/"], python)
        slim = slim if any(isinstance(table, list) and table for table in rules.values()) else []
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            job = mmdebstrap.Job(root, planned.profile, planned.epoch, beside, log_file, scratch, kept)
            found = mmdebstrap.make(job, slim, planned.base.locked.packages)
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)
    return found


def resolve(root: Path, state: Path, profile: Profile, cuts: Cuts) -> tuple[Package, ...]:
    """The packages that the base of a profile has when it is made now, sorted. Raises as `make` does."""
    kept = mmdebstrap.cache(state, profile.base.suite)
    with mmdebstrap.scratch() as scratch:
        log_file = state / profile.arch / "rootfs.log"
        job = mmdebstrap.Job(root, profile, 0, Path(os.devnull), log_file, scratch, kept)
        return mmdebstrap.make(job)


def check(locked: Sequence[Package], found: Sequence[Package]) -> list[str]:
    """The differences between locked and found packages, one line each; empty when they are the same."""
    before, after = (
        {(p.name, p.architecture): p for p in locked},
        {(p.name, p.architecture): p for p in found},
    )
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old and new and old.version == new.version and old.sha256 != new.sha256:
            lines.append(f"{key[0]} {old.version}: sha256 {old.sha256[:12]} → {new.sha256[:12]}")
        elif old != new:
            lines.append(f"{key[0]} {old.version if old else 'absent'} → {new.version if new else 'absent'}")
    return lines


def resolve_image_digest(ref: str) -> str:
    """The digest (sha256:…) that the registry gives for an image now. Raises Unreachable."""
    try:
        argv = ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{ref}"]
        return run.run(argv, always=True).stdout.strip()
    except CommandFailed as failed:
        registry = ref.partition("/")[0]
        raise Unreachable(
            f"{registry} gives no digest for {ref}: {mmdebstrap.last(failed)}",
            hint="behind a proxy set https_proxy; mirrors: registries.conf, passwords: `skopeo login`",
        ) from None
