"""The flags and variables that a version of vLLM knows, as data: presets/flags/<version>.toml and presets/flags.toml.

The first kind is made by `tools/vllm_flags.py` inside an image, from vLLM's own parser; the second is kept by hand and
holds what a parser can't tell, such as what a flag that is gone was replaced by.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
from packaging.version import InvalidVersion, Version

from warmstart import masking, toml
from warmstart.known import Gone, Known

FOLDER = "presets"

Value = str | bool | tuple[str, ...]
T = TypeVar("T")

_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_.]+)?")


class Flags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `vllm serve` of one version takes: names of flags without dashes, by what stands behind them."""

    version: str
    switch: frozenset[str]  # nothing; `--no-<name>` switches it off
    plain: frozenset[str]  # nothing, and there is no `--no-<name>`
    one: frozenset[str]  # a value
    several: frozenset[str]  # one value or more
    json: frozenset[str]  # a JSON object; single parts of it as `--<name>.<part> value`
    choices: dict[str, tuple[str, ...]]  # values that a flag takes, where there is a list of them
    alias: dict[str, str]  # other names: device-memory-utilization → gpu-memory-utilization, disable-x → no-enable-x
    env: frozenset[str]  # the variables of vllm.envs

    @property
    def names(self) -> frozenset[str]:
        """All flags, whatever stands behind them."""
        return self.switch | self.plain | self.one | self.several | self.json


class Kept(toml.Table, frozen=True):
    """The content of presets/flags.toml."""

    schema: int
    on_the_fly: tuple[str, ...]  # values of --quantization for checkpoints that are not quantised
    on_the_fly_cost: str
    ours: dict[str, str]  # flags that a preset may not set, with the reason
    gone: tuple[Gone, ...] = ()  # flags, parts of JSON flags ("a-flag.part") and values ("flag=value")


@cache
def kept(root: Path) -> Kept:
    """What is kept by hand. Raises ProfileError."""
    return toml.read(root / FOLDER / "flags.toml", Kept)


def versions(root: Path) -> list[str]:
    """The versions of vLLM whose flags are known, newest first."""
    return sorted((f.stem for f in (root / FOLDER / "flags").glob("*.toml")), key=Version, reverse=True)


def known(root: Path, version: str = "") -> Flags | None:
    """The flags of a version ("0.32.0", "0.32.0+rocm100"), of the newest without one; None when they are not known."""
    if not version:
        found = next(iter(versions(root)), "")
    else:
        try:
            found = Version(version).base_version
        except InvalidVersion:
            return None
    file = root / FOLDER / "flags" / f"{found}.toml"
    return _data(file) if found and file.is_file() else None


@cache
def _data(file: Path) -> Flags:
    return toml.read(file, Flags)


def gone(root: Path, flag: str) -> Gone | None:
    """What is known of a flag that vLLM has no more; None for any other."""
    return next((one for one in kept(root).gone if one.name == flag), None)


@cache
def gone_env(root: Path) -> dict[str, Gone]:
    """The same of all variables, by name. They are in arch/rules.toml, because no image may set one either."""
    return {one.name: one for one in toml.read(root / "arch" / "rules.toml", Known).gone}


def since(version: str, first: str) -> bool:
    """Whether a version is `first` or newer; an unknown version counts as newer."""
    try:
        return Version(version) >= Version(first)
    except InvalidVersion:
        return True


