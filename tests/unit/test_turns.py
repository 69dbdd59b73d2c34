"""Whose turn it is to have a kernel compiled."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
PATIENCE = 30.0  # seconds for a thread to get somewhere, on a machine under load


class Kernel(threading.Thread):
    """Somebody who wants a kernel; compiles it until told to end."""

    def __init__(self, turns: Any, key: str, urgent: bool, here: bool = False) -> None:
        super().__init__(daemon=True)
        self.turns, self.key, self.urgent, self.here = turns, key, urgent, here
        self.began, self.end, self.mine = threading.Event(), threading.Event(), None
        self.start()

    def run(self) -> None:
        with self.turns.turn(self.key, self.urgent, self.here) as self.mine:
            self.began.set()
            if self.mine:
                self.end.wait(PATIENCE)

    def finish(self) -> bool:
        self.end.set()
        self.join(PATIENCE)
        assert not self.is_alive()
        return bool(self.mine)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hook's file on a machine where two may be compiled at a time."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.setitem(sys.modules, "warmstart_compile", types.SimpleNamespace(compilers=lambda: 2))
    monkeypatch.delitem(sys.modules, "warmstart_turns", raising=False)
    yield importlib.import_module("warmstart_turns")
    sys.modules.pop("warmstart_turns", None)


def test_never_more_than_may_be(turns: Any) -> None:
    first, second = Kernel(turns, "a", True), Kernel(turns, "b", False)
    assert first.began.wait(PATIENCE)
    assert second.began.wait(PATIENCE)
    third = Kernel(turns, "c", True)
    assert not third.began.wait(0.1)
    assert first.finish()
    assert third.began.wait(PATIENCE)
    assert [second.finish(), third.finish()] == [True, True]
    assert (turns.working, turns.waiting) == (set(), 0)


def test_what_is_compiled_here_waits_for_its_own_alone(turns: Any) -> None:
    busy = [Kernel(turns, key, False) for key in "ab"]
    assert all(one.began.wait(PATIENCE) for one in busy)
    here, same = Kernel(turns, "c", False, here=True), Kernel(turns, "a", False, here=True)
    assert here.began.wait(PATIENCE)
    assert here.mine
    worker = Kernel(turns, "c", False)
    for one in (*busy, here):
        assert one.finish()
    assert [same.finish(), worker.finish()] == [False, False]
    assert turns.working == set()


def test_what_somebody_waits_for_comes_first(turns: Any) -> None:
    busy = [Kernel(turns, key, False) for key in "ab"]
    assert all(one.began.wait(PATIENCE) for one in busy)
    later = Kernel(turns, "later", False)
    urgent = [Kernel(turns, key, True) for key in ("now", "too")]
    until = time.monotonic() + PATIENCE
    while turns.waiting < len(urgent) and time.monotonic() < until:
        time.sleep(0.01)
    for one in busy:
        one.finish()
    assert all(one.began.wait(PATIENCE) for one in urgent)
    assert not later.began.is_set()
    for one in urgent:
        one.finish()
    assert later.began.wait(PATIENCE)
    assert later.finish()


def test_what_is_in_work_is_waited_for_and_not_compiled_again(turns: Any) -> None:
    first = Kernel(turns, "a", False)
    assert first.began.wait(PATIENCE)
    again = Kernel(turns, "a", True)
    until = time.monotonic() + PATIENCE
    while not turns.change._waiters and time.monotonic() < until:  # threads that wait for a change
        time.sleep(0.01)
    assert not again.began.wait(0.1)
    assert first.finish() is True
    assert again.finish() is False


def test_one_that_fails_leaves_its_place(turns: Any) -> None:
    with pytest.raises(OSError, match="the server has ended"), turns.turn("a", True):
        raise OSError("the server has ended")
    assert turns.working == set()


def test_a_forked_process_begins_anew(turns: Any) -> None:
    turns.working.add("of a thread that is not there")
    turns.forget()
    with turns.turn("of a thread that is not there", True) as mine:
        assert mine is True
