"""Who else holds a GPU: services that load models, other containers, any process with much memory on it.

Services are stopped and started through systemctl, when the user asks (`up --stop UNIT`) and when `down` restores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from warmstart import gpus, hints, log, processes, run, toml
from warmstart.errors import CommandFailed, DeviceHeld, EngineMissing, UsageError
from warmstart.processes import USER

BOOTED = Path("/run/systemd/system")  # is there where systemd runs the machine (sd_booted(3))
DRAIN = 30.0  # seconds that a stopped service's memory may take to come back


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """holders.toml."""

    services: tuple[str, ...]
    bytes: int


class Other(msgspec.Struct, frozen=True):
    """Somebody who holds GPUs: in words, its service if it has one, and what it holds, by PCI address."""

    who: str
    unit: str
    bytes: dict[str, int]


def known() -> Known:
    """The data of holders.toml, checked."""
    return toml.read(Path(__file__).with_name("holders.toml"), Known)


def services(root: Path = Path("/")) -> list[str]:
    """The running services that are known to load models, by the processes in them. `user:` marks a user's own."""
    names = {f"{name}.service" for name in known().services}
    found = {processes.unit(pid, root) for pid in processes.pids(root)}
    return sorted(unit for unit in found if unit.removeprefix(USER) in names)


def others(devices: Sequence[str], ours: Iterable[str], root: Path = Path("/")) -> list[Other]:
    """Who holds one of these GPUs (PCI addresses), but for our own containers (ids): known services first.

    Empty for a device that isn't a GPU: memory of the processor is the guard's business alone.
    """
    wanted = [device for device in devices if device != "cpu"]
    if not wanted:
        return []
    limit, mine = known().bytes, {one[:12] for one in ours}
    found = {unit: Other(unit.removeprefix(USER), unit, {}) for unit in services(root)}
    for holder in gpus.holders(root):
        held = {pci: size for pci, size in holder.bytes.items() if pci in wanted}
        if not held or holder.container in mine - {""}:
            continue
        unit = (USER if holder.user_unit else "") + holder.unit if holder.unit else ""
        if unit in found:
            found[unit] = Other(holder.unit, unit, _sum(found[unit].bytes, held))
        elif holder.container or sum(held.values()) >= limit:
            key = unit or holder.container or str(holder.pid)
            before = found[key].bytes if key in found else {}
            found[key] = Other(holder.owner, unit, _sum(before, held))
    return list(found.values())


def refuse(found: Sequence[Other]) -> None:
    """Raise DeviceHeld when somebody holds the device, saying how to end that."""
    if not found:
        return
    told = "; ".join(_told(other) for other in found)
    units = [other.unit for other in found if other.unit]
    if units:
        words = hints.options(" ".join(f"--stop {unit}" for unit in units))
        hint = f"{words} stops it until `{hints.command('down')}`; {hints.options('--force')} starts beside it"
    else:
        hint = f"stop it first; {hints.options('--force')} starts beside it, which can freeze the machine"
    raise DeviceHeld(f"held by another: {told}", hint=hint)


def stop(unit: str) -> str:
    """Stop a service and wait until it is gone. Returns its full name, as `start` takes it; empty when it didn't run.

    Raises UsageError for a service that systemd doesn't know, CommandFailed when it can't be stopped.
    """
    full = _full(unit)
    if not active(full):
        log.info(f"{full.removeprefix(USER)} does not run")
        return ""
    with log.step(f"stopping {full.removeprefix(USER)}"):
        _systemctl("stop", full)
    return full


def start(unit: str) -> bool:
    """Start a service that was stopped. Returns whether it did; tells the user how to when it didn't."""
    try:
        with log.step(f"starting {unit.removeprefix(USER)} again"):
            _systemctl("start", unit)
        return True
    except CommandFailed as failed:
        log.warn(f"{failed.message}; {failed.hint}")
        return False


def active(unit: str) -> bool:
    """Whether a service runs. Raises UsageError for one that systemd doesn't know, and where there is no systemd."""
    words = ["systemctl", *_manager(unit), "show", "--property=LoadState,ActiveState", unit.removeprefix(USER)]
    try:
        told = run.run(words, always=True, ok=range(256))
    except EngineMissing:
        raise _no_systemd(unit) from None
    facts = dict(line.partition("=")[::2] for line in told.stdout.splitlines())
    if facts.get("LoadState") == "not-found":
        raise UsageError(f"there is no service {unit.removeprefix(USER)}", hint="`systemctl list-units` names all")
    if "ActiveState" not in facts:
        if not BOOTED.is_dir():
            raise _no_systemd(unit)
        said = next((line.strip() for line in reversed((told.stderr or told.stdout).splitlines()) if line.strip()), "")
        hint = f"stop it by hand, and leave out --stop; what was asked: {' '.join(words)}"
        raise CommandFailed(f"systemctl says nothing of {unit.removeprefix(USER)}: {said[:200]}", hint=hint)
    return facts["ActiveState"] in ("active", "activating", "reloading", "deactivating")


def _no_systemd(unit: str) -> UsageError:
    told = f"--stop {unit.removeprefix(USER)}: no systemd runs on this machine, and --stop is for its services"
    return UsageError(told, hint="stop by hand what holds the device, and leave out --stop")


def drained(devices: Sequence[str], before: dict[str, int], seconds: float = DRAIN, root: Path = Path("/")) -> int:
    """Wait until the GPUs hold no more than `before` (bytes by PCI address). Returns the bytes still held above that.

    The kernel frees memory a moment after the last process is gone; what stays after `seconds` stays. A GPU whose
    memory before isn't known is left out.
    """
    until = time.monotonic() + seconds
    while True:
        held = used(devices, root)
        # Desktops and other programs come and go meanwhile: what is less than 256 MiB is not an engine's.
        above = sum(max(held[pci] - before[pci] - (256 << 20), 0) for pci in held if pci in before)
        if not above or time.monotonic() > until:
            return above
        time.sleep(0.25)


def used(devices: Sequence[str], root: Path = Path("/")) -> dict[str, int]:
    """Bytes in use on each of these GPUs, VRAM and GTT together."""
    return {gpu.pci: gpu.vram_used + gpu.gtt_used for gpu in gpus.read(root) if gpu.pci in devices}


def _full(unit: str) -> str:
    return unit if "." in unit.rpartition("/")[2] else f"{unit}.service"


def _manager(unit: str) -> list[str]:
    return ["--user"] if unit.startswith(USER) else []


def _words(verb: str, unit: str) -> list[str]:
    """The command. A service of the system is root's; sudo may not ask, because no terminal reaches it through us."""
    words = ["systemctl", *_manager(unit), verb, unit.removeprefix(USER)]
    if os.geteuid() == 0 or unit.startswith(USER):
        return words
    return ["sudo", "-n", *words]


def _systemctl(verb: str, unit: str) -> None:
    words = _words(verb, unit)
    if words[0] == "sudo":
        log.info(f"{unit} belongs to the system, so sudo is needed to {verb} it")
    try:
        run.run(words, timeout=120)
    except CommandFailed as failed:
        by_hand = " ".join(word for word in words if word != "-n")
        raise CommandFailed(f"{unit} did not {verb}: {failed.message}", hint=f"by hand: {by_hand}") from None


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {pci: one.get(pci, 0) + other.get(pci, 0) for pci in {**one, **other}}


def _told(other: Other) -> str:
    size = sum(other.bytes.values())
    amount = f" has {gpus.gib(size)} of the device" if size else " runs, and loads a model at any request"
    return other.who + amount
