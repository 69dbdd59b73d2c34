"""Wheels that a build made from sources: taken out of it, and put into a lock so that nobody has to make them again.

A compile of vLLM takes 30 to 75 minutes. What it made is an ordinary wheel: once a lock names it by its sha256, every
build from that lock installs it, wherever it came from.
"""

from __future__ import annotations

import shutil
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
    for path in found:
        log.info(f"made {path}: `lock {plan.arch} --made {path}` puts it into the lock, so that it is not made again")
    return tuple(found)


def adopt(state: Path, profile: Profile, locked: Sequence[Wheel], files: Sequence[Path]) -> tuple[Wheel, ...]:
    """The wheels of a lock with made ones in place of sources; the files go into the wheelhouse. Raises InputError."""
    every = {wheel.name: wheel for wheel in locked}
    for file in files:
        try:
            name, version, _, _ = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            raise InputError(f"{file} has no name of a wheel", hint="give what `image` left in made/") from None
        if not file.is_file():
            raise InputError(f"{file} can't be read", hint="give what `image` left in made/")
        wanted = every.get(canonicalize_name(name))
        if wanted is None or canonicalize_name(name) not in {canonicalize_name(n) for n in profile.wheels.from_source}:
            raise InputError(f"{profile.arch} takes no {name} made from sources", hint="see wheels.from-source")
        if wanted.version and str(version).partition("+")[0] != wanted.version.partition("+")[0]:
            raise InputError(f"{file.name} is not {name} {wanted.version}", hint="make the wheel of the locked version")
        if not targets.best([file.name], profile):
            raise InputError(f"{file.name} does not run on {profile.wheels.platform}", hint="see wheels.platform")
        digest, size = wheels.sha256(file), file.stat().st_size
        wheelhouse(state).mkdir(parents=True, exist_ok=True)
        if file.resolve().parent != wheelhouse(state).resolve():
            shutil.copyfile(file, wheelhouse(state) / f".{file.name}")
            (wheelhouse(state) / f".{file.name}").replace(wheelhouse(state) / file.name)
        every[wanted.name] = msgspec.structs.replace(
            wanted, version=str(version), file=file.name, sha256=digest, size=size, source=MADE
        )
    return tuple(sorted(every.values(), key=lambda wheel: wheel.name))
