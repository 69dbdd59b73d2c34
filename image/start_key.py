"""The folder of one cache key: its directories, who uses it, and whose CPU code lies in it.

Every start holds `in-use` by flock, shared, for as long as its command lives: the command inherits the descriptor. So
nobody removes a key that is in use, and who could hold it alone knows that all locks in it are left over.

Any UID may have put anything there, and this may be root: no link is followed, no pipe waited for.
"""

import errno
import fcntl
import json
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HOLD, HOST, STARTS = "in-use", "host.json", "starts"
SCHEMA = 1
CPUINFO = Path("/proc/cpuinfo")
TRIES = 500  # of 20 ms: somebody else removed the key just then, or has it alone until he has made it ready
LIMIT = 1_000_000  # bytes of a file that is read; this script's own have some hundred
QUIET = 3600.0  # seconds; a compiler writes nothing for minutes, not for an hour

# Default ACL rwx for all (acl(5): tag, rights, id): folders that a program makes below are as open as the cache's own,
# whatever its umask is. Else a second UID could write into the cache's directory but into nothing that the first made.
OPEN = b"\x02\0\0\0" + b"".join(tag.to_bytes(2, "little") + b"\x07\0" + b"\xff" * 4 for tag in (0x01, 0x04, 0x20))


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file that is no link. Raises OSError, at once for a pipe."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Linux refuses O_CREAT for another user's file in a folder like ours (fs.protected_regular).
        fd = os.open(path, flags & ~os.O_CREAT)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        fd = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_small(path: Path) -> bytes:
    """What is in a file. Raises OSError, also for one of more than LIMIT bytes."""
    with open(opened(path), "rb") as file:
        if len(told := file.read(LIMIT + 1)) > LIMIT:
            raise OSError(errno.EFBIG, "too large", str(path))
    return told


