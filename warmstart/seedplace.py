"""Putting the files of a seed into a cache: all of them checked first, then moved in one by one, index files last.

What a cache already has stays. A run that is broken off leaves waiting files in a folder of its own, which the next
one removes, and at most whole entries in their places; so it can be repeated.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from warmstart import cachedir, host, seedlayout, seedtiers, unpack
from warmstart.errors import SeedUnsafe
from warmstart.seedlayout import Image
from warmstart.unpack import Content, File

RECORDS = "seeds"  # the folder of lists of what was put in place, one a seed, below the cache key
HOST = "host.json"  # the entry point's: for which processor the cache's machine code is


class Placed(msgspec.Struct, frozen=True):
    """What a pull did: numbers of files."""

    files: int
    placed: int  # the others were there
    bytes: int  # of those that were placed


@contextmanager
def cache(top: Path, key: str, *, make: bool = False) -> Iterator[int]:
    """The open folder of a cache key, which nobody removes meanwhile. Raises InputError, FileNotFoundError."""
    with cachedir.opened(top, key, make=make) as folder, cachedir.held(folder):
        yield folder


def there(top: Path, image: Image) -> Placed | None:
    """What an earlier pull of that very seed put in place, if all of it is still there, else None."""
    try:
        with cache(top, image.facts.cache_key) as key:
            with cachedir.opened(key, RECORDS) as records:
                told = cachedir.content(records, _record(image), seedtiers.table().limits.manifest)
            content = msgspec.json.decode(told, type=Content)
            unpack.check(content.files, image.facts.tiers)
            if not any(True for _ in order(key, content.files)):
                return Placed(len(content.files), 0, 0)
    except (FileNotFoundError, msgspec.MsgspecError, SeedUnsafe):  # none, or one that somebody changed
        pass
    return None


def place(top: Path, layout: Path, image: Image) -> Placed:
    """Unpack the seed in a layout beside its place, check all of it, then move in what is not there yet.

    Raises SeedDamaged, SeedUnsafe, DiskFull, InputError; then nothing has been put in place.
    """
    cachedir.make_open(top)
    host.need_disk(top, image.expected.bytes, "unpacking the seed")
    with (
        seedlayout.layer(layout, image) as layer,
        cache(top, image.facts.cache_key, make=True) as key,
        cachedir.staged(key) as stage,
    ):

        def waiting(number: int) -> IO[bytes]:
            return cachedir.create(stage, str(number))

        content = unpack.unpack(layer, image.expected, waiting)
        _processor(key, stage, image.facts.cpu)
        waits = list(order(key, content.files))
        moved = [file for number, file, replace in waits if _move(stage, number, key, file, replace)]
        _note(key, stage, image, content)
    return Placed(len(content.files), len(moved), sum(file.size for file in moved))


def order(key: int, files: tuple[File, ...]) -> Iterator[tuple[int, File, bool]]:
    """The files to be moved, by number, index files last, and whether each replaces one that is there.

    An entry that has all of its index files is complete and left as it is. In one that lacks one, what a broken-off
    compilation left is replaced, so that nothing in it comes from two hands. A file of its own that is there stays.
    """
    last: list[tuple[int, File, bool]] = []
    groups: defaultdict[str, list[tuple[int, File, bool]]] = defaultdict(list)
    for number, file in enumerate(files):
        kind = seedtiers.kind(file.path)
        assert kind  # unpack has checked it
        groups[kind.entry].append((number, file, kind.index))
    for entry, members in groups.items():
        index = [file for _, file, is_index in members if is_index]
        if index and all(cachedir.exists(key, file.path) for file in index):
            continue
        replace = bool(entry and index)
        for number, file, is_index in members:
            if is_index:
                last.append((number, file, replace))
            elif replace or not cachedir.exists(key, file.path):
                yield number, file, replace
    yield from last


def _move(stage: int, number: int, key: int, file: File, replace: bool) -> bool:
    return cachedir.put(stage, str(number), key, file.path, replace=replace)


def _processor(key: int, stage: int, cpu: str) -> None:
    """Add to host.json what the seed's machine code needs: a start on another processor then sets it aside."""
    if not cpu:
        return
    told = cachedir.content(key, HOST)
    try:
        known: dict[str, Any] = json.loads(told) if told else {"schema": 1, "cpu": [], "gpus": []}
        known["cpu"] = sorted(set(known["cpu"]) | set(cpu.split(",")))
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # a damaged one makes the next start set all machine code aside
    _write(stage, HOST, json.dumps(known, indent=1) + "\n", cachedir.SHARED)
    cachedir.put(stage, HOST, key, HOST, replace=True)


def _note(key: int, stage: int, image: Image, content: Content) -> None:
    """Keep the list of what was put in place: the same seed again is nothing to do."""
    name = _record(image)
    _write(stage, name, msgspec.json.encode(content, order="sorted").decode())
    cachedir.put(stage, name, key, f"{RECORDS}/{name}", replace=True)


def _write(stage: int, name: str, text: str, mode: int = cachedir.FILE) -> None:
    with cachedir.create(stage, name, mode) as sink:
        sink.write(text.encode())


def _record(image: Image) -> str:
    return f"{image.digest.removeprefix('sha256:')}.json"
