"""Records of device tests: which of them validates a profile, and how `archs` shows it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import cuts, hardware, lock, plan, profile, tables
from warmstart.errors import ProfileError
from warmstart.hardware import Record
from warmstart.plan import Plan
from warmstart.profile import Profile

ROOT = Path(__file__).parents[2]
FIRMWARE = """VCE feature version: 0, firmware version: 0x00000000
ME feature version: 32, firmware version: 0x0000001f
MES_KIQ feature version: 6, firmware version: 0x0000006c
MES feature version: 1, firmware version: 0x00000083
VBIOS version: 113-STRXLGEN-001
"""


@pytest.fixture(scope="module")
def planned() -> Plan:
    loaded = profile.load(ROOT, "gfx1151")
    locked = lock.parse(lock.committed(ROOT, "gfx1151"))
    return plan.make(ROOT, loaded, locked, cuts.load(ROOT, loaded.profile))


@pytest.fixture
def record(planned: Plan, tmp_path: Path) -> Record:
    return hardware.make(planned, "sha256:1", "Radeon 8060S", 1, {"test_torch": "passed"}, tmp_path)


def commit(root: Path, record: Record | bytes) -> None:
    """Put a record where a profile looks for it."""
    folder = root / "arch" / "validated"
    folder.mkdir(parents=True)
    content = record if isinstance(record, bytes) else msgspec.json.encode(record)
    (folder / "gfx1151.json").write_bytes(content)


def changed(record: Record, **values: Any) -> Record:
    return msgspec.structs.replace(record, **values)


def test_a_record_says_what_was_tested(record: Record, planned: Plan, tmp_path: Path) -> None:
    assert record.passed
    assert (record.plan_id, record.lane, record.versions["rocm"]) == (planned.plan_id, "wheel", "10.0.0")
    assert record.date == datetime.datetime.now(datetime.UTC).date().isoformat()
    assert record.firmware == {}
    assert hardware.read(hardware.write(tmp_path, record)) == record
    assert (tmp_path / "gfx1151" / "device.json").is_file()


@pytest.mark.parametrize("tests", [{}, {"a": "passed", "b": "failed"}, {"a": "passed", "b": "skipped"}])
def test_only_a_whole_run_passes(planned: Plan, tmp_path: Path, tests: dict[str, str]) -> None:
    assert not hardware.make(planned, "sha256:1", "a GPU", 1, tests, tmp_path).passed


def test_firmware_of_the_first_gpu_that_tells(tmp_path: Path) -> None:
    for number, text in ((0, "no versions"), (1, FIRMWARE)):
        folder = tmp_path / "sys/kernel/debug/dri" / str(number)
        folder.mkdir(parents=True)
        (folder / "amdgpu_firmware_info").write_text(text)
    assert hardware.firmware(tmp_path) == {"ME": "0x0000001f", "MES_KIQ": "0x0000006c", "MES": "0x00000083"}


def test_a_record_of_the_same_versions_validates(record: Record, planned: Plan, tmp_path: Path) -> None:
    assert hardware.validated(tmp_path, planned.profile) is None
    commit(tmp_path, record)
    found = hardware.validated(tmp_path, planned.profile)
    assert found == record
    row = tables.arch(planned.profile, found.date if found else None)
    assert (row["hardware_validated"], row["validated_on"]) == (True, record.date)
    assert f"yes, {record.date}" in tables.archs([row])


@pytest.mark.parametrize(
    "change",
    [
        {"passed": False},
        {"arch": "gfx1150"},
        {"lane": "source"},
        {"versions": {}},
        {"versions": {"vllm": "0.33.0"}},
    ],
)
def test_a_record_of_something_else_does_not(
    record: Record, planned: Plan, tmp_path: Path, change: dict[str, Any]
) -> None:
    commit(tmp_path, changed(record, **change))
    assert hardware.validated(tmp_path, planned.profile) is None


@pytest.mark.parametrize("key", ["vllm", "torch", "rocm", "triton", "python", "aiter"])
def test_every_version_counts(record: Record, planned: Plan, tmp_path: Path, key: str) -> None:
    commit(tmp_path, changed(record, versions=record.versions | {key: "9"}))
    assert hardware.validated(tmp_path, planned.profile) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, b'{"schema": 1, "date": "soon"}'])
def test_a_file_that_is_no_record_is_an_error(planned: Plan, tmp_path: Path, data: bytes) -> None:
    commit(tmp_path, data)
    with pytest.raises(ProfileError, match=r"validated/gfx1151\.json is no record of device tests"):
        hardware.validated(tmp_path, planned.profile)


def test_a_date_that_is_none_is_an_error(record: Record, planned: Plan, tmp_path: Path) -> None:
    commit(tmp_path, changed(record, date="last week"))
    with pytest.raises(ProfileError, match="no record"):
        hardware.validated(tmp_path, planned.profile)


def test_without_a_record_the_profile_decides(planned: Plan) -> None:
    cpu: Profile = profile.load(ROOT, "cpu").profile
    assert tables.arch(cpu)["hardware_validated"] is True
    row = tables.arch(planned.profile)
    assert (row["hardware_validated"], row["validated_on"]) == (False, "")


def test_committed_records_are_records() -> None:
    for file in (ROOT / "arch" / "validated").glob("*"):
        assert file.stem in profile.archs(ROOT)
        assert hardware.read(file).arch == file.stem
