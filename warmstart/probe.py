"""What the installed buildah and podman can do, and settings with which they start containers here.

Features are found in `--help`, not in version numbers. Where the engine's own settings fail the proof
(`proof.py`), others are tried (`containersconf.py`) and written to `.warmstart/containers.conf`; on a healthy
machine nothing is written. The answer is kept in `.warmstart/engine.json` until a binary, a setting or a
limit changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from warmstart import containersconf, log, proof, run
from warmstart.containersconf import Settings
from warmstart.errors import CommandFailed, EngineBroken, EngineMissing, EngineTooOld

ENGINES = ("buildah", "podman")
NEEDED = {
    "buildah": "annotation build-context device force-rm format iidfile layers pull secret timestamp".split(),
    "podman": "cap-drop device read-only rootfs security-opt tmpfs".split(),
}
# Older ones lack RUN --mount from named contexts, or were never tried with this.
OLDEST = {"buildah": (1, 28), "podman": (4, 3)}

# Binaries and variables that decide how the engine behaves: when one changes, it is looked at again.
BINARIES = (
    *ENGINES,
    *containersconf.RUNTIMES,
    "conmon",
    "iptables",
    "nft",
    "slirp4netns",
    "pasta",
    "newuidmap",
)
VARIABLES = tuple(v for v in run.PASSED if v.startswith(("CONTAINERS_", "BUILDAH_", "STORAGE_", "XDG_", "HOME")))
CONF = ("CONTAINERS_CONF_OVERRIDE", "CONTAINERS_CONF")
VERSION = 1  # of what is kept in engine.json


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The engine on this machine."""

    buildah: str  # versions, as found
    podman: str
    features: tuple[str, ...]  # flags of `buildah build`, sorted, without dashes
    rootless: bool
    runtime: str  # path of the OCI runtime in use
    storage: str  # root of the image store
    cgroups: int  # 1 or 2
    conf: str = ""  # absolute path of the containers.conf that was written, if one was needed
    variable: str = ""  # the variable that makes the engine read it
    isolation: str = ""  # "chroot" where only builds work, and those without devices
    network: str = ""  # "host" where containers can't have a network of their own


def probe(state: Path) -> Capabilities:
    """The engine's capabilities; `state` is the `.warmstart` folder. A repeated call starts no process.

    Raises EngineMissing, EngineTooOld (what was found and what is needed) and EngineBroken (the engine's last
    error and what to try).
    """
    state = state.resolve()
    for name in ENGINES:
        if run.program(name) is None:
            raise EngineMissing(f"{name} is not installed", hint="tools/setup run engine, or make image, installs it")
    with _not_ours(state / "containers.conf"):
        key, file = _key(), state / "engine.json"
        if (kept := _kept(file, key)) is not None:
            return kept
        found = _look()
        if run.recorder.on:
            return found
        state.mkdir(parents=True, exist_ok=True)
        with log.step("engine: can it start a container?"):
            proven = _prove(state, found)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.encode({"key": key, "capabilities": proven}))
    part.replace(file)
    return proven


def known(state: Path) -> Capabilities | None:
    """What an earlier call of `probe` found, as long as it still holds. Starts no process, writes nothing."""
    state = state.resolve()
    with _not_ours(state / "containers.conf"):
        return _kept(state / "engine.json", _key())


def environment(caps: Capabilities) -> dict[str, str]:
    """What must be set for any plain podman or buildah call. Empty on a healthy machine with cgroups v2."""
    env = {caps.variable: caps.conf} if caps.conf else {}
    if caps.isolation:
        env["BUILDAH_ISOLATION"] = caps.isolation
    if caps.cgroups == 1:
        env["PODMAN_IGNORE_CGROUPSV1_WARNING"] = "1"  # podman 5 warns at every call
    return env


def flags(text: str) -> tuple[str, ...]:
    """The long flags in a `--help` text, sorted, without dashes."""
    return tuple(sorted(set(re.findall(r"^\s+(?:-\w, )?--([a-z][a-z-]+)", text, re.MULTILINE))))


def check(name: str, version: str, found: tuple[str, ...]) -> None:
    """Raises EngineTooOld when a needed flag is missing, or the version is older than any that was tried."""
    missing = [f"--{flag}" for flag in NEEDED[name] if flag not in found]
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if missing or (number and number < OLDEST[name]):
        needed = ".".join(map(str, OLDEST[name]))
        lacks = f" (lacks {', '.join(missing)})" if missing else ""
        raise EngineTooOld(
            f"{name} {version} is too old{lacks}: {needed} or later is needed",
            hint="Debian 12, Ubuntu 24.04 or a later release has it",
        )


@contextlib.contextmanager
def _not_ours(conf: Path) -> Iterator[None]:
    """Take our own containers.conf out of the environment, where a process that we started still has it."""
    ours = [name for name in CONF if os.environ.get(name) == str(conf)]
    for name in ours:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(dict.fromkeys(ours, str(conf)))


