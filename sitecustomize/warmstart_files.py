"""Small files on the cache volume, where any UID may have put anything: no pipe is waited for. Standard library only.

Links are followed, because a private copy of a volume that can't be written links to the large files of it.
"""

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


def read_json(path: str) -> Any:
    """What a JSON file holds; None when it can't be read, or has more than LIMIT bytes."""
    try:
        with opened(path) as file:
            text = file.read(LIMIT + 1)
        return json.loads(text) if len(text) <= LIMIT else None
    except (OSError, ValueError, RecursionError):
        return None


def put(path: str, text: str) -> None:
    """Write a file, whole at any moment and through no link; raises OSError."""
    part = f"{path}.{os.urandom(8).hex()}"  # a name that nobody can have put a link at
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        if os.path.lexists(part):
            os.unlink(part)
        raise
