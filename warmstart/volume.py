"""The cache volume: which caches lie on it, where, and what the start script does with them (`caches/caches.toml`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from warmstart import toml
from warmstart.profile import Profile

Place = Annotated[str, msgspec.Meta(pattern=r"^/?[a-z0-9_-]+(/[a-z0-9_-]+)*$")]


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One cache of caches.toml: its folder below the cache key, and the variables that name it."""

    name: Place
    path: Place
    env: tuple[str, ...]
    lanes: tuple[str, ...] = ()
    cpu_code: bool = False  # machine code of the host's processor
    locks: tuple[str, ...] = ()  # globs below `path` of files that are held by flock
    batons: tuple[str, ...] = ()  # of files that hold by being there
    private: tuple[str, ...] = ()  # of files that only their writer can read


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files that a warm start writes although it stores nothing new."""

    cache: Place
    files: str  # a glob below the cache's path
    why: str


class CacheTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """caches.toml."""

    volume: Place
    models: Place
    keep_gb: float
    keep_starts: int
    need_mb: int
    cpu_flags: str
    network: tuple[str, ...]
    local: tuple[str, ...]
    cache: tuple[Cache, ...]
    written: tuple[Written, ...] = ()


class Volume(msgspec.Struct, frozen=True):
    """What the start script does with the cache volume, from caches.toml."""

    root: str
    keep_gb: float  # of caches of other images, in 10^9 bytes
    keep_starts: int
    need_mb: int  # free space, in 10^6 bytes
    cpu_flags: str  # beginnings of names in /proc/cpuinfo, as a regular expression
    network: tuple[str, ...]  # types of file systems, as globs
    local: tuple[str, ...]  # of those, the ones without a network
    cpu_code: tuple[str, ...]  # directories with machine code of the host
    locks: tuple[str, ...]  # globs
    batons: tuple[str, ...]
    private: tuple[str, ...]


def table(root: Path, profile: Profile) -> CacheTable:
    """caches.toml, less what is for other lanes. Raises ProfileError."""
    whole = toml.read(root / "caches" / "caches.toml", CacheTable)
    chosen = tuple(c for c in whole.cache if not c.lanes or profile.lane in c.lanes)
    return msgspec.structs.replace(whole, cache=chosen)


def settings(caches: CacheTable, directories: dict[str, str]) -> Volume:
    """The start script's part of it; `directories` are those of the caches on the volume, by name."""

    def below(kind: str) -> tuple[str, ...]:
        return tuple(f"{directories[c.name]}/{glob}" for c in caches.cache for glob in getattr(c, kind))

    return Volume(
        root=caches.volume,
        keep_gb=caches.keep_gb,
        keep_starts=caches.keep_starts,
        need_mb=caches.need_mb,
        cpu_flags=caches.cpu_flags,
        network=caches.network,
        local=caches.local,
        cpu_code=tuple(directories[c.name] for c in caches.cache if c.cpu_code),
        locks=below("locks"),
        batons=below("batons"),
        private=below("private"),
    )
