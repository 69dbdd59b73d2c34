"""Records of device tests: what an image did on a real GPU, and which profiles that validates.

`tests/device` writes `.warmstart/<arch>/device.json`. Committed as `arch/validated/<arch>.json` it validates the
profile, as long as the profile names the versions that were tested.
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

import msgspec

from warmstart.errors import ProfileError
from warmstart.plan import Plan
from warmstart.schema import Profile

# What the kernel's debugfs says of each part, e.g. "MES feature version: 1, firmware version: 0x00000083".
FIRMWARE = re.compile(r"^(\w[\w ]*?) feature version: \d+, firmware version: (0x[0-9a-f]+)", re.MULTILINE)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The verdict of the device tests on one image on one machine."""

    schema: int = 1
    image_id: str
    plan_id: str
    arch: str
    lane: str
    gpu: str  # the GPU's name
    gpus: int  # how many of that arch were tested
    kernel: str
    firmware: dict[str, str]  # part → version; empty where the kernel told nothing (it tells root alone)
    versions: dict[str, str]  # the plan's: vLLM, torch, ROCm …
    date: str  # YYYY-MM-DD
    passed: bool
    tests: dict[str, str]  # test → passed, failed or skipped


def make(plan: Plan, image_id: str, gpu: str, gpus: int, tests: dict[str, str], root: Path = Path("/")) -> Record:
    """The record of a run on this machine, today. It passed when all tests passed: one that was left out counts."""
    return Record(
        image_id=image_id,
        plan_id=plan.plan_id,
        arch=plan.arch,
        lane=plan.lane,
        gpu=gpu,
        gpus=gpus,
        kernel=os.uname().release,
        firmware=firmware(root),
        versions=plan.versions,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        passed=bool(tests) and set(tests.values()) == {"passed"},
        tests=tests,
    )


def firmware(root: Path = Path("/")) -> dict[str, str]:
    """Firmware versions of the first GPU that tells them; empty for whoever may not read debugfs."""
    try:
        for file in sorted((root / "sys/kernel/debug/dri").glob("*/amdgpu_firmware_info")):
            if found := FIRMWARE.findall(file.read_text(encoding="utf-8")):
                return {name: version for name, version in found if int(version, 16)}
    except (OSError, UnicodeDecodeError):
        pass
    return {}


def write(state: Path, record: Record) -> Path:
    """Write `.warmstart/<arch>/device.json`; returns its path."""
    file = state / record.arch / "device.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n")
    return file


def read(file: Path) -> Record:
    """A record. Raises ProfileError for a file that is none."""
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
        datetime.date.fromisoformat(record.date)
    except (OSError, ValueError, RecursionError) as bad:
        place = f"{file.parent.name}/{file.name}"
        raise ProfileError(f"{place} is no record of device tests: {bad}", hint="tests/device writes it") from None
    return record


def validated(root: Path, profile: Profile) -> Record | None:
    """The committed record that validates `profile`: passed, on its arch, with its lane and exactly its versions.

    Raises ProfileError for a file in its place that is no record.
    """
    file = root / "arch" / "validated" / f"{profile.arch}.json"
    if not file.is_file():
        return None
    record = read(file)
    versions = {name: version for name, version in msgspec.to_builtins(profile.versions).items() if version}
    same = (record.arch, record.lane, record.versions) == (profile.arch, profile.lane, versions)
    return record if record.passed and same else None
