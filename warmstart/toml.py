"""Data files that are no profile: read and judged in one place, so that every mistake in one is told in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from warmstart.errors import ProfileError

T = TypeVar("T")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A table of a file: its keys are spelled with dashes, and no others may stand in it."""


def read(file: Path, kind: type[T]) -> T:
    """The content of a TOML file as `kind`. Raises ProfileError, naming the file by its folder and name."""
    name = f"{file.parent.name}/{file.name}"
    try:
        return msgspec.toml.decode(file.read_bytes(), type=kind)
    except OSError as bad:
        raise ProfileError(f"{name} can't be read: {bad.strerror}", hint="it is part of warmstart's tree") from None
    except msgspec.ValidationError as bad:
        raise ProfileError(f"{name}: {bad}", hint=_hint(str(bad), kind)) from None
    except (msgspec.MsgspecError, RecursionError) as bad:
        raise ProfileError(f"{name} is not valid TOML: {bad}", hint="mend it, or take back its last change") from None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that was probably meant, or nothing. `cutoff`: how alike they have to be, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), "")


def _hint(problem: str, kind: type[object]) -> str:
    unknown = re.search(r"unknown field `(.*?)`", problem)
    schema = msgspec.json.schema(kind)
    known = {key for table in schema.get("$defs", {}).values() for key in table.get("properties", ())}
    near = nearest(unknown[1], known) if unknown else ""
    return f"did you mean {near}?" if near else "the comments in that file say what belongs there"
