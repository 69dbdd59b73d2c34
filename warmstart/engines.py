"""What runs, for people: the table of `status`, the lines of `logs`, a command in an engine, a kernel on the GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warmstart import boxes, gpus, hints, lease, masking, processes, run
from warmstart.boxes import Listed
from warmstart.errors import NoEngine, UsageError
from warmstart.follow import lines, stream
from warmstart.lease import Lease

KEPT = 3  # logs of each preset


def status(state: Path, root: Path = Path("/")) -> dict[str, Any]:
    """All engines, and the devices' memory. The engine's list of containers is asked for once."""
    place, now = lease.folder(state), time.time()
    leases = lease.read(place)
    listed = boxes.listed(state)
    engines = [_row(state, place, one, now, listed) for one in leases]
    engines += [_stray_row(state, one) for one in boxes.without_lease(listed or (), leases)]
    machine = gpus.memory(root)
    devices = [
        {
            "device": gpu.pci,
            "arch": gpu.arch,
            "vram_total": gpu.vram_total,
            "vram_used": gpu.vram_used,
            "gtt_total": gpu.gtt_total,
            "gtt_used": gpu.gtt_used,
        }
        for gpu in gpus.read(root)
    ]
    held = [{"who": one.owner, "bytes": one.bytes} for one in (gpus.holders(root) if devices else ())]
    memory = {"total": machine.total, "available": machine.available, "swap_used": machine.swap_used}
    return {"engines": engines, "devices": devices, "holders": held, "memory": memory}


def url(port: int) -> str:
    """Where an engine of this machine answers."""
    return f"http://127.0.0.1:{port}/v1"


def log_file(state: Path, preset: str) -> Path | None:
    """The output of a preset's latest engine; None when there was none."""
    return max(_logs(state, preset).glob("*.log"), default=None)


