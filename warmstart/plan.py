"""The plan: a frozen value made from profile, lock and the tree; the only input of every later step.

`plan_id` is the digest of everything in it but itself and the tags and labels that hold it. `cache_key` covers
only what decides whether a cached kernel or verdict is still right, so that a new label throws no cache away.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from warmstart import lock as locks
from warmstart import patches, volume
from warmstart.cuts import Cuts
from warmstart.lock import Lock, LockedBase, Package, Wheel
from warmstart.names import HOME, LABEL, VENV
from warmstart.profile import BUILDER, NOT_IN_IMAGE, Loaded, Profile
from warmstart.volume import CacheTable, Volume

# The benchmark function that makes verdicts: those of another version are not comparable.
BENCH = ("warmstart_bench.py", "warmstart_device.py")
# What compiles the kernels of a record in the build.
REPLAY = (
    *(f"caches/{name}" for name in ("replay.py", "compilers.py", "standin.py", "verdicts.py", "bans.toml")),
    "sitecustomize/warmstart_spec.py",
)


class PlannedBase(msgspec.Struct, frozen=True):
    """The base by the name under which it lies in the engine's storage, and what it is made of."""

    ref: str
    key: str
    locked: LockedBase


class Made(msgspec.Struct, frozen=True):
    """A wheel that the build makes itself, because its index offers sources only."""

    name: str
    layer: str
    file: str  # the sources, in the wheelhouse
    sha256: str
    env: dict[str, str]
    within: str  # the stage whose Python builds it


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides an image. Same plan, same Containerfile, same image."""

    schema: Literal[1] = 1
    plan_id: str
    arch: str
    lane: str
    cache_key: str
    epoch: int
    state: str  # the lock's state
    tags: tuple[str, ...]
    base: PlannedBase
    versions: dict[str, str]
    env: dict[str, str]
    labels: dict[str, str]
    patches: dict[str, tuple[str, ...]]  # component → patch files in the order of its series
    records: tuple[str, ...] = ()  # files of caches/records/ whose kernels are compiled in the build
    caches: dict[str, str]  # cache name → directory on the volume
    volume: Volume  # what the start script does with it
    cuts: Cuts
    wheels: tuple[Wheel, ...]
    packages: dict[str, tuple[Package, ...]]  # layer → distribution packages that it has beyond the base's
    aiter: Literal["off", "core", "set", "device"]  # how aiter's compiled part comes into being
    inputs: dict[str, str]  # name → sha256 of a part of the tree or of the lock
    steps: tuple[str, ...]  # stages of the Containerfile, in order
    profile: Profile


def make(root: Path, loaded: Loaded, lock: Lock, cuts: Cuts, *, device: bool = False) -> Plan:
    """The plan for a profile and its lock, with the tree below `root` as it is now.

    With `device` the build has the GPU: aiter's core, where the image has it, is proven on it.
    """
    profile = loaded.profile
    caches = volume.table(root, profile)
    chosen = {name: patches.selected(root, name, profile) for name in profile.patches}
    inputs = _inputs(root, profile, lock, cuts, chosen)
    key = f"{profile.arch}-{locks.digest(_cache_inputs(root, profile, lock, inputs))[:12]}"
    directories = {c.name: f"{caches.volume}/{key}/{c.path}" for c in caches.cache}
    slimming = {"cuts": cuts.rules("os"), "slim": tree_digest(root / "image" / "slim.py")}
    base_key = locks.base_key(lock.base, lock.epoch, slimming)
    plan = Plan(
        plan_id="",
        arch=profile.arch,
        lane=profile.lane,
        cache_key=key,
        epoch=lock.epoch,
        state=lock.state,
        tags=(),
        base=PlannedBase(ref=_base_ref(profile, lock, base_key), key=base_key, locked=lock.base),
        versions={k: v for k, v in msgspec.to_builtins(profile.versions).items() if v},
        env=_env(profile, caches, directories),
        labels={},
        patches=chosen,
        records=records(root, profile),
        caches=directories,
        volume=volume.settings(caches, directories),
        cuts=cuts,
        wheels=lock.wheels,
        packages=lock.packages,
        aiter="device" if device and profile.aiter.mode == "core" else profile.aiter.mode,
        inputs=inputs,
        steps=_steps(root, profile, chosen),
        profile=profile,
    )
    return _named(plan)


def tree_digest(*paths: Path) -> str:
    """sha256 over names, executable bits and contents of files and folders, independent of time and place."""
    total = hashlib.sha256()
    for top in paths:
        files = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for file in files:
            if "__pycache__" in file.parts or file.suffix == ".pyc":
                continue
            name = file.relative_to(top.parent).as_posix()
            mode = "x" if file.stat().st_mode & 0o100 else "-"
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{mode} {name} {content}\n".encode())
    return total.hexdigest()


def _inputs(root: Path, profile: Profile, lock: Lock, cuts: Cuts, chosen: dict[str, tuple[str, ...]]) -> dict[str, str]:
    inputs = {
        "Containerfile.j2": tree_digest(root / "Containerfile.j2"),
        **{f"image/{f.name}": tree_digest(f) for f in sorted((root / "image").iterdir()) if f.is_file()},
        "sitecustomize": tree_digest(root / "sitecustomize"),
        # A new record changes what is replayed, in images of its arch alone.
        "caches": tree_digest(*(f for f in sorted((root / "caches").iterdir()) if f.is_file())),
        "lock/base": locks.digest(msgspec.to_builtins(lock.base)),
    }
    if found := records(root, profile):
        inputs["records"] = tree_digest(*(root / "caches" / "records" / name for name in found))
        inputs["replay"] = tree_digest(*(root / name for name in REPLAY))
    if profile.aiter.mode != "off":
        inputs["arch/aiter.toml"] = tree_digest(root / "arch" / "aiter.toml")
    for layer, packages in lock.packages.items():
        inputs[f"packages/{layer}"] = locks.digest(msgspec.to_builtins(packages))
    for layer in (*layers(profile), BUILDER):
        wheels = [w for w in lock.wheels if w.layer == layer]
        inputs[f"lock/{layer}"] = locks.digest(msgspec.to_builtins(wheels))
        inputs[f"cuts/{layer}"] = locks.digest(cuts.rules(layer))
    for component, files in chosen.items():
        inputs[f"patches/{component}"] = tree_digest(*(root / "patches" / component / f for f in files))
    return inputs


def records(root: Path, profile: Profile) -> tuple[str, ...]:
    """Names of the records of kernels and verdicts that an image of this arch is built with (caches/records/)."""
    if not profile.versions.triton:
        return ()
    files = (root / "caches" / "records").glob(f"{profile.arch}*.json")
    return tuple(sorted(f.name for f in files if f.stem.partition("-")[0] == profile.arch))


def created(epoch: int) -> str:
    """Seconds since 1970 as RFC 3339, for labels."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def layers(profile: Profile) -> tuple[str, ...]:
    """Names of the image's wheel layers, least changing first: arch-neutral Python, torch (and ROCm), vLLM."""
    return ("python", *(name for name in profile.wheels.layers if name != BUILDER))


