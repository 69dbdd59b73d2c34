"""The cache volume: what kind of file system it is, how much room it has, and caches of other images on it."""

import fnmatch
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import start_key  # type: ignore[import-not-found] # beside this file
from start_say import say  # type: ignore[import-not-found]

MOUNTS = Path("/proc/self/mountinfo")
KEY = re.compile(r"(cpu|gfx[0-9a-f]+)-[0-9a-f]{12}")
SIZE = "size"  # bytes of a key, noted while nobody used it
GONE = ".gone-"  # what is being removed


class Old(NamedTuple):
    """A folder that may be removed: one set aside comes before a key, and what was used last comes last."""

    is_key: bool
    used: float
    size: int
    path: Path


def filesystem(path: Path) -> str:
    """The type of the file system that `path` lies on, as in mountinfo(5); empty when that can't be told."""
    found = (0, "")
    with suppress(OSError, ValueError):
        for line in MOUNTS.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])
            if str(path) == place or str(path).startswith(place.rstrip("/") + "/"):
                found = max(found, (len(place), after.split(" ")[0]))
    return found[1]


def network(path: Path, types: list[str], local: list[str]) -> str:
    """The type of the file system of `path` if it is one over a network, else empty."""
    kind = filesystem(path)
    shared = any(fnmatch.fnmatchcase(kind, name) for name in types)
    return kind if shared and kind not in local else ""


def free(path: Path) -> float:
    """Bytes that this user can still write to the file system of `path`; 0 when it can hold no more files."""
    with suppress(OSError):
        disk = os.statvfs(path)
        return 0.0 if disk.f_files and not disk.f_favail else float(disk.f_bavail * disk.f_frsize)
    return float("inf")


def prune(root: Path, own: Path, bound: float, enough: Callable[[], bool] = lambda: False) -> None:
    """Remove caches that other images left until they take at most `bound` bytes, or until there is `enough` room.

    What is in use stays, however large.
    """
    for left in root.glob(f"{GONE}*"):
        delete(left)
    old = sorted(candidates(root, own))
    taken, kept = sum(one.size for one in old), 0
    for one in old:
        if taken <= bound or enough():
            return
        if remove(root, one):
            taken -= one.size
            say(f"removed {one.path.name}, unused for {age(one.used)}: {one.size / 1e9:.1f} GB")
        else:
            kept += one.size
    if taken > bound and kept and not enough():
        say(f"caches of other images take {taken / 1e9:.1f} GB: they are in use, or another user's")


def candidates(root: Path, own: Path) -> list[Old]:
    """Keys but the own one, and what was set aside in any."""
    found = []
    with suppress(OSError):
        for key in (path for path in root.iterdir() if KEY.fullmatch(path.name) and is_folder(path)):
            for aside in filter(is_folder, key.glob("*.aside-*")):
                found.append(Old(False, aside.stat().st_mtime, measure(aside), aside))
            if key != own:
                found.append(Old(True, last_use(key), size(key), key))
    return found


def before(root: Path, own: Path, part: str) -> list[Path]:
    """The folders `part` of keys of the same arch other than the own one, the last used first."""
    keys = [path for path in root.glob(f"{own.name.partition('-')[0]}-*") if path != own and KEY.fullmatch(path.name)]
    keys = [key for key in keys if is_folder(key) and is_folder(key / part) and start_key.inside(key, key / part)]
    return [key / part for key in sorted(keys, key=last_use, reverse=True)]


def is_folder(path: Path) -> bool:
    """Whether it is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def last_use(key: Path) -> float:
    """When a key was used last, in seconds since 1970; those of images without host.json by their folder."""
    for path in (key / start_key.HOST, key):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def size(key: Path) -> int:
    """Bytes of a key without what was set aside in it, from its note unless it was used since."""
    note = key / SIZE
    with suppress(OSError, ValueError):
        if note.stat().st_mtime > last_use(key):
            return int(start_key.read_small(note))
    total = measure(key)
    fd = unused(key)
    if fd >= 0:
        with suppress(OSError):
            start_key.overwrite(note, str(total))
        os.close(fd)
    return total


def measure(top: Path) -> int:
    """Bytes on the disk of all files below a folder, without what was set aside in it."""
    total = 0
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if ".aside-" not in name]
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def unused(key: Path) -> int:
    """A descriptor that holds the key alone; -1 when somebody uses it, or that can't be told."""
    fd, alone = start_key.hold(key)
    if fd >= 0 and not alone:
        os.close(fd)
    return fd if alone else -1


def remove(root: Path, one: Old) -> bool:
    """Remove a folder that nobody uses; whether it is gone. Renamed first, so that no start finds half of it."""
    fd = unused(one.path) if one.is_key else -1
    if one.is_key and fd < 0:
        return False
    gone = root / f"{GONE}{one.path.name}-{os.getpid()}"
    try:
        one.path.rename(gone)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    delete(gone)
    return True


def delete(tree: Path) -> None:
    """Delete a tree, as far as this user may."""
    import shutil  # which costs as much as all else that a usual start imports

    with suppress(RecursionError):
        shutil.rmtree(tree, ignore_errors=True)


def age(when: float) -> str:
    """How long ago that was, in words."""
    hours = max(0.0, time.time() - when) / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours"
