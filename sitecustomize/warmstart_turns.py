"""Whose turn it is to have a kernel compiled: what somebody waits for comes before what may be needed later.

There are never more at the same time than warmstart_compile.compilers() allows at that moment, so that weights which
are loaded meanwhile have their memory, and none is compiled twice at the same time. Standard library only.
"""

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator

LIMIT = 300.0  # seconds for one kernel, then its caller compiles it itself

change = threading.Condition()
working: "set[str]" = set()  # keys of kernels that are compiled now
waiting = 0  # of those that are waited for


@contextlib.contextmanager
def turn(key: str, urgent: bool, here: bool = False) -> "Iterator[bool]":
    """Wait for the turn of the kernel with this key; True when it is to be compiled, False when somebody just did.

    What is compiled `here`, by the process that needs it and not by a worker, waits for none but its own.
    """
    global waiting
    with change:
        waiting += urgent
        try:
            change.wait_for(lambda: here or key in working or (room() and (urgent or not waiting)), LIMIT)
        finally:
            waiting -= urgent
            change.notify_all()
        mine = key not in working
        if mine:
            working.add(key)
        else:
            change.wait_for(lambda: key not in working, LIMIT)
    try:
        yield mine
    finally:
        if mine:
            with change:
                working.discard(key)
                change.notify_all()


def room() -> bool:
    """Whether one more may be compiled now."""
    return len(working) < int(importlib.import_module("warmstart_compile").compilers())


def forget() -> None:
    """In a forked process: its parent's threads are not there."""
    global change, waiting
    change, waiting = threading.Condition(), 0
    working.clear()


os.register_at_fork(after_in_child=forget)
