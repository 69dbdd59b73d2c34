"""What an engine does while it writes nothing: it compiles, benches, loads, works, or hangs.

Two readings some seconds apart are compared. What counts as what is in `classify`, a pure function; `read` takes a
reading from /proc, sysfs and the cache volume. Nothing here ever stops anything.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from warmstart import gpus, host, processes
from warmstart.processes import Process

APART = 5.0  # seconds between the two readings of a look
FILES = 50_000  # of the cache that are looked at

# Below these a program does nothing that would explain its silence: vLLM's threads wake up now and then while they
# wait, and any disk or network that a model is loaded from gives more than this.
IDLE_CORES = 0.03
LOAD_BYTES = 1 << 20  # a second
BUSY_GPU = 30  # percent

Kind = Literal["compiles", "benches", "loads", "works", "hangs", "gone"]

# Compilers that torch, Triton, vLLM and aiter start, by their process names (cut to 15 characters by the kernel).
_COMPILER = re.compile(
    r"clang(\+\+)?(-\d+)?|cc1(plus)?|c\+\+|g\+\+(-\d+)?|gcc(-\d+)?|x86_64-linux-gnu.*|as|ld|ld\.lld|lld|collect2"
    r"|hipcc(\.pl|\.bin)?|amdclang(\+\+)?|ptxas|ninja|cmake|llc|opt|nvcc|cicc"
)
# Workers that compile in Python processes: torch's of Inductor, and the parallel ones of the image's start-up hooks.
_WORKER = re.compile(r"torch[/.]_inductor[/.]compile_worker|warmstart_workers")


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has done so far. Compared with a later one it says what it does."""

    at: float  # seconds, of any clock that only goes on
    processes: tuple[Process, ...]
    gpu_busy: int | None = None  # percent; None without a GPU that tells
    files: int = 0  # of the cache
    cache: int = 0  # their bytes
    newest: float = 0.0  # when the last of them was changed, in seconds since 1970
    received: int = 0  # bytes from the network


class Activity(msgspec.Struct, frozen=True):
    """What an engine does, and what was seen that says so."""

    kind: Kind
    evidence: str


def classify(before: Reading, after: Reading) -> Activity:
    """What happened between two readings."""
    if not after.processes:
        return Activity("gone", "its processes have ended")
    seconds = max(after.at - before.at, 0.001)
    cores = _cpu(before, after) / seconds
    written = after.files - before.files, after.cache - before.cache
    compilers = sorted({p.name for p in (*before.processes, *after.processes) if _COMPILER.fullmatch(p.name)})
    workers = _busy_workers(before, after)
    grows = written != (0, 0) or after.newest > before.newest
    used = f"{cores:.1f} cores busy"
    if compilers:
        return Activity("compiles", f"{', '.join(compilers)} running, {used}{_grown(*written)}")
    if workers:
        return Activity("compiles", f"{workers} compile workers running, {used}{_grown(*written)}")
    if grows and cores > IDLE_CORES:
        return Activity("compiles", f"the cache is written, {used}{_grown(*written)}")
    if (after.gpu_busy or 0) >= BUSY_GPU:
        return Activity("benches", f"the GPU is {after.gpu_busy} % busy, {used}")
    for what, size in (("read from disk", _disk(before, after)), ("received", after.received - before.received)):
        if size / seconds >= LOAD_BYTES:
            return Activity("loads", f"{size / seconds / 1e6:.0f} MB/s {what}, {used}")
    if cores > IDLE_CORES:
        return Activity("works", f"{used}, no compiler, no cache written, no GPU busy")
    gpu = "" if after.gpu_busy is None else f", GPU {after.gpu_busy} % busy"
    return Activity("hangs", f"for {seconds:.0f} s no processor time, nothing read, nothing written{gpu}")


def read(pid: int, at: float, *, cache: Path | None = None, card: str = "", root: Path = Path("/")) -> Reading:
    """A reading of a container whose first process is `pid`; `card` is DRM's name of its GPU, `cache` a folder."""
    files, size, newest = _files(cache) if cache else (0, 0, 0.0)
    return Reading(
        at=at,
        processes=processes.tree(pid, root),
        gpu_busy=_busy(card, root),
        files=files,
        cache=size,
        newest=newest,
        received=_received(pid, root),
    )


def _cpu(before: Reading, after: Reading) -> float:
    """Seconds of processor time in between: of those that are there now, and of children that ended meanwhile."""
    known = {(p.pid, p.began): p.cpu for p in before.processes}
    return sum(max(p.cpu - known.get((p.pid, p.began), 0.0), 0.0) for p in after.processes)


def _disk(before: Reading, after: Reading) -> int:
    known = {(p.pid, p.began): p.read for p in before.processes}
    return sum(max(p.read - known.get((p.pid, p.began), 0), 0) for p in after.processes)


def _busy_workers(before: Reading, after: Reading) -> int:
    known = {(p.pid, p.began): p.cpu for p in before.processes}
    used = (p.cpu - known.get((p.pid, p.began), 0.0) for p in after.processes if _WORKER.search(p.command))
    return sum(seconds > 0.1 for seconds in used)


def _grown(files: int, size: int) -> str:
    return f", cache {files:+} files {size / 1e6:+.1f} MB" if files or size else ""


def _busy(card: str, root: Path) -> int | None:
    return host.number(host.text(root / gpus.DRM / card / "device/gpu_busy_percent")) if card else None


def _received(pid: int, root: Path) -> int:
    """Bytes that came to the network that a process is in, but for those that it sent itself."""
    try:
        lines = (root / "proc" / str(pid) / "net/dev").read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return 0
    pairs = (line.partition(":") for line in lines)
    return sum(int(rest.split()[0]) for name, _, rest in pairs if name.strip() != "lo")


def _files(folder: Path) -> tuple[int, int, float]:
    """How many files lie below a folder, their bytes, and when the last one was changed."""
    count, size, newest, waiting = 0, 0, 0.0, [str(folder)]
    while waiting and count < FILES:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    count, size, newest = count + 1, size + stat.st_size, max(newest, stat.st_mtime)
        except OSError:
            continue  # removed while we looked, or not ours to read
    return count, size, newest
