"""What the user sees while something runs: steps with seconds, and one JSON object a line with --json.

Everything for people goes to stderr, so that stdout holds only what a verb returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TICK = 0.2  # seconds between two updates of the live line: fast enough to look alive, slow enough to cost nothing
SILENCE = 15.0  # seconds without a line after which a step tells what it is at, where there is no live line


class _Settings:
    """How to show progress; set once by the command line."""

    json = False
    quiet = False
    debug = False


settings = _Settings()


def configure(*, json: bool = False, quiet: bool = False, debug: bool = False) -> None:
    """Choose the form of progress for this process."""
    settings.json, settings.quiet, settings.debug = json, quiet, debug


def event(kind: str, **fields: Any) -> None:
    """With --json: one object on stdout. Otherwise nothing."""
    if settings.json:
        print(json.dumps({"event": kind, **fields}), flush=True)


def info(text: str) -> None:
    """A line for people, unless -q."""
    event("info", text=text)
    if not settings.quiet:
        _print(text)


def warn(text: str) -> None:
    """A warning: shown even with -q."""
    event("warning", text=text)
    prefix = "::warning::" if _in_github() else "warning: "
    _print(f"{prefix}{text}")


def debug(text: str) -> None:
    """A line shown only with --debug."""
    if settings.debug:
        _print(text)


def error(message: str, hint: str = "", code: int = 1) -> None:
    """The one line of a failure, and its hint below."""
    event("error", message=message, hint=hint, code=code)
    _print(f"{'::error::' if _in_github() else 'error: '}{message}")
    if hint:
        _print(f"  hint: {hint}")


class Step:
    """The running step; `note` shows what it is at."""

    def __init__(self, title: str, *, live: bool) -> None:
        self.title, self.live = title, live
        self.started = self._printed = time.monotonic()
        self.detail = ""

    def note(self, detail: str) -> None:
        """Show `detail` behind the step's title until the next note; without a terminal as a line, now and then."""
        self.detail = detail
        now = time.monotonic()
        if not self.live and not settings.quiet and detail and now - self._printed >= SILENCE:
            self._printed = now
            _print(f"  {self.seconds:.0f} s  {_printable(detail)}")

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.started


_running: list[Step] = []  # steps can run in several threads at once; one line shows them all
_lock = threading.Lock()


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Announce a step, keep it visibly alive, and close it with its seconds.

    On a terminal: one line that counts seconds. In CI: a fold group. With --json: begin and end events.
    """
    live = sys.stderr.isatty() and not (settings.quiet or settings.debug or settings.json)
    current = Step(title, live=live)
    event("step", title=title, state="begin")
    if live:
        with _lock:
            _running.append(current)
            if len(_running) == 1:
                threading.Thread(target=_tick, daemon=True).start()
    elif _in_github() and not settings.quiet:
        _print(f"::group::{title}")
    elif not settings.quiet:
        _print(f"• {title}")
    state = "failed"
    try:
        yield current
        state = "done"
    finally:
        if live:
            with _lock:
                _running.remove(current)
                sys.stderr.write("\r\033[K")
        if not settings.quiet:
            _print(f"{'✓' if state == 'done' else '✗'} {title}  {current.seconds:.1f} s")
        if _in_github() and not live and not settings.quiet:
            _print("::endgroup::")
        event("step", title=title, state=state, seconds=round(current.seconds, 3))


def _tick() -> None:
    """Show the running steps on one line until there is none."""
    while True:
        with _lock:
            if not _running:
                return
            shown = "  ".join(f"· {s.title}  {s.seconds:.0f} s  {s.detail}" for s in _running)
            sys.stderr.write("\r\033[K" + _printable(shown)[: _columns() - 1])
            sys.stderr.flush()
        time.sleep(TICK)


def _columns() -> int:
    """Width of the terminal; some report 0 when they don't know."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _printable(text: str) -> str:
    """A tool's line without what would move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def _print(text: str) -> None:
    clear = "\r\033[K" if _running else ""  # the live line, which is drawn again
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: no reason to fail
        print(f"{clear}{text}", file=sys.stderr, flush=True)


def _in_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"
