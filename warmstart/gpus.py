"""GPUs, their memory and who holds it, as the kernel tells: KFD's topology, amdgpu's sysfs, DRM's fdinfo.

Everything is read below `root`, so that a test can show another machine. Bytes are 0 where the kernel tells nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from warmstart import host, processes
from warmstart.host import text

GIB = 1 << 30
DRM = "sys/class/drm"
KFD_PROCESSES = "sys/class/kfd/kfd/proc"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}  # of fdinfo (kernel: Documentation/gpu/drm-usage-stats)
# AMD's APU for data centres (MI300A): the one APU for which amdgpu offers mem_busy_percent. Id: pci.ids.
INSTINCT_APU = "0x74a0"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One AMD GPU that can compute."""

    index: int  # in HIP's order, before any *_VISIBLE_DEVICES
    arch: str  # LLVM target name
    pci: str  # domain:bus:device.function
    card: str  # DRM's name, "card1"; empty without amdgpu's DRM part
    render: str  # "renderD128", below /dev/dri
    vram_total: int  # bytes; of an APU: what the firmware set aside for it
    vram_used: int
    gtt_total: int  # bytes of the machine's memory that the GPU may use
    gtt_used: int
    cu: int  # compute units
    apu: bool  # it shares the processor's memory
    display: bool  # the firmware showed its screen on it
    unique_id: str  # "GPU-<16 hex>" as ROCR_VISIBLE_DEVICES takes it; empty where the GPU has none

    @property
    def known(self) -> bool:
        """Whether the kernel told the sizes of its memory."""
        return self.vram_total > 0

    @property
    def uses_gtt(self) -> bool:
        """Whether ROCm's allocations come from the machine's memory instead of what is set aside.

        amdgpu decides it when it is loaded (`apu_prefer_gtt` in amdgpu_ttm_init): on an APU whose set-aside part is
        smaller than GTT. Then every allocation for the device is one in GTT.
        """
        return self.apu and self.vram_total < self.gtt_total


class Memory(msgspec.Struct, frozen=True):
    """The machine's memory, in bytes; all 0 when it can't be read."""

    total: int
    available: int  # the kernel's estimate of what can be had without swapping
    swap_total: int
    swap_used: int


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of GPUs."""

    pid: int
    name: str
    unit: str  # systemd's service that it belongs to, "llama.service"; empty for none
    user_unit: bool  # that service belongs to a user's manager (systemctl --user)
    container: str  # the first 12 digits of its container's id; empty outside of one
    bytes: dict[str, int]  # by the GPU's PCI address: VRAM and GTT together

    @property
    def owner(self) -> str:
        """Who that is, in words: its service, its container, else the process."""
        return self.unit or (f"container {self.container}" if self.container else f"{self.name} (pid {self.pid})")


def read(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs of KFD's topology in HIP's order, with their memory. Empty without the driver."""
    by_address: dict[str, tuple[str, Path | None]]
    by_address = {_uevent(device).get("PCI_SLOT_NAME", ""): (card, device) for card, device in cards(root)}
    found = []
    for index, gpu in enumerate(host.gpus(root)):
        card, device = by_address.get(gpu.pci, ("", None))
        found.append(_gpu(index, gpu, card, device))
    return tuple(found)


def cards(root: Path = Path("/")) -> Iterator[tuple[str, Path]]:
    """The names of all graphics cards in DRM, whoever made them, and the folder of each one's device."""
    for card in sorted((root / DRM).glob("card*")):
        if re.fullmatch(r"card\d+", card.name):  # card0-DP-1 is a connector
            yield card.name, card / "device"


def memory(root: Path = Path("/")) -> Memory:
    """The machine's memory from /proc/meminfo."""
    kib = {}
    for line in text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        kib[name] = host.number("".join(value.split()[:1])) or 0
    total, free = kib.get("SwapTotal", 0), kib.get("SwapFree", 0)
    return Memory(kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10, total << 10, (total - free) << 10)


def holders(root: Path = Path("/")) -> tuple[Holder, ...]:
    """Processes that hold memory of GPUs, the largest first.

    fdinfo of other users' processes is hidden from whoever isn't root; KFD's own list shows those that compute.
    """
    held: dict[int, dict[str, int]] = {}
    for pid in processes.pids(root):
        if found := _from_fdinfo(root / "proc" / str(pid)):
            held[pid] = found
    for pid, found in _from_kfd(root).items():
        # Both lists have what a process of ROCm allocated, so the larger counts.
        own = held.setdefault(pid, {})
        own |= {pci: max(size, own.get(pci, 0)) for pci, size in found.items()}
    found_all = [_holder(pid, sizes, root) for pid, sizes in held.items() if any(sizes.values())]
    return tuple(sorted(found_all, key=lambda h: (-sum(h.bytes.values()), h.pid)))


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.1f} GiB"


