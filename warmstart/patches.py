"""Patches: `patches/<component>/series` and the files it names, each with a header that says why it is there.

The header is `Field: value` lines above the first difference; patches/README.md says what each field is for.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import get_args

import msgspec

from warmstart import toml
from warmstart.errors import PatchError
from warmstart.schema import Lane, Profile

REQUIRED = ("Subject", "Why", "Upstream", "Applies-to", "Drop-when", "Marker")
OPTIONAL = ("Lanes", "Archs")
# The version ranges that image/patch.py understands: the stage that it runs in has no `packaging`.
RANGE = re.compile(r"(>=|<|==)\d+(\.\d+)*(\.\*)?(, ?(>=|<)\d+(\.\d+)*)*")
ARCH = re.compile(r"cpu|gfx[0-9a-f?*]+")


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """A patch file: its header, and the files that it changes (relative to site-packages)."""

    component: str
    name: str
    subject: str
    why: str
    upstream: str  # a link, or "none yet"
    applies_to: str  # versions of the component, e.g. >=0.32,<0.34
    drop_when: str  # a range of versions, or `<file>: <regex>` that matches in sources which don't need it
    marker: str  # text that the files hold once patched, and only then
    lanes: tuple[str, ...] = ()  # empty: all
    archs: tuple[str, ...] = ()  # names or patterns such as gfx11*; empty: all
    files: tuple[str, ...]


def series(root: Path, component: str) -> tuple[Patch, ...]:
    """The patches of a component, in the order of its series file; none without one. Raises PatchError."""
    folder = root / "patches" / component
    file = folder / "series"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    for name in names:
        if not (folder / name).is_file():
            hint = _near(name, [p.name for p in folder.glob("*.patch")]) or "take it out of the series"
            raise PatchError(f"patches/{component}/series names {name}, which is not there", hint=hint)
    return tuple(read(folder / name) for name in names)


def selected(root: Path, component: str, profile: Profile) -> tuple[str, ...]:
    """Names of the patches in the image of a profile, in order: those whose Lanes and Archs include it."""
    return tuple(p.name for p in series(root, component) if _is_for(p, profile))


def read(file: Path) -> Patch:
    """A patch file as a value. Raises PatchError when its header is incomplete or says what can't be."""
    header, _, difference = ("\n" + file.read_text(encoding="utf-8")).partition("\n--- ")
    fields = _fields(file.name, header)
    files = tuple(re.findall(r"^\+\+\+ b/(\S+)", difference, re.MULTILINE))
    added = re.findall(r"^\+(?!\+\+ )(.*)$", difference, re.MULTILINE)
    lanes, archs = (tuple(fields.get(name, "").replace(",", " ").split()) for name in OPTIONAL)
    for good, problem, hint in (
        (files, "it changes no file below b/", "make it with `diff -ur a b`"),
        (
            RANGE.fullmatch(fields["Applies-to"]),
            f"Applies-to {fields['Applies-to']!r} is no range of versions",
            "for example >=0.32,<0.34 or ==0.33.*",
        ),
        (
            is_range(fields["Drop-when"]) or _is_regex(fields["Drop-when"]),
            f"Drop-when {fields['Drop-when']!r} is neither a range of versions nor `<file>: <regex>`",
            "for example >=0.34, or vllm/envs.py: VLLM_NEW_NAME",
        ),
        (
            re.fullmatch(r"https://\S+|none yet", fields["Upstream"]),
            f"Upstream {fields['Upstream']!r} is neither a link nor `none yet`",
            "link the issue or the change",
        ),
        (
            any(fields["Marker"] in line for line in added),
            f"no line that it adds holds its Marker {fields['Marker']!r}",
            "take a text from an added line",
        ),
        (
            set(lanes) <= set(get_args(Lane)),
            f"Lanes {' '.join(lanes)!r} holds an unknown lane",
            f"known: {', '.join(get_args(Lane))}",
        ),
        (
            all(map(ARCH.fullmatch, archs)),
            f"Archs {' '.join(archs)!r} holds what is no arch",
            "for example gfx1151 gfx12*",
        ),
    ):
        if not good:
            raise PatchError(f"{file.parent.name}/{file.name}: {problem}", hint=hint)
    return Patch(
        component=file.parent.name,
        name=file.name,
        lanes=lanes,
        archs=archs,
        files=files,
        **{name.lower().replace("-", "_"): fields[name] for name in REQUIRED},
    )


def is_range(text: str) -> bool:
    """Whether a Drop-when is a range of versions, and not a file and what to find in it."""
    return RANGE.fullmatch(text) is not None


def _fields(name: str, header: str) -> dict[str, str]:
    """Header lines as fields; a line that begins with a space continues the one above."""
    fields: dict[str, str] = {}
    last = ""
    for line in header.splitlines():
        if line[:1].isspace() and last:
            fields[last] += " " + line.strip()
            continue
        if not line.strip():
            continue
        last, colon, value = line.partition(":")
        if not colon or last not in REQUIRED + OPTIONAL:
            hint = _near(last, [*REQUIRED, *OPTIONAL]) or f"known: {', '.join(REQUIRED + OPTIONAL)}"
            raise PatchError(f"{name}: unknown field {last!r} in its header", hint=hint)
        if last in fields:
            raise PatchError(f"{name}: field {last} stands twice in its header", hint="leave one")
        fields[last] = value.strip()
    missing = [field for field in REQUIRED if not fields.get(field)]
    if missing:
        raise PatchError(f"{name}: its header lacks {', '.join(missing)}", hint="see patches/README.md")
    return fields


def _is_for(patch: Patch, profile: Profile) -> bool:
    return (not patch.lanes or profile.lane in patch.lanes) and (
        not patch.archs or any(fnmatch.fnmatchcase(profile.arch, pattern) for pattern in patch.archs)
    )


def _is_regex(text: str) -> bool:
    file, colon, pattern = text.partition(": ")
    try:
        re.compile(pattern)
    except re.error:
        return False
    return bool(colon and pattern) and " " not in file


def _near(name: str, known: list[str]) -> str:
    near = toml.nearest(name, known, cutoff=0.6)
    return f"did you mean {near}?" if near else ""
