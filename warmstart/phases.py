"""vLLM's start log as named phases with seconds. Which line means what is data: phases.toml.

`read` takes a saved log, `Reader` a live one. A start lasts from the process's start if that is known, else
from the first line, until the server answers. Borders, each set by a line, divide it, so that the phases add
up to it. Of several workers that write the same line the last sets the border: the slowest is the critical
path. The durations that vLLM reports place the borders that no line marks, and stand in the details.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from warmstart import logline
from warmstart.errors import InputError
from warmstart.logline import Marker

BAR = 24  # characters of a full bar in the table

Compile = Literal["cold", "warm", "eager", "unknown"]


class Figure(msgspec.Struct, frozen=True):
    """A duration in seconds that vLLM reported, and the process that did."""

    name: str
    seconds: float
    process: str


class Phase(msgspec.Struct, frozen=True):
    """A named part of one start. `start` and `end` are seconds after the start's begin; a phase that was
    entered more than once has fewer `seconds` than lie between them."""

    name: str
    seconds: float
    start: float
    end: float
    detail: tuple[Figure, ...] = ()


class StartRecord(msgspec.Struct, frozen=True):
    """One start of vLLM. The seconds of its phases add up to `seconds`."""

    version: str
    phases: tuple[Phase, ...]  # in the order in which they began
    seconds: float  # until the server answered, or until the last line of a start that didn't get there
    ready: bool
    reached: str  # the last phase that began
    error: str = ""  # what a failed start said, the cause if it named one; empty when it died without a word
    hint: str = ""
    compile: Compile = "unknown"
    counters: dict[str, int] = {}
    jit_kernels: tuple[str, ...] = ()  # compiled while serving: a warm image has none
    clock: logline.Source = "reported"
    restarts: int = 0  # earlier starts in the same log


class Event(msgspec.Struct, frozen=True):
    """What a line told: `at` is seconds after the start's begin, `seconds` the length of what ended."""

    kind: Literal["begin", "end", "note", "ready", "failed", "restart"]
    phase: str
    at: float
    seconds: float = 0.0
    text: str = ""


class _Border(msgspec.Struct):
    """Where a phase begins. One that isn't `sure` was set by a line without a time of its own."""

    phase: str
    at: float
    sure: bool


