"""The doctor on the user's environment and on power."""

from __future__ import annotations

from warmstart.findings import Check, Finding, Host, Unreadable, needed, ok, skipped
from warmstart.host import text

SLOW = ("low-power", "quiet", "cool", "power-saver")  # of the firmware's platform profiles
SAVING = ("powersave", "balanced-battery", "laptop-battery-powersave", "power-saver")  # of tuned's


def environment(host: Host) -> Finding:
    """Variables that change what an engine does. Containers get only what a preset gives them, other programs all."""
    env = host.environment
    if env is None:
        raise Unreadable("/proc/self/environ")
    hip, cuda, rocr = (env.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "CUDA", "ROCR"))
    if hip is not None and cuda is not None and hip != cuda:
        evidence = f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda}: vLLM stops when they differ"
        return Finding("error", evidence, "unset CUDA_VISIBLE_DEVICES", "env | grep VISIBLE_DEVICES")
    if hip is not None and rocr is not None:
        evidence = (
            f"HIP_VISIBLE_DEVICES={hip} counts within ROCR_VISIBLE_DEVICES={rocr}: GPUs that were meant are hidden"
        )
        return Finding("warning", evidence, "unset ROCR_VISIBLE_DEVICES", "env | grep VISIBLE_DEVICES")
    found = [(row.name, f"{row.name}={env[row.name]}: {row.why}") for row in host.facts.variable if row.name in env]
    found += [(name, f"{name}: vLLM no longer knows it. {use}") for name, use in host.gone.items() if name in env]
    if "rocm" in env.get("LD_LIBRARY_PATH", "").lower():
        found.append(("LD_LIBRARY_PATH", f"LD_LIBRARY_PATH={env['LD_LIBRARY_PATH']} puts another ROCm first"))
    if not found:
        return ok("nothing in it changes what an engine does")
    names = " ".join(name for name, _ in found)
    return Finding(
        "warning", "; ".join(told for _, told in found), f"unset {names}", f"env | grep -E '{names.replace(' ', '|')}'"
    )


def power(host: Host) -> Finding:
    """Nothing keeps GPU or processor slow: amdgpu's level, the firmware's and tuned's profiles, the battery."""
    for gpu in (gpu for gpu in host.gpus if gpu.card and gpu.arch == host.image.arch):
        path = f"sys/class/drm/{gpu.card}/device/power_dpm_force_performance_level"
        level = needed(host, path)
        if level not in {"auto", "high", "perf_determinism"}:
            evidence = f"the GPU at {gpu.pci} is held at level {level}"
            return Finding("warning", evidence, f"echo auto | sudo tee /{path}", f"cat /{path}")
    profile = text(host.root / "sys/firmware/acpi/platform_profile")
    if profile in SLOW:
        path = "/sys/firmware/acpi/platform_profile"
        return Finding(
            "warning", f"the platform profile is {profile}", f"echo performance | sudo tee {path}", f"cat {path}"
        )
    tuned = text(host.root / "etc/tuned/active_profile")
    if tuned in SAVING:
        remedy = "sudo tuned-adm profile accelerator-performance"
        return Finding("warning", f"tuned's profile is {tuned}", remedy, "tuned-adm active")
    supplies = sorted((host.root / "sys/class/power_supply").glob("*"))
    mains = [text(entry / "online") for entry in supplies if text(entry / "type") == "Mains"]
    if mains and "1" not in mains:
        return Finding("warning", "the machine runs on battery", "plug it in", "cat /sys/class/power_supply/*/online")
    if not host.gpus and not profile and not tuned:
        return skipped("nothing tells of power here")
    told = [f"platform profile {profile}" if profile else "", f"tuned {tuned}" if tuned else ""]
    return ok(", ".join(filter(None, told)) or "GPU level auto")


CHECKS: dict[str, Check] = {"environment": environment, "power": power}
