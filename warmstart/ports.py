"""Who listens on a TCP port, from /proc alone: no connection is made and nothing is started."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

from warmstart import processes

LISTEN = "0A"  # the state in /proc/net/tcp (kernel: include/net/tcp_states.h)
LOCAL = frozenset(  # addresses that a server on 127.0.0.1 would clash with, as the kernel writes them
    ("00000000", "0100007F", "0" * 32, "0000000000000000FFFF00000100007F", "0" * 24 + "01000000")
)


def listener(port: int, root: Path = Path("/")) -> str:
    """Who listens on this machine's port, in words; empty when it is free.

    Another user's process shows only its user, unless root asks.
    """
    for table in ("tcp", "tcp6"):
        for line in _lines(root / "proc/net" / table):
            words = line.split()
            if len(words) < 10 or words[3] != LISTEN:
                continue
            address, _, number = words[1].partition(":")
            if int(number, 16) == port and address in LOCAL:
                return _who(words[9], int(words[7]), root)
    return ""


def _who(inode: str, user: int, root: Path) -> str:
    pid = processes.find(lambda one: _has(root / "proc" / str(one) / "fd", f"socket:[{inode}]"), root)
    if not pid:
        return f"a process of the user {_name(user)}"
    short = processes.name(pid, root)
    if short in ("conmon", "rootlessport") and (found := re.search(r"-n (\S+)", processes.command(pid, root))):
        return f"the container {found[1]}"
    if service := processes.unit(pid, root):
        return f"the service {service.removeprefix(processes.USER)} ({short}, pid {pid})"
    if container := processes.container(pid, root):
        return f"{short} in the container {container} (pid {pid})"
    return f"{short} (pid {pid})"


def _has(folder: Path, link: str) -> bool:
    try:
        return any(os.readlink(entry.path) == link for entry in os.scandir(folder))
    except OSError:
        return False


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()[1:]
    except OSError:
        return []
