"""What is wrong with this machine for an image, with evidence, a remedy each, and how to see that it helped.

The checks are small functions in `checks_*.py`; what they need of the outside is collected here first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from warmstart import (
    checks_access,
    checks_engine,
    checks_gpu,
    checks_host,
    checks_memory,
    findings,
    gpus,
    host,
    leftovers,
    log,
    probe,
    profile,
    run,
    store,
    tables,
    toml,
)
from warmstart.errors import (
    EngineBroken,
    HostFaults,
    HostUnreadable,
    HostWarnings,
    ImageMissing,
    InputError,
    WarmstartError,
)
from warmstart.findings import Check, Engine, Finding, Host, Image, Unreadable
from warmstart.known import Known
from warmstart.names import LABEL

PATIENCE = 5.0  # seconds for one question to the engine
FIRMWARE = re.compile(
    r"^Package: (?:linux-firmware|firmware-amd-graphics)\n(?:[A-Z][^\n]*\n(?: [^\n]*\n)*?)*?Version: (\S+)",
    re.MULTILINE,
)
CODES = {"error": HostFaults.code, "warning": HostWarnings.code, "unreadable": HostUnreadable.code}

CHECKS: dict[str, Check] = {
    **checks_gpu.CHECKS,
    **checks_memory.CHECKS,
    **checks_access.CHECKS,
    **checks_engine.CHECKS,
    **checks_host.CHECKS,
}


class Row(msgspec.Struct, frozen=True):
    """One check and its finding."""

    check: str
    severity: findings.Severity
    evidence: str
    remedy: str
    verify: str


class Report(msgspec.Struct, frozen=True):
    """All findings, in the order of the checks."""

    image: str  # what the machine was held against
    arch: str
    worst: findings.Severity
    findings: tuple[Row, ...]


def examine(root: Path, state: Path, other: Path = Path("/"), image: str = "") -> Report:
    """The report on this machine, or on the one whose files lie below `other` (then no process is started for it).

    Raises ImageMissing for an image that isn't there, InputError for an `other` that is no folder.
    """
    if not other.is_dir():
        raise InputError(f"{other} is no folder", hint="--root takes a folder with sys, proc, dev and etc of a machine")
    other = other.resolve()
    return report(collect(root, state, other, labels(image) if image else expected(root, other)))


def report(machine: Host) -> Report:
    """Every check on what was collected."""
    rows = []
    for name, check in CHECKS.items():
        found = _checked(check, machine)
        rows.append(Row(name, found.severity, found.evidence, found.remedy, found.verify))
    worst = max((row.severity for row in rows), key=findings.ORDER.index)
    return Report(machine.image.source, machine.image.arch, worst, tuple(rows))


def code(found: Report) -> int:
    """The exit code of the worst finding: 0, or that of HostUnreadable, HostWarnings or HostFaults."""
    return CODES.get(found.worst, 0)


def text(found: Report) -> str:
    """The report for people: one line a check, and below what is wrong its remedy and how to see that it helped."""
    rows = []
    for row in found.findings:
        rows.append([row.severity, row.check, row.evidence])
        rows += [["", "", f"remedy: {row.remedy}"]] if row.remedy else []
        rows += [["", "", f"verify: {row.verify}"]] if row.remedy and row.verify else []
    counts = {name: sum(row.severity == name for row in found.findings) for name in reversed(findings.ORDER)}
    last = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"for {found.image} ({found.arch})\n{tables.grid(rows)}\n{last}"


def collect(root: Path, state: Path, other: Path, image: Image) -> Host:
    """What the checks look at, of the machine whose files lie below `other`."""
    live = other == Path("/")
    gone = toml.read(root / "arch" / "rules.toml", Known).gone
    return Host(
        root=other,
        gpus=gpus.read(other),
        memory=gpus.memory(other),
        image=image,
        facts=findings.facts(root),
        environment=dict(os.environ) if live else _environ(other),
        gone={row.name: row.instead for row in gone},
        engine=engine(state) if live else None,
        state=state if live else None,
        package=package(other, live=live) if image.bad_firmware else "",
    )


def expected(root: Path, other: Path) -> Image:
    """The image that this machine would get, by its profile."""
    arch, why = host.default_arch(other, profile.archs(root))
    log.debug(f"ARCH={arch}: {why}")
    device = profile.load(root, arch).profile.device
    source = f"arch/{arch}.toml"
    if device is None:
        return Image(source=source, arch=arch)
    return Image(source=source, arch=arch, min_kernel=device.min_kernel, bad_firmware=device.bad_firmware)


def labels(ref: str) -> Image:
    """What an image says of itself. Raises ImageMissing, EngineBroken, and InputError if it isn't warmstart's."""
    told = run.run(["podman", "image", "inspect", "--format", "{{json .Labels}}", ref], ok=range(256), always=True)
    if broken := store.broken_image(told):
        raise EngineBroken(f"podman can't read image {broken[:12]}, and so not {ref}", hint=f"podman rmi {broken}")
    if told.code:
        raise ImageMissing(f"there is no image {ref}", hint="`podman images` lists them; `make image` builds one")
    found: Mapping[str, str] = msgspec.json.decode(told.stdout or "null", type=dict[str, str] | None) or {}
    if f"{LABEL}arch" not in found:
        raise InputError(
            f"{ref} is no image of warmstart: it has no label {LABEL}arch", hint="`make archs`, `make image`"
        )
    bad = tuple(filter(None, re.split(r"[\s,]+", found.get(f"{LABEL}bad-firmware", ""))))
    minimum = found.get(f"{LABEL}min-kernel", "")
    return Image(source=ref, arch=found[f"{LABEL}arch"], min_kernel=minimum, bad_firmware=bad)


def engine(state: Path) -> Engine:
    """What podman tells of itself, in one or two short calls, and what its store shows of builds that were cut off."""
    try:
        if caps := probe.known(state):
            env = probe.environment(caps)
            known = Engine(
                version=caps.podman,
                runtime=caps.runtime,
                rootless=caps.rootless,
                storage=caps.storage,
                tried=True,
                conf=caps.conf,
                isolation=caps.isolation,
            )
        else:
            env, known = {}, _asked()
        if known.problem:
            return known
        filters = [f"--filter=label={LABEL}arch", "--filter=status=exited"]
        ps = ["podman", "ps", "--all", *filters, "--format", "{{.Names}}"]
        names = run.run(ps, env=env, timeout=PATIENCE, always=True).stdout.split()
        storage = Path(known.storage)
        cut = [leftovers.told(one) for one in leftovers.cut_off(storage, state) if one.mark.name == leftovers.MARK]
        broken = store.lasting(lambda: dict.fromkeys(store.unreadable(storage)))
        return msgspec.structs.replace(known, exited=tuple(names), cut=tuple(cut), broken=tuple(sorted(broken)))
    except WarmstartError as bad:
        return Engine(problem=bad.message)


def package(other: Path, *, live: bool) -> str:
    """The version of the package with the GPU's firmware; empty where no package manager's files tell it."""
    if found := FIRMWARE.search(host.text(other / "var/lib/dpkg/status")):
        return found[1]
    for entry in sorted((other / "var/lib/pacman/local").glob("linux-firmware*")):
        if named := re.match(r"linux-firmware(?:-amdgpu)?-(\d{8}\S*)$", entry.name):
            return named[1]
    if live and run.program("rpm"):
        asked = ["rpm", "-q", "--qf", "%{VERSION}\n", "amd-gpu-firmware", "linux-firmware"]
        told = run.run(asked, ok=range(256), timeout=PATIENCE, always=True).stdout
        return next((line for line in told.splitlines() if line[:1].isdigit()), "")
    return ""


def _asked() -> Engine:
    told = run.run(["podman", "info", "--format", "json"], timeout=PATIENCE, always=True).stdout
    info = msgspec.json.decode(told)
    own = info["host"]
    if not own["ociRuntime"]:
        return Engine(problem="podman finds no OCI runtime")
    return Engine(
        version=str(info["version"]["Version"]),
        runtime=str(own["ociRuntime"]["name"]),
        rootless=bool(own["security"]["rootless"]),
        storage=str(info["store"]["graphRoot"]),
    )


def _checked(check: Check, machine: Host) -> Finding:
    try:
        return check(machine)
    except Unreadable as bad:
        return Finding("unreadable", f"can't be read: {bad}")
    except OSError as bad:
        return Finding("unreadable", f"can't be read: {bad.filename}: {bad.strerror}")
    except ValueError as bad:
        return Finding("unreadable", f"can't be understood: {bad}")


def _environ(other: Path) -> Mapping[str, str] | None:
    try:
        words = (other / "proc/self/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (word.partition("=") for word in words) if name}
