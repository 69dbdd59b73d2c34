"""Wheel tags of the Python and platform that an image holds, and the best wheel for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from warmstart.errors import ProfileError
from warmstart.profile import Profile

PLATFORM = re.compile(r"(x86_64|aarch64)-manylinux_2_(\d+)")
# The oldest glibc 2.x that manylinux knows for each machine (PEP 600 and the PEPs it replaces).
OLDEST = {"x86_64": 5, "aarch64": 17}
# Names that manylinux tags had before they named the glibc version (PEP 513, 571, 599).
OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def fill(text: str, profile: Profile) -> str:
    """`text` with the profile's versions for {vllm}, {torch} …, its arch for {arch}, its extra for {device}.

    Raises ProfileError for a placeholder that is none of these, or that the profile leaves empty.
    """
    known = {name: getattr(profile.versions, name) for name in profile.versions.__struct_fields__}
    known |= {"arch": profile.arch, "device": profile.device.extra if profile.device else ""}

    def value(match: re.Match[str]) -> str:
        if not known.get(match[1]):
            raise ProfileError(
                f"{{{match[1]}}} in {text!r} stands for nothing",
                hint=f"set it in [versions]; known: {', '.join(sorted(k for k, v in known.items() if v))}",
            )
        return str(known[match[1]])

    return re.sub(r"\{(\w+)\}", value, text)


def platforms(platform: str) -> list[str]:
    """Platform tags that run on `platform` (uv's name for it), the best first. Raises ProfileError."""
    found = PLATFORM.fullmatch(platform)
    if not found:
        raise ProfileError(
            f"wheels.platform {platform!r} is not supported",
            hint="for example x86_64-manylinux_2_36, for glibc 2.36 and newer",
        )
    machine, newest = found[1], int(found[2])
    names: list[str] = []
    for minor in range(newest, OLDEST[machine] - 1, -1):
        names.append(f"manylinux_2_{minor}_{machine}")
        names += [f"{OLD_NAMES[minor]}_{machine}"] if minor in OLD_NAMES else []
    return [*names, f"linux_{machine}"]


@cache
def ranks(python: str, platform: str) -> dict[Tag, int]:
    """All tags that the target accepts, each with its place: 0 is the best. `python` is like 3.11."""
    version = tuple(int(part) for part in python.split("."))[:2]
    abi = interpreter = "cp" + "".join(map(str, version))
    names = platforms(platform)
    tags = [*cpython_tags(version, [abi], names), *compatible_tags(version, interpreter, names)]
    return {tag: place for place, tag in reversed(list(enumerate(tags)))}


def best(files: Iterable[str], profile: Profile) -> str:
    """The file name of the one wheel that an installer would choose for the target; empty when none fits."""
    places = ranks(profile.versions.python, profile.wheels.platform)
    fitting = []
    for file in files:
        try:
            _, _, build, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        if usable := [places[tag] for tag in tags if tag in places]:
            # Installers take the most specific tag, then the highest build number; the name settles the rest.
            fitting.append((min(usable), (-build[0], build[1]) if build else (0, ""), file))
    return min(fitting)[2] if fitting else ""


def for_pip(profile: Profile, files: Iterable[str]) -> list[str]:
    """pip's arguments for the target, with those platforms alone that `files` name, the best first."""
    version = profile.versions.python
    named = {t.platform for file in files if file.endswith(".whl") for t in parse_wheel_filename(file)[3]}
    args = ["--python-version", version, "--implementation", "cp", "--abi", "cp" + version.replace(".", "")]
    every = platforms(profile.wheels.platform)
    for name in [p for p in every if p in named] or every[-1:]:  # without one, pip would take the host's own
        args += ["--platform", name]
    return args
