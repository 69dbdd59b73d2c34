"""GPUs, memory and holders, read from the trees of several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import MIB, NAMES, device, plant, put
from warmstart import gpus

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("strix-halo-0.5g", [("gfx1151", 40, True, True)]),
        ("strix-halo-64g", [("gfx1151", 40, True, False)]),  # 64 GiB set aside are more than 31 of GTT
        ("strix-halo-96g", [("gfx1151", 40, True, False)]),
        ("rx7600xt-desktop", [("gfx1102", 32, False, False)]),
        ("r9700-igpu-first", [("gfx1036", 2, True, True), ("gfx1201", 64, False, False)]),
        ("mi300x-8", [("gfx942", 304, False, False)] * 8),
        ("cpu-only", []),
    ],
)
def test_gpus(tmp_path: Path, name: str, found: list[tuple[str, int, bool, bool]]) -> None:
    read = gpus.read(plant(tmp_path, name))
    assert [(gpu.arch, gpu.cu, gpu.apu, gpu.uses_gtt) for gpu in read] == found
    assert [gpu.index for gpu in read] == list(range(len(found)))


def test_every_machine_is_looked_at() -> None:
    assert len(NAMES) == 7


def test_all_of_a_card(tmp_path: Path) -> None:
    card = gpus.read(plant(tmp_path, "r9700-igpu-first"))[1]
    assert (card.pci, card.card, card.render, card.display) == ("0000:03:00.0", "card2", "renderD129", False)
    assert (card.vram_total, card.vram_used) == (32624 * MIB, 18500 * MIB)
    assert card.unique_id == f"GPU-{4659307216401530915:016x}"


def test_memory(tmp_path: Path) -> None:
    found = gpus.memory(plant(tmp_path, "rx7600xt-desktop"))
    assert found == gpus.Memory(49283072 << 10, 40 * GIB, 4 * GIB, 0)
    assert gpus.memory(tmp_path / "nowhere") == gpus.Memory(0, 0, 0, 0)
    put(tmp_path, "proc/meminfo", f"MemTotal: {'9' * 5000} kB\nMemAvailable: 5 kB\nSwapTotal:\n")
    assert gpus.memory(tmp_path) == gpus.Memory(0, 5 << 10, 0, 0)


def test_sizes_that_are_no_numbers_are_unknown(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    (card,) = {gpu.card for gpu in gpus.read(root) if not gpu.apu}
    put(root, f"sys/class/drm/{card}/device/mem_info_vram_total", "9" * 5000)
    assert [gpu.vram_total for gpu in gpus.read(root) if gpu.card == card] == [0]


def test_old_kernels_give_an_apu_the_processors_node(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    node = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    node.write_text(node.read_text().replace("cpu_cores_count 0", "cpu_cores_count 8"))
    assert gpus.read(root)[0].apu


def test_mi300a_is_an_apu_though_it_has_mem_busy_percent(tmp_path: Path) -> None:
    root = plant(tmp_path, "mi300x-8")
    put(root, "sys/class/drm/card3/device/device", "0x74a0\n")
    assert [gpu.apu for gpu in gpus.read(root)] == [False, False, True] + [False] * 5


def test_without_amdgpus_sysfs_sizes_are_unknown(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    for file in device(root, 1).glob("mem_info_*"):
        file.write_text("")
    found = gpus.read(root)[0]
    assert not found.known
    assert (found.vram_total, found.gtt_used) == (0, 0)
    (device(root, 1) / "uevent").unlink()
    assert gpus.read(root)[0].card == ""


def test_a_client_that_is_open_twice_counts_once(tmp_path: Path) -> None:
    desktop, browser = gpus.holders(plant(tmp_path, "rx7600xt-desktop"))
    assert (desktop.name, desktop.bytes) == ("kwin_wayland", {"0000:03:00.0": 960 * MIB})
    assert (desktop.unit, desktop.user_unit, desktop.container) == ("plasma-kwin_wayland.service", True, "")
    assert (browser.unit, browser.owner) == ("", "firefox (pid 2310)")


def test_the_services_own_unit(tmp_path: Path) -> None:
    (llama,) = gpus.holders(plant(tmp_path, "r9700-igpu-first"))
    assert (llama.unit, llama.user_unit, llama.bytes) == ("llama.service", False, {"0000:03:00.0": 18400 * MIB})


def test_a_container_by_its_id(tmp_path: Path) -> None:
    (engine,) = gpus.holders(plant(tmp_path, "mi300x-8"))
    assert (engine.container, engine.owner) == ("3f0c1d9a7b5e", "container 3f0c1d9a7b5e")


@pytest.mark.parametrize(
    ("group", "container"),
    [
        ("0::/user.slice/user@1000.service/app.slice/vllm.service/libpod-payload-" + "ab" * 32, "abababababab"),
        ("12:devices:/docker/" + "cd" * 32 + "\n0::/", "cdcdcdcdcdcd"),
        ("0::/system.slice/docker-" + "ef" * 32 + ".scope", "efefefefefef"),
        ("0::/system.slice/ollama.service", ""),
    ],
)
def test_containers_of_several_engines(tmp_path: Path, group: str, container: str) -> None:
    root = plant(tmp_path, "mi300x-8")
    put(root, "proc/7788/cgroup", group + "\n")
    assert gpus.holders(root)[0].container == container


def test_both_lists_show_the_same_memory(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    put(root, "sys/class/kfd/kfd/proc/1201/vram_50001", f"{500 * MIB}\n")
    assert gpus.holders(root)[0].bytes == {"0000:03:00.0": 960 * MIB}  # the larger of both, not the sum
    put(root, "sys/class/kfd/kfd/proc/1201/vram_50001", f"{5000 * MIB}\n")
    assert gpus.holders(root)[0].bytes == {"0000:03:00.0": 5000 * MIB}


@pytest.mark.parametrize(
    "text", ["", "drm-driver:\tamdgpu\n", "drm-driver:\ti915\ndrm-memory-vram:\t9 KiB\n", "\0\0:\n"]
)
def test_other_files_of_fdinfo(tmp_path: Path, text: str) -> None:
    root = plant(tmp_path, "cpu-only")
    put(root, "proc/77/fdinfo/3", text)
    assert gpus.holders(root) == ()


def test_newer_kernels_name_the_memory_otherwise(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    file = root / "proc/2310/fdinfo/20"
    file.write_text(file.read_text().replace("drm-memory-", "drm-resident-").replace(f"{420 << 10} KiB", "420 MiB"))
    assert gpus.holders(root)[1].bytes == {"0000:03:00.0": 460 * MIB}
