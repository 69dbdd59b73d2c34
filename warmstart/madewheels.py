"""Wheels that a build made from sources: taken out of it, and put into a lock so that nobody has to make them again.

A compile of vLLM takes 30 to 75 minutes. What it made is an ordinary wheel: once a lock names it by its sha256, every
build from that lock installs it, wherever it came from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from warmstart import engine, log, targets, wheels
from warmstart.engine import Capabilities
from warmstart.errors import InputError
from warmstart.inputs import contexts, wheelhouse
from warmstart.lock import MADE, Wheel
from warmstart.plan import Plan, made
from warmstart.profile import BUILDER, Profile


def export(state: Path, plan: Plan, containerfile: str, caps: Capabilities) -> tuple[Path, ...]:
    """Copy the wheels that a build compiled out of it, to `.warmstart/<arch>/made/`; returns their paths.

    Their stages come from the layer cache, so nothing is compiled again. Raises what a build does.
    """
    found = []
    for wheel in made(plan):
        if wheel.within != BUILDER:
            continue
        folder = state / plan.arch / "made"
        folder.mkdir(parents=True, exist_ok=True)
        stage = engine.build(
            caps,
            containerfile,
            context=state / plan.arch / "context",
            tags=[],
            epoch=plan.epoch,
            contexts=contexts(state, plan),
            network="none",
            target=f"made-{wheel.name}",
            log_file=state / plan.arch / "made.log",
        )
        with engine.extracted(caps, stage, "/out") as out:
            for file in sorted(out.rglob("*.whl")):
                shutil.copyfile(file, folder / f".{file.name}")
                (folder / f".{file.name}").replace(folder / file.name)
                found.append(folder / file.name)
    lane = f"--lane {plan.lane} " if plan.profile.default_lane else ""
    for path in found:
        log.info(f"made {path}. So that it is not made again: make lock ARCH={plan.arch} ARGS='{lane}--made {path}'")
    return tuple(found)


def adopt(state: Path, profile: Profile, locked: Sequence[Wheel], files: Sequence[Path]) -> tuple[Wheel, ...]:
    """The wheels of a lock with made ones in place of sources; the files go into the wheelhouse. Raises InputError."""
    every = {wheel.name: wheel for wheel in locked}
    require(profile, files)
    for file in files:
        name, version, _, _ = parse_wheel_filename(file.name)
        wanted = every.get(canonicalize_name(name))
        if wanted is None:
            raise InputError(f"the lock of {profile.arch} has no {name}", hint="see wheels.requires")
        if wanted.version and str(version).partition("+")[0] != wanted.version.partition("+")[0]:
            raise InputError(f"{file.name} is not {name} {wanted.version}", hint="make the wheel of the locked version")
        digest, size = wheels.sha256(file), file.stat().st_size
        wheelhouse(state).mkdir(parents=True, exist_ok=True)
        place = wheelhouse(state) / _named(file.name, profile.arch)
        if file.resolve() != place.resolve():
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            shutil.copyfile(file, beside)
            beside.replace(place)
        every[wanted.name] = msgspec.structs.replace(
            wanted, version=str(version), file=place.name, sha256=digest, size=size, source=MADE
        )
    return tuple(sorted(every.values(), key=lambda wheel: wheel.name))


def require(profile: Profile, files: Sequence[Path]) -> None:
    """Raises InputError for a file that is no wheel made from sources for this arch."""
    sources = {canonicalize_name(name) for name in profile.wheels.from_source}
    for file in files:
        try:
            name, _, _, _ = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            raise InputError(f"{file} has no name of a wheel", hint="give what `image` left in made/") from None
        if not file.is_file():
            raise InputError(f"{file} can't be read", hint="give what `image` left in made/")
        if canonicalize_name(name) not in sources:
            raise InputError(f"{profile.arch}, lane {profile.lane}, makes no {name} from sources", hint="see --lane")
        if not targets.best([file.name], profile):
            raise InputError(f"{file.name} does not run on {profile.wheels.platform}", hint="see wheels.platform")
        found = archs(file)
        if (found or name == "vllm") and profile.arch not in found:
            raise InputError(
                f"{file.name} is made for {', '.join(sorted(found)) or 'no GPU'}, not for {profile.arch}",
                hint=f"make image ARCH={profile.arch} makes one",
            )


def archs(file: Path) -> set[str]:
    """The archs of the device code in a wheel's libraries. Raises InputError for what is no wheel."""
    from image.code_objects import code_objects_of

    found = set()
    try:
        with zipfile.ZipFile(file) as wheel, tempfile.TemporaryDirectory(prefix="warmstart-") as folder:
            if not any(name.endswith(".dist-info/METADATA") for name in wheel.namelist()):
                raise InputError(f"{file} is no wheel: it has no METADATA", hint="give what `image` left in made/")
            for name in wheel.namelist():
                if name.endswith(".so"):
                    found |= {one.arch for one in code_objects_of(Path(wheel.extract(name, folder)))}
    except (zipfile.BadZipFile, ValueError) as bad:
        raise InputError(f"{file} is no wheel: {bad}", hint="give what `image` left in made/") from None
    return found


def _named(file: str, arch: str) -> str:
    """A wheel's file name with the arch as build tag, so that those for two archs can lie in one folder."""
    parts = file.removesuffix(".whl").split("-")
    return "-".join([*parts[:2], f"0{arch}", *parts[-3:]]) + ".whl"
