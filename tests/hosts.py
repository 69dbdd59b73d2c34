"""Machines for tests: `plant` writes the trees of sysfs and /proc that tests/data/hosts describes.

The files have the form that the kernel documents; the sizes are those of the description.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

HOSTS = Path(__file__).parent / "data" / "hosts"
NAMES = sorted(file.stem for file in HOSTS.glob("*.toml"))
MIB = 1 << 20
SESSION = 12345  # the user in /proc/self/status: never the owner of the planted files


def plant(root: Path, name: str) -> Path:
    """Write the machine of that name below `root` and return `root`."""
    data = tomllib.loads((HOSTS / f"{name}.toml").read_text(encoding="utf-8"))
    put(root, "proc/meminfo", "".join(f"{key}: {value:>15} kB\n" for key, value in data["memory"].items()))
    put(root, "proc/cmdline", data["cmdline"] + "\n")
    put(root, "proc/sys/kernel/osrelease", data["kernel"] + "\n")
    put(
        root, "proc/self/status", f"Name:\tpython\nUid:\t{SESSION}\t{SESSION}\t{SESSION}\t{SESSION}\nGroups:\t44 105 \n"
    )
    put(root, "proc/self/environ", "HOME=/home/user\0PATH=/usr/bin\0")
    put(root, "proc/mounts", "/dev/sda1 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev,inode64 0 0\n")
    put(root, "etc/group", "root:x:0:\nvideo:x:44:user\nrender:x:105:user\n")
    put(root, "etc/passwd", f"root:x:0:0::/root:/bin/sh\nuser:x:{SESSION}:{SESSION}::/home/user:/bin/sh\n")
    gpus = data.get("gpu", [])
    if gpus:
        _node(root, 0, {"cpu_cores_count": 16, "simd_count": 0, "gfx_target_version": 0}, 0, 0)
        put(root, "dev/kfd", "", 0o666)
    for number, gpu in enumerate(gpus, start=1):
        _gpu(root, number, gpu)
    for process in data.get("process", []):
        _process(root, process, {gpu["pci"]: _gpu_id(number) for number, gpu in enumerate(gpus, start=1)})
    return root


def put(root: Path, path: str, text: str, mode: int = 0o644) -> Path:
    """Write one file below `root`."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        file.chmod(0o644)
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def device(root: Path, card: int) -> Path:
    """The folder of a card's PCI device."""
    return root / f"sys/class/drm/card{card}/device"


def _gpu(root: Path, number: int, gpu: dict[str, Any]) -> None:
    domain, bus, rest = gpu["pci"].split(":")
    slot, function = rest.split(".")
    facts = {
        "cpu_cores_count": 0,
        "simd_count": gpu["cu"] * gpu["simd-per-cu"],
        "mem_banks_count": 1,
        "simd_per_cu": gpu["simd-per-cu"],
        "gfx_target_version": gpu["version"],
        "vendor_id": 4098,
        "device_id": int(gpu["id"], 16),
        "location_id": int(bus, 16) << 8 | int(slot, 16) << 3 | int(function),
        "domain": int(domain, 16),
        "drm_render_minor": 127 + number,
        "unique_id": gpu.get("unique", 0),
        "local_mem_size": 0,
    }
    _node(root, number, facts, _gpu_id(number), gpu.get("kfd-mib", gpu["vram-mib"]) * MIB)
    folder = f"sys/class/drm/card{number}/device"
    address = f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_ID=1002:{gpu['id'][2:].upper()}\nPCI_SLOT_NAME={gpu['pci']}\n"
    put(root, f"{folder}/uevent", address)
    put(root, f"{folder}/vendor", "0x1002\n")
    put(root, f"{folder}/device", f"{gpu['id']}\n")
    put(root, f"{folder}/boot_vga", f"{int(gpu.get('boot-vga', False))}\n")
    put(root, f"{folder}/gpu_busy_percent", "0\n")
    put(root, f"{folder}/power_dpm_force_performance_level", "auto\n")
    if not gpu.get("apu"):
        put(root, f"{folder}/mem_busy_percent", "0\n")
    for kind in ("vram", "gtt"):
        put(root, f"{folder}/mem_info_{kind}_total", f"{gpu[f'{kind}-mib'] * MIB}\n")
        put(root, f"{folder}/mem_info_{kind}_used", f"{gpu[f'{kind}-used-mib'] * MIB}\n")
    if "mes" in gpu:
        put(root, f"{folder}/fw_version/mes_fw_version", f"{gpu['mes']}\n")
    put(root, f"sys/class/drm/card{number}-DP-1/status", "disconnected\n")
    put(root, f"dev/dri/renderD{127 + number}", "", 0o666)
    put(root, "sys/module/ttm/parameters/pages_limit", f"{gpu['gtt-mib'] * 256}\n")


def _node(root: Path, number: int, facts: dict[str, int], gpu_id: int, memory: int) -> None:
    folder = f"sys/class/kfd/kfd/topology/nodes/{number}"
    put(root, f"{folder}/properties", "".join(f"{name} {value}\n" for name, value in facts.items()))
    put(root, f"{folder}/gpu_id", f"{gpu_id}\n")
    bank = f"heap_type {1 if gpu_id else 0}\nsize_in_bytes {memory}\nflags 0\nwidth 128\nmem_clk_max 1000\n"
    put(root, f"{folder}/mem_banks/0/properties", bank)


def _gpu_id(number: int) -> int:
    return 50000 + number


def _process(root: Path, process: dict[str, Any], ids: dict[str, int]) -> None:
    folder = f"proc/{process['pid']}"
    put(root, f"{folder}/comm", process["name"] + "\n")
    put(root, f"{folder}/cgroup", process["cgroup"] + "\n")
    for number, client in enumerate(process.get("clients", []), start=20):
        text = f"pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t{client['client']}\n"
        text += f"drm-pdev:\t{client['pci']}\npasid:\t32770\ndrm-memory-vram:\t{client['vram-mib'] << 10} KiB\n"
        text += f"drm-memory-gtt: \t{client['gtt-mib'] << 10} KiB\ndrm-memory-cpu: \t0 KiB\ndrm-engine-gfx:\t12 ns\n"
        put(root, f"{folder}/fdinfo/{number}", text)
        link = root / folder / "fd" / str(number)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/dri/renderD128")
    for pci, mib in process.get("kfd", {}).items():
        put(root, f"sys/class/kfd/kfd/proc/{process['pid']}/vram_{ids[pci]}", f"{mib * MIB}\n")
