"""Processes as /proc shows them: whether one still is the one it was, and what a whole tree of them does."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from warmstart.host import text

USER = "user:"  # before the name of a service of a user's own manager
TICKS = os.sysconf("SC_CLK_TCK")  # a second of processor time, as /proc counts it
CONTAINER = re.compile(r"(?:libpod-(?:payload-)?|docker-|/docker/|crio-)([0-9a-f]{12})[0-9a-f]{52}")


class Process(msgspec.Struct, frozen=True):
    """One process. What may not be read is 0 or empty."""

    pid: int
    parent: int
    name: str
    command: str  # its words, joined by spaces
    cpu: float  # seconds of processor time, with those of its children that ended
    read: int  # bytes it had read from disks, likewise
    began: int  # ticks after the machine's start: with the pid it names a process for good


def began(pid: int, root: Path = Path("/")) -> int:
    """When a process began, in ticks after the machine's start; 0 when there is none, or only a dead one."""
    facts = _stat(root / "proc" / str(pid)) if pid else None
    return int(facts[1][19]) if facts and facts[1][0] not in "ZX" else 0


def when(began: int) -> float:
    """The time of a begin, in seconds since 1970: the earliest that its tick allows."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began / TICKS


def boot(root: Path = Path("/")) -> str:
    """Names this run of the machine: pids and ticks mean nothing in another."""
    return text(root / "proc/sys/kernel/random/boot_id")


def tree(pid: int, root: Path = Path("/")) -> tuple[Process, ...]:
    """A process and all its descendants, by pid. Empty when it is gone."""
    stats = {number: facts for number in pids(root) if (facts := _stat(root / "proc" / str(number)))}
    inside = {pid} & stats.keys()
    grown = True
    while grown:
        more = {number for number, (_, facts) in stats.items() if int(facts[1]) in inside} - inside
        inside |= more
        grown = bool(more)
    return tuple(_process(number, *stats[number], root / "proc" / str(number)) for number in sorted(inside))


def pids(root: Path = Path("/")) -> list[int]:
    """All pids, sorted."""
    return listed(root / "proc")


def listed(folder: Path) -> list[int]:
    """The pids that a folder of the kernel has an entry for, sorted."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except OSError:
        return []


def name(pid: int, root: Path = Path("/")) -> str:
    """A process's short name; empty when it is gone."""
    return text(root / "proc" / str(pid) / "comm")


def command(pid: int, root: Path = Path("/")) -> str:
    """A process's words, joined by spaces; empty when it is gone."""
    return text(root / "proc" / str(pid) / "cmdline").replace("\0", " ").strip()


def unit(pid: int, root: Path = Path("/")) -> str:
    """The systemd service that a process belongs to; empty for none. `user:` before it means a user's own manager."""
    group = text(root / "proc" / str(pid) / "cgroup")
    found = [one for one in re.findall(r"([^/\n]+\.service)(?=/|$|\n)", group) if not one.startswith("user@")]
    return (USER if "user@" in group else "") + found[-1] if found else ""


def container(pid: int, root: Path = Path("/")) -> str:
    """The first 12 digits of the id of the container that a process runs in; empty outside of one."""
    found = CONTAINER.search(text(root / "proc" / str(pid) / "cgroup"))
    return found[1] if found else ""


def find(wanted: Callable[[int], bool], root: Path = Path("/")) -> int:
    """The first process for which `wanted` holds, or 0."""
    return next((pid for pid in pids(root) if wanted(pid)), 0)


def _process(pid: int, short: str, facts: list[str], folder: Path) -> Process:
    read = re.search(r"^read_bytes: (\d+)$", text(folder / "io"), re.MULTILINE)
    return Process(
        pid=pid,
        parent=int(facts[1]),
        name=short,
        command=text(folder / "cmdline").replace("\0", " ").strip(),
        cpu=sum(int(ticks) for ticks in facts[11:15]) / TICKS,
        read=int(read[1]) if read else 0,
        began=int(facts[19]),
    )


def _stat(folder: Path) -> tuple[str, list[str]] | None:
    """A process's short name, and what /proc/<pid>/stat says behind it (proc(5), from the third field on)."""
    head, end, rest = text(folder / "stat").rpartition(")")
    return (head.partition("(")[2], rest.split()) if end else None
