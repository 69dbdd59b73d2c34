"""What of a cache goes into a seed: a copy of its known files that stands still, made whole and made small.

A server may write to the cache meanwhile, so each file is copied once and only the copy is used from there on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from warmstart import cachedir, seedtiers
from warmstart.errors import InputError, SeedUnsafe
from warmstart.unpack import CHUNK, File

GROUP = "__grp__"  # begins the name of Triton's list of a kernel's files
BINARY = (".hsaco", ".cubin")

# Values that must never leave the machine: tokens of Hugging Face, and variables that are named as secrets.
SECRET = re.compile(rb'\bhf_[A-Za-z0-9]{30,}|"[A-Z0-9_]*(API_KEY|_TOKEN|PASSWORD|SECRET)"\s*:\s*"[^"]{8,}"')
OVERLAP = 200  # bytes that two chunks share, so that a secret across their border is seen


class Taken(msgspec.Struct, frozen=True):
    """Copies of cache files, by their paths below the cache key."""

    copies: dict[str, Path]
    left_out: int  # files of known kinds that belong to something incomplete


def take(key: int, place: str, tiers: tuple[str, ...], cu: int, stage: Path) -> Taken:
    """Copy the files of these tiers from an open folder of one cache key, `place` in its image, to `stage`.

    Verdicts are those of `cu` compute units (0: of any). Kernels come without Triton's intermediate forms. Raises
    SeedUnsafe for a file that holds a secret, InputError for one that changes meanwhile.
    """
    copies: dict[str, Path] = {}
    for path, source in cachedir.files(key):
        kind = seedtiers.kind(path)
        if kind is None or kind.tier not in tiers or (cu and seedtiers.cu(path) not in {0, cu}):
            continue
        copies[path] = stage / str(len(copies))
        _copy(source, copies[path], path)
    whole = _whole(copies, place)
    return Taken(dict(sorted(whole.items())), len(copies) - len(whole))


def listed(taken: Mapping[str, Path]) -> tuple[File, ...]:
    """The list of these files, in order, with their sizes and digests."""
    found = []
    for path, copy in sorted(taken.items()):
        with copy.open("rb") as data:
            found.append(File(path, copy.stat().st_size, hashlib.file_digest(data, "sha256").hexdigest()))
    return tuple(found)


def entries(paths: Mapping[str, Path]) -> int:
    """How many things of their own these files are: kernels, verdicts, compiled models, other artefacts."""
    kinds = [(path, seedtiers.kind(path)) for path in paths]
    return len({kind.entry or path for path, kind in kinds if kind})


def formats(paths: Mapping[str, Path]) -> list[str]:
    """The kinds of caches in MCV's words."""
    ahead = any("/torch_aot_compile/" in path for path in paths)
    binary = any("/artifact_compile_range_" in path for path in paths)
    triton = any(path.startswith("triton/") for path in paths)
    return [name for name, there in (("aot_compile", ahead), ("binary", binary), ("triton", triton)) if there]


def _copy(source: int, copy: Path, path: str) -> None:
    before, tail, size = os.fstat(source), b"", 0
    with copy.open("wb") as sink:
        while data := os.read(source, CHUNK):
            if SECRET.search(tail + data):
                raise SeedUnsafe(f"{path} holds what looks like a secret", hint="remove it from the cache, start again")
            sink.write(data)
            size += len(data)
            tail = data[-OVERLAP:]
    after = os.fstat(source)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != after.st_size:
        raise InputError(f"{path} changes while it is read", hint="stop what uses the cache, then again")


def _whole(copies: Mapping[str, Path], place: str) -> dict[str, Path]:
    """These files, less what is incomplete; the lists of kernels' files name what is in the seed alone."""
    by_entry: defaultdict[str, list[str]] = defaultdict(list)
    whole = {}
    for path in copies:
        kind = seedtiers.kind(path)
        if kind and kind.entry:
            by_entry[kind.entry].append(path)
        else:
            whole[path] = copies[path]
    for entry, paths in by_entry.items():
        kept = _kernel(entry, paths, copies, place) if entry.startswith("triton/") else _complete(paths)
        whole |= {path: copies[path] for path in kept}
    return whole


def _complete(paths: list[str]) -> list[str]:
    """All files of an entry that has its index."""
    return paths if any(kind.index for kind in map(seedtiers.kind, paths) if kind) else []


def _kernel(entry: str, paths: list[str], copies: Mapping[str, Path], place: str) -> list[str]:
    """The files of one folder of Triton's cache: complete kernels, and libraries, which have no list."""
    kept: set[str] = set()
    grouped: set[str] = set()
    for group in (path for path in paths if path.startswith(f"{entry}/{GROUP}")):
        children = _children(copies[group])
        grouped |= {group} | {f"{entry}/{child}" for child in children}
        dropped = tuple(f".{ending}" for ending in seedtiers.table().kernels.dropped)
        names = sorted(child for child in children if not child.endswith(dropped))
        needed = [f"{entry}/{name}" for name in names]
        if not any(name.endswith(BINARY) for name in names) or not all(path in copies for path in needed):
            continue
        # As on the volume of the image, so that Triton finds them there without our help, too.
        paths_inside = {name: f"{place}/{entry}/{name}" for name in names}
        copies[group].write_text(json.dumps({"child_paths": paths_inside}), encoding="utf-8")
        kept |= {group, *needed}
    kept |= {path for path in paths if path.endswith(".so") and path not in grouped}
    return sorted(kept)


def _children(group: Path) -> list[str]:
    """Names of the files in Triton's list of a kernel's; empty for a damaged one."""
    try:
        paths = json.loads(group.read_bytes())["child_paths"]
        return [str(name) for name in paths if "/" not in name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
