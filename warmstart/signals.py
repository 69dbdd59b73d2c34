"""Ctrl-C and SIGTERM: passed on to every running command, then raised in the main thread as our own errors.

Each command leads a process group of its own (`run.py`), so a terminal's Ctrl-C reaches it only through us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from warmstart import early
from warmstart.errors import Interrupted, Terminated

# Leaders of the groups that run now, each with the signal that we got and passed on to it (0: none).
_live: dict[int, int] = {}

# Threads that are about to start a command, and the signal that waits until they have.
_starting: set[int] = set()
_waiting: list[int] = []


def catch() -> None:
    """From now on SIGINT and SIGTERM stop all commands, of whichever thread, and raise in the main thread.

    Raised are Interrupted or Terminated. A second signal kills what the first could not stop.
    """
    for number in early.TOLD:
        signal.signal(number, _stop)


@contextlib.contextmanager
def starting() -> Iterator[Callable[[int], None]]:
    """Holds signals back while a command starts, and gives the function to tell its group to.

    Without it a signal could come when the process is there but not yet known, and so could not be stopped.
    """
    me = threading.get_ident()
    _starting.add(me)
    try:
        yield lambda group: _live.__setitem__(group, 0)
    finally:
        _starting.discard(me)
        if _waiting and not _starting:
            os.kill(os.getpid(), _waiting.pop())


def ended(group: int) -> None:
    """Forget a command that is gone."""
    _live.pop(group, None)


def passed_on(group: int) -> int:
    """The signal that was passed on to a group, or 0."""
    return _live.get(group, 0)


def send(group: int, number: int) -> None:
    """Send a signal to a whole process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end(group: int, seconds: float) -> None:
    """Let what is left of a group finish for some seconds, then kill it."""
    until = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.02)
    send(group, signal.SIGKILL)


def error(number: int) -> Interrupted | Terminated:
    """What a signal is as an error."""
    kind = Interrupted if number == signal.SIGINT else Terminated
    return kind(early.TOLD[number], hint=early.HINT)


def tied() -> Callable[[], None]:
    """A function for a child to call: the kernel then sends it SIGTERM when we die, however we die."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    set_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h

    def tie() -> None:
        prctl(set_death_signal, int(signal.SIGTERM), 0, 0, 0)

    return tie


def _stop(number: int, _frame: FrameType | None) -> None:
    if _starting:
        _waiting[:] = [number]
        return
    # SIGINT for both: it is what tools clean up after.
    for group, before in list(_live.items()):
        _live[group] = number
        send(group, signal.SIGKILL if before else signal.SIGINT)
    raise error(number)
