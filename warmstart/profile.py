"""Profiles: everything known about one arch, as data in `arch/`.

A profile is `arch/<arch>.toml` over its family's file (and that one's own family) over `arch/defaults.toml`.
Tables merge key by key, any other value replaces the one below it. Another lane than the profile's own lies
in `[lanes.<name>]` and is merged last. The origin of every value is kept, so that `plan` can show it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from warmstart import hints, toml
from warmstart.errors import ProfileError, UnknownArch, UsageError
from warmstart.schema import Index as Index
from warmstart.schema import Profile as Profile

ARCH_NAME = re.compile(r"cpu|gfx[0-9a-f]{3,5}")  # LLVM target names, and the one lane without a GPU
WHOLE_NAME = re.compile(r"gfx([6-9][0-9a-f]{2}|1[0-9][0-9a-f]{2})")  # so long are those that there are of GPUs

# Profile keys that say something about the image but change no byte of it.
NOT_IN_IMAGE = ("budget", "evidence", "lanes", "default-lane", "hardware-validated")

BUILDER = "builder"  # the layer of what builds an image's wheels: it is not part of the image


class Loaded(msgspec.Struct, frozen=True):
    """A profile and, for every value, the file that set it (key "env.HF_HOME" → "arch/defaults.toml")."""

    profile: Profile
    origins: dict[str, str]


def archs(root: Path) -> list[str]:
    """All archs that have a profile, `cpu` first."""
    found = [p.stem for p in (root / "arch").glob("*.toml") if ARCH_NAME.fullmatch(p.stem)]
    return sorted(found, key=lambda a: (a != "cpu", a))


def load(root: Path, arch: str, lane: str = "") -> Loaded:
    """The profile of `arch`, in its own lane or another that it offers.

    Raises UnknownArch, or ProfileError for unknown keys, bad values, and lanes that are not offered.
    """
    own = root / "arch" / f"{arch}.toml"
    if not ARCH_NAME.fullmatch(arch) or not own.is_file():
        known = archs(root)
        near = "" if WHOLE_NAME.fullmatch(arch) else toml.nearest(arch.lower(), known, cutoff=0.6)
        hint = f"did you mean {hints.word('ARCH', near)}? " if near else ""
        works = f"; for any other GPU there is no image yet: {hints.word('ARCH', 'cpu')} works"
        other = works if arch.lower().startswith("gfx") else ""
        raise UnknownArch(f"unknown arch {arch!r}", hint=f"{hint}known: {', '.join(known)}{other}")
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    lanes: dict[str, Any] = {}
    for file in _files(root, own):
        data = _read(file)
        name = f"arch/{file.name}"
        offered = data.pop("lanes", {})
        for table, prefix in [(data, ""), *((t, f"lanes.{n}.") for n, t in offered.items())]:
            _refuse_unknown(table, Profile, name, prefix)
        _merge(merged, data, origins, name)
        _merge(lanes, offered, origins, name, "lanes.")
    chosen = lane or str(merged.get("lane", ""))
    if chosen not in {merged.get("lane"), *lanes}:
        known = sorted({str(merged.get("lane")), *lanes})
        raise UsageError(f"{arch} has no lane {lane!r}", hint=f"it has {', '.join(known)}")
    merged.pop("default-lane", None)
    if chosen in lanes and chosen != merged.get("lane"):
        merged["default-lane"] = merged.get("lane")
    if chosen in lanes:
        own_lane = {key: value for key, value in lanes[chosen].items() if key != "summary"} | {"lane": chosen}
        _merge(merged, own_lane, origins, f"arch/{own.name}, lane {chosen}")
    merged["arch"] = arch
    merged["lanes"] = {name: t.get("summary", "") for name, t in lanes.items() if name != chosen}
    origins["arch"] = f"arch/{own.name}"
    try:
        return Loaded(_fold(msgspec.convert(_for_arch(merged, arch), Profile)), origins)
    except msgspec.ValidationError as bad:
        raise ProfileError(f"arch/{own.name}: {bad}", hint=_where(str(bad), origins)) from None


def choose(profile: Profile, choice: str) -> Profile:
    """The profile with one of its choices of wheels instead of its own. Raises ProfileError for an unknown one."""
    if not choice:
        return profile
    wheels = profile.wheels
    if choice not in wheels.choices:
        known = ", ".join(sorted(wheels.choices)) or "none"
        raise UsageError(f"{profile.arch} has no choice {choice!r} of wheels", hint=f"it has {known}")
    chosen = wheels.choices[choice]
    requires = tuple(chosen.replaces.get(re.split(r"[^\w.-]", r)[0], r) for r in wheels.requires)
    indexes = (*wheels.indexes, *chosen.indexes)
    return msgspec.structs.replace(profile, wheels=msgspec.structs.replace(wheels, requires=requires, indexes=indexes))


def packages(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Distribution packages beyond the base, by the layer that they are installed in."""
    found: dict[str, tuple[str, ...]] = {}
    for name, feature in profile.features.items():
        if feature.enabled and feature.packages:
            layer = feature.layer or name
            found[layer] = (*found.get(layer, ()), *feature.packages)
    if profile.lane == "source" and profile.source_lane:
        found[BUILDER] = profile.source_lane.packages
    return found


