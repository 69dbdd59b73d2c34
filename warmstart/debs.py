"""Distribution packages that one layer has beyond the base's: of a feature, or of the stage that builds from sources.

They are fetched as the base's are, into the same folder, and installed in the build by dpkg without a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from warmstart import mmdebstrap, wheels
from warmstart.lock import Package
from warmstart.profile import Profile, packages


def resolve(root: Path, state: Path, profile: Profile, base: Sequence[Package]) -> dict[str, tuple[Package, ...]]:
    """Layer → the packages that its own need and `base` lacks, sorted. Raises as `rootfs.make` does."""
    return {layer: _with(root, state, profile, names, base) for layer, names in packages(profile).items()}


def fetch(
    root: Path, state: Path, profile: Profile, base: Sequence[Package], locked: dict[str, tuple[Package, ...]]
) -> dict[str, tuple[Package, ...]]:
    """Make sure that all locked package files are there. Returns the layers whose packages are others by now."""
    folder = mmdebstrap.cache(state, profile.base.suite)
    moved = {}
    for layer, names in packages(profile).items():
        wanted = locked.get(layer, ())
        if wanted and all(_is_there(folder, package) for package in wanted):
            continue
        found = _with(root, state, profile, names, (*base, *wanted), less=base)
        if found != wanted:
            moved[layer] = found
    return moved


def file(package: Package) -> str:
    """The name of a package's file in apt's folder: apt writes an epoch's colon as %3a."""
    return f"{package.name}_{package.version.replace(':', '%3a')}_{package.architecture}.deb"


def listing(locked: Iterable[Package], folder: str) -> tuple[str, str]:
    """The package files in `folder`: one line each as sha256sum checks them, and one line each by name alone."""
    every = sorted(locked, key=lambda p: p.name)
    return (
        "".join(f"{p.sha256}  {folder}/{file(p)}\n" for p in every),
        "".join(f"{folder}/{file(p)}\n" for p in every),
    )


def _with(
    root: Path,
    state: Path,
    profile: Profile,
    names: Sequence[str],
    locked: Sequence[Package],
    less: Sequence[Package] | None = None,
) -> tuple[Package, ...]:
    """The packages of a base that has `names` as well, without those that it has anyhow (`less`)."""
    larger = msgspec.structs.replace(profile.base, packages=(*profile.base.packages, *names))
    profile = msgspec.structs.replace(profile, base=larger)
    with mmdebstrap.scratch() as scratch:
        kept, log_file = mmdebstrap.cache(state, larger.suite), state / profile.arch / "debs.log"
        job = mmdebstrap.Job(root, profile, 0, Path(os.devnull), log_file, scratch, kept)
        found = mmdebstrap.make(job, locked=locked)
    base = {(p.name, p.architecture) for p in (locked if less is None else less)}
    return tuple(p for p in found if (p.name, p.architecture) not in base)


def _is_there(folder: Path, package: Package) -> bool:
    path = folder / file(package)
    return path.is_file() and wheels.sha256(path) == package.sha256
