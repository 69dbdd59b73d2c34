"""The working folder of an aiter build: fresh for each, held while it runs, removed even if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path


def folder(dest: Path) -> tuple[Path, int]:
    """A fresh folder beside `dest`, held by a lock on itself; folders of killed builds are removed first."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    for old in dest.parent.glob(f".{dest.name}.work-*"):
        handle = os.open(old, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end_processes(old)
            shutil.rmtree(old)
        except BlockingIOError:
            pass  # a build that is running
        finally:
            os.close(handle)
    work = Path(tempfile.mkdtemp(prefix=f".{dest.name}.work-", dir=dest.parent))
    handle = os.open(work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return work, handle


def end_processes(place: Path) -> None:
    """Kill what runs in `place` (compilers outlive a killed builder) and wait until it's gone, 5 s at most."""
    deadline = time.monotonic() + 5
    while (found := running_in(place)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def running_in(place: Path) -> list[int]:
    """The processes whose working directory is `place` or below it."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # gone, or not ours to see
            if link.readlink().is_relative_to(place):
                found.append(int(link.parent.name))
    return found
