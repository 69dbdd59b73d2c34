"""What earlier starts took: the records of a preset by image and cache state, and the estimate that they give.

`.warmstart/starts/<preset>/<12 digits of the image>-<cold, warm, eager or unknown>.jsonl`, a start a line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from warmstart.logline import formats
from warmstart.phases import StartRecord

KEPT = 20  # records of one kind; older ones are dropped
PROFILE = "profile"
LATER = ("compile", "kv", "graphs", "ready")  # phases that may come after profiling


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start that came to its end, good or bad."""

    preset: str
    image: str  # its id
    began: float  # seconds since 1970
    wall: float  # seconds from the container's start until the server answered, by our own clock
    record: StartRecord


def add(state: Path, start: Start) -> Path:
    """Keep a start's record; returns its file."""
    file = _file(state, start.preset, start.image, start.record.compile)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [*_read(file), start][-KEPT:]
    part = file.with_suffix(".new")
    part.write_bytes(msgspec.json.Encoder().encode_lines(kept))
    part.replace(file)
    return file


def of(state: Path, preset: str, image: str = "", compile_state: str = "") -> tuple[Start, ...]:
    """The kept starts of a preset that became ready, the oldest first; of one image and cache state if given."""
    folder = state / "starts" / preset
    wanted = f"{_short(image) if image else '*'}-{compile_state or '*'}.jsonl"
    found = [start for file in folder.glob(wanted) for start in _read(file) if start.record.ready]
    return tuple(sorted(found, key=lambda start: start.began))


def expected(state: Path, preset: str, image: str) -> dict[str, float]:
    """The seconds that each phase of the next start will take: the medians of earlier starts of its cache state.

    The next start of an image that started before is warm, but for one that compiles nothing. Nobody knows it of a
    new image: its caches may be empty, or come from a seed. Empty where there is no such start to compare with.
    """
    before = of(state, preset, image)
    if not before:
        return {}
    last = before[-1].record.compile
    similar = of(state, preset, image, "warm" if last == "cold" else last)
    return typical([start.record for start in similar[-5:]])


def typical(records: Sequence[StartRecord]) -> dict[str, float]:
    """The median seconds of each phase; a phase that a start didn't have counts as 0 there."""
    found = [{phase.name: phase.seconds for phase in record.phases} for record in records]
    return {
        kind.name: statistics.median(one.get(kind.name, 0.0) for one in found)
        for kind in formats().phase
        if any(kind.name in one for one in found)
    }


def remaining(expectation: dict[str, float], now: StartRecord) -> float | None:
    """The seconds until a running start is ready, by phase: what is left of this one, and all that come after it.

    None without an expectation. A phase that takes longer than expected doesn't make the rest shorter.
    """
    if not expectation:
        return None
    passed = {phase.name: phase.seconds for phase in now.phases}
    order = [kind.name for kind in formats().phase]
    at = order.index(now.reached)

    def coming(name: str) -> bool:
        if name == now.reached:
            return True
        # vLLM profiles before it compiles, and goes back to it: from compiling, from KV, from graphs.
        if name == PROFILE or now.reached == PROFILE:
            return now.reached != order[-1] and (name == PROFILE or (name not in passed and name in LATER))
        return name not in passed and order.index(name) > at

    return sum(max(seconds - passed.get(name, 0.0), 0.0) for name, seconds in expectation.items() if coming(name))


def _file(state: Path, preset: str, image: str, compile_state: str) -> Path:
    return state / "starts" / preset / f"{_short(image)}-{compile_state}.jsonl"


def _short(image: str) -> str:
    return image.removeprefix("sha256:")[:12]


def _read(file: Path) -> list[Start]:
    """A file's records; lines of another version of warmstart are left out."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Start))
        except msgspec.MsgspecError:
            continue
    return found
