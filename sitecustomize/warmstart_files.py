"""Small files on the cache volume, where any UID may have put anything: no pipe is waited for. Standard library only.

Links are followed, because a private copy of a volume that can't be written links to the large files of it.
"""

import contextlib
import errno
import json
import os
import stat
from typing import Any, BinaryIO

LIMIT = 1_000_000  # bytes of a JSON file; those of Triton and the hooks have some thousand


def opened(path: str) -> BinaryIO:
    """A regular file, to be read; raises OSError, at once for a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(fd, "rb")


def read_json(path: str, limit: int = LIMIT) -> Any:
    """What a JSON file holds; None when it can't be read, or has more than `limit` bytes."""
    try:
        with opened(path) as file:
            text = file.read(limit + 1)
        return json.loads(text) if len(text) <= limit else None
    except (OSError, ValueError, RecursionError):
        return None


def make(folder: str) -> None:
    """Make a folder, open to any UID where the one above it is, as the entry point makes them; raises OSError."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    make(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        if os.stat(above).st_mode & 0o002:
            os.chmod(folder, 0o1777)


def put(path: str, data: bytes) -> None:
    """Write a file, whole at any moment and through no link; raises OSError."""
    folder, name = os.path.split(path)
    # Beside it, under a name that no other writer has, and at which nobody can have put a link.
    part = os.path.join(folder, f"{name[:100]}.tmp.{os.urandom(8).hex()}")
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
