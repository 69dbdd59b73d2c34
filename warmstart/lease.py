"""Who may use a device: one lease for each engine, in one file that all of a user's checkouts share.

A lease names its devices (a GPU's PCI address, or "cpu") and the bytes it may take of each; several engines share
a device as long as the sum fits. It is held by a container, or until there is one by the `up` that makes it. Both
are known by pid and time of begin, so a lease whose holder died is stale, however that happened, and blocks nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from warmstart import hints, processes, run
from warmstart.errors import DeviceHeld, InputError, NoEngine, UsageError

PREFIX = "warmstart-"  # of a container's name; the preset's follows
LIMIT = 600.0  # seconds that an `up` may take until its container runs, after which its lease expires

Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # what a clock can show


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one engine to its devices."""

    preset: str
    container: str  # its name
    devices: tuple[str, ...]
    bytes: int = 0  # of each device; 0: all of it
    state: Literal["starting", "ready", "stopping"] = "starting"
    since: Moment  # seconds since 1970
    expires: Moment  # likewise; counts until the container runs
    boot: str
    owner: int  # pid of the `up`
    owner_began: int
    process: int = 0  # the container's first process; 0 until there is one
    process_began: int = 0
    container_id: str = ""
    image: str = ""  # its id
    port: int = 0
    log: str = ""  # the file with the engine's output
    cache: str = ""  # the cache volume's folder on this machine
    stopped: tuple[str, ...] = ()  # services that `down` starts again
    before: dict[str, int] = {}  # bytes that were in use on each device when it came
    warning: str = ""  # what it does to the machine's memory; empty when all is well
    reason: str = ""  # why it was stopped, when that was for its memory
    stopper: int = 0  # pid of who stops it
    stopper_began: int = 0

    @property
    def name(self) -> tuple[int, int, float]:
        """Tells this lease from any other, also from a later one of the same preset."""
        return self.owner, self.owner_began, self.since


def container_name(preset: str) -> str:
    """The name of a preset's container: what a container's name can't hold becomes a dash."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_.-]", "-", preset)


def folder(state: Path, root: Path = Path("/")) -> Path:
    """Where leases lie: in the user's runtime folder, which a reboot empties, or below `state` (`.warmstart`).

    A start by cron or ssh may know no runtime folder where one exists: it must find the leases all the same. That of
    root goes when root's last session ends, while root's containers stay, so that root has another.
    """
    user = os.getuid()
    own = root / "run/user" / str(user)
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or own)
    if user == 0 and runtime == own:
        return root / "run/warmstart" if os.access(root / "run", os.W_OK) else state / "run"
    usable = runtime.is_dir() and (runtime != own or own.stat().st_uid == user)
    return runtime / "warmstart" if usable else state / "run"


def new(preset: str, container: str, devices: tuple[str, ...], **facts: Any) -> Lease:
    """A lease of this process, from now on."""
    me, now = os.getpid(), time.time()
    return Lease(
        preset=preset,
        container=container,
        devices=devices,
        since=now,
        expires=now + LIMIT,
        boot=processes.boot(),
        owner=me,
        owner_began=processes.began(me),
        **facts,
    )


def alive(lease: Lease, now: float, root: Path = Path("/")) -> bool:
    """Whether a lease still holds: its container runs, or the `up` that makes it does and isn't late."""
    if lease.boot != processes.boot(root):
        return False
    if lease.process:
        return 0 < lease.process_began == processes.began(lease.process, root)
    return now < lease.expires and 0 < lease.owner_began == processes.began(lease.owner, root)


def read(place: Path) -> tuple[Lease, ...]:
    """All leases, stale ones too, the oldest first. A file that can't be understood counts as empty."""
    try:
        return msgspec.json.decode((place / "leases.json").read_bytes(), type=tuple[Lease, ...])
    except (OSError, RecursionError, msgspec.MsgspecError):
        return ()


def live(place: Path, but: Lease | None = None) -> tuple[Lease, ...]:
    """The leases that still hold, but for one."""
    now = time.time()
    return tuple(one for one in read(place) if alive(one, now) and not (but and one.name == but.name))


def find(place: Path, container: str) -> Lease | None:
    """The lease of a container, stale or not."""
    return next((lease for lease in read(place) if lease.container == container), None)