def _gpu(index: int, gpu: host.Gpu, card: str, device: Path | None) -> Gpu:
    sizes = {name: _number(device, f"mem_info_{name}") for name in ("vram_total", "vram_used", "gtt_total", "gtt_used")}
    return Gpu(
        index=index,
        arch=gpu.arch,
        pci=gpu.pci,
        card=card,
        render=f"renderD{gpu.render_minor}",
        cu=gpu.compute_units,
        apu=_apu(gpu, device),
        display=_number(device, "boot_vga") == 1,
        unique_id=f"GPU-{gpu.unique_id:016x}" if gpu.unique_id else "",
        **sizes,
    )


def _apu(gpu: host.Gpu, device: Path | None) -> bool:
    """Whether a GPU is part of a processor.

    Old kernels give such a GPU the processor's own KFD node. Later ones keep them apart, but amdgpu has no
    mem_busy_percent for an APU while it has gpu_busy_percent (default_attr_update in amdgpu_pm.c); MI300A is the
    exception there, known by its PCI id. Without amdgpu's sysfs, no memory of its own tells it.
    """
    if device is None or not (device / "gpu_busy_percent").exists():
        return gpu.integrated
    return gpu.integrated or not (device / "mem_busy_percent").exists() or text(device / "device") == INSTINCT_APU


def _uevent(device: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in text(device / "uevent").splitlines())
    return {name: value for name, _, value in pairs}


def _number(folder: Path | None, name: str) -> int:
    return host.number(text(folder / name) if folder else "") or 0


def _from_fdinfo(process: Path) -> dict[str, int]:
    """Bytes by PCI address that a process holds through DRM; its descriptors of one client show the same memory."""
    clients: dict[tuple[str, str], int] = {}
    try:
        names = [entry.name for entry in (process / "fdinfo").iterdir()]
    except OSError:
        return {}
    for name in names:
        if not _may_be_drm(process / "fd" / name):
            continue
        lines = (line.partition(":") for line in text(process / "fdinfo" / name).splitlines())
        facts = {key: value.strip() for key, _, value in lines}
        if facts.get("drm-driver") == "amdgpu" and "drm-pdev" in facts:
            client = facts["drm-pdev"], facts.get("drm-client-id", name)
            clients[client] = sum(_size(facts, region) for region in ("vram", "gtt"))
    found: dict[str, int] = {}
    for (pci, _), size in clients.items():
        found[pci] = found.get(pci, 0) + size
    return found


def _may_be_drm(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("/dev/dri/")
    except OSError:
        return True  # the link is hidden or gone: then fdinfo says it


def _size(facts: dict[str, str], region: str) -> int:
    """Bytes of a region. amdgpu's own key is the older one; the kernel's common one says the same."""
    value = facts.get(f"drm-memory-{region}") or facts.get(f"drm-resident-{region}") or ""
    size, _, unit = value.partition(" ")
    return (host.number(size) or 0) * UNITS.get(unit.strip(), 0)


def _from_kfd(root: Path) -> dict[int, dict[str, int]]:
    """Bytes by PCI address that processes hold through KFD, readable for everybody: proc/<pid>/vram_<gpu id>."""
    pci = {text(root / host.KFD_NODES / str(gpu.node) / "gpu_id"): gpu.pci for gpu in host.gpus(root)}
    found: dict[int, dict[str, int]] = {}
    for pid in processes.listed(root / KFD_PROCESSES):
        for file in (root / KFD_PROCESSES / str(pid)).glob("vram_*"):
            if (address := pci.get(file.name.removeprefix("vram_"))) and (size := _number(file.parent, file.name)):
                found.setdefault(pid, {})[address] = size
    return found


def _holder(pid: int, sizes: dict[str, int], root: Path) -> Holder:
    unit = processes.unit(pid, root)
    return Holder(
        pid=pid,
        name=processes.name(pid, root) or "a process",
        unit=unit.removeprefix(processes.USER),
        user_unit=unit.startswith(processes.USER),
        container=processes.container(pid, root),
        bytes=sizes,
    )
