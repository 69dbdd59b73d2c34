"""The folder of caches on the host: read and written without ever following a link in it.

Containers write to it, so whatever lies there may be a trap for a host's root: each step down is opened as a folder
and nothing else, and files are put in place by name inside of an opened folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from warmstart import run
from warmstart.errors import Busy, InputError, NothingToSeed
from warmstart.probe import Capabilities, environment

# Folders are usable by any UID, as the image's entry point makes them: a cache's own with the sticky bit, those below
# without, so that any container can replace a damaged entry. The default ACL (acl(5): tag, rights, id) is rwx for all
# and makes what programs add below as open, whatever their umask is.
MODE, BELOW = 0o1777, 0o777
OPEN = b"\x02\0\0\0" + b"".join(tag.to_bytes(2, "little") + b"\x07\0" + b"\xff" * 4 for tag in (0x01, 0x04, 0x20))
FILE = 0o644
SHARED = 0o666  # host.json: a start by another user notes there what it adds
HOLD = "in-use"  # held by flock while a start uses the key: nobody removes the key then
PATIENCE = 10.0  # seconds to wait for whoever removes a key
KEY = r"(cpu|gfx[0-9a-f]+)-[0-9a-f]{12}"  # names the folder of one image's caches
STAGE = ".seed-"  # begins the name of the folder that files wait in
SMALL = 1 << 20  # bytes: far above what host.json has
NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FOLDER = os.O_RDONLY | os.O_DIRECTORY | NO_LINK

# A volume's files can belong to other users of the container's user namespace.
RIGHTS = "as the user who runs the containers; without root: podman unshare .venv/bin/python build.py seed …"


def locate(caps: Capabilities, place: str, *, make: bool = False) -> Path:
    """The folder of `place`: a folder if there is a "/" in it or it is one of dots, else a volume's of that name.

    With `make` it is made; a dry run tells where podman would. Raises NothingToSeed when it isn't there.
    """
    if "/" in place or set(place) == {"."}:
        folder = Path(place).expanduser().absolute()
        if make and not run.recorder.on:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as bad:
                raise InputError(f"{folder} can't be made: {bad.strerror}", hint=RIGHTS) from None
        elif not make and not folder.is_dir():
            raise NothingToSeed(f"there is no folder {folder}", hint="name a volume, or a folder of caches")
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", place):
        raise InputError(f"{place!r} is neither a folder nor the name of a volume", hint="./name is a folder")
    told = _mountpoint(caps, place)
    if not told and make:
        run.run(["podman", "volume", "create", place], env=environment(caps))
        told = f"{caps.storage}/volumes/{place}/_data" if run.recorder.on else _mountpoint(caps, place)
    if not told:
        hint = f"--from another one, or serve something first: podman run -v {place}:/cache …"
        raise NothingToSeed(f"there is no volume {place}", hint=hint)
    return Path(told)


def make_open(top: Path) -> None:
    """Let any UID add caches of its image to a folder or volume that was never used."""
    with opened(top) as folder:
        if not os.listdir(folder):
            os.fchmod(folder, MODE)


def _mountpoint(caps: Capabilities, volume: str) -> str:
    words = ["podman", "volume", "inspect", "--format", "{{.Mountpoint}}", volume]
    told = run.run(words, env=environment(caps), ok=(0, 1, 125), always=True)
    return "" if told.code else told.stdout.strip()


@contextlib.contextmanager
def opened(top: Path | int, *parts: str, make: bool = False) -> Iterator[int]:
    """A folder below `top` (itself taken as it is), as an open descriptor; no part of `parts` may be a link.

    With `make` what is missing is made, usable by any UID. Raises InputError for a link or what may not be opened,
    FileNotFoundError.
    """
    descriptor = os.dup(top) if isinstance(top, int) else os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts):
            if make:
                _make(descriptor, part, BELOW if depth else MODE)
            below = os.open(part, FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    except OSError as bad:
        if bad.errno in {errno.ELOOP, errno.ENOTDIR}:
            told = f"{'/'.join(parts)} in the cache is a link or no folder"
            raise InputError(told, hint="remove it: a cache has none") from None
        if bad.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise InputError(f"the cache can't be used: {bad.strerror} ({bad.filename})", hint=RIGHTS) from None
        raise
    finally:
        os.close(descriptor)


def _make(folder: int, name: str, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
        made = os.open(name, FOLDER, dir_fd=folder)
        try:
            os.fchmod(made, mode)  # mkdir's own mode is cut by the umask
            with contextlib.suppress(OSError):  # a file system without ACLs
                os.setxattr(made, "system.posix_acl_default", OPEN)
        finally:
            os.close(made)


def keys(top: Path) -> list[str]:
    """The cache keys that lie in a folder of caches."""
    names = os.listdir(top) if top.is_dir() else []
    return sorted(name for name in names if re.fullmatch(KEY, name))


def files(top: int) -> Iterator[tuple[str, int]]:
    """Every regular file below an open folder: its path from there, and an open descriptor of it."""
    for folder, folders, names, here in os.fwalk(".", dir_fd=top, follow_symlinks=False, onerror=_failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            try:
                descriptor = os.open(name, os.O_RDONLY | NO_LINK, dir_fd=here)
            except OSError as bad:
                if bad.errno in {errno.ELOOP, errno.ENOENT, errno.ENXIO}:
                    continue  # a link, gone meanwhile, or a socket
                raise InputError(f"{name} in the cache can't be read: {bad.strerror}", hint=RIGHTS) from None
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    yield os.path.normpath(os.path.join(folder, name)), descriptor
            finally:
                os.close(descriptor)


def _failed(problem: OSError) -> None:
    if problem.errno != errno.ENOENT:
        raise InputError(f"the cache can't be read: {problem.strerror}", hint=RIGHTS)


@contextlib.contextmanager
def held(key: int) -> Iterator[None]:
    """Keep the starts of other images from removing a key; where that can't be told, nothing.

    Raises Busy when somebody has the key to himself for longer than a removal takes.
    """
    descriptor = -1
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(HOLD, os.O_RDONLY | os.O_CREAT | NO_LINK, 0o666, dir_fd=key)
            _share(descriptor)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _share(descriptor: int) -> None:
    latest = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= latest:
                told = f"somebody keeps the cache to himself: {HOLD} in it has been locked for {PATIENCE:.0f} s"
                raise Busy(told, hint="a start that removes old caches does for a moment; see lslocks") from None
        time.sleep(0.1)


@contextlib.contextmanager
def staged(key: int) -> Iterator[int]:
    """A folder inside an open one for files that wait to be put in place; gone afterwards.

    Those that broken-off runs left are removed first: nobody holds them any more.
    """
    for old in os.listdir(key):
        if old.startswith(STAGE):
            _remove_left(key, old)
    name = f"{STAGE}{secrets.token_hex(6)}"
    os.mkdir(name, 0o700, dir_fd=key)
    try:
        with opened(key, name) as stage:
            fcntl.flock(stage, fcntl.LOCK_EX)
            yield stage
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=key)


def _remove_left(key: int, name: str) -> None:
    with contextlib.suppress(OSError, InputError), opened(key, name) as left:
        fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(name, ignore_errors=True, dir_fd=key)


def create(folder: int, name: str, mode: int = FILE) -> IO[bytes]:
    """A new file in an open folder, for writing."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600, dir_fd=folder)
    os.fchmod(descriptor, mode)
    return os.fdopen(descriptor, "wb")


