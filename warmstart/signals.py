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

# A signal that comes just before the main thread falls asleep, or that another thread gets, doesn't wake it: Python
# only notes it. So one that means nothing follows, some times: NUDGE is ignored by whoever doesn't ask for it.
NUDGE = signal.SIGURG
NUDGES, BETWEEN = 5, 0.1  # how often, and the seconds before each

# Leaders of the groups that run now, each with the signal that we got and passed on to it (0: none).
_live: dict[int, int] = {}

# Threads that are about to start a command, each with the signal that came meanwhile (0: none).
_starting: dict[int, int] = {}

# For changes to both. _stop, which can interrupt any of them in the main thread and itself, needs it too.
_change = threading.RLock()


def catch() -> None:
    """From now on SIGINT and SIGTERM stop all commands, of whichever thread, and raise in the main thread.

    Raised are Interrupted or Terminated. A second signal kills what the first could not stop.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)  # Python asks for it
    threading.Thread(target=_nudge, args=(ours,), name="nudge", daemon=True).start()
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(NUDGE, lambda *_: None)
    for number in early.TOLD:
        signal.signal(number, _stop)


@contextlib.contextmanager
def starting() -> Iterator[Callable[[int], None]]:
    """Holds signals back while a command starts, and gives the function to tell its group to.

    Without it a signal could come when the process is there but not yet known, and so could not be stopped.
    """
    me = threading.get_ident()
    main = me == threading.main_thread().ident
    groups: list[int] = []
    with _change:
        _starting[me] = 0
    try:
        yield groups.append
    finally:
        with _change:
            _live.update(dict.fromkeys(groups, 0 if main else _starting[me]))
            number = _starting.pop(me)
        if number and main:
            _stop(number, None)
        for group in groups if number else ():
            send(group, signal.SIGINT)


def ended(group: int) -> None:
    """Forget a command that is gone."""
    with _change:
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


def _nudge(pipe: int) -> None:
    """See that the main thread hears of each signal. `pipe` has a byte for each that came, its number."""
    main = threading.main_thread().ident
    while came := os.read(pipe, 64):
        for _ in range(NUDGES if set(came) - {NUDGE} else 0):
            time.sleep(BETWEEN)
            signal.pthread_kill(main, NUDGE)  # type: ignore[arg-type]


def _stop(number: int, _frame: FrameType | None) -> None:
    me = threading.get_ident()  # the main thread: Python runs handlers nowhere else
    if me in _starting:
        _starting[me] = number
        return
    with _change:
        # A thread that is starting a command passes the signal on by itself. Were we to wait for that and to be
        # woken by another signal, it could come just before we sleep again, and nothing would end that sleep.
        _starting.update(dict.fromkeys(_starting, number))
        groups = dict(_live)
        _live.update(dict.fromkeys(groups, number))
    # SIGINT for both: it is what tools clean up after.
    for group, before in groups.items():
        send(group, signal.SIGKILL if before else signal.SIGINT)
    raise error(number)