def pick(place: Path, name: str = "") -> Lease:
    """The engine of a preset, or the only one. Raises NoEngine, and UsageError when several run."""
    leases = read(place)
    if name:
        one = next((one for one in leases if one.preset == name), None)
        if one is None:
            start = f"`{hints.command('up', name)}` starts it"
            others = f"these do: {', '.join(one.preset for one in leases)}"
            raise NoEngine(f"no engine of {name} runs", hint=others if leases else start)
        return one
    if not leases:
        raise NoEngine("no engine runs", hint=f"`{hints.command('up', '…')}` starts one")
    if len(leases) > 1:
        raise UsageError("several engines run", hint=f"name one: {hints.presets([one.preset for one in leases])}")
    return leases[0]


def take(place: Path, wanted: Lease, capacity: Mapping[str, int]) -> None:
    """Take a lease.

    `capacity` has the bytes of each device that all engines together may take; without it one engine has the device.
    Raises DeviceHeld, naming the holder.
    """
    with _changing(place) as leases:
        now = time.time()
        live = [lease for lease in leases if alive(lease, now) and lease.name != wanted.name]
        for holder in live:
            if holder.container == wanted.container:
                refuse_same(holder)
        for device in wanted.devices:
            sharing = [lease for lease in live if device in lease.devices]
            if why := _conflict(wanted, sharing, capacity.get(device, 0)):
                raise _held(device, sharing[0], why)
        # Those of the dead stay for `status` and `down`, but for the one whose container is made anew.
        leases[:] = [*(lease for lease in leases if lease.container != wanted.container), wanted]


def refuse_same(holder: Lease) -> NoReturn:
    """Raise DeviceHeld for an engine that runs already."""
    at = {"ready": f"it answers on port {holder.port}", "stopping": "it is being stopped"}
    yet = f"it doesn't answer yet: `{hints.command('status')}` shows when it does"
    hint = f"{at.get(holder.state, yet)}; `{hints.command('down', holder.preset)}` stops it"
    raise DeviceHeld(f"{holder.preset} runs already ({holder.state} since {_clock(holder)})", hint=hint)


def same(place: Path, lease: Lease) -> Lease | None:
    """A lease as it is now; None when it was released."""
    return next((one for one in read(place) if one.name == lease.name), None)


def update(place: Path, lease: Lease, **changes: Any) -> Lease | None:
    """Change a lease. Returns it as it is now, or None when somebody released it (`down` did)."""
    with _changing(place) as leases:
        for number, one in enumerate(leases):
            if one.name == lease.name:
                leases[number] = msgspec.structs.replace(one, **changes)
                return leases[number]
    return None


def release(place: Path, lease: Lease) -> None:
    """Give a lease back; one that is not there any more is no mistake."""
    with _changing(place) as leases:
        leases[:] = [one for one in leases if one.name != lease.name]


def starting(place: Path, before: Lease) -> tuple[Lease, ...]:
    """Live leases, taken before `before`, of engines that still start."""
    now = time.time()
    return tuple(
        one for one in read(place) if one.state == "starting" and _order(one) < _order(before) and alive(one, now)
    )


def _order(lease: Lease) -> tuple[float, int]:
    return lease.since, lease.owner


def _conflict(wanted: Lease, sharing: list[Lease], capacity: int) -> str:
    """Why a device can't be shared; empty when it can."""
    if not sharing:
        return ""
    if not capacity or not wanted.bytes or not all(lease.bytes for lease in sharing):
        return "one engine at a time"
    taken = sum(lease.bytes for lease in sharing)
    if taken + wanted.bytes <= capacity:
        return ""
    need, free, whole = (size / 2**30 for size in (wanted.bytes, max(capacity - taken, 0), capacity))
    return f"{need:.1f} GiB are needed, {free:.1f} of {whole:.1f} GiB are not given away"


def _held(device: str, holder: Lease, why: str) -> DeviceHeld:
    told = f"{device} is held by {holder.preset} ({holder.state} since {_clock(holder)}): {why}"
    return DeviceHeld(told, hint=f"`{hints.command('down', holder.preset)}` stops it")


def _clock(lease: Lease) -> str:
    return time.strftime("%H:%M", time.localtime(lease.since))


@contextlib.contextmanager
def _changing(place: Path) -> Iterator[list[Lease]]:
    """All leases, to be changed by nobody else meanwhile; written whole or not at all."""
    if run.recorder.on:
        yield list(read(place))
        return
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as bad:
        told = f"{place} can't be made, where leases of devices lie: {bad.strerror}"
        raise InputError(told, hint="remove what is in its place") from None
    with (place / "leases.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        leases = list(read(place))
        before = list(leases)
        yield leases
        if leases != before:
            part = place / "leases.json.new"
            part.write_bytes(msgspec.json.format(msgspec.json.encode(leases), indent=1))
            part.replace(place / "leases.json")
