"""The lock of an arch: name, exact version and sha256 of all that goes into its image.

`arch/<arch>.lock.json` is committed; a relock that `image` had to make lies under `.warmstart/<arch>/`. An
address is kept only for vendors' own indexes (by the name that the profile gives it).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from warmstart.errors import LockMismatch, LockMissing, LockNotResolved
from warmstart.profile import Profile, packages

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # a normalised name, PEP 503
VERSION = re.compile(r"[A-Za-z0-9.+!_-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MADE = "made"  # source of a wheel that a build from sources made
PIP = "pip"  # source of a wheel that the machine's own pip configuration found


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One distribution package of a rootfs."""

    name: str
    version: str
    architecture: str
    sha256: str


class LockedBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base: packages of a rootfs, or the digest of a registry image."""

    kind: Literal["rootfs", "image"]
    suite: str = ""
    packages: tuple[Package, ...] = ()
    image: str = ""
    digest: str = ""


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One wheel. In state `pins` only name, version and layer are known."""

    name: str  # normalised
    version: str
    layer: str
    file: str = ""
    sha256: str = ""
    size: int = 0  # bytes
    source: str = PIP  # "pip", "made", or the name of one of the profile's indexes


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All inputs of an image, fixed."""

    schema: Literal[1]
    arch: str
    state: Literal["resolved", "pins"]
    epoch: int  # seconds since 1970: the time stamp of everything in the image
    profile: str  # what the profile said when the lock was made: see `wanted`
    base: LockedBase
    wheels: tuple[Wheel, ...]
    packages: dict[str, tuple[Package, ...]] = {}  # layer → distribution packages that it has beyond the base's
    choice: str = ""  # which of the profile's wheels.choices was taken
    of: str = ""  # a relock: digest of the committed lock that it stands in for


def committed(root: Path, slug: str) -> Path:
    """Where the committed lock of an arch (or of another lane of it: the profile's slug) lies."""
    return root / "arch" / f"{slug}.lock.json"


def relocked(state: Path, slug: str) -> Path:
    """Where a relock made by `image` lies."""
    arch, _, lane = slug.partition(".")
    return state / arch / (f"{lane}.lock.json" if lane else "lock.json")


def wanted(profile: Profile, dropped: tuple[str, ...]) -> str:
    """Digest of the parts of a profile that decide a lock. A lock made for other parts is refused."""
    parts = {
        "base": profile.base,
        "versions": profile.versions,
        "requires": profile.wheels.requires,
        "choices": profile.wheels.choices,
        "overrides": profile.wheels.overrides,
        "from-source": profile.wheels.from_source,
        "listed": sorted(name for index in profile.wheels.indexes for name in index.packages),
        "platform": profile.wheels.platform,
        "layers": profile.wheels.layers,
        "packages": packages(profile),
        "device": profile.device.extra if profile.device else "",
        "dropped": dropped,
    }
    return digest(msgspec.to_builtins(parts))


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of a value (sorted keys, no spaces)."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def read(root: Path, state: Path, profile: Profile, dropped: tuple[str, ...], *, frozen: bool = False) -> Lock:
    """The lock to build from: the relock if there is one for this profile and committed lock, else the committed.

    With `frozen` only a resolved, committed lock will do. Raises LockMissing, LockMismatch, LockNotResolved.
    """
    path = committed(root, profile.slug)
    if not path.is_file():
        raise LockMissing(f"arch/{path.name} is missing", hint=profile.lock_command)
    lock = validate(parse(path), profile)
    if lock.profile != wanted(profile, dropped):
        raise LockMismatch(
            f"arch/{path.name} was made for another profile: {_difference(lock, profile)}",
            hint=profile.lock_command,
        )
    if frozen:
        if lock.state == "pins":
            raise LockNotResolved(
                f"arch/{path.name} holds versions without hashes",
                hint=f"on a machine that reaches the vendor's index: {profile.lock_command}",
            )
        return lock
    newer = relocked(state, profile.slug)
    if newer.is_file():
        again = parse(newer)
        if again.of == digest(msgspec.to_builtins(lock)):
            return validate(again, profile)
    return lock


def parse(path: Path) -> Lock:
    """A lock file as a value. Raises LockMismatch when it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lock)
    except msgspec.MsgspecError as bad:
        raise LockMismatch(f"{path.name} can't be read: {bad}", hint="make it anew with `make lock`") from None


def validate(lock: Lock, profile: Profile) -> Lock:
    """The lock itself, if all in it can be what a build takes. Raises LockMismatch naming what can't."""
    layers = {"python", *profile.wheels.layers}
    names = [w.name for w in lock.wheels]
    bad = [f"wheel {w.name!r}" for w in lock.wheels if not _is_wheel(w, layers, lock.state)]
    bad += [f"{name} twice" for name in sorted({n for n in names if names.count(n) > 1})]
    bad += [f"arch {lock.arch!r}"] if lock.arch != profile.arch else []
    bad += ["no wheels"] if not lock.wheels else []
    bad += [f"epoch {lock.epoch}"] if not 0 <= lock.epoch < 2**32 else []
    bad += ["an image without digest"] if lock.base.kind == "image" and not DIGEST.fullmatch(lock.base.digest) else []
    bad += [f"packages of {name!r}" for name in lock.packages if name not in packages(profile)]
    bad += ["no packages"] if lock.base.kind == "rootfs" and not lock.base.packages else []
    if bad:
        told = "; ".join(bad[:3])
        raise LockMismatch(f"the lock of {profile.arch} can't be right: {told}", hint=f"make lock ARCH={profile.arch}")
    return lock


def _is_wheel(wheel: Wheel, layers: set[str], state: str) -> bool:
    plain = NAME.fullmatch(wheel.name) and VERSION.fullmatch(wheel.version) and wheel.layer in layers
    file = not wheel.file or (wheel.file == Path(wheel.file).name and not wheel.file.startswith("."))
    hashed = SHA256.fullmatch(wheel.sha256) if wheel.sha256 or state == "resolved" else True
    return bool(plain and file and hashed and wheel.size >= 0)


def write(path: Path, lock: Lock) -> None:
    """Write a lock, byte-stable and whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(lock, order="sorted"), indent=1) + b"\n"
    beside = path.with_suffix(".tmp")
    beside.write_bytes(text)
    beside.replace(path)


def base_key(base: LockedBase, epoch: int, options: dict[str, Any]) -> str:
    """Digest that names a base: its packages or digest, its time stamp, and how it is made."""
    return digest({"base": msgspec.to_builtins(base), "epoch": epoch, "options": options})


def changed(
    base: LockedBase, wheels: tuple[Wheel, ...], new_base: LockedBase, new_wheels: tuple[Wheel, ...]
) -> list[tuple[str, str, str]]:
    """What differs between two locks: (name, version before, version after), "absent" where there is none."""
    found: list[tuple[str, str, str]] = []
    for kind, before, after in (
        ("package", {p.name: p.version for p in base.packages}, {p.name: p.version for p in new_base.packages}),
        ("wheel", {w.name: w.version for w in wheels}, {w.name: w.version for w in new_wheels}),
    ):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                found.append((f"{kind} {name}", before.get(name, "absent"), after.get(name, "absent")))
    if base.digest != new_base.digest:
        found.append(("base image", base.digest, new_base.digest))
    return found


def _difference(lock: Lock, profile: Profile) -> str:
    """The most telling reason why a lock does not match, for the error line."""
    pinned = {w.name: w.version for w in lock.wheels}
    for name in ("vllm", "torch", "triton"):
        version = getattr(profile.versions, name)
        for candidate in (name, f"{name}-cpu"):
            if version and candidate in pinned and not pinned[candidate].startswith(version):
                return f"{candidate} is {pinned[candidate]} in the lock and {version} in the profile"
    if lock.base.suite != profile.base.suite:
        return f"base suite is {lock.base.suite} in the lock and {profile.base.suite} in the profile"
    return "packages or requirements changed since"
