"""What a check of the doctor gets to see, and what it says."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from warmstart import toml
from warmstart.gpus import Gpu, Memory
from warmstart.toml import Table

Severity = Literal["ok", "skipped", "unreadable", "warning", "error"]  # from best to worst
ORDER: tuple[Severity, ...] = get_args(Severity)


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    severity: Severity
    evidence: str  # what was seen, with figures
    remedy: str = ""  # an exact command, or what to do where no command does it
    verify: str = ""  # a command that shows whether it helped


class Disk(Table, frozen=True):
    """GB that have to be free."""

    image: float
    cpu_image: float
    caches: float
    models: float
    cpu_models: float


class Sizes(Table, frozen=True):
    """Limits of memory; their units are in the file."""

    gtt_leaves: int
    gtt_least: int
    shm: int
    swap_used: float


class Firmware(Table, frozen=True):
    """Firmware that is known to fail."""

    archs: tuple[str, ...]
    part: str
    version: str
    package: str
    why: str
    link: str


class Option(Table, frozen=True):
    """An option of the kernel that does nothing, or harm."""

    option: str
    why: str
    instead: str
    fatal: bool = False  # with it the driver does not load


class Variable(Table, frozen=True):
    """A variable of the environment."""

    name: str
    why: str


class Facts(Table, frozen=True):
    """arch/doctor.toml."""

    schema: int
    disk: Disk
    memory: Sizes
    firmware: tuple[Firmware, ...]
    option: tuple[Option, ...]
    variable: tuple[Variable, ...]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What the image says it needs: its labels, or the profile that it would be built from."""

    source: str  # "localhost/…:gfx1151" or "arch/gfx1151.toml"
    arch: str
    min_kernel: str = ""
    bad_firmware: tuple[str, ...] = ()  # versions of the package linux-firmware


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The container engine, as it tells itself. `problem`: why it does not, else empty."""

    problem: str = ""
    version: str = ""
    runtime: str = ""  # the OCI runtime's name
    rootless: bool = False
    storage: str = ""  # folder of its images
    tried: bool = False  # it was seen to start a container
    conf: str = ""  # the containers.conf of ours without which it could not
    isolation: str = ""  # "chroot": it builds, but starts no container
    exited: tuple[str, ...] = ()  # names of warmstart's containers that ended
    cut: tuple[str, ...] = ()  # what is left of each build that was cut off, in words
    broken: tuple[str, ...] = ()  # ids of images that can't be read, with which podman lists none


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """All that the checks look at."""

    root: Path
    gpus: tuple[Gpu, ...]
    memory: Memory
    image: Image
    facts: Facts
    environment: Mapping[str, str] | None  # None: it can't be read
    gone: Mapping[str, str] = {}  # variables that vLLM no longer knows → what to use
    engine: Engine | None = None  # None: not asked, because another root is looked at
    state: Path | None = None  # the .warmstart folder
    package: str = ""  # version of linux-firmware, where its package manager's files tell it


Check = Callable[[Host], Finding]


class Unreadable(Exception):
    """A file of the kernel that a check needs can't be read; its path."""


def facts(root: Path) -> Facts:
    """The content of arch/doctor.toml of the tree at `root`. Raises ProfileError."""
    return toml.read(root / "arch" / "doctor.toml", Facts)


def ok(evidence: str) -> Finding:
    """All is well."""
    return Finding("ok", evidence)


def skipped(why: str) -> Finding:
    """The check has nothing to look at here."""
    return Finding("skipped", why)


def needed(host: Host, path: str) -> str:
    """The stripped content of a file. Raises Unreadable, which makes the check's finding "unreadable"."""
    try:
        return (host.root / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as bad:
        raise Unreadable(f"/{path}: {bad.strerror}") from None


def status(path: Path) -> Any:
    """What stat says of a path; None when it isn't there. Raises Unreadable."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as bad:
        raise Unreadable(f"{path}: {bad.strerror}") from None


def mode(found: Any) -> str:
    """A file's kind and rights as ls shows them."""
    return stat.filemode(found.st_mode)