def new_log(state: Path, preset: str) -> Path:
    """The file for the output of a preset's next engine. It gets one of its own: who still follows an earlier engine
    must not take this one's lines for that one's."""
    return (_logs(state, preset) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log").resolve()


def drop_logs(state: Path, preset: str) -> None:
    """Remove a preset's logs, but for the latest ones."""
    for old in sorted(_logs(state, preset).glob("*.log"))[:-KEPT]:
        old.unlink(missing_ok=True)


def text(told: dict[str, Any]) -> str:
    """The table of `status`."""
    found = [_line(row) for row in told["engines"]] or ["no engine"]
    for gpu in told["devices"]:
        used, total = gpu["vram_used"] + gpu["gtt_used"], gpu["vram_total"]
        sizes = f"{gpus.gib(used)} used, VRAM {gpus.gib(total)}, GTT {gpus.gib(gpu['gtt_total'])}"
        found.append(f"{gpu['device']} {gpu['arch']}: {sizes}")
    found += [f"  {one['who']} has {gpus.gib(sum(one['bytes'].values()))}" for one in told["holders"]]
    memory = told["memory"]
    free, total = gpus.gib(memory["available"]), gpus.gib(memory["total"])
    found.append(f"memory: {free} of {total} available, swap {gpus.gib(memory['swap_used'])}")
    return "\n".join(found)


def show_log(state: Path, name: str, *, follow: bool) -> None:
    """Write an engine's log to stdout, tokens masked; with `follow` until it ends. Raises NoEngine."""
    place = lease.folder(state)
    one = next((one for one in lease.read(place) if one.preset == name), None)
    other = boxes.stray(state, place, name) if one is None and (follow or not name) else None
    if not name and other is None:
        one = lease.pick(place)
    name = one.preset if one else other.preset if other else name
    file = Path(one.log) if one else log_file(state, name)
    if file is None or not file.is_file():
        hint = f"`podman logs {other.name}` may have it" if other else f"`{hints.command('status')}` names the engines"
        raise NoEngine(f"there is no log of {name}", hint=hint)
    pid = other.pid if other else 0
    began = processes.began(pid) if pid else 0

    def runs() -> bool:
        return lease.alive(one, time.time()) if one else bool(began) and processes.began(pid) == began

    for line in stream(file, runs) if follow else lines(file):
        print(masking.text(line), flush=follow)
    sys.stdout.flush()


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """`[PRESET] -- COMMAND …` as preset and command. Raises UsageError."""
    before, dashes, after = list(words), "", []
    if "--" in before:
        at = before.index("--")
        before, dashes, after = before[:at], "--", before[at + 1 :]
    if not after or len(before) > 1 or not dashes:
        raise UsageError("exec needs a command behind --", hint=f"`{hints.execute('vllm serve --help')}`")
    return (before[0] if before else ""), after


def execute(state: Path, name: str, command: Sequence[str], env: dict[str, str]) -> None:
    """Become a command inside an engine's container, on this terminal. Raises NoEngine."""
    one = lease.pick(lease.folder(state), name)
    if not lease.alive(one, time.time()):
        hint = f"`{hints.command('logs', one.preset)}` shows its end"
        raise NoEngine(f"{one.preset} does not run any more", hint=hint)
    terminal = ["--interactive", *(["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else [])]
    run.become(["podman", "exec", *terminal, one.container, *command], env=env)


def _logs(state: Path, preset: str) -> Path:
    return state / "logs" / lease.container_name(preset)


def _stray_row(state: Path, one: Listed) -> dict[str, Any]:
    """A container that no lease names."""
    end = f"exit code {one.code}; `{hints.command('logs', one.preset)}` shows its end"
    return {
        "preset": one.preset,
        "state": "running" if one.pid else "ended",
        "since": one.started,
        "port": 0,
        "devices": (),
        "bytes": 0,
        "container": one.name,
        "warning": "",
        "log": str(log_file(state, one.preset) or ""),
        "why": "not by a lease here" if one.pid else end,
    }


def _row(state: Path, place: Path, one: Lease, now: float, listed: Sequence[Listed] | None) -> dict[str, Any]:
    """One engine. The lease of one that is gone, and that nothing has to be put right for, is given back."""
    row: dict[str, Any] = {
        "preset": one.preset,
        "state": one.state,
        "since": one.since,
        "port": one.port,
        "devices": one.devices,
        "bytes": one.bytes,
        "container": one.container,
        "warning": one.warning,
        "log": one.log,
    }
    stops = one.state == "stopping" and now < one.expires and processes.began(one.stopper) == one.stopper_began > 0
    if lease.alive(one, now) or stops:
        if one.state == "stopping" and not stops:
            row["why"] = f"who stopped it was stopped too; `{hints.command('down', one.preset)}` does it"
        return row
    row["state"], row["why"] = _dead(state, place, one, listed)
    row["bytes"] = one.bytes if row["state"] == one.state else 0  # an engine that ended has nothing
    if one.stopped:
        row["why"] += f"; `{hints.command('down', one.preset)}` starts {', '.join(one.stopped)} again"
    elif row["state"] == "gone":
        lease.release(place, one)
    return row


def _dead(state: Path, place: Path, one: Lease, listed: Sequence[Listed] | None) -> tuple[str, str]:
    """What became of an engine whose first process is not there any more."""
    if one.reason:
        return "stopped", one.reason
    if listed is None:
        return "ended", "podman can't be asked what became of its container"
    # An `up` that was killed may have started a container without having written it down.
    same = (box for box in listed if (box.id == one.container_id if one.container_id else box.name == one.container))
    seen = next(same, None)
    if seen is None and not one.container_id:
        return "gone", "its `up` ended before there was a container"
    if seen is None:
        return "gone", "its container was removed, and not by warmstart"
    if seen.pid:
        from warmstart import container, probe

        if whole := container.look(probe.probe(state), seen.id):
            pid, began = container.began(whole)
            lease.update(place, one, container_id=whole.id, cache=whole.cache, process=pid, process_began=began)
        return one.state, "its container was restarted" if one.container_id else "its `up` was killed"
    return "ended", f"exit code {seen.code}; `{hints.command('logs', one.preset)}` shows its end"


def _line(row: dict[str, Any]) -> str:
    since = time.strftime("%H:%M", time.localtime(row["since"]))
    told = ", ".join([f"{row['preset']}: {row['state']} since {since}", *row["devices"]])
    told += f" ({gpus.gib(row['bytes'])})" if row["bytes"] else ""
    told += f", {url(row['port'])}" if row["state"] == "ready" else ""
    return told + (f"; {row['why']}" if row.get("why") else "") + (f"; {row['warning']}" if row["warning"] else "")