def names(folder: int) -> list[str]:
    """The names in an open folder, in order."""
    return sorted(os.listdir(folder))


def content(folder: int, name: str, most: int = SMALL) -> bytes:
    """The first `most` bytes of a file in an open folder; empty when it isn't there or is no file."""
    try:
        descriptor = os.open(name, os.O_RDONLY | NO_LINK, dir_fd=folder)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as data:
        return data.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def exists(folder: int, path: str) -> bool:
    """Whether a regular file is there below an open folder."""
    try:
        with opened(folder, *path.split("/")[:-1]) as parent:
            found = os.stat(path.rpartition("/")[2], dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode)


def put(stage: int, name: str, key: int, path: str, *, replace: bool) -> bool:
    """Move a waiting file to its place in one step; without `replace` one that is there stays. True when it moved."""
    parts: Sequence[str] = path.split("/")
    with opened(key, *parts[:-1], make=True) as parent:
        if not replace:
            try:
                os.link(name, parts[-1], src_dir_fd=stage, dst_dir_fd=parent, follow_symlinks=False)
                return True
            except FileExistsError:
                return False
            except OSError as bad:
                if bad.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}:
                    raise
                # A file system without hard links.
                if exists(parent, parts[-1]):
                    return False
        os.rename(name, parts[-1], src_dir_fd=stage, dst_dir_fd=parent)
        return True
