"""Data files that are no profile: read and judged in one place, so that every mistake in one is told in one line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from warmstart.errors import ProfileError

T = TypeVar("T")


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


def _hint(problem: str, kind: type[object]) -> str:
    unknown = re.search(r"unknown field `(.*?)`", problem)
    schema = msgspec.json.schema(kind)
    known = {key for table in schema.get("$defs", {}).values() for key in table.get("properties", ())}
    near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5) if unknown else []
    return f"did you mean {near[0]}?" if near else "the comments in that file say what belongs there"
