"""containers.conf, where the engine's own settings can't start a container: what to try, and the file for it.

Known faults: podman as root asks for higher limits than it may (no CAP_SYS_RESOURCE); crun refuses hybrid
cgroups; there is no systemd to make cgroups; the tools for a container's own network are missing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from warmstart import run
from warmstart.errors import EngineBroken

RUNTIMES = ("crun", "runc")
CAP_SYS_RESOURCE = 24  # bit in /proc/self/status CapEff (linux/capability.h)
MOST_FILES = 1 << 20  # what podman itself asks for where it may: 1,048,576 open files

# Read in this order, each over the one before; below them .d/*.conf (man containers.conf).
SYSTEM = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which settings a machine needs."""

    may_raise_limits: bool  # CAP_SYS_RESOURCE
    files: int  # hard limit on open files; -1: none
    processes: int  # hard limit on processes; -1: none
    pid_max: int
    hybrid_cgroups: bool  # a v2 tree with controllers beside the v1 trees: crun refuses that
    systemd: bool
    runtimes: tuple[str, ...]  # OCI runtimes that are installed
    rootless: bool


class Settings(msgspec.Struct, frozen=True):
    """What a containers.conf changes. Empty: nothing."""

    ulimits: tuple[str, ...] = ()
    runtime: str = ""
    cgroups: str = ""  # "cgroupfs", or the engine's own choice
    network: str = ""  # "host", or the engine's own choice

    @property
    def changes(self) -> int:
        """How many settings differ from the engine's own."""
        return sum(map(bool, (self.ulimits, self.runtime, self.cgroups, self.network)))


def facts() -> Facts:
    """The facts of this machine, read from /proc, /sys and PATH."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
    return Facts(
        may_raise_limits=bool(int(status["CapEff"], 16) >> CAP_SYS_RESOURCE & 1),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        pid_max=int(Path("/proc/sys/kernel/pid_max").read_text()),
        hybrid_cgroups=controllers.is_file() and bool(controllers.read_text().strip()),
        systemd=Path("/run/systemd/system").is_dir(),
        runtimes=tuple(name for name in RUNTIMES if run.program(name)),
        rootless=os.geteuid() != 0,
    )


def ulimits(known: Facts) -> tuple[str, ...]:
    """Limits that the kernel grants: not above the hard ones, nor more processes than process ids."""
    files = min(n for n in (known.files, MOST_FILES) if n > 0)
    processes = min(n for n in (known.processes, known.pid_max) if n > 0)
    return (f"nofile={files}:{files}", f"nproc={processes}:{processes}")


def candidates(known: Facts) -> list[Settings]:
    """Settings to try, the likeliest first; the engine's own (no change) is not among them.

    The host's network, which gives up isolation, comes after all that keep the container's own.
    """
    limits = () if known.may_raise_limits else ulimits(known)
    runtime = "runc" if known.hybrid_cgroups and "runc" in known.runtimes else ""
    every = itertools.product(((), ulimits(known)), ("", *known.runtimes), ("", "cgroupfs"), ("", "host"))

    def unlikely(s: Settings) -> tuple[bool, bool, int, int]:
        return bool(s.network), bool(s.cgroups), (s.ulimits != limits) + (s.runtime != runtime), s.changes

    return sorted((s for c in every if (s := Settings(*c)).changes), key=unlikely)


def text(settings: Settings, below: Mapping[str, Any] | None = None) -> str:
    """A containers.conf with these settings over those of `below`."""
    containers: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    if settings.ulimits:
        containers["default_ulimits"] = list(settings.ulimits)
    if settings.network:
        containers["netns"] = settings.network
    if settings.runtime:
        engine["runtime"] = settings.runtime
    if settings.cgroups:
        engine["cgroup_manager"] = settings.cgroups
    merged = merge(below or {}, {"containers": containers, "engine": engine})
    head = "# Written by warmstart: this machine's own settings can't start a container.\n"
    return head + "\n".join(_toml(merged, ())) + "\n"


def existing() -> dict[str, Any]:
    """What the machine's and the user's own containers.conf files set, merged as the engine does.

    For engines whose CONTAINERS_CONF replaces these files (podman 4.3) instead of adding to them.
    """
    merged: dict[str, Any] = {}
    for path in files():
        merged = merge(merged, read(Path(path)))
    return merged


def files() -> list[str]:
    """The containers.conf files that are there, in the order in which they are read."""
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    found: list[Path] = []
    for file in (*SYSTEM, f"{own}/containers/containers.conf"):
        found += [Path(file), *sorted(Path(f"{file}.d").glob("*.conf"))]
    return [str(path) for path in found if path.is_file()]


def read(path: Path) -> dict[str, Any]:
    """One containers.conf as tables. Raises EngineBroken when it isn't TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as failure:
        raise EngineBroken(f"{path} can't be read: {failure}", hint="correct or remove that file") from None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key; any other value of `above` replaces that of `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _toml(table: Mapping[str, Any], name: tuple[str, ...]) -> Iterator[str]:
    if name:
        yield f"\n[{'.'.join(map(_key, name))}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, (*name, key))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value) if isinstance(value, (str, bool, int, float)) else json.dumps(str(value))
