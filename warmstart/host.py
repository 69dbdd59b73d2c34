"""Facts of this machine: operating system, GPUs, free disk. Read from files, so that a test can show another root."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from warmstart.errors import DiskFull, HostUnsupported

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as the kernel's KFD topology lists it."""

    node: int
    arch: str  # LLVM target name
    compute_units: int
    render_minor: int  # /dev/dri/renderD<minor>
    pci: str  # domain:bus:device.function
    integrated: bool  # an APU or iGPU: shares its node or its memory with the CPU
    unique_id: int  # 0 where the GPU has none


def require_linux() -> None:
    """Raises HostUnsupported where the kernel isn't Linux: images are built from Linux system calls alone."""
    if platform.system() != "Linux":
        raise HostUnsupported(
            f"warmstart needs Linux, this is {platform.system()}", hint="use a Linux machine or a Linux virtual machine"
        )


def target_name(version: int) -> str:
    """LLVM target of KFD's decimal gfx_target_version: 110501 → gfx1151, 90402 → gfx942, 90010 → gfx90a."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def gpus(root: Path = Path("/")) -> list[Gpu]:
    """All AMD GPUs that the KFD driver knows, in its order. Empty without the driver."""
    found = []
    folder = root / KFD_NODES
    nodes = [node for node in folder.glob("*") if number(node.name) is not None]
    for node in sorted(nodes, key=lambda node: int(node.name)):
        facts = _properties(node / "properties")
        if version := facts.get("gfx_target_version", 0):
            found.append(
                Gpu(
                    node=int(node.name),
                    arch=target_name(version),
                    compute_units=facts.get("simd_count", 0) // max(facts.get("simd_per_cu", 1), 1),
                    render_minor=facts.get("drm_render_minor", 0),
                    pci=_pci(facts.get("domain", 0), facts.get("location_id", 0)),
                    integrated=facts.get("cpu_cores_count", 0) > 0 or not _local_memory(node),
                    unique_id=facts.get("unique_id", 0),
                )
            )
    return found


def number(value: str) -> int | None:
    """A number as the kernel writes one, at most 20 digits (64 bits); None for anything else."""
    return int(value) if re.fullmatch(r"\s*[0-9]{1,20}\s*", value) else None


def choose(found: list[Gpu]) -> tuple[Gpu | None, str]:
    """The GPU to work for, and why: a discrete card before an integrated one, then more compute units, then order."""
    if not found:
        return None, "no AMD GPU in the kernel's KFD topology"
    best = min(found, key=lambda g: (g.integrated, -g.compute_units, g.node))
    if len(found) == 1:
        return best, "the only AMD GPU"
    kind = "integrated" if best.integrated else "discrete"
    others = ", ".join(f"{g.arch} ({g.compute_units} CUs)" for g in found if g is not best)
    return best, f"{kind}, {best.compute_units} CUs; passed over: {others}"


def default_arch(root: Path = Path("/"), known: Collection[str] = ()) -> tuple[str, str]:
    """The arch when none is given, and why: that of the chosen GPU among those of `known` archs (all), else `cpu`."""
    found = gpus(root)
    usable = [gpu for gpu in found if not known or gpu.arch in known]
    if found and not usable:
        return "cpu", f"there is no image for this machine's {', '.join(sorted({gpu.arch for gpu in found}))}"
    gpu, why = choose(usable)
    return (gpu.arch, why) if gpu else ("cpu", why)


def build_device(wanted: str, dev: Path = Path("/dev")) -> bool:
    """Whether a build gets this machine's GPU: "always", "never", or "auto" for when there is one.

    Raises HostUnsupported for "always" without the device nodes.
    """
    there = (dev / "kfd").exists() and (dev / "dri").is_dir()
    if wanted == "always" and not there:
        raise HostUnsupported(
            "--device always, but this machine has no /dev/kfd with /dev/dri",
            hint="load the amdgpu driver, or build with --device never: aiter's core needs no GPU",
        )
    return there and wanted != "never"


def free_bytes(path: Path) -> int:
    """Bytes that may still be written below `path` (its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def need_disk(path: Path, needed: int, purpose: str) -> None:
    """Raises DiskFull unless `needed` bytes are free below `path`."""
    free = free_bytes(path)
    if free < needed:
        raise DiskFull(
            f"{purpose} needs {needed / 1e9:.1f} GB below {path}, {free / 1e9:.1f} GB are free",
            hint="`make prune` frees old caches and images of warmstart",
        )


def text(file: Path) -> str:
    """The content of a file of the kernel, stripped; empty when it can't be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def _properties(file: Path) -> dict[str, int]:
    facts = {}
    for line in text(file).splitlines():
        name, _, value = line.partition(" ")
        if (known := number(value)) is not None:
            facts[name] = known
    return facts


def _pci(domain: int, location: int) -> str:
    """KFD's location_id holds bus (8 bits), device (5) and function (3)."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 0x7}"


def _local_memory(node: Path) -> int:
    # heap_type 1 and 2 are the GPU's own memory, visible or not to the CPU (KFD's HSA_MEM_HEAP_TYPE_FB_*).
    banks = [_properties(bank / "properties") for bank in (node / "mem_banks").glob("*")]
    return sum(b.get("size_in_bytes", 0) for b in banks if b.get("heap_type") in {1, 2})
