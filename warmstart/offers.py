"""What vendors' indexes offer, as far as a rehearsal has to know: `arch/rehearsal.toml`, typed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from warmstart.errors import ProfileError
from warmstart.lock import PIP, Wheel


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A table of arch/rehearsal.toml: unknown keys are errors."""


class Address(_Table, frozen=True, kw_only=True):
    """An index by the form of its address that is known to be right."""

    address: str
    absent: Annotated[int, msgspec.Meta(ge=400, lt=500)]  # HTTP status for a name that it doesn't have


class Content(_Table, frozen=True, kw_only=True):
    """Files of a stand-in, by kind; paths are below site-packages."""

    libraries: dict[str, tuple[str, ...]] = {}
    hip: dict[str, tuple[str, ...]] = {}
    modules: dict[str, str] = {}
    code: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Standin(Content, frozen=True, kw_only=True):
    """A stand-in: where it is offered, its metadata and its files."""

    name: str
    index: str
    why: str
    form: Literal["wheel", "sdist", "vllm", "vllm-sources", "triton"] = "wheel"
    tag: str = "py3-none-any"
    versions: tuple[str, ...] = ()  # where the locks leave the version open
    requires: tuple[str, ...] = ()
    extras: dict[str, tuple[str, ...]] = {}
    scripts: dict[str, str] = {}
    built_for: tuple[str, ...] = ()
    sources: str = ""
    runpath: str = ""
    also: dict[str, Content] = {}  # more files for one arch


class Rehearsal(_Table, frozen=True, kw_only=True):
    """All of arch/rehearsal.toml."""

    unpacked_mb: Annotated[int, msgspec.Meta(ge=1)]  # of an image of stand-ins, in place of the profile's budget
    archs: dict[str, Literal[32, 64]]
    families: dict[str, str]
    index: tuple[Address, ...]
    standin: tuple[Standin, ...]


def load(root: Path) -> Rehearsal:
    """arch/rehearsal.toml. Raises ProfileError."""
    try:
        found = msgspec.toml.decode((root / "arch" / "rehearsal.toml").read_bytes(), type=Rehearsal)
    except (OSError, msgspec.MsgspecError) as bad:
        raise ProfileError(f"arch/rehearsal.toml: {bad}") from None
    known = {index.address for index in found.index}
    for one in found.standin:
        if one.index and one.index not in known:
            raise ProfileError(f"arch/rehearsal.toml: {one.name} is in an index that has no table: {one.index}")
    return found


def wanted(table: Rehearsal, wheels: Iterable[Wheel]) -> list[tuple[Standin, str, str]]:
    """The stand-ins for a lock: each with its arch (or family; empty for neither) and its version.

    Those for other archs are among them, as they are in the real indexes.
    """
    vendors = {w.name: w.version for w in wheels if w.source != PIP}
    general = {w.name: w.version for w in wheels if w.source == PIP}
    found = []
    for one in table.standin:
        locked = vendors if one.index else general
        places = table.archs if "{arch}" in one.name else table.families if "{family}" in one.name else ("",)
        versions = one.versions or [locked[named(one, a)] for a in places if named(one, a) in locked][:1]
        found += [(one, a, version) for version in versions for a in places]
    return found


def named(one: Standin, arch: str) -> str:
    """The distribution's name for an arch or a family."""
    return one.name.replace("{arch}", arch).replace("{family}", arch)
