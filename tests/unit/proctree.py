"""A /proc below a temporary folder."""

from __future__ import annotations

from pathlib import Path


def add(
    root: Path,
    pid: int,
    parent: int = 1,
    *,
    name: str = "python3",
    command: str = "",
    ticks: int = 0,
    read: int = 0,
    began: int = 100,
    group: str = "",
    state: str = "S",
) -> Path:
    """Make, or make again, a process; returns its folder."""
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    middle = " ".join(["0"] * 9)
    (folder / "stat").write_text(
        f"{pid} ({name}) {state} {parent} {middle} {ticks} 0 0 0 20 0 1 0 {began} 0 0\n".replace("  ", " ")
    )
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cmdline").write_text((command or name).replace(" ", "\0") + "\0")
    (folder / "io").write_text(f"rchar: 5\nread_bytes: {read}\nwrite_bytes: 0\n")
    (folder / "cgroup").write_text(f"0::{group}\n")
    return folder