def _look() -> Capabilities:
    versions, features = {}, {}
    for name, verb in (("buildah", "build"), ("podman", "run")):
        words = run.run([name, "--version"], always=True).stdout.split()
        versions[name] = words[2] if len(words) > 2 else "?"
        features[name] = flags(run.run([name, verb, "--help"], ok=range(256), always=True).stdout)
        check(name, versions[name], features[name])
    try:
        told = json.loads(run.run(["podman", "info", "--format", "json"], always=True, timeout=60).stdout)
        other = json.loads(run.run(["buildah", "info"], always=True, timeout=60).stdout)["store"]
        host, store = told["host"], told["store"]
        runtime = host["ociRuntime"]["path"]
    except CommandFailed as failure:
        error = proof.last_line(failure)
        raise EngineBroken(f"the engine can't run here: {error}", hint=proof.hint(error)) from None
    except TypeError:  # ociRuntime is null
        raise EngineBroken("podman finds no OCI runtime", hint=proof.hint("")) from None
    theirs = other["GraphDriverName"], other["GraphRoot"]
    if theirs != (store["graphDriverName"], store["graphRoot"]):
        raise EngineBroken(
            f"podman keeps its images in {store['graphRoot']} ({store['graphDriverName']}), "
            f"but buildah in {theirs[1]} ({theirs[0]})",
            hint="podman keeps to its first storage driver: name that one in storage.conf",
        )
    return Capabilities(
        buildah=versions["buildah"],
        podman=versions["podman"],
        features=features["buildah"],
        rootless=host["security"]["rootless"],
        runtime=runtime,
        storage=store["graphRoot"],
        cgroups=int(host["cgroupVersion"].lstrip("v")),
    )


def _prove(state: Path, found: Capabilities) -> Capabilities:
    """The capabilities with which containers start, after writing a containers.conf if one is needed."""
    conf, yours = state / "containers.conf", os.environ.get(CONF[1])
    folder = Path(tempfile.mkdtemp(prefix="probe-", dir=state))
    right = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(right, fcntl.LOCK_EX)  # a folder without it is of a probe that was cut off
        error = proof.fault(folder, environment(found)) if proof.prepare(folder) else ""
        if error and yours:
            raise EngineBroken(f"the engine can't start a container: {error}", hint=proof.hint(error))
        if error:
            return _changed(folder, conf, found, error)
        if not yours:
            conf.unlink(missing_ok=True)  # of a time when one was needed
        return found
    finally:
        if not proof.mounts(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(right)


def _changed(folder: Path, conf: Path, found: Capabilities, error: str) -> Capabilities:
    """Try settings until containers start and write them to `conf`; else a chroot, for builds only."""
    variable, below = _variable(folder)
    trial, latest = folder / "containers.conf", error
    for settings in containersconf.candidates(containersconf.facts()):
        if proof.about_network(latest) and not settings.network:
            continue  # it fails before anything else can
        trial.write_text(containersconf.text(settings, below), encoding="utf-8")
        changed = msgspec.structs.replace(
            found,
            conf=str(trial),
            variable=variable,
            network=settings.network,
            runtime=run.program(settings.runtime) or found.runtime,
        )
        latest = proof.fault(folder, environment(changed))
        if not latest:
            trial.replace(conf)
            _tell(conf, error, settings)
            return msgspec.structs.replace(changed, conf=str(conf))
    changed = msgspec.structs.replace(found, isolation="chroot")
    if not proof.fault(folder, environment(changed), podman=False):
        log.warn(f"containers can't start here ({error}): builds run in a chroot, without devices")
        return changed
    raise EngineBroken(f"the engine can't start a container: {error}", hint=proof.hint(error))


def _tell(conf: Path, error: str, settings: Settings) -> None:
    log.info(f"the engine's own settings can't start a container ({error}); others, which can, are in {conf}")
    if settings.network:
        log.warn(f"containers share the host's network here; {proof.hint('network')}")


def _variable(folder: Path) -> tuple[str, dict[str, object]]:
    """The variable through which both engines read one more containers.conf, and what that has to carry over.

    An engine that reads CONTAINERS_CONF_OVERRIDE fails on a file that isn't TOML; older ones ignore it.
    """
    broken = folder / "broken.conf"
    broken.write_text("=", encoding="utf-8")
    env = {CONF[0]: str(broken)}
    if all(run.run([name, "info"], env=env, ok=range(256)).code for name in ENGINES):
        yours = os.environ.get(CONF[0])
        return CONF[0], containersconf.read(Path(yours)) if yours else {}
    return CONF[1], containersconf.existing()


def _key() -> str:
    """A digest of all that decides the answer."""
    known: list[object] = [VERSION, os.uname().release, msgspec.to_builtins(containersconf.facts())]
    known += [os.environ.get(variable, "") for variable in VARIABLES]
    files = [run.program(name) or "" for name in BINARIES]
    files += [os.environ.get(v, "") for v in VARIABLES if v.startswith("CONTAINERS_")]
    files += containersconf.files()
    for path in map(os.path.realpath, filter(None, files)):
        if os.path.isfile(path):
            stat = os.stat(path)
            known.append((path, stat.st_mtime_ns, stat.st_size))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _kept(file: Path, key: str) -> Capabilities | None:
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        if msgspec.json.decode(kept["key"]) != key:
            return None
        caps = msgspec.json.decode(kept["capabilities"], type=Capabilities)
    except (OSError, KeyError, msgspec.MsgspecError):
        return None
    return caps if not caps.conf or os.path.isfile(caps.conf) else None
