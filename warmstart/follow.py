"""An engine's log as it grows: the file that the container's output is written to, read again every so often.

The file is read instead of `podman logs --follow`: that costs nothing while nothing is written, survives a
restart of the container, and has the engine's stamp of each line.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

POLL = 0.2  # seconds between two looks: the live line shows whole seconds
CHUNK = 1 << 20  # bytes read at once

# A line of the k8s-file log driver: its time, the stream, F for a whole line or P for a piece of one, the text.
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP]) ?(.*)", re.DOTALL)


class Line(msgspec.Struct, frozen=True):
    """What the engine wrote: a line, and when its last piece was written, in seconds since 1970."""

    at: float
    text: str


class Tail:
    """Reads a log from its begin, then what comes. A file that was replaced or emptied is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wrote = 0.0  # when the engine last wrote something, be it a piece of a line; seconds since 1970
        self._at = 0
        self._inode = 0
        self._rest = b""
        self._pieces: dict[str, str] = {}

    def read(self) -> list[Line]:
        """The whole lines that were written since the last call. Empty when there is no file (yet)."""
        try:
            with self.path.open("rb") as file:
                self._same(os.fstat(file.fileno()))
                file.seek(self._at)
                found = []
                while piece := file.read(CHUNK):
                    self._at += len(piece)
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    found += [line for raw in lines if (line := self._line(raw.decode("utf-8", "replace")))]
                return found
        except FileNotFoundError:
            return []

    def _same(self, stat: os.stat_result) -> None:
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self._at, self._inode, self._rest, self._pieces = 0, stat.st_ino, b"", {}

    def _line(self, raw: str) -> Line | None:
        found = _LINE.fullmatch(raw)
        if not found:
            return None
        stamp, stream, kind, text = found.groups()
        at = self.wrote = datetime.fromisoformat(stamp).timestamp()
        whole = self._pieces.pop(stream, "") + text
        if kind == "P":
            self._pieces[stream] = whole
            return None
        return Line(at, whole)


def lines(path: Path, last: int = 0) -> list[str]:
    """The texts of a log's lines, or of its last ones."""
    return [line.text for line in Tail(path).read()][-last:]


def stream(path: Path, alive: Callable[[], bool]) -> Iterator[str]:
    """The texts of a log's lines from the first one on, until `alive` says that nothing more will come."""
    tail = Tail(path)
    while True:
        last = not alive()
        yield from (line.text for line in tail.read())
        if last:
            return
        time.sleep(POLL)
