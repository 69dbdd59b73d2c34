"""The doctor on the container engine and what it needs of the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from warmstart import host as machine
from warmstart import leftovers as left
from warmstart import presets
from warmstart.checks_access import session
from warmstart.findings import Check, Finding, Host, Unreadable, needed, ok, skipped
from warmstart.gpus import gib
from warmstart.lease import PREFIX

STARTS = ("run warmstart outside of a container, or in one with more rights", "podman run --rm IMAGE true")
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}  # of mount options


def engine(host: Host) -> Finding:
    """Podman is there and, as far as that was tried before, starts containers."""
    if host.engine is None:
        return skipped("only asked of this machine itself")
    if host.engine.problem:
        return Finding("error", host.engine.problem, "make image, or tools/setup run engine", "podman info")
    if not host.engine.version:
        raise Unreadable("podman tells no version")
    kind = "rootless" if host.engine.rootless else "as root"
    evidence = f"podman {host.engine.version}, {kind}, {host.engine.runtime}"
    if host.engine.isolation:
        return Finding("warning", f"{evidence}: it builds images, but starts no container", *STARTS)
    if not host.engine.tried:
        return ok(f"{evidence}; whether it starts a container was not tried yet: make image does")
    if host.engine.conf:
        return ok(f"{evidence}; it starts containers with {host.engine.conf} alone, which warmstart sets for its calls")
    return ok(f"{evidence}; it starts containers")


def runtime(host: Host) -> Finding:
    """The OCI runtime hands the session's groups on: without root only crun does (--group-add keep-groups)."""
    if host.engine is None or host.image.arch == "cpu":
        return skipped("only asked of this machine itself" if host.engine is None else "the cpu image uses no device")
    if host.engine.problem or not host.engine.runtime:
        raise Unreadable("the engine does not tell its runtime")
    name = Path(host.engine.runtime).name
    if name == "crun" or not host.engine.rootless:
        how = "keep-groups" if name == "crun" else "numbers of groups (root)"
        return ok(f"{name}: devices by {how}")
    remedy = 'install the package crun, then in ~/.config/containers/containers.conf: [engine] runtime = "crun"'
    evidence = f"{name} ignores keep-groups: a rootless container can't open /dev/kfd"
    return Finding("error", evidence, remedy, "podman info --format '{{.Host.OCIRuntime.Name}}'")


def selinux(host: Host) -> Finding:
    """SELinux lets containers use devices."""
    enforce = host.root / "sys/fs/selinux/enforce"
    if not enforce.parent.is_dir():
        return ok("no SELinux")
    if needed(host, "sys/fs/selinux/enforce") != "1":
        return ok("SELinux is permissive")
    if host.image.arch == "cpu":
        return ok("SELinux is enforcing; the cpu image uses no device")
    if needed(host, "sys/fs/selinux/booleans/container_use_devices").startswith("1"):
        return ok("SELinux is enforcing, with container_use_devices on")
    return Finding(
        "warning",
        "SELinux is enforcing and container_use_devices is off: containers need --security-opt label=disable",
        "sudo setsebool -P container_use_devices=true",
        "getsebool container_use_devices",
    )


def shm(host: Host) -> Finding:
    """The size of /dev/shm, through which the processes of one engine share tensors (with --ipc host: the host's)."""
    mounts = [line.split() for line in needed(host, "proc/mounts").splitlines()]
    options = next((words[3] for words in mounts if len(words) > 3 and words[1] == "/dev/shm"), None)
    if options is None:
        return Finding("error", "/dev/shm is not mounted", "sudo mount -t tmpfs tmpfs /dev/shm", "df -h /dev/shm")
    given = re.search(r"\bsize=(\d+)([kmg]?)\b", options)
    size = int(given[1]) * UNITS[given[2]] if given else host.memory.total // 2  # tmpfs's default
    if not size:
        raise Unreadable("the size of /dev/shm")
    if size >= host.facts.memory.shm << 20:
        return ok(gib(size))
    evidence = f"{size >> 20} MiB: several GPUs with --ipc host need {host.facts.memory.shm} MiB"
    several = len([gpu for gpu in host.gpus if gpu.arch == host.image.arch]) > 1
    remedy = f"sudo mount -o remount,size={host.facts.memory.shm}M /dev/shm"
    return Finding("warning" if several else "ok", evidence, remedy if several else "", "df -h /dev/shm")


