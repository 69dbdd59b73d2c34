"""Rehearsals: what stands in for what, and what a rehearsal refuses."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from warmstart import loopback, offers, profile, rehearse, standins, verify
from warmstart.errors import Interrupted, LockMismatch, ProfileError, VerifyFailed
from warmstart.lock import Lock, LockedBase, Wheel
from warmstart.loopback import Served
from warmstart.standins import Made

ROOT = Path(__file__).parents[2]
TABLE = offers.load(ROOT)
ARCHS = rehearse.archs(ROOT)
REAL = "https://stable.repo.amd.com/rocm/whl-next/"


def lock(*wheels: Wheel) -> Lock:
    return Lock(1, "gfx1151", "pins", 0, "", LockedBase("rootfs"), wheels)


def vendors(arch: str) -> set[str]:
    """What the lock of an arch takes from a vendor's index."""
    text = (ROOT / "arch" / f"{arch}.lock.json").read_bytes()
    return {w.name for w in msgspec.json.decode(text, type=Lock).wheels if w.source not in ("pip", "made")}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_wheel_of_a_vendor_has_a_stand_in(arch: str) -> None:
    locked = msgspec.json.decode((ROOT / "arch" / f"{arch}.lock.json").read_bytes(), type=Lock)
    made = {offers.named(one, a) for one, a, _ in offers.wanted(TABLE, locked.wheels)}
    assert vendors(arch) <= made


@pytest.mark.parametrize("arch", ARCHS)
def test_device_wheels_of_other_archs_are_offered_too(arch: str) -> None:
    locked = msgspec.json.decode((ROOT / "arch" / f"{arch}.lock.json").read_bytes(), type=Lock)
    made = {offers.named(one, a) for one, a, _ in offers.wanted(TABLE, locked.wheels)}
    assert {f"rocm-sdk-device-{a}" for a in TABLE.archs} <= made


def test_all_archs_with_a_gpu_are_rehearsed() -> None:
    assert [a for a in profile.archs(ROOT) if a != "cpu"] == ARCHS


def test_an_unknown_key_or_index_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "arch" / "rehearsal.toml").read_text(encoding="utf-8")
    (tmp_path / "arch").mkdir()
    file = tmp_path / "arch" / "rehearsal.toml"
    file.write_text(text.replace("\nwhy = ", "\nwhi = ", 1), encoding="utf-8")
    with pytest.raises(ProfileError, match="whi"):
        offers.load(tmp_path)
    file.write_text(text.replace('absent = 403\n', 'absent = 403\n[[index]]\naddress = "x"\nabsent = 404\n', 1))
    offers.load(tmp_path)
    file.write_text(re.sub(r'(?m)^index = "https://wheels', 'index = "https://wheel', text))
    with pytest.raises(ProfileError, match="has no table"):
        offers.load(tmp_path)


def test_only_scheme_host_and_port_of_an_address_are_replaced() -> None:
    served = Served({"https://stable.repo.amd.com": "http://127.0.0.1:5"}, [])
    assert served.address(REAL) == "http://127.0.0.1:5/rocm/whl-next/"
    assert served.address("https://stable.repo.amd.com/rocm/whl/") == "http://127.0.0.1:5/rocm/whl/"
    assert served.address("https://elsewhere.example/rocm/whl-next/") == ""


def test_pages_of_an_index() -> None:
    made = Made("torch", "2.0+rocm10", REAL, "", "/x/torch-2.0+rocm10-py3-none-any.whl", "ab", "Name: torch\n")
    pages = loopback._pages("/rocm/whl-next", [made])
    assert set(pages) == {
        "/rocm/whl-next/torch/",
        "/rocm/whl-next/torch/torch-2.0+rocm10-py3-none-any.whl",
        "/rocm/whl-next/torch/torch-2.0+rocm10-py3-none-any.whl.metadata",
    }
    page = str(pages["/rocm/whl-next/torch/"])
    assert 'href="torch-2.0%2Brocm10-py3-none-any.whl#sha256=ab"' in page


def test_the_vendors_part_must_be_as_committed() -> None:
    committed = lock(Wheel("torch", "2.0", "torch", source="vllm"), Wheel("fa", "", "vision", source="vllm"))
    wheels = Wheel("torch", "2.0", "torch", source="vllm"), Wheel("fa", "2.8", "vision", source="vllm")
    assert rehearse.differences(committed, lock(*wheels)) == ()
    other = msgspec.structs.replace(wheels[0], version="2.1")
    with pytest.raises(LockMismatch, match=r"torch 2\.1 instead of 2\.0"):
        rehearse.differences(committed, lock(other, wheels[1]))
    more = Wheel("amd-torch-device-gfx90a", "2.0", "device", source="rocm")
    with pytest.raises(LockMismatch, match=r"amd-torch-device-gfx90a 2\.0 instead of absent"):
        rehearse.differences(committed, lock(*wheels, more))
    with pytest.raises(LockMismatch, match=r"torch absent instead of 2\.0"):
        rehearse.differences(committed, lock(wheels[1]))


def test_other_differences_are_told() -> None:
    committed, found = lock(Wheel("six", "1", "python")), lock(Wheel("six", "2", "python"))
    assert rehearse.differences(committed, found) == ("wheel six: 1 → 2",)


def test_an_index_of_an_unknown_host_is_refused() -> None:
    known = profile.load(ROOT, "gfx1151").profile
    with pytest.raises(ProfileError, match="doesn't know"):
        rehearse._redirected(known, Served({"https://other.example": "http://127.0.0.1:5"}, []))


def test_requirements_files_are_read_as_pip_does() -> None:
    texts = {
        "requirements/rocm.txt": "# one\n-r common.txt\n--extra-index-url x\ngrpcio==1  # why\n",
        "requirements/common.txt": "six>=1; python_version > '3'\n",
    }
    assert standins._requirements(texts, "requirements/rocm.txt") == ["six>=1; python_version > '3'", "grpcio==1"]


def test_where_the_tests_end_a_record_says_what_was_skipped() -> None:
    record = rehearse.Rehearsed(
        arch="gfx1151",
        plan_id="1",
        real_plan_id="2",
        indexes={},
        standins={"torch": "x"},
        tests=(verify.Test("test_a::b", "skipped", 0.1, "stand-in: torch"),),
        passed=3,
        skipped=1,
    )
    lines = rehearse.text(record).splitlines()
    assert "  1 skipped: stand-in: torch" in lines
    assert lines[-1] == "3 passed, 0 failed, 1 skipped"


def test_of_several_archs_a_failed_one_keeps_no_other_back() -> None:
    done = []

    def one(arch: str) -> None:
        done.append(arch)
        if arch in ("b", "c"):
            raise VerifyFailed(f"{arch} is broken", hint="h")

    with pytest.raises(VerifyFailed) as caught:
        rehearse.each(["a", "b", "c", "d"], one)
    assert done == ["a", "b", "c", "d"]
    assert (caught.value.message, caught.value.hint) == ("2 of 4 archs failed (b, c): b is broken", "h")


def test_ctrl_c_ends_all_of_them() -> None:
    done = []

    def one(arch: str) -> None:
        done.append(arch)
        raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        rehearse.each(["a", "b"], one)
    assert done == ["a"]
