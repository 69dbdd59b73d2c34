"""GPU detection from KFD's topology: names, the choice between an iGPU and a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import host
from warmstart.errors import DiskFull, HostUnsupported


def node(root: Path, number: int, version: int, *, cus: int, cpus: int = 0, vram: int = 0, location: int = 768) -> None:
    """One KFD topology node as the kernel shows it."""
    folder = root / host.KFD_NODES / str(number)
    facts = {
        "cpu_cores_count": cpus,
        "simd_count": cus * 2,
        "simd_per_cu": 2,
        "gfx_target_version": version,
        "drm_render_minor": 128 + number,
        "location_id": location,
        "domain": 0,
    }
    (folder / "mem_banks" / "0").mkdir(parents=True)
    (folder / "properties").write_text("".join(f"{k} {v}\n" for k, v in facts.items()), encoding="utf-8")
    bank = f"heap_type {1 if vram else 0}\nsize_in_bytes {vram}\n"
    (folder / "mem_banks" / "0" / "properties").write_text(bank, encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (110501, "gfx1151"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90500, "gfx950"),
    ],
)
def test_target_names(version: int, name: str) -> None:
    assert host.target_name(version) == name


def test_no_driver_means_cpu(tmp_path: Path) -> None:
    assert host.default_arch(tmp_path)[0] == "cpu"


def test_the_cpu_node_is_no_gpu(tmp_path: Path) -> None:
    node(tmp_path, 0, 0, cus=0, cpus=16)
    assert host.gpus(tmp_path) == []


def test_strix_halo_alone(tmp_path: Path) -> None:
    node(tmp_path, 0, 0, cus=0, cpus=32)
    node(tmp_path, 1, 110501, cus=40, vram=512 << 20)
    arch, why = host.default_arch(tmp_path)
    assert (arch, why) == ("gfx1151", "the only AMD GPU")


def test_a_card_is_chosen_before_the_igpu_that_comes_first(tmp_path: Path) -> None:
    node(tmp_path, 1, 100306, cus=2, vram=0)
    node(tmp_path, 2, 120001, cus=64, vram=32 << 30, location=0x0300)
    arch, why = host.default_arch(tmp_path)
    assert arch == "gfx1201"
    assert "passed over: gfx1036 (2 CUs)" in why
    assert host.gpus(tmp_path)[1].pci == "0000:03:00.0"


def test_a_gpu_without_an_image_is_passed_over(tmp_path: Path) -> None:
    node(tmp_path, 1, 100302, cus=32, vram=8 << 30)  # a gfx1032 card
    node(tmp_path, 2, 110003, cus=12, vram=0)  # beside a gfx1103 APU
    assert host.default_arch(tmp_path, ["cpu", "gfx1103"])[0] == "gfx1103"
    arch, why = host.default_arch(tmp_path, ["cpu", "gfx1151"])
    assert arch == "cpu"
    assert why == "there is no image for this machine's gfx1032, gfx1103"


def test_unreadable_properties_are_no_gpu(tmp_path: Path) -> None:
    (tmp_path / host.KFD_NODES / "1").mkdir(parents=True)
    assert host.gpus(tmp_path) == []


def test_what_is_no_number_of_the_kernel_is_not_read(tmp_path: Path) -> None:
    node(tmp_path, 1, 110501, cus=40, vram=512 << 20)
    for name in (".hidden", "1_0", "²", "x", "9" * 30):
        (tmp_path / host.KFD_NODES / name).mkdir()
    facts = tmp_path / host.KFD_NODES / "1" / "properties"
    facts.write_bytes(facts.read_bytes() + b"location_id " + b"9" * 5000 + b"\nsimd_per_cu \xc2\xb2\nbad \xff 1\n")
    assert [(gpu.node, gpu.compute_units, gpu.pci) for gpu in host.gpus(tmp_path)] == [(1, 40, "0000:03:00.0")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" 7\n", 7),
        ("9" * 20, 10**20 - 1),
        ("9" * 21, None),
        ("-1", None),
        ("1_0", None),
        ("²", None),
        ("", None),
    ],
)
def test_numbers_of_the_kernel(text: str, number: int | None) -> None:
    assert host.number(text) == number


def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(HostUnsupported, match="Darwin"):
        host.require_linux()


def test_disk_nearly_full(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="are free"):
        host.need_disk(tmp_path / "not" / "there", 10**18, "this build")
