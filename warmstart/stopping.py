"""An engine down: stopped, its memory seen to come back, its lease given back, and what `up` stopped started again."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from warmstart import boxes, container, gpus, hints, holders, lease, log, processes, run, runline
from warmstart.engine import Capabilities
from warmstart.errors import Interrupted, MemoryKept, NoEngine, Terminated
from warmstart.lease import Lease

LATE = 60  # seconds that a container may take to go, beyond its grace, before `status` looks for itself
SHORT = 10  # seconds that an engine gets to stop which isn't ready: nobody waits for an answer of it


def down(root: Path, state: Path, caps: Capabilities, name: str = "") -> list[str]:
    """Stop an engine, check that the device's memory came back, and start what `up` stopped. Returns what was stopped.

    Without a lease, and if there is only one, the container that a failed start left is removed.
    Raises NoEngine, UsageError when several run and none is named, and MemoryKept.
    """
    place = lease.folder(state)
    try:
        one = lease.pick(place, name)
    except NoEngine:
        other = boxes.stray(state, place, name)
        if other is None:
            raise
        log.info(f"{other.preset} has no lease, but a container")
        one = lease.new(other.preset, other.name, ())
    _stop(caps, place, one, runline.data(root).stop_seconds if one.state == "ready" else SHORT)
    if run.recorder.on:
        return [one.preset]
    lease.release(place, one)
    try:
        kept = _drained(one)
    finally:  # Ctrl-C as well: nobody else knows any more what was stopped
        restore(place, one)
    if kept:
        who = "; ".join(other.who for other in holders.others(one.devices, ()))
        told = f"{gpus.gib(kept)} of the device did not come back" + (f": held by {who}" if who else "")
        raise MemoryKept(told, hint=f"a process may have survived: `{hints.command('status')}` names it")
    return [one.preset]


def _drained(one: Lease) -> int:
    """Wait until an engine's GPUs have their memory back. Returns the bytes that did not come back."""
    known = [pci for pci in one.devices if pci in one.before]
    if not known:
        return 0
    with log.step("the device's memory comes back"):
        return holders.drained(known, one.before)


def undo(caps: Capabilities, place: Path, mine: Lease) -> None:
    """After Ctrl-C: the container is stopped and removed, the lease given back. After one more it is killed."""
    try:
        _stop(caps, place, mine, SHORT)
    except (Interrupted, Terminated):
        container.remove(caps, mine.container)
        lease.release(place, mine)
        raise
    lease.release(place, mine)


def _stop(caps: Capabilities, place: Path, one: Lease, grace: int) -> None:
    """Stop and remove a container; its lease says so first, for whoever looks meanwhile."""
    me = os.getpid()
    by = {"stopper": me, "stopper_began": processes.began(me)}
    lease.update(place, one, state="stopping", expires=time.time() + grace + LATE, **by)
    with contextlib.nullcontext() if run.recorder.on else log.step(f"stopping {one.preset}"):
        container.stop(caps, one.container, grace)
        container.remove(caps, one.container)


def give_back(place: Path, mine: Lease) -> None:
    """Give an engine's lease back, and start what was stopped for it."""
    lease.release(place, mine)
    restore(place, mine)


def restore(place: Path, one: Lease) -> None:
    """Start what was stopped for an engine; while another one has the device, that one's `down` will."""
    if not one.stopped:
        return
    sharing = [other for other in lease.live(place) if set(other.devices) & set(one.devices)]
    if sharing:
        lease.update(place, sharing[0], stopped=tuple(dict.fromkeys((*sharing[0].stopped, *one.stopped))))
        log.info(f"{', '.join(one.stopped)} stays stopped until {sharing[0].preset} is down")
        return
    for unit in one.stopped:
        holders.start(unit)
