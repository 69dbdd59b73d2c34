"""What is wrong with an engine that ended, told by its log and its exit code. The data: diagnosis.toml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from warmstart import masking, toml

TAIL = 15  # lines of the log that are shown with a failure


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known failure; diagnosis.toml explains the fields."""

    name: str
    means: str
    remedy: str
    match: str = ""
    codes: tuple[int, ...] = ()
    line: str = ""


class Entries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """diagnosis.toml."""

    entry: tuple[Entry, ...]


class Diagnosis(msgspec.Struct, frozen=True):
    """Why an engine ended: in one line, what to do, and the line of the log that says so."""

    name: str
    means: str
    remedy: str
    line: str = ""


@cache
def entries() -> tuple[Entry, ...]:
    """The data of diagnosis.toml, checked."""
    return toml.read(Path(__file__).with_name("diagnosis.toml"), Entries).entry


def diagnose(lines: Sequence[str], code: int) -> Diagnosis | None:
    """The first entry that one of the lines fits, else one of the exit code; None for what is not known."""
    for entry in entries():
        if not entry.match:
            continue
        pattern = re.compile(entry.match, re.IGNORECASE)
        for line in lines:
            if found := pattern.search(line):
                told = entry.means.format_map({name: text or "?" for name, text in found.groupdict().items()})
                return Diagnosis(entry.name, told, entry.remedy, masking.text(line.strip())[:300])
    for entry in entries():
        if code in entry.codes:
            return Diagnosis(entry.name, entry.means, entry.remedy)
    return None


def tail(lines: Sequence[str], count: int = TAIL) -> str:
    """The last lines of a log as they may be shown."""
    return "\n".join(f"  | {masking.text(line.rstrip())}" for line in list(lines)[-count:])
