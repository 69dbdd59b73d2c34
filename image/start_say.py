"""What the start script tells: lines on stderr, because stdout belongs to the command."""

import os
import sys
from contextlib import suppress


def say(text: str) -> None:
    """One line."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    try:
        if sys.stderr is not None:  # print would take stdout
            print(f"warmstart: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # full, closed, or a pipe that nobody reads
        sys.stderr = None  # what is left in it would change the exit code to 120


def fill_closed() -> None:
    """Open /dev/null for what of stdin, stdout and stderr is closed, before another file gets its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
