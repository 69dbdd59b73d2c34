"""The containers of presets, by one cheap look at podman's list: those of leases, and those that no lease names.

`status` has no time for more: it imports nothing of what starts a container.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from warmstart import hints, lease, run
from warmstart.errors import UsageError
from warmstart.lease import Lease
from warmstart.names import PRESET


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's list says of the container of a preset."""

    preset: str
    name: str
    id: str
    pid: int  # of its first process; 0 when it doesn't run
    code: int  # exit code of one that ended
    started: float  # seconds since 1970; when it was made, for one that never ran


class _Row(msgspec.Struct):
    """podman's names for that."""

    Id: str
    Names: list[str]
    Labels: dict[str, str]
    Pid: int
    ExitCode: int
    StartedAt: int  # negative for one that never ran
    Created: int


class _Engine(msgspec.Struct):
    """Of what probe.py found, that which podman needs to be told."""

    conf: str = ""
    variable: str = ""


class _Proven(msgspec.Struct):
    """What probe.py keeps."""

    capabilities: _Engine


def listed(state: Path) -> tuple[Listed, ...] | None:
    """All containers that were started from a preset, whoever did it; None when podman can't be asked.

    An engine that was never used here isn't asked: it would have to be put to the proof first.
    """
    try:
        kept = msgspec.json.decode((state / "engine.json").read_bytes(), type=_Proven).capabilities
        env = {kept.variable: kept.conf} if kept.conf else {}
        told = run.glance(["podman", "ps", "--all", f"--filter=label={PRESET}", "--format=json"], env=env)
        return None if told is None else read(told)
    except (OSError, msgspec.MsgspecError):
        return None


def read(text: str) -> tuple[Listed, ...]:
    """The list as podman writes it. Raises msgspec.MsgspecError."""
    return tuple(
        Listed(
            preset=one.Labels[PRESET],
            name=one.Names[0],
            id=one.Id,
            pid=one.Pid,
            code=one.ExitCode,
            started=float(one.StartedAt if one.StartedAt > 0 else one.Created),
        )
        for one in msgspec.json.decode(text or "[]", type=list[_Row] | None) or ()
    )


def without_lease(found: Sequence[Listed], leases: Sequence[Lease]) -> list[Listed]:
    """Those that no lease names."""
    named = {one.container for one in leases}
    return [one for one in found if one.name not in named]


def stray(state: Path, place: Path, name: str = "") -> Listed | None:
    """The container of a preset that no lease names: that of a start that failed, or of somebody else.

    Without a name the only one, and only where there is no lease at all. Raises UsageError when there are several.
    """
    leases = lease.read(place)
    if leases and not name:
        return None
    found = [one for one in without_lease(listed(state) or (), leases) if name in ("", one.preset)]
    if len(found) > 1 and not name:
        names = hints.presets(list(dict.fromkeys(one.preset for one in found)))
        raise UsageError("there are several containers", hint=f"name one: {names}")
    ours = [one for one in found if one.name == lease.container_name(one.preset)]
    return next(iter(ours or found), None)