def made(plan: Plan) -> tuple[Made, ...]:
    """The wheels that are made in the build. One that the lock names as a wheel was made before, and is installed."""
    profile = plan.profile
    settings = {re.sub(r"[-_.]+", "-", name).lower(): env for name, env in profile.wheels.from_source.items()}
    found = []
    for wheel in plan.wheels:
        if wheel.name not in settings or wheel.file.endswith(".whl"):
            continue
        file = wheel.file or f"{wheel.name.replace('-', '_')}-{wheel.version}.tar.gz"
        within = "python" if wheel.layer in layers(profile)[:2] else "toolchain"
        env = settings[wheel.name]
        if wheel.name == "vllm" and profile.source_lane:
            within, env = BUILDER, env | profile.source_lane.env
        found.append(Made(wheel.name, wheel.layer, file, wheel.sha256, env, within))
    return tuple(found)


def _cache_inputs(root: Path, profile: Profile, lock: Lock, inputs: dict[str, str]) -> dict[str, Any]:
    versions = profile.versions
    return {
        "arch": profile.arch,
        "rocm": versions.rocm,
        "python": versions.python,
        "libstdc++": next((p.version for p in lock.base.packages if p.name.startswith("libstdc++6")), lock.base.digest),
        "torch": versions.torch,
        "triton": versions.triton,
        "vllm": versions.vllm,
        "aiter": versions.aiter,
        "patches": {k: v for k, v in inputs.items() if k.startswith("patches/")},
        "env": {k: v for k, v in profile.env.items() if k.startswith(("TRITON_", "AITER_"))},
        "bench": tree_digest(*(root / "sitecustomize" / name for name in BENCH)),
        "path": VENV,
    }


