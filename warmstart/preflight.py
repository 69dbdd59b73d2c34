"""All that `up` has to know before it starts anything: the image, the devices, the model, room for it, a free port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from warmstart import (
    engine,
    gpus,
    guard,
    hints,
    holders,
    host,
    lease,
    limits,
    log,
    need,
    ports,
    presets,
    profile,
    sizes,
)
from warmstart.engine import Capabilities, ImageInfo
from warmstart.errors import DeviceHeld, DiskFull, ImageMissing, ModelMissing, PortTaken, PresetUnfit
from warmstart.gpus import Gpu
from warmstart.guard import Judgement
from warmstart.lease import Lease
from warmstart.names import LABEL
from warmstart.presets import Preset

CPU = "cpu"  # the device of an image without a GPU
HUB = "https://huggingface.co"
PROXIES = ("https_proxy", "all_proxy")  # in either case: podman hands them on, and then names are resolved elsewhere
ASK = 2.0  # seconds after which a name server that is silent is no reason for anything


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A preset that can be started."""

    preset: Preset  # with what the guard set
    image: ImageInfo
    ref: str
    arch: str
    gpus: tuple[Gpu, ...]  # those it uses; none for the cpu
    judgement: Judgement

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of its devices, as leases have them."""
        return devices(self.gpus)


def devices(found: Sequence[Gpu]) -> tuple[str, ...]:
    """PCI addresses; "cpu" without a GPU."""
    return tuple(gpu.pci for gpu in found) or (CPU,)


def choose(
    caps: Capabilities, root: Path, name: str, sets: dict[str, str], force: bool
) -> tuple[Preset, ImageInfo, str]:
    """The preset by its name, its image, and the name that the image was asked for by.

    Raises UnknownPreset, PresetError, PresetUnfit, UnknownArch for a GPU that no profile is for, and ImageMissing with
    the command that makes it.
    """
    preset = presets.load(root, name, sets)
    machine = host.default_arch(known=preset.archs)[0] if preset.archs else host.default_arch()[0]
    ref = preset.image or profile.load(root, machine).profile.tag
    if not preset.image:
        presets.usable(preset, machine, force=force)  # before it is said that the image of a wrong arch is missing
    try:
        image = engine.inspect(caps, ref)
    except ImageMissing:
        made = f"`make image ARCH={machine}` builds it" if not preset.image else f"`podman pull {ref}` fetches it"
        raise ImageMissing(f"there is no image {ref} here", hint=made) from None
    arch = image.labels.get(f"{LABEL}arch", "")
    preset = presets.load(root, name, sets, image.labels.get(f"{LABEL}vllm", ""))
    presets.usable(preset, arch, force=force)
    return preset, image, ref


def use(
    preset: Preset,
    arch: str,
    bounds: limits.Limits,
    live: Sequence[Lease] = (),
    root: Path = Path("/"),
    keep: Sequence[str] = (),
) -> tuple[Gpu, ...]:
    """The GPUs of the image's arch that the engine will use; none for the cpu.

    Those of `keep` come first, then those that no engine has, then cards before an APU.
    Raises PresetUnfit without a GPU of that arch.
    """
    if arch in ("", CPU):
        return ()
    here = gpus.read(root)
    found = [gpu for gpu in here if gpu.arch == arch]
    if chosen := preset.env.get("HIP_VISIBLE_DEVICES") or preset.env.get("ROCR_VISIBLE_DEVICES"):
        words = [word.strip() for word in chosen.split(",")]
        found = [gpu for gpu in found if str(gpu.index) in words or gpu.unique_id in words]
    if not found:
        have = ", ".join(sorted({gpu.arch for gpu in here})) or "no AMD GPU"
        hint = "`make image` builds the one for this machine; leave `image` out of the preset then"
        raise PresetUnfit(f"the image is for {arch}, and there is none here to use: {have}", hint=hint)
    busy = {device for one in live for device in one.devices}
    found.sort(key=lambda gpu: (gpu.pci not in keep, gpu.pci in busy, gpu.apu, -gpu.cu, gpu.index))
    wanted = sizes.asked(preset.flags, preset.env, need.Model(weights=1, source=""), found, bounds).gpus
    return tuple(sorted(found[:wanted], key=lambda gpu: gpu.index))


def judge(
    preset: Preset,
    image: ImageInfo,
    ref: str,
    arch: str,
    hub: Path,
    bounds: limits.Limits,
    live: Sequence[Lease],
    *,
    keep: Sequence[str] = (),
    force: bool,
    root: Path = Path("/"),
) -> Ready:
    """Whether it fits now, and what the guard sets. A model whose size nobody knows gets its devices for itself.

    Raises MemoryShort, DeviceHeld when another engine is in the way, InputError for files that are broken.
    """
    used = use(preset, arch, bounds, live, root, keep)
    place = need.find(preset.model, hub)
    size = preset.weights_gb
    if place is None and not size and not need.guess(preset.model, bounds.guess):
        log.warn(f"nothing says how large {preset.model} is: its memory is watched, but not judged before the start")
        unknown = Judgement(fits=True, budget_bytes=0, need_bytes=0, kv_bytes=0, parts={}, reason="size unknown")
        return Ready(preset=preset, image=image, ref=ref, arch=arch, gpus=used, judgement=unknown)
    model = need.read(place, size, preset.model, bounds.guess)
    promised: dict[str, int] = {}
    for one in live:
        for device in one.devices if one.state == "starting" else ():
            promised[device] = promised.get(device, 0) + one.bytes
    told = guard.judge(used, gpus.memory(root), model, preset.flags, bounds, preset.env, promised, force=force)
    if not told.fits and (sharing := [one for one in live if set(one.devices) & set(devices(used))]):
        who = ", ".join(one.preset for one in sharing)
        hint = f"`{hints.command('down', sharing[0].preset)}` makes room; {told.hint}"
        raise DeviceHeld(f"no room beside {who}: {told.reason}", hint=hint)
    guard.require(told)
    for note in told.notes:
        log.info(note)
    log.info(f"{preset.name}: {told.reason}")
    merged = msgspec.structs.replace(preset, flags=preset.flags | told.flags, env=preset.env | told.env)
    return Ready(preset=merged, image=image, ref=ref, arch=arch, gpus=used, judgement=told)


def capacity(ready: Ready, live: Sequence[Lease]) -> dict[str, int]:
    """The bytes of each device that all engines together may take: what is free now, and what the others have."""
    found = {}
    for device in ready.devices:
        others = sum(one.bytes for one in live if device in one.devices)
        found[device] = others + ready.judgement.budget_bytes
    return found


def port_free(preset: Preset, live: Sequence[Lease], root: Path = Path("/")) -> None:
    """Raise PortTaken, saying by whom, when something listens on the preset's port."""
    hint = "choose another: " + hints.options(f"--set port={preset.port + 1}")
    for one in live:
        if one.port == preset.port:
            raise PortTaken(f"port {preset.port} is taken by {one.preset} ({one.state})", hint=hint)
    if who := ports.listener(preset.port, root):
        raise PortTaken(f"port {preset.port} is taken by {who}", hint=hint)


