"""Which files belong to a seed, by tier: those that `seeds.toml` knows, and no others, on either side."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from warmstart import toml
from warmstart.errors import UsageError

TIERS = ("kernels", "verdicts", "artefacts")  # in this order everywhere

# Never part of a seed, whatever else a path looks like: locks, files that are being written, hidden ones, and `..`.
_LEFT_OUT = re.compile(r"(.*/)?(\.[^/]*|tmp[._-][^/]*|[^/]*\.(lock|tmp|part|pyc)|locks|__pycache__)(/.*)?")
_CU = re.compile(r"verdicts/cu([0-9]+)/")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What no seed exceeds."""

    files: int
    bytes: int
    manifest: int
    path: int


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dropped: tuple[str, ...]


class Flags(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    left_out: tuple[str, ...]


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of file."""

    tier: Literal["kernels", "verdicts", "artefacts"]
    path: str
    index: str = ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """seeds.toml."""

    limits: Limits
    kernels: Kernels
    flags: Flags
    known: tuple[Known, ...]


class Kind(msgspec.Struct, frozen=True):
    """What a path is: its tier, the folder that is complete or not as a whole ("" for none), an index file or not."""

    tier: str
    entry: str
    index: bool


@functools.cache
def table() -> Table:
    """seeds.toml."""
    return toml.read(Path(__file__).with_name("seeds.toml"), Table)


def kind(path: str) -> Kind | None:
    """What a file below the cache key is; None for one that no seed may hold."""
    if len(path) > table().limits.path or "//" in path or path.endswith("/") or _LEFT_OUT.fullmatch(path):
        return None
    for known, pattern, index in _patterns():
        if found := pattern.fullmatch(path):
            entry = found.groupdict().get("entry") or ""
            return Kind(known.tier, entry, bool(entry and index and index.fullmatch(path.rpartition("/")[2])))
    return None


def cu(path: str) -> int:
    """The number of compute units that a verdict's path names; 0 for any other file."""
    found = _CU.match(path)
    return int(found[1]) if found else 0


def tiers(words: str) -> tuple[str, ...]:
    """The tiers of `--tier a,b`, in their order. Raises UsageError for an unknown one."""
    wanted = [word for word in re.split(r"[,\s]+", words) if word]
    if unknown := [word for word in wanted if word not in TIERS]:
        raise UsageError(f"unknown tier {unknown[0]!r}", hint=f"tiers are {', '.join(TIERS)}")
    return ordered(wanted)


def ordered(found: Sequence[str]) -> tuple[str, ...]:
    """These tiers, each once, in their order."""
    return tuple(tier for tier in TIERS if tier in found)


@functools.cache
def _patterns() -> tuple[tuple[Known, re.Pattern[str], re.Pattern[str] | None], ...]:
    return tuple(
        (known, re.compile(known.path), re.compile(known.index) if known.index else None) for known in table().known
    )
