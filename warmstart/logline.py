"""One line of vLLM's log: what it means, when it was written, by whom. The texts are data: phases.toml."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

DAY = 86_400.0  # seconds
ZONE = 900.0  # seconds: every time zone is a multiple of a quarter of an hour away from UTC
LOOK = 600  # characters of a line searched for stamp and process: a progress bar may come before them

# Where times come from: stamps of the container engine, stamps of vLLM, our own clock, or durations alone.
Source = Literal["prefix", "log", "wall", "reported"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_STAMP = re.compile(r"(?:\d\d-\d\d[T ]|\b[IWEF]\d{4} )(\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_SERVICE = r"(?:[\w.-]+ +\| +)?"  # docker compose
_ZONED = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_OUTER = re.compile(rf"{_SERVICE}{_ZONED}(?!\S)(?! - )")  # "stamp - name - level" is a logger's own format
_PROCESS = re.compile(r"\(([A-Za-z][\w.-]*)(?: [a-z]+=[\w.]+)* pid=\d+[^)]*\)")
_RANK = re.compile(r"[_-]?[A-Z]{0,4}\d+")
_WHO = r"(?:.*?\([A-Za-z][^()]* pid=\d+[^)]*\) *)?"
_HEAD = re.compile(rf"^{_WHO}(?:.*?[A-Z]+ [\d-]+ [\d:.,]+ \[[\w./-]+:\d+\] )?")
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)")  # the last line of a traceback
_HOLES = {
    "seconds": r"(?P<seconds>\d+(?:\.\d+)?)",
    "count": r"(?P<count>\d[\d,]*)",
    "version": r"(?P<version>\d[^\s,)]*)",
    "name": r"(?P<name>[^\s\],]+)",
    "label": r"(?P<label>[^:]*)",
    "*": r".*?",
}


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text to be found in a line; phases.toml explains the fields."""

    text: str
    edge: Literal["start", "begin", "in", "end", "ready", "note", "failure"]
    phase: str = ""
    then: str = ""
    count: str = ""
    after: str = ""
    since: str = ""
    until: str = ""
    cause: bool = False
    hint: str = ""

    @property
    def label(self) -> str:
        """The text before the duration: the name of the figure."""
        return re.sub(r"\s*\{.*?\}\s*", " ", self.text.split("{seconds}")[0]).strip(" :(,")


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A phase: its name in records, its title in tables, and what it is."""

    name: str
    title: str
    what: str


class Formats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """phases.toml."""

    phase: tuple[Kind, ...]
    marker: tuple[Marker, ...]


@cache
def formats() -> Formats:
    """The data of phases.toml, checked."""
    text = Path(__file__).with_name("phases.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Formats)


def titles() -> dict[str, str]:
    """The title of each phase, by its name."""
    return {kind.name: kind.title for kind in formats().phase}


def pattern(text: str) -> tuple[str, re.Pattern[str]]:
    """The longest literal part of a text, for a quick test before the pattern is tried, and the pattern."""
    parts = re.split(r"\{(seconds|count|version|name|label|\*)\}", text.removeprefix("^"))
    built = "".join(_HOLES[part] if number % 2 else re.escape(part) for number, part in enumerate(parts))
    return max(parts[::2], key=len), re.compile(rf"\A{built}" if text[0] == "^" else built)


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str], Marker], ...]:
    return tuple((*pattern(marker.text), marker) for marker in formats().marker)


def matches(line: str) -> list[tuple[Marker, dict[str, str]]]:
    """The markers that a plain line holds, each with what stands in its placeholders."""
    return [
        (marker, match.groupdict())
        for key, regex, marker in _patterns()
        if key in line and (match := regex.search(body(line) if marker.text[0] == "^" else line))
    ]


def plain(line: str) -> str:
    """The line without colours, and one of vLLM's JSON log in the form of its text log."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return _from_json(line) if '{"asctime"' in line else line


def _from_json(line: str) -> str:
    head, key, rest = line.partition('{"asctime"')
    try:
        told = msgspec.json.decode(key + rest, type=dict[str, str | int | float | None])
    except msgspec.DecodeError:  # cut off
        return line
    name = told.get("vllm_process_name") or told.get("processName")
    who = f"({name} pid={told.get('process')}) {told.get('levelname')}"
    return f"{head}{who} {told['asctime']} [{told.get('name')}:0] {told.get('message')}"


def process(line: str) -> str:
    """The name of the process that wrote the line, such as `Worker_TP0`; empty where the line doesn't say."""
    found = _PROCESS.search(line, 0, LOOK) if "pid=" in line else None
    return found[1] if found else ""


def role(name: str) -> str:
    """What peers have in common: Worker_TP0_EP1 → Worker, EngineCore_DP0 → EngineCore."""
    return _RANK.sub("", name)


def body(line: str) -> str:
    """The line without process, level, stamp and source file, at most 300 characters."""
    return _HEAD.sub("", line).strip()[:300]


def raised(line: str) -> str:
    """What a traceback's last line says; empty for other lines."""
    text = body(line) if "Error" in line or "Exception" in line else ""
    return text if _RAISED.match(text) else ""


class Clock:
    """The time of each line, in seconds after the reader's zero: its stamp, else when it was read, else that
    of the line before. Of a stamp only the time of day counts, the nearest one: neither the year that vLLM
    leaves out nor the zone matters then."""

    def __init__(self, started: float | None) -> None:
        self.source: Source = "reported"
        self.at = 0.0
        self.sure = True  # whether this line's time is known, or taken from the line before
        self._started = started
        self._stamp: tuple[float, float] | None = None  # the last stamp: its time of day, and its time here
        self._shift: float | None = None  # what to add to `now` to have the time here

    def tick(self, line: str, now: float | None) -> None:
        """Sets `at` and `sure` for a plain line; `now` is when it was read, seconds since 1970, if known."""
        outer = _OUTER.match(line)
        found = _STAMP.search(line, outer.end() if outer and self.source == "log" else 0, LOOK)
        if self.source == "prefix" and not outer:
            found = None  # the stamps inside may be of another zone
        at = self._stamped(found, outer is not None, now) if found else None
        if now is not None:
            at = self._live(at, now, fine=bool(found and found[4]))
        self.sure = at is not None
        self.at = self.at if at is None else at

    def _stamped(self, found: re.Match[str], outer: bool, now: float | None) -> float:
        day = int(found[1]) * 3600 + int(found[2]) * 60 + float(f"{found[3]}.{found[4] or 0}")
        if self._stamp:
            at = self._stamp[1] + (day - self._stamp[0] + DAY / 2) % DAY - DAY / 2
        elif now is not None and self._shift is not None:
            at = now + self._shift
        else:
            at = max(self.at, self._lead(day, now))
        if not self._stamp:
            self.source = "prefix" if outer else "log"
        self._stamp = (day, at)
        return at

    def _lead(self, day: float, now: float | None) -> float:
        """The seconds between the process's start and its first stamp, of which only the zone is unknown."""
        if self._started is None:
            return 0.0
        lead = (day - self._started) % ZONE
        return lead if now is None or lead < now - self._started + 1 else now - self._started

    def _live(self, at: float | None, now: float, fine: bool) -> float:
        """A line is read after it was written: the largest difference of stamp and `now` is the truest. It
        gives a stamp of whole seconds its fraction, and a line without a stamp its time."""
        if self._shift is None:
            if at is None:
                self.source = "wall"
                at = self.at if self._started is None else now - self._started
            self._shift = at - now
            return at
        if at is None:
            return max(self.at, now + self._shift)
        self._shift = max(self._shift, at - now)
        return at if fine else min(now + self._shift, at + 0.999)

    def read(self, now: float) -> float:
        """The time here at a moment (seconds since 1970) at which nothing was written, maybe not yet anything."""
        shift = self._shift
        if shift is None and self._started is not None:
            shift = -self._started
        return self.at if shift is None else max(self.at, now + shift)
