"""One engine up, and down again: the order of things, and what is put right when one of them fails.

Whatever happens to the `up` that follows it, an engine is in one of few states (docs/running.md): none, starting,
ready, ended (its container is kept until the next `up`), or gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from warmstart import (
    container,
    engines,
    hints,
    holders,
    lease,
    limits,
    log,
    outcome,
    phases,
    preflight,
    presets,
    run,
    runline,
    starts,
    startup,
    stopping,
)
from warmstart.container import Seen
from warmstart.engine import Capabilities
from warmstart.errors import (
    CommandFailed,
    DeviceHeld,
    EngineStopped,
    Interrupted,
    PortTaken,
    Terminated,
    WarmstartError,
)
from warmstart.follow import POLL
from warmstart.lease import Lease
from warmstart.names import LABEL
from warmstart.phases import StartRecord
from warmstart.preflight import Ready
from warmstart.startup import Silence, Startup

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # of the user's environment, handed on to the engine
DOWNLOAD = 2.0  # times the weights' size must be free: what is fetched is written aside first


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `up`."""

    stop: tuple[str, ...] = ()  # services to be stopped first
    force: bool = False
    detach: bool = False
    profile: bool = False
    silence: float  # seconds without a line after which it is looked at


class Up(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` returns."""

    preset: str
    container: str
    url: str
    image_id: str
    devices: tuple[str, ...]
    ready: bool  # False with --detach: it still starts
    wall: float  # seconds until it answered; 0 with --detach
    record: StartRecord | None


def text(started: Up) -> str:
    """What `up` says in the end: the table of the phases, and where the engine answers or will."""
    if started.record:
        return f"{phases.table(started.record)}\n{started.preset}: {started.url}"
    when = f"`{hints.command('status')}` shows when it is ready, to answer at {started.url}"
    return f"{started.preset} starts: {when}"


def up(root: Path, state: Path, caps: Capabilities, name: str, sets: dict[str, str], ask: Ask) -> Up:
    """Start the engine of a preset, and follow it until it is ready.

    Ctrl-C, and every failure, stops it again, gives its devices back and starts what `--stop` stopped.
    """
    place = lease.folder(state)
    preset, image, ref = preflight.choose(caps, root, name, sets, ask.force)
    for warning in preset.warnings:
        log.warn(warning)
    arch = image.labels.get(f"{LABEL}arch", "")
    hub, bounds = Path(presets.models_folder()) / "hub", limits.load(root)
    if one := preflight.running(preset.name, place):
        lease.refuse_same(one)
    stray = container.look(caps, lease.container_name(preset.name))
    if stray and stray.pid:
        hint = f"`{hints.command('down', preset.name)}` stops it"
        raise DeviceHeld(f"the container {lease.container_name(preset.name)} runs, and has no lease", hint=hint)
    preflight.port_free(preset, lease.live(place))
    preflight.model_there(preset, hub, int(_weights(preset) * DOWNLOAD))
    preflight.hub_there(preset, hub)
    used = preflight.devices(preflight.use(preset, arch, bounds, lease.live(place)))
    with _services(place, preset.name, ask.stop) as stopped:
        preflight.not_held(used, lease.live(place), force=ask.force)
        ready = preflight.judge(preset, image, ref, arch, hub, bounds, lease.live(place), force=ask.force)
        mine = lease.new(
            preset.name,
            lease.container_name(preset.name),
            ready.devices,
            bytes=ready.judgement.need_bytes,
            port=preset.port,
            image=image.image_id,
            log=str(engines.new_log(state, preset.name)),
            stopped=tuple(stopped),
            before=holders.used(ready.devices),
        )
        lease.take(place, mine, preflight.capacity(ready, lease.live(place)))
        try:
            if _queue(place, mine):
                others = lease.live(place, mine)
                ready = preflight.judge(
                    preset, image, ref, arch, hub, bounds, others, keep=mine.devices, force=ask.force
                )
            _watcher(root, state, mine, keep_record=ask.detach)
            seen = _launch(root, state, caps, place, mine, ready)
            if seen is None:  # --dry-run
                lease.release(place, mine)
                return _result(ready, None, 0.0)
            if ask.detach:
                return _result(ready, None, 0.0)
            return _follow(state, caps, place, mine, ready, seen, ask)
        except WarmstartError as failure:
            if isinstance(failure, (Interrupted, Terminated)):
                stopping.undo(caps, place, mine)
            lease.release(place, mine)
            raise
        except BaseException:  # a bug: nothing may be left running that nobody knows of
            stopping.undo(caps, place, mine)
            raise


def _follow(state: Path, caps: Capabilities, place: Path, mine: Lease, ready: Ready, seen: Seen, ask: Ask) -> Up:
    """Follow a start until the engine answers. Raises StartFailed, EngineStopped, MemoryPressure."""
    follows = Startup(caps, seen, mine.port)
    card = ready.gpus[0].card if ready.gpus else ""
    silence = Silence(follows, ask.silence, card, profile=ask.profile, rootless=caps.rootless)
    expectation = starts.expected(state, mine.preset, mine.image)
    shown = 0.0
    with log.step(f"{mine.preset} starts") as step:
        while follows.state == "starting":
            for event in follows.step():
                startup.show(event)
                if event.kind == "restart":
                    lease.update(place, mine, process=follows.process[0], process_began=follows.process[1])
            if activity := silence.step():
                log.info(silence.tell(activity))
            if time.monotonic() - shown >= 1.0:  # what is shown has whole seconds
                shown = time.monotonic()
                step.note(startup.live(follows.record(), expectation))
            time.sleep(POLL)
        if follows.state != "ready":
            raise outcome.ended(place, mine.preset, follows)
    outcome.finish(state, place, mine, follows, keep=True)
    return _result(ready, follows.record(), follows.wall)


def _launch(root: Path, state: Path, caps: Capabilities, place: Path, mine: Lease, ready: Ready) -> Seen | None:
    """Make the container anew and write it into the lease. None with --dry-run.

    Raises EngineStopped when `down` came meanwhile, PortTaken, CommandFailed.
    """
    Path(presets.models_folder(), "hub").mkdir(parents=True, exist_ok=True)
    file = Path(mine.log)
    tokens = {name: os.environ[name] for name in TOKENS if os.environ.get(name)}
    line = runline.make(root, ready.preset, container.setting(caps, ready.ref, ready.gpus), tokens)
    container.remove(caps, mine.container)
    if not run.recorder.on:
        file.parent.mkdir(parents=True, exist_ok=True)
        engines.drop_logs(state, mine.preset)
    words = ["podman", "run", *container.options(mine.preset, file), *line.words]
    try:
        container.start(caps, words, line.secrets)
    except CommandFailed as failed:
        container.remove(caps, mine.container)
        if "address already in use" in failed.message:
            hint = "choose another: " + hints.options(f"--set port={mine.port + 1}")
            raise PortTaken(f"port {mine.port} is taken", hint=hint) from None
        raise
    if run.recorder.on:
        return None
    seen = container.look(caps, mine.container)
    pid, began = container.began(seen) if seen else (0, 0)
    facts = {"container_id": seen.id, "cache": seen.cache} if seen else {}
    # One that ended at once has no process; the lease is then held by us until its end was told.
    if seen is None or lease.update(place, mine, process=pid, process_began=began, **facts) is None:
        container.remove(caps, mine.container)
        raise _stopped(mine, "started")
    return seen


def _stopped(mine: Lease, did: str) -> EngineStopped:
    return EngineStopped(f"{mine.preset} was stopped while it {did}", hint=f"somebody ran `{hints.command('down')}`")


def _queue(place: Path, mine: Lease) -> bool:
    """Wait for engines that start already: cold starts in parallel slow each other down, or fail. Whether it waited."""
    if run.recorder.on or not (before := lease.starting(place, mine)):
        return False
    with log.step(f"waiting until {', '.join(one.preset for one in before)} is ready"):
        while lease.starting(place, mine):
            if lease.update(place, mine, expires=time.time() + lease.LIMIT) is None:
                raise _stopped(mine, "waited")
            time.sleep(0.5)
    return True


def _watcher(root: Path, state: Path, mine: Lease, *, keep_record: bool) -> None:
    """Start the process that watches the memory as long as the engine runs."""
    words: list[str | Path] = [sys.executable, root / "build.py", "watch", mine.preset]
    words += ["--record"] if keep_record else []
    run.detach(words, log_file=state / "logs" / mine.container / "watch.txt")


@contextlib.contextmanager
def _services(place: Path, preset: str, units: Sequence[str]) -> Iterator[list[str]]:
    """Stop services, and start them again when what is done inside fails. Gives the names of those that were stopped,
    and of those that an earlier start of the preset stopped and nobody started yet."""
    stale = lease.find(place, lease.container_name(preset))
    stopped = list(stale.stopped) if stale else []
    try:
        for unit in units:
            if (full := holders.stop(unit)) and full not in stopped:
                stopped.append(full)
        yield stopped
    except BaseException:
        for unit in stopped:
            holders.start(unit)
        raise


def _weights(preset: presets.Preset) -> float:
    """The preset's own figure of the weights, in bytes; 0 where it has none."""
    return float(preset.weights_gb or 0) * 1e9


def _result(ready: Ready, record: StartRecord | None, wall: float) -> Up:
    return Up(
        preset=ready.preset.name,
        container=lease.container_name(ready.preset.name),
        url=engines.url(ready.preset.port),
        image_id=ready.image.image_id,
        devices=ready.devices,
        ready=record is not None,
        wall=round(wall, 3),
        record=record,
    )
