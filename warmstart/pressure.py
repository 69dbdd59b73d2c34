"""What a running engine does to the machine's memory: ok, warn, or stop before the machine stalls.

A pure state machine over readings. Whoever runs the engine calls `watch` every few seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from warmstart.gpus import Gpu, Memory, gib
from warmstart.limits import Watch

Level = Literal["ok", "warn", "stop"]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the machine, in bytes."""

    at: float  # seconds of a clock that only goes forward
    available: int
    swap_used: int
    gtt_used: int  # of cards only: where GTT is the engine's own memory its growth says nothing


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen so far."""

    level: Level
    reason: str  # what is wrong, with figures; empty when nothing is
    first: Reading  # what growth is counted from
    warned_since: float | None = None  # since when a limit is passed; None: none is
    stop_since: float | None = None
    calm_since: float | None = None


def reading(at: float, memory: Memory, devices: tuple[Gpu, ...]) -> Reading:
    """A reading of an engine on `devices`."""
    leaked = sum(gpu.gtt_used for gpu in devices if not gpu.uses_gtt)
    return Reading(at=at, available=memory.available, swap_used=memory.swap_used, gtt_used=leaked)


def watch(before: State | None, now: Reading, limits: Watch) -> State:
    """The state after one more reading; without one before it, the first. "stop" is final."""
    if before is None:
        before = State(level="ok", reason="", first=now)
    if before.level == "stop" or now.available <= 0 < before.first.available:
        return before  # stopped, or this reading failed
    stop, warn = _passed(before.first, now, limits, stop=True), _passed(before.first, now, limits, stop=False)
    stop_since = (before.stop_since if before.stop_since is not None else now.at) if stop else None
    warned_since = (before.warned_since if before.warned_since is not None else now.at) if warn else None
    calm_since = None if warn else (before.calm_since if before.calm_since is not None else now.at)
    level: Level = before.level
    reason = before.reason
    if now.available and now.available < limits.least_available:
        level, reason = "stop", _available(now)
    elif stop_since is not None and now.at - stop_since >= limits.stop_seconds:
        level, reason = "stop", f"{stop}, for {now.at - stop_since:.0f} s"
    elif warned_since is not None and now.at - warned_since >= limits.warn_seconds:
        level, reason = "warn", warn
    elif calm_since is not None and now.at - calm_since >= limits.calm_seconds:
        level, reason = "ok", ""
    return State(
        level=level,
        reason=reason,
        first=before.first,
        warned_since=warned_since,
        stop_since=stop_since,
        calm_since=calm_since,
    )


def _passed(first: Reading, now: Reading, limits: Watch, *, stop: bool) -> str:
    """The first limit that is passed, in words; empty for none."""
    available = limits.stop_available if stop else limits.warn_available
    swap = limits.stop_swap if stop else limits.warn_swap
    gtt = limits.stop_gtt if stop else limits.warn_gtt
    if 0 < now.available < available:
        return _available(now)
    if now.swap_used - first.swap_used > swap:
        return f"{gib(now.swap_used - first.swap_used)} went to swap since the engine started"
    if now.gtt_used - first.gtt_used > gtt:
        return (
            f"the engine's memory leaks from the card into the machine's: {gib(now.gtt_used - first.gtt_used)} of GTT"
        )
    return ""


def _available(now: Reading) -> str:
    return f"only {gib(now.available)} of memory is available"