class Reader:
    """Reads a log as it grows. `started`: when the process began, in seconds since 1970, if known."""

    def __init__(self, started: float | None = None) -> None:
        self.marked = 0  # lines that said something
        self._clock = logline.Clock(started)
        self._restarts = 0
        self._tail = ""
        self._begin(0.0)

    def _begin(self, zero: float) -> None:
        self._zero = zero
        self._borders = [_Border(logline.formats().phase[0].name, zero, True)]
        self._figures: list[tuple[str, Figure]] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._kernels: dict[str, None] = {}
        self._nth: Counter[tuple[str, str]] = Counter()
        self._shared: dict[tuple[str, str, int], list[tuple[_Border, bool]]] = {}
        self._version = self._banner = self._error = self._hint = self._raised = ""
        self._cause = False
        self._ready: float | None = None

    @property
    def phase(self) -> str:
        """The phase that runs now."""
        return self._borders[-1].phase

    def write(self, text: str, now: float | None = None) -> list[Event]:
        """Takes any piece of the log; a line that hasn't ended is held back. `now` as for `feed`."""
        *lines, self._tail = (self._tail + text).split("\n")
        return [event for line in lines for event in self.feed(line, now)]

    def feed(self, line: str, now: float | None = None) -> list[Event]:
        """Takes a line. `now`, in seconds since 1970: when it was read, for a log that is followed live."""
        return [event for part in line.split("\r") if part.strip() for event in self._line(part, now)]

    def _line(self, line: str, now: float | None) -> list[Event]:
        line = logline.plain(line)
        self._clock.tick(line, now)
        if self._clock.sure:  # what was set without a time of its own can't be later than this line
            for border in itertools.takewhile(lambda border: not border.sure, reversed(self._borders)):
                border.at = min(border.at, self._clock.at)
        process = logline.process(line)
        self._raised = self._raised or logline.raised(line)
        hits = logline.matches(line)
        return [event for marker, found in hits for event in self._mark(marker, found, process, line)]

    def _mark(self, marker: Marker, found: dict[str, str], process: str, line: str) -> list[Event]:
        self.marked += 1
        if marker.edge == "failure":
            return self._fail(marker, line)
        events = []
        if marker.edge == "start":
            if self._over(process):
                self._restarts += 1
                self._begin(self._clock.at)
                events.append(Event("restart", self.phase, 0.0))
            self._banner = process or "?"
        if self._ready is not None and marker.phase:  # a running server's lines are no part of its start
            return events
        self._version = found.get("version", self._version)
        self._count(marker, found, process)
        seconds = float(found["seconds"]) if "seconds" in found else None
        events += self._move(marker, seconds, process)
        if seconds is not None:
            self._figures.append((marker.phase, Figure(marker.label, seconds, process)))
            events.append(Event("note", marker.phase, self._clock.at - self._zero, seconds, marker.label))
        return events

    def _over(self, process: str) -> bool:
        """Whether a banner begins another start than the one that was read so far."""
        late = self.phase not in ("import", "compile")  # compile: aiter may build a module before the banner
        return bool(self._ready is not None or self._error or late or self._banner == (process or "?"))

    def _count(self, marker: Marker, found: dict[str, str], process: str) -> None:
        if "name" in found and not marker.phase:
            self._kernels[found["name"]] = None
        if marker.count:
            key = (marker.count, found.get("label", process))
            told = found.get("count", "").replace(",", "")
            self._counts[key] = int(told) if told else self._counts.get(key, 0) + 1

    def _move(self, marker: Marker, seconds: float | None, process: str) -> list[Event]:
        """Sets the borders that a line tells, or moves those that a peer set with the same line."""
        if not self._clock.sure and seconds is not None and marker.edge != "note":  # so much has passed
            self._clock.at = max(self._clock.at, self._since(marker) + seconds)
        now, early = self._clock.at, self._clock.at - (seconds or 0.0)
        self._nth[marker.text, process] += 1
        key = (marker.text, logline.role(process), self._nth[marker.text, process])
        if key in self._shared:
            for border, begun in self._shared[key]:
                border.at = max(border.at, early if begun else now)
            return []
        first, made = len(self._borders) - 1, self._shared.setdefault(key, [])
        if marker.edge in ("in", "end"):
            if self.phase != marker.phase and (marker.edge == "in" or seconds is not None):
                made += self._border(marker.phase, early, begun=True)
            elif self.phase == marker.phase and seconds is not None and not self._borders[-1].sure:
                self._borders[-1].at = max(self._borders[-2].at, early)
        if marker.edge == "end" and self.phase == marker.phase:
            made += self._border(self._borders[-2].phase if marker.then == "back" else marker.then, now)
        elif marker.edge == "begin":
            made += self._border(marker.phase, now)
        elif marker.edge == "ready":
            self._ready = now
        return self._told(first)

    def _since(self, marker: Marker) -> float:
        """From when a line's duration runs, for a line without a time of its own."""
        ends = [new.at for old, new in itertools.pairwise(self._borders) if old.phase == marker.after]
        return ends[-1] if ends else self._borders[-1].at if self.phase == marker.phase else self._clock.at

    def _border(self, phase: str, at: float, *, begun: bool = False) -> list[tuple[_Border, bool]]:
        if phase == self.phase:
            return []
        self._borders.append(_Border(phase, max(at, self._borders[-1].at), self._clock.sure))
        return [(self._borders[-1], begun)]

    def _told(self, first: int) -> list[Event]:
        """The events of all borders after number `first`."""
        events = []
        for old, new in itertools.pairwise(self._borders[first:]):
            events.append(Event("end", old.phase, new.at - self._zero, new.at - old.at))
            events.append(Event("begin", new.phase, new.at - self._zero))
        if self._ready is not None:
            total = self._ready - self._zero
            events.append(Event("end", self.phase, total, self._ready - self._borders[-1].at))
            events.append(Event("ready", self.phase, total, total))
        return events

    def _fail(self, marker: Marker, line: str) -> list[Event]:
        if self._ready is not None:
            return []
        first, at = not self._error, self._clock.at - self._zero
        if first or (marker.cause and not self._cause):
            self._error, self._hint, self._cause = logline.body(line), marker.hint, marker.cause
        return [Event("failed", self.phase, at, text=self._error)] if first else []

    def record(self, now: float | None = None) -> StartRecord:
        """What the log told so far. With `now`, in seconds since 1970, the running phase lasts until then."""
        last = self._clock.at if now is None else self._clock.read(now)
        end = max(self._zero, last if self._ready is None else self._ready)
        marks = list(itertools.accumulate((min(border.at, end) for border in self._borders), max))
        spans: dict[str, list[tuple[float, float]]] = {}
        for border, span in zip(self._borders, itertools.pairwise([*marks, end]), strict=True):
            spans.setdefault(border.phase, []).append(span)
        phases = []
        for name, parts in spans.items():
            detail = tuple(figure for phase, figure in self._figures if phase == name)
            seconds = sum(stop - start for start, stop in parts)
            phases.append(Phase(name, seconds, parts[0][0] - self._zero, parts[-1][1] - self._zero, detail))
        ready, counters = self._ready is not None, self._counters()
        return StartRecord(
            version=self._version,
            phases=tuple(phases),
            seconds=end - self._zero,
            ready=ready,
            reached=self.phase,
            error="" if ready else (not self._cause and self._raised) or self._error,
            hint="" if ready else self._hint,
            compile=_compile(counters),
            counters=counters,
            jit_kernels=tuple(self._kernels),
            clock=self._clock.source,
            restarts=self._restarts,
        )

    def _counters(self) -> dict[str, int]:
        """Workers count the same work: the largest is meant. Counts with labels are parts: their sum is."""
        labelled = {marker.count for marker in logline.formats().marker if "{label}" in marker.text}
        told: dict[str, int] = {}
        for (name, _), value in sorted(self._counts.items()):
            told[name] = told.get(name, 0) + value if name in labelled else max(told.get(name, 0), value)
        return told