def leaves(profile: Profile) -> dict[str, Any]:
    """Every value of a profile by dotted key, lists whole: {"versions.vllm": "0.32.0", …}."""
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        else:
            flat[key] = value

    walk(msgspec.to_builtins(profile), "")
    return flat


def _files(root: Path, own: Path) -> list[Path]:
    """The files of a profile, the most general first. Also a family can have a family."""
    files = [own]
    while family := _read(files[0]).get("family"):
        file = root / "arch" / f"{family}.toml"
        if file in files or not re.fullmatch(r"[a-z0-9_]+", str(family)):
            raise ProfileError(f"arch/{files[0].name}: {family!r} can't be its family", hint="a family is another file")
        files.insert(0, file)
    return [root / "arch" / "defaults.toml", *files]


def _for_arch(value: Any, arch: str) -> Any:
    """A copy of a merged profile with {arch} filled in wherever a family names what differs by arch only."""
    if isinstance(value, dict):
        return {_for_arch(k, arch): _for_arch(v, arch) for k, v in value.items()}
    if isinstance(value, list):
        return [_for_arch(v, arch) for v in value]
    return value.replace("{arch}", arch) if isinstance(value, str) else value


def _fold(profile: Profile) -> Profile:
    """The profile with the wheels and the environment of its enabled features where all others are."""
    wheels, env = profile.wheels, dict(profile.env)
    layers, indexes = dict(wheels.layers), list(wheels.indexes)
    requires = list(wheels.requires)
    for name, feature in profile.features.items():
        if not feature.enabled:
            continue
        names = tuple(re.split(r"[^\w.-]", requirement)[0] for requirement in feature.requires)
        requires += feature.requires
        if names:
            layers[feature.layer or name] = (*layers.get(feature.layer or name, ()), *names)
        for i, index in enumerate(indexes):
            offered = feature.indexes.get(index.name, ())
            indexes[i] = msgspec.structs.replace(index, packages=(*index.packages, *offered))
        env |= feature.env
    if profile.lane == "source" and profile.source_lane:
        requires += profile.source_lane.requires
        layers[BUILDER] = tuple(re.split(r"[^\w.-]", requirement)[0] for requirement in profile.source_lane.requires)
        for i, index in enumerate(indexes):  # the SDK's own parts come from where its others do
            more = tuple(n for n in layers[BUILDER] if n.startswith("rocm-sdk") and "rocm-sdk-core" in index.packages)
            indexes[i] = msgspec.structs.replace(index, packages=(*index.packages, *more))
    folded = msgspec.structs.replace(wheels, requires=tuple(requires), layers=layers, indexes=tuple(indexes))
    return msgspec.structs.replace(profile, wheels=folded, env=env)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"arch/{file.name} is missing", hint="a profile names it as its family") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise ProfileError(f"arch/{file.name} is not valid TOML: {bad}") from None


def _merge(into: dict[str, Any], data: dict[str, Any], origins: dict[str, str], file: str, prefix: str = "") -> None:
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            below = into.setdefault(key, {})
            if isinstance(below, dict):
                _merge(below, value, origins, file, f"{dotted}.")
                continue
        into[key] = value
        origins[dotted] = file


def _refuse_unknown(data: dict[str, Any], table: type[Any], file: str, prefix: str = "") -> None:
    """msgspec names neither the file nor a near miss, so unknown keys are found here first."""
    hints = get_type_hints(table)
    fields = {f.encode_name: hints[f.name] for f in msgspec.structs.fields(table)}
    for key, value in data.items():
        if key not in fields:
            near = toml.nearest(key, fields)
            hint = f"did you mean {prefix}{near}?" if near else f"known here: {', '.join(sorted(fields))}"
            raise ProfileError(f"{file}: unknown key {prefix}{key}", hint=hint)
        inner = _struct_in(fields[key])
        for item in value if isinstance(value, list) else [value]:
            if inner and isinstance(item, dict):
                _refuse_unknown(item, inner, file, f"{prefix}{key}.")


def _struct_in(hint: Any) -> type[Any] | None:
    """The table type inside a hint such as `Device | None` or `tuple[Index, ...]`."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    if get_origin(hint) is dict:
        return None
    return next((t for t in map(_struct_in, get_args(hint)) if t), None)


def _where(problem: str, origins: dict[str, str]) -> str:
    """The file that set the value msgspec complains about (its path is `$.a.b`)."""
    match = re.search(r"`\$\.([^`]*)`", problem)
    key = match.group(1) if match else ""
    files = {f for k, f in origins.items() if key and (k == key or k.startswith(f"{key}."))}
    return f"set in {', '.join(sorted(files))}" if files else "see arch/defaults.toml for all keys"