def disk(host: Host) -> Finding:
    """Space for an update of the image, for caches, and for models."""
    sizes = host.facts.disk
    env = {"HOME": "/root", **(host.environment or {})}
    storage = Path(host.engine.storage) if host.engine and host.engine.storage else _storage(host, Path(env["HOME"]))
    hub = Path(presets.models_folder(env))
    image = sizes.cpu_image if host.image.arch == "cpu" else sizes.image
    models = sizes.cpu_models if host.image.arch == "cpu" else sizes.models
    elsewhere = f"delete models below {hub} that you serve no more, or set HF_HOME to a folder on a larger disk"
    told, short, remedies = [], [], []
    for folder, least, purpose, remedy in (
        (storage, image + sizes.caches, "image and caches", "make prune; podman image prune"),
        (hub, models, "models", elsewhere),
    ):
        path = host.root / folder.relative_to("/") if folder.is_absolute() else folder
        try:
            free = machine.free_bytes(path)
        except OSError as bad:
            raise Unreadable(f"{path}: {bad.strerror}") from None
        told.append(f"{free / 1e9:.0f} GB for {purpose}")
        if free < least * 1e9:
            short.append(f"{folder} has {free / 1e9:.1f} GB free, {purpose} want {least:.0f}")
            remedies.append(remedy)
    if short:
        return Finding("warning", "; ".join(short), "; ".join(remedies), f"df -h {storage} {hub}")
    return ok(", ".join(told))


def leftovers(host: Host) -> Finding:
    """Containers of warmstart that ended; containers, images and files of builds that were cut off."""
    if host.engine is None and host.state is None:
        return skipped("only asked of this machine itself")
    if host.engine and host.engine.problem:
        raise Unreadable("the engine can't be asked for containers")
    try:
        names = os.listdir(host.state) if host.state else []
    except FileNotFoundError:
        names = []
    except OSError as bad:
        raise Unreadable(f"{host.state}: {bad.strerror}") from None
    seen, remedies, verify = [], [], []
    if broken := host.engine.broken if host.engine else ():
        seen.append(f"images that can't be read, with which podman lists none: {_some(broken)}")
        remedies.append(f"podman rmi {' '.join(broken)}")
        verify.append("podman images")
    if ended := host.engine.exited if host.engine else ():
        seen.append(f"{len(ended)} ended: {_some(ended)}")
        remedies += [f"make down PRESET={name.removeprefix(PREFIX)}" for name in ended if name.startswith(PREFIX)]
        if others := [name for name in ended if not name.startswith(PREFIX)]:
            remedies.append(f"podman rm {' '.join(others)}")
        verify.append("podman ps -a")
    cut = [f"of a build that was cut off: {told}" for told in (host.engine.cut if host.engine else ())]
    if probes := [folder.name for folder in left.probes(host.state)] if host.state and names else []:
        cut.append(f"of a probe that was cut off: {', '.join(probes)}")
    if cut:
        seen += cut
        remedies.append("make prune")
        verify.append("podman ps -a --external")
    return Finding("warning", "; ".join(seen), "; ".join(remedies), "; ".join(verify)) if seen else ok("none")


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}"


def _storage(host: Host, home: Path) -> Path:
    """Where podman's images are by default."""
    root = session(host).user == 0
    return Path("/var/lib/containers/storage") if root else home / ".local/share/containers/storage"


CHECKS: dict[str, Check] = {
    "engine": engine,
    "runtime": runtime,
    "selinux": selinux,
    "shm": shm,
    "disk": disk,
    "leftovers": leftovers,
}
