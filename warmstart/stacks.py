"""Where an engine's Python is, seen from outside by py-spy, shown short. py-spy is optional and only ever looks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from warmstart import run
from warmstart.errors import CommandFailed
from warmstart.processes import Process

FRAMES = 4  # shown of each process, the innermost first
PATIENCE = 20.0  # seconds that one look may take

# Functions that say what is done, wherever they are on the stack.
TELLING = {
    "do_bench": "benches a kernel",
    "_bench": "benches a kernel",
    "make_amdgcn": "compiles a kernel",
    "make_hsaco": "compiles a kernel",
    "_compile_fx_inner": "compiles a graph",
    "load_weights": "loads weights",
    "snapshot_download": "downloads",
    "hf_hub_download": "downloads",
    "capture": "captures graphs",
}
_FRAME = re.compile(r"^\s+(?P<name>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^Thread \S+ \((?P<state>[^)]*)\)(?:: \"(?P<name>.*)\")?")


def program() -> str | None:
    """py-spy, from this Python's own environment or the PATH; None when it isn't installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else run.program("py-spy")


def look(process: Process, rootless: bool) -> str:
    """A process's stack in one line: what it is doing, and the innermost frames. Says why where that fails."""
    spy = program()
    if not spy:
        return "py-spy is not installed: .venv/bin/uv pip install py-spy"
    # A rootless container's processes belong to the user's own namespace of users: seen from inside of that.
    words = [*(["podman", "unshare"] if rootless else []), spy, "dump", "--pid", str(process.pid)]
    try:
        return short(run.run(words, always=True, timeout=PATIENCE).stdout)
    except CommandFailed as failed:
        return f"py-spy saw nothing: {failed.message}"


def short(dump: str) -> str:
    """py-spy's dump in one line: the main thread's innermost frames, after what a telling frame says."""
    frames = _main(dump)
    if not frames:
        return "no Python frame"
    meaning = next((TELLING[name] for name, _ in frames if name in TELLING), "")
    inner = " < ".join(f"{name} ({place})" for name, place in frames[:FRAMES])
    return f"{meaning}: {inner}" if meaning else inner


def of_interest(found: tuple[Process, ...]) -> Process | None:
    """The process to look into: the Python that used the most processor time."""
    pythons = [p for p in found if "python" in p.command or "vllm" in p.command.lower() or p.name.startswith("VLLM")]
    return max(pythons, key=lambda p: p.cpu, default=None)


def _main(dump: str) -> list[tuple[str, str]]:
    """Function and place of the main thread's frames, the innermost first; of the first thread without a main one."""
    threads: list[tuple[str, list[tuple[str, str]]]] = []
    for line in dump.splitlines():
        if head := _THREAD.match(line):
            threads.append((head["name"] or "", []))
        elif threads and (frame := _FRAME.match(line)):
            place = Path(frame["file"]).name + (f":{frame['line']}" if frame["line"] else "")
            threads[-1][1].append((frame["name"].strip(), place))
    return next((frames for name, frames in threads if name == "MainThread"), threads[0][1] if threads else [])
