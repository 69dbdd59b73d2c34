"""The doctor on GPUs, driver and firmware."""

from __future__ import annotations

import re

from warmstart.findings import Check, Finding, Host, needed, ok, skipped
from warmstart.gpus import cards
from warmstart.host import KFD_NODES, text


def listed(host: Host) -> Finding:
    """The GPUs that can compute, and cards that can't because the driver's compute part is missing."""
    _topology(host)
    found = [name for name, device in cards(host.root) if text(device / "vendor") == "0x1002"]
    if host.gpus:
        unknown = [gpu.pci for gpu in host.gpus if not gpu.known]
        if unknown:
            return Finding("unreadable", f"amdgpu tells no memory sizes of {', '.join(unknown)}")
        told = "; ".join(f"{gpu.arch} at {gpu.pci}, {gpu.cu} CUs" for gpu in host.gpus)
        return ok(told if len(host.gpus) <= 2 else f"{len(host.gpus)} GPUs: {host.gpus[0].arch} …")
    if found:
        remedy = "sudo modprobe amdgpu; when that fails, a kernel with CONFIG_HSA_AMD"
        return Finding("error", f"{', '.join(found)} of AMD, none of it in KFD's topology", remedy, "ls /dev/kfd")
    return ok("no AMD GPU: only the cpu image runs here")


def arch(host: Host) -> Finding:
    """Whether a GPU is of the image's arch."""
    _topology(host)
    wanted, found = host.image.arch, [gpu.arch for gpu in host.gpus]
    if wanted == "cpu":
        return ok("the cpu image runs anywhere")
    if wanted in found:
        return ok(f"{host.image.source} is for {wanted}, which is here")
    here = ", ".join(sorted(set(found))) or "no AMD GPU"
    best = f"make image ARCH={found[0]}" if found else "make image ARCH=cpu"
    return Finding("error", f"{host.image.source} is for {wanted}, here is {here}", best, "make archs")


def integrated(host: Host) -> Finding:
    """Whether a program that takes the first GPU takes the processor's small one."""
    _topology(host)
    if len(host.gpus) < 2:
        return skipped("there are not several GPUs")
    first, discrete = host.gpus[0], [gpu for gpu in host.gpus if not gpu.apu]
    if not first.apu or not discrete:
        return ok(f"the first GPU is {first.arch} at {first.pci}")
    env = host.environment or {}
    if chosen := next((name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if env.get(name)), ""):
        return ok(f"{chosen}={env[chosen]} chooses")
    name = discrete[0].unique_id or str(discrete[0].index)
    told = f"the first GPU is the processor's {first.arch}, the card {discrete[0].arch} is number {discrete[0].index}"
    return Finding(
        "warning",
        f"{told}: the image chooses the right one, other programs may not",
        f"export ROCR_VISIBLE_DEVICES={name}",
        "rocminfo | grep gfx",
    )


def kernel(host: Host) -> Finding:
    """The kernel against the oldest that the arch works with."""
    release = needed(host, "proc/sys/kernel/osrelease")
    if not host.image.min_kernel:
        return ok(f"{release}; {host.image.arch} asks for no particular one")
    if _version(release) >= _version(host.image.min_kernel):
        return ok(f"{release}, at least {host.image.min_kernel}")
    return Finding(
        "error",
        f"{release} is older than {host.image.min_kernel}, which {host.image.arch} needs ({host.image.source})",
        f"install a kernel of {host.image.min_kernel} or newer from the distribution, then: sudo reboot",
        "uname -r",
    )


def firmware(host: Host) -> Finding:
    """The GPU's firmware, by what amdgpu loaded and by the installed package, against those known to fail."""
    mine = [gpu for gpu in host.gpus if gpu.arch == host.image.arch and gpu.card]
    if not mine or not (host.image.bad_firmware or any(host.image.arch in row.archs for row in host.facts.firmware)):
        return skipped(f"no firmware is known to fail with {host.image.arch}")
    seen = []
    for row in (row for row in host.facts.firmware if host.image.arch in row.archs):
        loaded = needed(host, f"sys/class/drm/{mine[0].card}/device/fw_version/{row.part}_fw_version")
        seen.append(f"{row.part} {loaded}")
        # The upper bytes name the table's layout, the last one is the release.
        if int(loaded, 16) & 0xFF == int(row.version, 16):
            return _bad(f"{row.part} firmware {loaded}, of linux-firmware {row.package}: {row.why} ({row.link})")
    bad = next((one for one in host.image.bad_firmware if one in host.package), "")
    if bad:
        return _bad(f"linux-firmware {host.package} is installed: bad for {host.image.arch} ({host.image.source})")
    return ok(", ".join([*seen, f"linux-firmware {host.package}"] if host.package else seen))


def _topology(host: Host) -> None:
    """Raises Unreadable where KFD lists a node whose properties can't be read, as in a container without the device."""
    for node in (host.root / KFD_NODES).glob("*"):
        needed(host, f"{KFD_NODES}/{node.name}/properties")


def _bad(evidence: str) -> Finding:
    return Finding(
        "error",
        evidence,
        "update linux-firmware, make the initramfs anew (update-initramfs -u, dracut -f or mkinitcpio -P), sudo reboot",
        "cat /sys/class/drm/card*/device/fw_version/mes_fw_version",
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("-")[0]))[:3]


CHECKS: dict[str, Check] = {
    "gpus": listed,
    "arch": arch,
    "igpu": integrated,
    "kernel": kernel,
    "firmware": firmware,
}
