"""Unit tests start no process and open no socket: the interpreter's own audit events say when one tries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine is no failure

# Audit events that CPython raises before it does the thing, whichever module asks: `sh` forks in Python,
# subprocess in C. Names: "Audit events table" in the documentation of Python.
FORBIDDEN = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "socket.__new__",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "subprocess.Popen",
}

watched: list[str] | None = None  # the events of the running unit test; None outside of unit tests


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """The audit hook: fails the unit test that tries, also when it catches every Exception."""
    if watched is not None and event in FORBIDDEN:
        watched.append(event)
        pytest.fail(f"a unit test tried {event} {args}")


sys.addaudithook(refuse)  # for the life of the process: Python can't take a hook away


@pytest.fixture(autouse=True)
def not_by_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints name commands in the words of make when make runs: `make unit` must see what pytest alone sees."""
    monkeypatch.delenv("MAKELEVEL", raising=False)


@pytest.fixture(autouse=True)
def attempts() -> Iterator[list[str]]:
    """The forbidden events of this test. A test that provokes one on purpose clears the list."""
    global watched
    watched = []
    try:
        yield watched
        if watched:
            pytest.fail(f"a unit test tried {', '.join(watched)}, and the code under test hid it")
    finally:
        watched = None