def _env(profile: Profile, caches: CacheTable, directories: dict[str, str]) -> dict[str, str]:
    """The ENV table of the image: paths, caches, then the profile's own, which wins."""
    env = {
        "PATH": f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "VIRTUAL_ENV": VENV,
        "LANG": "C.UTF-8",
        "HF_HOME": caches.models,
        "WARMSTART_CACHES": ":".join(sorted(directories.values())),
    }
    if profile.versions.triton:
        env |= {"TRITON_CACHE_MANAGER": "warmstart_cache:SeededCacheManager", "WARMSTART_SEED": f"{HOME}/seed"}
    if profile.device and profile.device.llc_mib:
        env["WARMSTART_LLC_MIB"] = f"{profile.device.llc_mib:g}"  # what a benchmark of a kernel has to flush
    if profile.device and profile.device.unified_memory:
        env["WARMSTART_DROP_PAGES"] = "1"  # weights would be in memory twice
    for cache in caches.cache:
        env |= dict.fromkeys(cache.env, directories[cache.name])
    return dict(sorted((env | profile.env).items()))


def _steps(root: Path, profile: Profile, chosen: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    patched = ("patched",) if any(chosen.values()) else ()
    modules = ("aiter-modules",) if profile.aiter.mode != "off" else ()
    kernels = ("kernels",) if records(root, profile) else ()
    return ("os", *layers(profile), *modules, *patched, *kernels, "runtime")


def _base_ref(profile: Profile, lock: Lock, key: str) -> str:
    if lock.base.kind == "image":
        return f"{lock.base.image}@{lock.base.digest}"
    return f"localhost/warmstart/base:{lock.base.suite}-{key[:12]}"


def _named(plan: Plan) -> Plan:
    """Give the plan its id, then the tags and labels that hold it."""
    content = msgspec.to_builtins(plan)
    for key in NOT_IN_IMAGE:
        content["profile"].pop(key, None)
    plan_id = locks.digest(content)
    tag = plan.profile.tag
    tags = (f"{tag}-vllm{plan.versions['vllm']}-{plan_id[:12]}", tag)
    labels = _labels(plan, plan_id)
    return msgspec.structs.replace(plan, plan_id=plan_id, tags=tags, labels=labels)


def _labels(plan: Plan, plan_id: str) -> dict[str, str]:
    profile, versions, device = plan.profile, plan.versions, plan.profile.device
    oci, own = "org.opencontainers.image.", LABEL
    labels = {
        f"{oci}title": f"{profile.image.title} ({plan.arch})",
        f"{oci}description": profile.summary,
        f"{oci}vendor": profile.image.vendor,
        f"{oci}source": profile.image.source,
        f"{oci}url": profile.image.source,
        f"{oci}documentation": f"{profile.image.source}#readme",
        f"{oci}licenses": profile.image.licenses,
        f"{oci}version": versions["vllm"],
        f"{oci}revision": plan_id,
        f"{oci}ref.name": f"{plan.arch}-vllm{versions['vllm']}-{plan_id[:12]}",
        f"{oci}created": created(plan.epoch),
        f"{oci}authors": profile.image.vendor,
        f"{oci}base.name": plan.base.ref.partition("@")[0],
        f"{oci}base.digest": plan.base.locked.digest or f"sha256:{plan.base.key}",
        f"{own}arch": plan.arch,
        f"{own}plan-id": plan_id,
        f"{own}cache-key": plan.cache_key,
        f"{own}vllm": versions["vllm"],
        f"{own}torch": versions["torch"],
        f"{own}triton": versions.get("triton", ""),
        f"{own}rocm": versions.get("rocm", ""),
        f"{own}aiter": versions.get("aiter", ""),
        f"{own}wave": str(device.wave) if device else "",
        f"{own}min-kernel": device.min_kernel if device else "",
        f"{own}bad-firmware": ",".join(device.bad_firmware) if device else "",
        "com.github.containers.toolbox": "true",  # toolbox and distrobox take images with this label alone
    }
    return dict(sorted(labels.items()))