def model_there(preset: Preset, hub: Path, bytes_needed: int) -> None:
    """Raise ModelMissing for a folder that is not there or holds no model, DiskFull when it can't be downloaded."""
    if place := presets.model_folder(preset.model) or presets.cached_folder(preset.model, hub):
        if not place.is_dir():
            hint = hints.options("--set model=/its/folder") + ", or a name on Hugging Face such as Qwen/Qwen3-0.6B"
            raise ModelMissing(f"there is no model in {place}", hint=hint)
        if not (place / "config.json").is_file():
            raise ModelMissing(f"{place} holds no model: no config.json", hint="name the folder that has it")
    elif need.find(preset.model, hub) is None and host.free_bytes(hub) < bytes_needed:
        free = host.free_bytes(hub)
        raise DiskFull(
            f"{preset.model} needs {bytes_needed / 1e9:.1f} GB below {hub}, {free / 1e9:.1f} GB are free",
            hint="free some space (`hf cache delete`), or set HF_HOME to a larger disk",
        )


def hub_there(preset: Preset, hub: Path) -> None:
    """Warn when a model has to be fetched from a host that has no address here: vLLM finds that out much later."""
    if preset.model.startswith("/") or need.find(preset.model, hub):
        return
    env = os.environ | preset.env
    if "HF_HUB_OFFLINE" in preset.env or any(env.get(name) or env.get(name.upper()) for name in PROXIES):
        return
    host_name = urlsplit(preset.env.get("HF_ENDPOINT") or HUB).hostname or ""
    if not _has_address(host_name):
        log.warn(f"{preset.model} is not in {hub}, and {host_name} can't be resolved here: it can't be fetched")


def _has_address(name: str) -> bool:
    """Whether a host's name can be resolved; only a plain no is one, not silence."""
    no: list[OSError] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(name, 443)
        except (OSError, UnicodeError) as failed:
            no.append(OSError(failed))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ASK)
    return not no


def not_held(found: tuple[str, ...], live: Sequence[Lease], *, force: bool, root: Path = Path("/")) -> None:
    """Raise DeviceHeld when a service, a container or a process holds one of these devices; with `force` only warn."""
    others = holders.others(found, [one.container_id for one in live], root)
    try:
        holders.refuse(others)
    except DeviceHeld as held:
        if not force:
            raise
        log.warn(f"--force: {held.message}")


def running(preset: str, place: Path) -> Lease | None:
    """The live lease of a preset's engine, if it has one."""
    live = {one.container: one for one in lease.live(place)}
    return live.get(lease.container_name(preset))
