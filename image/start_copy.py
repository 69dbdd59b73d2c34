"""Caches in a place of this start's own, for a volume that can't be written: it reads those, what it makes is lost."""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import start_key  # type: ignore[import-not-found] # beside this file

SMALL = 1 << 20  # a larger file is linked to: nothing changes one in place, and a copy in /tmp may take up memory


def copy(key: Path, parts: list[str], *, full: bool = True) -> Path | None:
    """A private folder with the key's caches in it, empty ones unless `full`; None when there is no room for it."""
    where = None
    try:
        where = Path(tempfile.mkdtemp(prefix="warmstart-"))
        own = where / key.name
        start_key.make_all(own, parts)
        for name in [start_key.HOST, *parts] if full else []:
            take(key / name, own / name)
    except BaseException as problem:  # Ctrl-C as well
        if where:
            with suppress(RecursionError):
                shutil.rmtree(where, ignore_errors=True)
        if isinstance(problem, (OSError, RecursionError)):  # shutil.Error is an OSError
            return None
        raise
    return own


def take(source: Path, target: Path) -> None:
    """Copy a file or a tree, without what is neither a folder nor a regular file; large files as links."""

    def one(old: str, new: str) -> str:
        if os.stat(old).st_size < SMALL:
            return str(shutil.copyfile(old, new))
        os.symlink(old, new)
        return new

    if not os.path.lexists(source) or left_out(str(source.parent), [source.name]):
        return
    if source.is_dir():
        shutil.copytree(source, target, copy_function=one, dirs_exist_ok=True, ignore=left_out)
    else:
        one(str(source), str(target))


def left_out(folder: str, names: list[str]) -> list[str]:
    """Of `names`, those that this user can't read, links, pipes and devices."""
    return [name for name in names if not usable(os.path.join(folder, name))]


def usable(path: str) -> bool:
    """Whether it is a folder or a regular file, not by a link, and this user can read it."""
    mode = os.lstat(path).st_mode
    return (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) and os.access(path, os.R_OK)


def point(old: Path, new: Path) -> None:
    """Change every path at or below `old` in the environment to the same one below `new`, in lists of paths too."""
    for name, value in os.environ.items():
        words = [f"{new}{word[len(str(old)) :]}" if below(word, old) else word for word in value.split(":")]
        if words != value.split(":"):
            os.environ[name] = ":".join(words)


def below(path: str, folder: Path) -> bool:
    """Whether a path is that folder or lies in it."""
    return path == str(folder) or path.startswith(f"{folder}/")


def room() -> float:
    """Bytes that are free where copies are made."""
    disk = os.statvfs(tempfile.gettempdir())
    return float(disk.f_bavail * disk.f_frsize)
