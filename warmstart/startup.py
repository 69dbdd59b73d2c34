"""One start of an engine as it is followed: its log, its phases, what its silence means, and how it ended."""

from __future__ import annotations

import http.client
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from warmstart import container, log, logline, masking, processes, stacks, starts, watchdog
from warmstart.container import Seen
from warmstart.engine import Capabilities
from warmstart.follow import Tail
from warmstart.phases import Event, Reader, StartRecord
from warmstart.watchdog import Activity, Reading

KEPT = 400  # lines of the log that are kept for a diagnosis
ASK = 5.0  # seconds between two questions to the server, in case that its log doesn't say that it is ready
RETURN = 2.0  # seconds after which a container that ended won't be there again: `podman restart` takes less
NOTICE = 30.0  # the same while podman hasn't noticed that it ended, or is just removing it: a busy machine is slow
UNSETTLED = ("running", "stopping", "removing")  # podman's words for that

EARLY = 0.5  # seconds that an engine's first lines may be older than its start, where its process is gone already

State = Literal["starting", "ready", "ended", "gone"]


class Startup:
    """Follows one start. `step` is called every so often, and `state` says how far it is.

    `ended`: the container is there but doesn't run. `gone`: it was removed. A restart begins a new start.
    """

    def __init__(self, caps: Capabilities, seen: Seen, port: int) -> None:
        self.state: State = "starting"
        self.seen = seen
        self.lines: deque[str] = deque(maxlen=KEPT)
        self.answered = 0.0  # seconds since 1970 when it was ready
        self._caps, self._port = caps, port
        self._tail = Tail(Path(seen.log))
        self._reader = Reader(seen.started)
        self.process = container.began(seen)  # pid and time of begin of its first process
        self._since = self._oldest()
        self._dead = 0.0  # when its process was first missed
        self._asked = time.monotonic()

    def step(self) -> list[Event]:
        """Take what was written since the last step."""
        runs = self.runs  # looked at before the log: what a dying process wrote last is read, too
        events = self._read()
        if self.state == "starting" and not runs:
            events += self._missed()
        elif self.state == "starting" and time.monotonic() - self._asked >= ASK:
            self._asked = time.monotonic()
            if answers(self._port):
                events += self._feed('"GET /health HTTP/1.1" 200 OK', time.time())
        return events

    def record(self) -> StartRecord:
        """The phases so far; the running one lasts until now."""
        return self._reader.record(time.time() if self.state == "starting" else None)

    @property
    def wall(self) -> float:
        """Seconds from the container's start until it answered."""
        return self.answered - self.seen.started

    @property
    def silent(self) -> float:
        """Seconds since the engine last wrote something."""
        return time.time() - max(self._tail.wrote, self.seen.started)

    @property
    def runs(self) -> bool:
        """Whether that process is still there."""
        pid, began = self.process
        return bool(began) and processes.began(pid) == began

    @property
    def pid(self) -> int:
        """The container's first process."""
        return self.process[0]

    def _read(self) -> list[Event]:
        found: list[Event] = []
        for line in self._tail.read():
            if line.at < self._since:  # of the same container's start before
                continue
            self.lines.append(line.text)
            found += self._feed(line.text, line.at)
        return found

    def _oldest(self) -> float:
        """When the first line may have been written: podman notes a start last, on a busy machine seconds later."""
        return processes.when(self.process[1]) if self.process[1] else self.seen.started - EARLY

    def _feed(self, text: str, at: float) -> list[Event]:
        events = self._reader.feed(text, at)
        if self.state == "starting" and any(event.kind == "ready" for event in events):
            self.state, self.answered = "ready", at
        return events

    def _missed(self) -> list[Event]:
        """The process is gone: was the container restarted, did it end, or was it removed?"""
        self._dead = self._dead or time.monotonic()
        found = container.look(self._caps, self.seen.id)
        if found and found.pid and (process := container.began(found)) != self.process and process[1]:
            self.seen, self.process, self._dead = found, process, 0.0
            self._since = self._oldest()
            self.lines.clear()
            self._reader = Reader(found.started)
            return [Event("restart", self._reader.phase, 0.0)]
        if found is None:
            self.state = "gone"
        elif time.monotonic() - self._dead >= (NOTICE if found.status in UNSETTLED else RETURN):
            self.seen, self.state = found, "ended"
        return self._read()


class Silence:
    """What the engine's silence means: two readings, some seconds apart, whenever it was silent for a while."""

    def __init__(self, startup: Startup, limit: float, card: str, *, profile: bool, rootless: bool) -> None:
        self._startup, self._limit, self._card = startup, limit, card
        self._profile, self._rootless = profile, rootless
        self._before: Reading | None = None
        self._next = 0.0

    def step(self) -> Activity | None:
        """What the engine does, when that is to be told; None most of the time."""
        now = time.monotonic()
        if self._startup.silent < self._limit:
            self._before, self._next = None, 0.0
            return None
        if now < self._next:
            return None
        cache = Path(self._startup.seen.cache) if self._startup.seen.cache else None
        reading = watchdog.read(self._startup.pid, now, cache=cache, card=self._card)
        before, self._before = self._before, reading
        if before is None:
            self._next = now + watchdog.APART
            return None
        self._before, self._next = None, now + self._limit
        return watchdog.classify(before, reading)

    def tell(self, seen: Activity) -> str:
        """That in one line, with --profile and where its Python is."""
        told = f"no line for {self._startup.silent:.0f} s: it {seen.kind} ({seen.evidence})"
        log.event("silence", seconds=round(self._startup.silent), does=seen.kind, evidence=seen.evidence)
        if self._profile and (process := stacks.of_interest(processes.tree(self._startup.pid))):
            told += f"\n  {process.name} {process.pid}: {stacks.look(process, self._rootless)}"
        return told


def answers(port: int, seconds: float = 1.0) -> bool:
    """Whether the server on this machine's port answers /health with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def live(record: StartRecord, expectation: Mapping[str, float]) -> str:
    """The running phase with its seconds, and what remains by earlier starts: the text of the live line."""
    title, now = logline.titles()[record.reached], {p.name: p.seconds for p in record.phases}
    told = f"{title} {now.get(record.reached, 0.0):.0f} s"
    left = starts.remaining(dict(expectation), record)
    if left is None:
        return f"{told} (nothing to compare with)"
    return f"{told}, about {left:.0f} s left" if left >= 1 else f"{told}, any moment now"


def show(event: Event) -> None:
    """Tell an event: a line when a phase ends, and one object with --json."""
    log.event(
        "phase",
        state=event.kind,
        name=event.phase,
        at=round(event.at, 3),
        seconds=round(event.seconds, 3),
        text=masking.text(event.text),
    )
    # A terminal has the live line, --json the object above.
    if event.kind == "end" and event.seconds >= 0.05 and not log.settings.json and not sys.stderr.isatty():
        log.info(f"  {logline.titles()[event.phase]:<17}{event.seconds:8.1f} s")
    elif event.kind == "restart":
        log.info("the container was restarted: a new start begins")
