"""The doctor on memory: what the GPU may use, what is in use, and options of the kernel about it."""

from __future__ import annotations

import re

from warmstart import gpus
from warmstart.findings import Check, Finding, Host, Unreadable, needed, ok, skipped
from warmstart.gpus import GIB, gib

PAGE = 4096


def gtt(host: Host) -> Finding:
    """How much of the machine's memory an APU's GPU may use, against the memory there is."""
    apu = next((gpu for gpu in host.gpus if gpu.apu and gpu.arch == host.image.arch), None)
    if apu is None:
        return skipped("no GPU that shares the processor's memory is used")
    if not apu.known or not host.memory.total:
        raise Unreadable("amdgpu's memory sizes or /proc/meminfo")
    leaves, least = host.facts.memory.gtt_leaves * GIB, host.facts.memory.gtt_least * GIB
    most = max(host.memory.total - leaves, 0)
    told = (
        f"{gib(apu.vram_total)} set aside by the firmware, {gib(apu.gtt_total)} of GTT, {gib(host.memory.total)} of RAM"
    )
    limit = f"ttm.pages_limit={most // GIB * GIB // PAGE}"
    verify = "cat /sys/module/ttm/parameters/pages_limit /sys/class/drm/card*/device/mem_info_gtt_total"
    if apu.uses_gtt and apu.gtt_total > host.memory.total - leaves:
        evidence = f"{told}: with so much GTT the machine stalls before an allocation fails"
        return Finding("warning", evidence, f"{limit} on the kernel's command line, then: sudo reboot", verify)
    if max(apu.gtt_total, apu.vram_total) < least:
        return Finding(
            "warning", f"{told}: too little for most models", f"{limit} on the kernel's command line", verify
        )
    if not apu.uses_gtt:
        remedy = f"for more, let the firmware set aside 512 MiB, and give the kernel {limit}"
        if apu.vram_total < host.memory.total:
            return Finding("warning", f"{told}: engines can use what is set aside alone", remedy, verify)
        return ok(f"{told}: engines use what is set aside")
    if apu.vram_total > 2 * GIB:
        evidence = f"{told}: ROCm does not touch what is set aside, as GTT is larger"
        return Finding("warning", evidence, "let the firmware (UMA frame buffer size) set aside 512 MiB", verify)
    return ok(told)


def command_line(host: Host) -> Finding:
    """Options on the kernel's command line that do nothing, do harm, or contradict each other."""
    words = needed(host, "proc/cmdline").split()
    if not words:
        raise Unreadable("/proc/cmdline is empty")
    wrong = [
        (word, row)
        for word in words
        for row in host.facts.option
        if re.fullmatch(row.option, word) and (host.gpus or row.fatal or "amdgpu" in word)
    ]
    values = {key: value for key, _, value in (word.partition("=") for word in words)}
    pages, size = values.get("ttm.pages_limit", ""), values.get("amdgpu.gttsize", "")
    if pages.isdigit() and size.isdigit() and int(pages) * PAGE != int(size) << 20:
        evidence = f"ttm.pages_limit says {gib(int(pages) * PAGE)}, amdgpu.gttsize {gib(int(size) << 20)}"
        return Finding("error", evidence, "remove amdgpu.gttsize from the kernel's command line", "cat /proc/cmdline")
    if not wrong:
        return ok("nothing on it is known to be useless or harmful")
    told = "; ".join(f"{word}: {row.why}" for word, row in wrong)
    fatal = any(row.fatal for _, row in wrong)
    remedies = "; ".join(dict.fromkeys(row.instead for _, row in wrong))
    return Finding("error" if fatal else "warning", told, f"{remedies}, then: sudo reboot", "cat /proc/cmdline")


def free(host: Host) -> Finding:
    """Memory and swap in use, and who holds memory of GPUs."""
    memory = host.memory
    if not memory.total or not memory.available:
        raise Unreadable("/proc/meminfo")
    told = f"{gib(memory.available)} of {gib(memory.total)} available"
    if memory.swap_total and memory.swap_used > host.facts.memory.swap_used * memory.swap_total:
        evidence = f"{told}, {gib(memory.swap_used)} of {gib(memory.swap_total)} swap in use"
        return Finding("warning", evidence, "close what is large: ps -eo rss,comm --sort=-rss | head", "free -h")
    held = [holder for holder in gpus.holders(host.root) if sum(holder.bytes.values()) > GIB]
    if held:
        who = ", ".join(f"{one.owner} {gib(sum(one.bytes.values()))}" for one in held[:3])
        remedy = _stop(held[0])
        return Finding("warning", f"{told}; GPU memory is held by {who}", remedy, "make status")
    return ok(told)


def _stop(holder: gpus.Holder) -> str:
    if holder.unit:
        return f"systemctl --user stop {holder.unit}" if holder.user_unit else f"sudo systemctl stop {holder.unit}"
    return f"podman stop {holder.container}" if holder.container else f"kill {holder.pid}"


CHECKS: dict[str, Check] = {"gtt": gtt, "command-line": command_line, "free-memory": free}
