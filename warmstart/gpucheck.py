"""`gpu-check`: one kernel, launched in the image on the devices that an engine would get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from warmstart import container, diagnosis, engine, gpus, hints, host, log, presets, profile, run, runline
from warmstart.engine import Capabilities
from warmstart.errors import ImageMissing, StartFailed
from warmstart.names import PYTHON, START

PATIENCE = 300.0  # seconds: the first launch on a GPU may have to load a gigabyte of device code


class Device(msgspec.Struct, frozen=True):
    """What torch sees of one device, and whether its kernels gave the right results."""

    device: str
    name: str
    arch: str
    ok: bool


class Checked(msgspec.Struct, frozen=True):
    """The answer of `gpu-check`."""

    image: str
    image_arch: str
    torch: str
    hip: str
    devices: tuple[Device, ...]


def check(root: Path, caps: Capabilities, arch: str) -> Checked:
    """Launch a kernel in the image of an arch, or of this machine's.

    Raises UnknownArch, ImageMissing, and StartFailed when no device of the image's arch runs kernels.
    """
    wanted = arch or host.default_arch()[0]
    ref = profile.load(root, wanted).profile.tag
    if not engine.exists(caps, ref):
        raise ImageMissing(f"there is no image {ref} here", hint=f"`make image ARCH={wanted}` builds it")
    used = [gpu for gpu in gpus.read() if gpu.arch == wanted]
    preset = presets.Preset(name="gpu-check", model="none")
    setting = container.setting(caps, ref, used)
    # The flags of an engine's run line that concern its rights and devices, so that what is seen here holds there.
    parts = [p.word for p in runline.make(root, preset, setting).parts if p.flag not in ("publish", "volume", "label")]
    code = (root / "tools" / "gpu_kernel.py").read_text(encoding="utf-8")
    words = ["podman", "run", "--rm", *parts, "--network=none", "--tmpfs=/cache", f"--entrypoint={START}"]
    words += [ref, PYTHON, "-c", code]
    with log.step(f"a kernel in {ref}"):
        told = run.run(words, env=engine.environment(caps), ok=range(256), timeout=PATIENCE)
    return _answer(ref, wanted, told)


def text(found: Checked) -> str:
    """The answer for people."""
    lines = [f"{one.device}: {one.name}, {one.arch}: kernels ran, with the right results" for one in found.devices]
    if found.image_arch == "cpu":
        lines.append("this is the cpu image: it uses no GPU")
    return "\n".join([*lines, f"torch {found.torch}" + (f", HIP {found.hip}" if found.hip else "")])


def _answer(ref: str, arch: str, told: run.Result) -> Checked:
    facts: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for line in told.stdout.splitlines():
        try:
            one = dict(json.loads(line))
        except ValueError:
            continue
        if "device" in one:
            found.setdefault(one["device"], {}).update(one)
        else:
            facts = one
    devices = tuple(
        Device(name, one.get("name", ""), one.get("arch", ""), bool(one.get("ok"))) for name, one in found.items()
    )
    checked = Checked(ref, arch, facts.get("torch", ""), facts.get("hip", ""), devices)
    if run.recorder.on:
        return checked
    bad = [one for one in devices if not one.ok]
    if told.code or bad or not devices:
        lines = (told.stderr + told.stdout).splitlines()
        known = diagnosis.diagnose(lines, told.code)
        where = f" on {bad[0].name} ({bad[0].arch})" if bad else ""
        means = known.means if known else f"it ended with exit code {told.code}"
        silent = " Nothing was said: the image most likely holds no device code for it." if bad and not known else ""
        build = f"`make image ARCH={bad[0].arch if bad else arch}` builds the right image"
        hint = hints.reworded(known.remedy) if known else build
        raise StartFailed(f"no kernel ran{where}: {means}.{silent}", hint=hint)
    if arch != "cpu" and all(one.arch != arch for one in devices):
        seen = ", ".join(one.arch for one in devices)
        hint = f"`{hints.command('doctor')}` says which GPU is chosen"
        raise StartFailed(f"the image is for {arch}, but torch sees {seen}", hint=hint)
    return checked
