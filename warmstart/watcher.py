"""The process that stays beside an engine: it watches the machine's memory, and ends with the engine.

`up` starts it in the background (`warmstart watch PRESET`) before there is a container. It stops an engine that
would make the machine stall, and says in the lease why; it notes when an engine became ready whose `up` did not wait
for that. Everything else it only writes down, in `.warmstart/logs/<container>/watch.txt`.
"""

from __future__ import annotations

import time
from pathlib import Path

from warmstart import container, gpus, lease, limits, log, outcome, pressure, stopping
from warmstart.container import Seen
from warmstart.engine import Capabilities
from warmstart.lease import Lease
from warmstart.pressure import State
from warmstart.startup import Startup

PAUSE = 2.0  # seconds between two looks: a machine that swaps stalls within about ten


def watch(root: Path, state: Path, caps: Capabilities, preset: str, *, keep_record: bool) -> str:
    """Stay until the engine is gone, or was stopped for the machine's sake. Returns why it ended, in words.

    `keep_record`: nobody else follows this start, so its record is kept here, and a failed one is cleaned up here.
    """
    place, bounds = lease.folder(state), limits.load(root)
    mine = lease.find(place, lease.container_name(preset))
    seen = _appears(caps, place, mine) if mine else None
    if mine is None or seen is None:
        return "there is no such engine"
    follows = Startup(caps, seen, mine.port)
    seen_memory: State | None = None
    while True:
        if follows.state == "starting":
            events = follows.step()
            if any(event.kind == "restart" for event in events):
                _moved(place, mine, follows)
            if any(event.kind == "ready" for event in events):
                outcome.finish(state, place, mine, follows, keep=keep_record)
                _say(f"ready after {follows.wall:.1f} s")
        if follows.state in ("ended", "gone"):
            if keep_record:
                _say(outcome.ended(place, mine.preset, follows).message)
                stopping.give_back(place, mine)
            return f"the engine {follows.state} while it started"
        if follows.state == "ready" and not follows.runs:
            again = _again(caps, follows.seen)
            if again is None:
                return "the engine has ended"
            follows = Startup(caps, again, mine.port)
            _moved(place, mine, follows)
        seen_memory, before = _memory(mine, seen_memory, bounds), seen_memory
        if before is None or seen_memory.level != before.level:
            _say(f"memory: {seen_memory.level} {seen_memory.reason}")
            lease.update(place, mine, warning=seen_memory.reason)
        if seen_memory.level == "stop":
            lease.update(place, mine, reason=seen_memory.reason)
            container.stop(caps, mine.container, stopping.SHORT)
            return f"stopped: {seen_memory.reason}"
        time.sleep(PAUSE)


def _appears(caps: Capabilities, place: Path, mine: Lease) -> Seen | None:
    """Wait for the container of a lease. None when its `up` gave it up.

    An `up` that was killed before it wrote the container into the lease may have started one: that is done here then.
    """
    while one := lease.same(place, mine):
        if one.container_id:
            return container.look(caps, one.container_id)
        if not lease.alive(one, time.time()):
            seen = container.look(caps, one.container)
            if seen is None or not seen.pid:
                return None
            pid, began = container.began(seen)
            facts = {"container_id": seen.id, "cache": seen.cache, "process": pid, "process_began": began}
            return seen if lease.update(place, mine, **facts) else None
        time.sleep(0.25)
    return None


def _memory(mine: Lease, before: State | None, bounds: limits.Limits) -> State:
    """What the engine does to the machine's memory now."""
    used = tuple(gpu for gpu in gpus.read() if gpu.pci in mine.devices)
    return pressure.watch(before, pressure.reading(time.monotonic(), gpus.memory(), used), bounds.watch)


def _again(caps: Capabilities, before: Seen) -> Seen | None:
    """The container when it runs once more, after a restart that takes a moment; None when it stays down."""
    until = time.monotonic() + 3 * PAUSE
    while (seen := container.look(caps, before.id)) and time.monotonic() < until:
        if seen.pid:
            return seen
        time.sleep(0.5)
    return None


def _moved(place: Path, mine: Lease, follows: Startup) -> None:
    """The container has another first process now."""
    pid, began = follows.process
    lease.update(place, mine, process=pid, process_began=began, state="starting")
    _say(f"restarted, now with the process {pid}")


def _say(text: str) -> None:
    log.info(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