class Bad(Exception):
    """What is wrong with a flag or a variable, in one line, and what to do about it."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


def check_env(root: Path, name: str, version: str = "") -> None:
    """Raise Bad for a name that is none, or a variable that this version of vLLM (without one: any) does not know."""
    _judged(root, version, lambda one, told: _check_env(root, name, one, told))


def _check_env(root: Path, name: str, version: str, told: str) -> None:
    flags = known(root, version)
    if not _ENV.fullmatch(name):
        raise Bad(f"env.{_start(name)} is no name of a variable")
    old = gone_env(root).get(name)
    if old and since(version or (flags.version if flags else ""), old.since):
        raise Bad(f"vLLM has no {name} since {old.since}", old.instead)
    if flags and name.startswith("VLLM_") and name not in flags.env:
        near = toml.nearest(name[5:], {one[5:] for one in flags.env if one.startswith("VLLM_")}, cutoff=0.75)
        hint = f"did you mean VLLM_{near}?" if near else "vllm/envs.py holds all that it reads"
        raise Bad(f"{told} does not know {name}", hint)


def check(root: Path, key: str, value: str, version: str = "", also: Collection[str] = ()) -> tuple[str, Value | None]:
    """A flag's own name and its value as it is passed on, None when it needs no word.

    True stands for a switch (`no-…` for one that is switched off), a tuple for several values. Without data of the
    version nothing is checked; without a version, what any known one takes is right. `also` are keys that are no flags,
    for hints. Raises Bad.
    """
    return _judged(root, version, lambda one, told: _check(root, key, value, one, also, told))


def _judged(root: Path, version: str, judge: Callable[[str, str], T]) -> T:
    """What `judge` says for a version, or else for the first known one that takes it. The Bad that it raises then is
    the newest's, and names no version: nobody knows yet which one the image has."""
    if version:
        flags = known(root, version)
        return judge(version, f"vLLM {flags.version if flags else version}")
    first: Bad | None = None
    for one in versions(root):
        try:
            return judge(one, "vLLM")
        except Bad as bad:
            first = first or bad
    if first:
        raise first
    return judge("", "vLLM")


def _check(
    root: Path, key: str, value: str, version: str, also: Collection[str], told: str
) -> tuple[str, Value | None]:
    flags = known(root, version)
    name, point, part = key.partition(".")
    if name in kept(root).ours:
        raise Bad(f"{name} can't be set", kept(root).ours[name])
    if flags is None or name not in flags.alias:  # a name can come back
        _refuse_gone(root, key, value, version or (flags.version if flags else ""))
    if not _FLAG.fullmatch(key):
        raise Bad(f"{_start(key)} is no flag of vLLM", _near_key(key, flags, also))
    if flags is None:
        return (key, True) if value in ("", "true") else (f"no-{key}", True) if value == "false" else (key, value)
    name = flags.alias.get(name, name)
    if name not in flags.names and name.removeprefix("no-") not in flags.switch:
        raise Bad(f"{told} has no flag --{name}", _near_key(name, flags, also))
    if point and name not in flags.json:
        raise Bad(f"{name} has no parts", f"leave out .{part}")
    return _checked(name + point + part, value, flags)


def _checked(key: str, value: str, flags: Flags) -> tuple[str, Value | None]:
    """A known flag with a value of the kind that it takes."""
    off = key.removeprefix("no-")
    if key in flags.plain or off in flags.switch:
        if value not in ("", "true", "false"):
            raise Bad(f"{key} takes no value, not {masking.text(value)!r}", "nothing or true switches it on")
        if value != "false":
            return key, True
        return (off, True) if key != off else (f"no-{key}", True) if key in flags.switch else (key, None)
    if not value:
        raise Bad(f"{key} needs a value", "in --set, nothing takes the flag out of the preset")
    if key in flags.json:
        try:
            if not isinstance(json.loads(value), dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise Bad(f"{key} takes a JSON object", f'such as {{"a": 1}}, or {key}.a = 1') from None
    if key in flags.several:
        try:
            return key, tuple(shlex.split(value))
        except ValueError as bad:
            raise Bad(f"{key}: {bad}") from None
    allowed = flags.choices.get(key, ())
    if allowed and value not in allowed:
        near = toml.nearest(value, allowed, cutoff=0.6)
        raise Bad(f"{key} can't be {value!r}", f"did you mean {near}?" if near else f"it takes {', '.join(allowed)}")
    return key, value


def _start(name: str) -> str:
    """As much of a wrong name as may be shown: behind a space stands a value, where somebody forgot the "="."""
    return next(iter(name.split()), "''")


def _refuse_gone(root: Path, key: str, value: str, version: str) -> None:
    """Raise Bad for a flag, or a part of a JSON value, that this version of vLLM has no more."""
    parts = [key, key.removeprefix("no-"), f"{key}={value}"]
    if value.startswith("{"):
        parts += [f"{key}.{part}" for part in re.findall(r'"([A-Za-z0-9_]+)"\s*:', value)]
    for part in parts:
        old = gone(root, part)
        if old and since(version, old.since):
            raise Bad(f"vLLM has no {part} since {old.since}", old.instead)


def _near_key(key: str, flags: Flags | None, also: Collection[str]) -> str:
    near = toml.nearest(key, {*also, *(flags.names if flags else ())}, cutoff=0.6)
    return f"did you mean {near}?" if near else f"keys besides vLLM's flags: env.NAME, {', '.join(also)}"