def _compile(counters: dict[str, int]) -> Compile:
    loaded = counters.get("graphs_from_cache") or counters.get("aot_loaded")
    if counters.get("graphs_compiled") or (counters.get("aot_saved") and not loaded):
        return "cold"
    return "warm" if loaded else "eager" if counters.get("eager") else "unknown"


def read(lines: Iterable[str], started: float | None = None) -> StartRecord:
    """The last start in a saved log; `started` as for Reader. Raises InputError when no line is vLLM's."""
    reader = Reader(started)
    for line in lines:
        reader.feed(line)
    if not reader.marked:
        raise InputError("no line of vLLM's start log is in there", hint="give the log of `vllm serve`")
    return reader.record()


def read_file(path: Path) -> StartRecord:
    """The last start in a log file. Raises InputError when it can't be read or isn't vLLM's log."""
    try:
        return read(path.read_text(encoding="utf-8", errors="replace").split("\n"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="give a saved log of `vllm serve`") from error


def table(record: StartRecord) -> str:
    """For people: a line for each phase with its seconds, its share and a bar; then what was counted."""
    titles = logline.titles()
    lines = [f"vLLM {record.version or 'of unknown version'}, seconds by {record.clock} clock"]
    for phase in record.phases:
        share = phase.seconds / (record.seconds or 1.0)
        bar = "█" * round(share * BAR)
        lines.append(f"{titles[phase.name]:<17}{phase.seconds:9.1f}{share:7.0%}  {bar}".rstrip())
    where = "ready" if record.ready else f"not ready: the log ends in {titles[record.reached]}"
    lines.append(f"{'total':<17}{record.seconds:9.1f}         {where}")
    if record.error:
        lines += [f"error: {record.error}", *([f"  ({record.hint})"] if record.hint else [])]
    counted = (f"{name} {value:,}" for name, value in record.counters.items())
    lines.append(", ".join([f"compile {record.compile}", *counted]))
    if record.jit_kernels:
        lines.append(f"compiled while serving: {', '.join(record.jit_kernels)}")
    return "\n".join(lines)
