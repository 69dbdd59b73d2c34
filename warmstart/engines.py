"""What runs, for people: the table of `status`, the lines of `logs`, a command in an engine, a kernel on the GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warmstart import gpus, lease, masking, run
from warmstart.errors import NoEngine, UsageError
from warmstart.follow import lines, stream
from warmstart.lease import Lease

KEPT = 3  # logs of each preset


def status(state: Path, root: Path = Path("/")) -> dict[str, Any]:
    """All engines, and the devices' memory. A process is started only for an engine that ended."""
    place, now = lease.folder(state), time.time()
    engines = [_row(state, place, one, now) for one in lease.read(place)]
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
        sizes = f"{_gib(used)} used, VRAM {_gib(total)}, GTT {_gib(gpu['gtt_total'])}"
        found.append(f"{gpu['device']} {gpu['arch']}: {sizes}")
    found += [f"  {one['who']} has {_gib(sum(one['bytes'].values()))}" for one in told["holders"]]
    memory = told["memory"]
    free, total = _gib(memory["available"]), _gib(memory["total"])
    found.append(f"memory: {free} of {total} available, swap {_gib(memory['swap_used'])}")
    return "\n".join(found)


def show_log(state: Path, name: str, *, follow: bool) -> None:
    """Write an engine's log to stdout, tokens masked; with `follow` until it ends. Raises NoEngine."""
    place = lease.folder(state)
    one = next((one for one in lease.read(place) if one.preset == name), None)
    if not name:
        one = lease.pick(place)
    file = Path(one.log) if one else log_file(state, name)
    if file is None or not file.is_file():
        raise NoEngine(f"there is no log of {name}", hint="`warmstart status` names the engines")
    for line in stream(file, lambda: bool(one and lease.alive(one, time.time()))) if follow else lines(file):
        print(masking.text(line), flush=follow)
    sys.stdout.flush()


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """`[PRESET] -- COMMAND …` as preset and command. Raises UsageError."""
    before, dashes, after = list(words), "", []
    if "--" in before:
        at = before.index("--")
        before, dashes, after = before[:at], "--", before[at + 1 :]
    if not after or len(before) > 1 or not dashes:
        raise UsageError("exec needs a command behind --", hint="warmstart exec [PRESET] -- vllm serve --help")
    return (before[0] if before else ""), after


def execute(state: Path, name: str, command: Sequence[str], env: dict[str, str]) -> None:
    """Become a command inside an engine's container, on this terminal. Raises NoEngine."""
    one = lease.pick(lease.folder(state), name)
    if not lease.alive(one, time.time()):
        raise NoEngine(f"{one.preset} does not run any more", hint=f"`warmstart logs {one.preset}` shows its end")
    terminal = ["--interactive", *(["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else [])]
    run.become(["podman", "exec", *terminal, one.container, *command], env=env)


def _logs(state: Path, preset: str) -> Path:
    return state / "logs" / lease.container_name(preset)


def _row(state: Path, place: Path, one: Lease, now: float) -> dict[str, Any]:
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
    if lease.alive(one, now):
        return row
    row["state"], row["why"] = _dead(state, place, one)
    if one.stopped:
        row["why"] += f"; `warmstart down {one.preset}` starts {', '.join(one.stopped)} again"
    elif row["state"] == "gone":
        lease.release(place, one)
    return row


def _dead(state: Path, place: Path, one: Lease) -> tuple[str, str]:
    """What became of an engine whose first process is not there any more."""
    if one.reason:
        return "stopped", one.reason
    from warmstart import container, probe

    # An `up` that was killed may have started a container without having written it down.
    seen = container.look(probe.probe(state), one.container_id or one.container)
    if seen is None and not one.container_id:
        return "gone", "its `up` ended before there was a container"
    if seen is None:
        return "gone", "its container was removed, and not by warmstart"
    if seen.pid:
        pid, began = container.began(seen)
        lease.update(place, one, container_id=seen.id, cache=seen.cache, process=pid, process_began=began)
        return one.state, "its container was restarted" if one.container_id else "its `up` was killed"
    return "ended", f"exit code {seen.code}; `warmstart logs {one.preset}` shows its end"


def _line(row: dict[str, Any]) -> str:
    since = time.strftime("%H:%M", time.localtime(row["since"]))
    told = f"{row['preset']}: {row['state']} since {since}, {', '.join(row['devices'])}"
    told += f" ({_gib(row['bytes'])})" if row["bytes"] else ""
    told += f", http://127.0.0.1:{row['port']}/v1" if row["state"] == "ready" else ""
    return told + (f"; {row['why']}" if row.get("why") else "") + (f"; {row['warning']}" if row["warning"] else "")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
