"""A lock in state `pins`: all that can be known where the vendors' indexes do not answer.

What the general index offers is resolved as for any lock. The vendors' wheels, and whatever is offered as
sources only, have no hash, and for a version what the profile names: empty where that is left to the vendor.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from warmstart import lock as locks
from warmstart import solve, targets
from warmstart.lock import PIP, Lock, LockedBase, Package, Wheel
from warmstart.profile import Profile


def pins(profile: Profile, dropped: Sequence[str], packages: Sequence[Package], epoch: int) -> Lock:
    """The lock of a profile with the packages of its base as given, or by name alone where that is all.

    Raises what `solve.resolve` does.
    """
    unhashed = pinned(profile)
    names = {wheel.name for wheel in unhashed}
    general = tuple(r for r in profile.wheels.requires if _name(r, profile) not in names)
    replaced = tuple(o for o in profile.wheels.overrides if _name(o, profile) not in names)
    wheels = msgspec.structs.replace(profile.wheels, requires=general, indexes=(), overrides=replaced)
    found = solve.resolve(msgspec.structs.replace(profile, wheels=wheels), sorted({*dropped, *names}))
    base = packages or tuple(Package(name, "", "", "") for name in sorted(profile.base.packages))
    return Lock(
        schema=1,
        arch=profile.arch,
        state="pins",
        epoch=epoch,
        profile=locks.wanted(profile, tuple(dropped)),
        base=LockedBase(kind=profile.base.kind, suite=profile.base.suite, packages=tuple(base)),
        wheels=tuple(sorted((*found, *unhashed), key=lambda wheel: wheel.name)),
    )


def pinned(profile: Profile) -> tuple[Wheel, ...]:
    """The wheels that only a vendor's index or a build from sources gives, as the profile names them."""
    layers = {canonicalize_name(p): layer for layer, names in profile.wheels.layers.items() for p in names}
    sources = {canonicalize_name(p): index.name for index in profile.wheels.indexes for p in index.packages}
    from_source = {canonicalize_name(name) for name in profile.wheels.from_source}
    found = []
    for text in profile.wheels.requires:
        requirement = Requirement(targets.fill(text, profile))
        name = canonicalize_name(requirement.name)
        if name not in sources and name not in from_source:
            continue
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        local = profile.versions.variant if name == "vllm" and name in sources else ""
        version = "+".join(filter(None, [*exact[:1], local]))
        found.append(Wheel(name, version, layers.get(name, "python"), source=sources.get(name, PIP)))
    return tuple(sorted(found, key=lambda wheel: wheel.name))


def _name(requirement: str, profile: Profile) -> str:
    return canonicalize_name(Requirement(targets.fill(requirement, profile)).name)