def overwrite(path: Path, text: str) -> None:
    """Put the text in place of what is in a file. Raises OSError, also for a file that has another name elsewhere."""
    with open(opened(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        if os.fstat(file.fileno()).st_nlink != 1:
            raise OSError(errno.EMLINK, "a link to another file", str(path))
        file.truncate()
        file.write(text.encode())


def inside(key: Path, file: Path) -> bool:
    """Whether the folders between the key and a file are the key's own, none a link."""
    return os.path.realpath(file.parent) == os.path.join(os.path.realpath(key), file.parent.relative_to(key))


def make(path: Path, mode: int = 0o1777) -> None:
    """Make a directory that any UID can use. Raises OSError, also for one that is there and can't be written."""
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(20, "not a directory", str(path)) from None
        if not os.access(path, os.W_OK | os.X_OK):
            readonly = os.statvfs(path).f_flag & os.ST_RDONLY
            raise PermissionError(30, "read-only file system" if readonly else "permission denied", str(path)) from None
        return
    with suppress(OSError):  # a file system without ACLs
        os.setxattr(path, "system.posix_acl_default", OPEN)


def make_all(key: Path, parts: list[str]) -> None:
    """Make the key's folder and the directories `parts` below it. Raises OSError."""
    make_parents(key.parent)
    make(key)
    make(key / STARTS, 0o777)
    for part in parts:
        make_parents((key / part).parent)
        make(key / part)


def make_parents(path: Path) -> None:
    """Make a folder and those above it; one that is there may be read-only."""
    if not path.is_dir():
        make_parents(path.parent)
        make(path)


def hold(key: Path) -> tuple[int, bool]:
    """Hold the key: the descriptor, and whether nobody else holds it. (-1, False) where that can't be told."""
    for _ in range(TRIES):
        fd = -1
        try:
            fd = opened(key / HOLD, os.O_RDONLY | os.O_CREAT)
            alone = locked(fd, fcntl.LOCK_EX)
            if (alone or locked(fd, fcntl.LOCK_SH)) and os.fstat(fd).st_ino == os.stat(key / HOLD).st_ino:
                return fd, alone
        except OSError:
            if fd >= 0:
                os.close(fd)
            return -1, False  # a file system without flock; or this is no file
        os.close(fd)
        time.sleep(0.02)
    return -1, False


def share(fd: int) -> None:
    """Let others hold the key too, and pass it on to the command."""
    if fd >= 0:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.set_inheritable(fd, True)


def locked(fd: int, kind: int) -> bool:
    """Take a flock without waiting; whether it could be had. Raises OSError where there is no flock."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def clear_locks(key: Path, locks: list[str], batons: list[str], alone: bool, network: bool) -> None:
    """Remove what killed processes left: `locks` held by flock, and `batons`, which hold by being there.

    Held alone, no process of this image's key lives, so all are left over; but one that was started past this script
    still has its flock. A network file system may not pass flock on: there, and beside others, a baton counts as left
    over when nothing in its folder has changed for an hour.
    """
    for pattern in locks if alone and not network else []:
        for file in own_files(key, pattern):
            with suppress(OSError):
                fd = opened(file)
                try:
                    if locked(fd, fcntl.LOCK_EX):
                        os.unlink(file)
                finally:
                    os.close(fd)
    for pattern in batons:
        for file in own_files(key, pattern):
            with suppress(OSError):
                if (alone and not network) or time.time() - last_change(file) > QUIET:
                    os.unlink(file)


def open_up(key: Path, private: list[str]) -> None:
    """Let other users read what this one stored."""
    for pattern in private:
        for file in own_files(key, pattern):
            with suppress(OSError), open(opened(file), "rb") as stored:  # another user's
                told = os.fstat(stored.fileno())
                if not told.st_mode & 0o004 and told.st_nlink == 1:
                    os.fchmod(stored.fileno(), 0o644)


def own_files(key: Path, pattern: str) -> list[Path]:
    """Files of the key by a pattern, none behind a link to another folder."""
    return [file for file in key.glob(pattern) if inside(key, file)]


def last_change(baton: Path) -> float:
    """When something in a baton's folder, or in the folders of that, changed last; in seconds since 1970."""
    files = [baton.parent, *baton.parent.glob("*"), *baton.parent.glob("*/*")]
    return max(file.lstat().st_mtime for file in files)


def cpu_flags(names: str) -> list[str]:
    """This processor's flags that begin like one of `names`; empty when they can't be read."""
    with suppress(OSError, ValueError), open(CPUINFO, encoding="utf-8") as lines:
        for line in lines:
            kind, _, flags = line.partition(":")
            if kind.strip() in ("flags", "Features"):
                return sorted({flag for flag in flags.split() if re.match(names, flag)})
    return []


def read_host(key: Path) -> dict[str, Any] | None:
    """host.json: what the key was used on; empty when there is none, None for one that can't be read."""
    try:
        told = json.loads(read_small(key / HOST))
        if told["schema"] == SCHEMA and all(isinstance(flag, str) for flag in told["cpu"]):
            return dict(told)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def foreign(host: dict[str, Any] | None, flags: list[str]) -> str:
    """Why CPU code of the key must not be run here; empty when it may."""
    if host is None:
        return f"{HOST} is damaged, so nobody knows for which processor it was compiled"
    lacking = sorted(set(host.get("cpu", ())) - set(flags))
    if not flags or not lacking:
        return ""  # made for less, or just as much, as this processor has
    return f"it was compiled for a processor with {', '.join(lacking[:3])}{' …' if lacking[3:] else ''}"


def set_aside(key: Path, parts: list[str]) -> None:
    """Rename directories of the key that have something in them, and make them anew; all of them or, raising, none."""
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    moved: list[tuple[Path, Path]] = []
    try:
        for path in [key / part for part in parts]:
            if any(path.iterdir()):
                moved.append((path.rename(f"{path}.aside-{when}"), path))
                make(path)
    except OSError:
        for aside, path in moved:
            with suppress(OSError):
                aside.rename(path)  # in place of the empty one
        raise


def write_host(key: Path, host: dict[str, Any], flags: list[str], gpus: list[dict[str, Any]]) -> None:
    """Note in host.json what the key is used on from now on; its time is that of the last use."""
    cards = [{"arch": gpu["arch"], "cu": gpu["cu"]} for gpu in gpus]
    told = {"schema": SCHEMA, "cpu": sorted({*host.get("cpu", ()), *flags}), "gpus": cards}
    file = key / HOST
    with suppress(OSError):
        if {name: host.get(name) for name in told} == told:
            os.utime(file, follow_symlinks=False)
            return
        text = json.dumps(told, indent=1) + "\n"
        aside = file.with_name(f".{HOST}.{os.urandom(8).hex()}")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w") as made:
                made.write(text)
            aside.replace(file)
        except OSError as problem:
            with suppress(OSError):
                aside.unlink()
            if isinstance(problem, PermissionError):  # another user's, in a folder where only the owner renames
                overwrite(file, text)
