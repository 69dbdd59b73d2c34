"""The GPUs that a start uses, from KFD's topology: those of the image's arch, and how many compute units they have."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from start_say import say  # type: ignore[import-not-found] # beside this file

EXIT_WRONG_GPU = 64
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def target_name(version: int) -> str:
    """LLVM target of KFD's decimal gfx_target_version: 110501 → gfx1151."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def pci_address(domain: int, location: int) -> str:
    """domain:bus:device.function, as amdsmi takes it; location_id holds bus (8 bits), device (5), function (3)."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 0x7}"


def topology() -> tuple[list[dict[str, Any]], bool]:
    """The GPUs of KFD's topology in HIP's order (arch, pci, uuid, cu), and whether it has nodes that can't be read.

    What a container may not use is listed but not readable, and HIP does not count it. `cu` is the number of compute
    units, 0 when the kernel doesn't tell.
    """
    found, hidden = [], False
    nodes = [node for node in KFD_NODES.glob("*") if node.name.isdecimal()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        try:
            lines = (node / "properties").read_text().splitlines()
            facts = {name: int(value) for name, _, value in (ln.partition(" ") for ln in lines) if value.isdecimal()}
        except (OSError, ValueError):
            hidden = True
            continue
        if version := facts.get("gfx_target_version", 0):
            pci = pci_address(facts.get("domain", 0), facts.get("location_id", 0))
            units = facts.get("simd_count", 0) // (facts.get("simd_per_cu", 0) or sys.maxsize)
            uuid = f"gpu-{facts.get('unique_id', 0):016x}"
            found.append({"arch": target_name(version), "pci": pci, "uuid": uuid, "cu": units})
    return found, hidden


def listed(setting: str, gpus: list[dict[str, Any]]) -> list[int]:
    """Indices of the GPUs that a *_VISIBLE_DEVICES variable names, by number or (shortened) UUID.

    ROCm ends its reading at the first word that names none, so this does too.
    """
    found: list[int] = []
    for word in setting.replace(" ", "").split(","):
        uuid = re.fullmatch(r"gpu-[0-9a-f]+", word.lower())
        fits = [i for i, g in enumerate(gpus) if word == str(i) or (uuid and g["uuid"].startswith(uuid[0]))]
        if len(fits) != 1:
            break
        found += fits
    return found


def settle(arch: str) -> list[dict[str, Any]]:
    """Let HIP see the GPUs of this image's arch alone, tell vLLM their PCI addresses, and return them.

    Device code is for one arch: on another GPU every kernel launch fails, late and obscurely. The user's own
    choice by ROCm's variables stands, unless it leaves no GPU that the image can use.
    """
    gpus, hidden = topology()
    if arch == "cpu" or not gpus:
        return []
    several = hidden or len(gpus) > 1  # with a single GPU no list can be in another order
    whose = "this machine has"
    if (setting := os.environ.get("ROCR_VISIBLE_DEVICES")) is not None:
        gpus = [gpus[i] for i in listed(setting, gpus)]
        whose = "ROCR_VISIBLE_DEVICES leaves"
    used = list(range(len(gpus)))
    by_user = next((n for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if os.environ.get(n)), "")
    if by_user:
        used = listed(os.environ[by_user], gpus)
        whose = f"{by_user} leaves"
    right = [i for i in used if gpus[i]["arch"] == arch]
    if used and not right:
        others = ", ".join(gpus[i]["arch"] for i in used)
        advice = "use the image of that arch" if whose == "this machine has" else f"name a {arch} there"
        say(f"this image is for {arch}, {whose} {others}: {advice}")
        sys.exit(EXIT_WRONG_GPU)
    if several and right:
        # All that HIP counts: vLLM looks up by HIP_VISIBLE_DEVICES which of them it uses.
        os.environ.setdefault("WARMSTART_GPUS", ",".join(gpu["pci"] for gpu in gpus))
    if right != used and whose == "this machine has":
        os.environ["HIP_VISIBLE_DEVICES"] = ",".join(map(str, right))
        chosen = ", ".join(gpus[i]["pci"] for i in right)
        others = ", ".join(f"{gpus[i]['arch']} at {gpus[i]['pci']}" for i in used if i not in right)
        say(f"using {arch} at {chosen}, not {others} (HIP_VISIBLE_DEVICES chooses otherwise)")
    if right and gpus[right[0]]["cu"]:
        # Verdicts are kept by this number. Of unlike GPUs of one arch the first counts: one kernel is chosen for all.
        os.environ.setdefault("WARMSTART_CU", str(gpus[right[0]]["cu"]))
    return [gpus[i] for i in right]
