"""The run line of a preset's container: the flags of `podman run`, each with its reason.

One source for `up` and `emit`. It is a value: what it depends on besides the preset is in Setting, which container.py
reads from this machine. Reasons and sizes are data in presets/runline.toml.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from warmstart import masking, presetfiles, presets, toml
from warmstart.errors import InputError
from warmstart.names import PRESET
from warmstart.presets import Preset

INSIDE = 8000  # vLLM's own port
CACHE = "warmstart-cache"  # the volume, whatever the image: it is keyed inside
CHOOSING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The content of presets/runline.toml."""

    schema: int
    stop_seconds: int
    tmpfs: str
    shm: str
    shm_several: str
    why: dict[str, str]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a run line depends on besides the preset."""

    image: str
    models: str  # the user's Hugging Face cache, an absolute path
    devices: tuple[str, ...] = ()  # /dev/kfd and render nodes; none for a CPU
    visible: tuple[str, str] = ("", "")  # the variable that chooses GPUs, and its value
    groups: tuple[int, ...] = ()  # that own the devices
    engine: str = "podman"  # or docker
    rootless: bool = True
    keep_groups: bool = True  # the OCI runtime is crun
    uid: int = 0
    gid: int = 0
    selinux: bool = False  # enforcing
    init: bool = True  # the engine has a program for it
    network: str = ""  # "host" where a container can't have its own


class Part(msgspec.Struct, frozen=True):
    """One flag: `--flag=value`, or `--flag` alone."""

    flag: str
    value: str
    why: str

    @property
    def word(self) -> str:
        """The flag as a word of a command."""
        return f"--{self.flag}={self.value}" if self.value else f"--{self.flag}"


class RunLine(msgspec.Struct, frozen=True):
    """A run line. `secrets` are the values of those variables that `parts` name without one."""

    parts: tuple[Part, ...]
    image: str
    command: tuple[str, ...]
    secrets: dict[str, str]

    @property
    def words(self) -> list[str]:
        """What stands behind `podman run`, with `--detach`, `--name` and the like still to be put before it."""
        return [*(part.word for part in self.parts), self.image, *self.command]

    @property
    def shown(self) -> list[str]:
        """The same as it may be printed."""
        return masking.words(self.words)


@cache
def data(root: Path) -> Data:
    """Reasons and sizes. Raises ProfileError."""
    return toml.read(root / presetfiles.FOLDER / "runline.toml", Data)


def make(root: Path, preset: Preset, setting: Setting, secrets: Mapping[str, str] | None = None) -> RunLine:
    """The run line of a preset. `secrets` are further variables that may not be shown, such as the user's HF_TOKEN."""
    facts = data(root)
    env, hidden = _environment(preset, setting, secrets or {})
    found: list[tuple[str, str]] = [
        ("pull", "never"),
        *([("init", "")] if setting.init else []),
        ("stop-signal", "SIGINT"),
        ("stop-timeout", str(facts.stop_seconds)),
        ("cap-drop", "all"),
        ("security-opt", "no-new-privileges"),
        *([("security-opt", "label=disable")] if setting.selinux else []),
        ("read-only", ""),
        ("tmpfs", f"/tmp:{facts.tmpfs}"),
        ("shm-size", facts.shm_several if count(preset) > 1 else facts.shm),
        *([] if setting.rootless or not setting.uid else [("user", f"{setting.uid}:{setting.gid}")]),
        *[("device", node) for node in setting.devices],
        *[("group-add", group) for group in groups(setting)],
        *[("env", f"{name}={value}") for name, value in sorted(env.items())],
        *[("env", name) for name in sorted(hidden)],
        ("network", "host") if setting.network == "host" else ("publish", f"127.0.0.1:{preset.port}:{INSIDE}"),
        *[("volume", volume) for volume in volumes(preset, setting.models)],
        ("label", f"{PRESET}={preset.name}"),
    ]
    words = presets.command(preset)
    if setting.network == "host":
        words += ["--host", "127.0.0.1", "--port", str(preset.port)]
    parts = tuple(Part(flag, value, facts.why[flag]) for flag, value in found)
    return RunLine(parts, setting.image, tuple(words), hidden)


def count(preset: Preset) -> int:
    """GPUs that the preset takes."""
    sizes = (str(preset.flags.get(f"{kind}-parallel-size", "1")) for kind in ("tensor", "pipeline", "data"))
    return math.prod(int(size) if size.isdecimal() else 1 for size in sizes)


def volumes(preset: Preset, models: str) -> list[str]:
    """The cache volume, the user's model cache as it is, and a model that is a folder, read-only. Raises InputError."""
    folder = presets.model_folder(preset.model)
    if not f"{models}{folder or ''}".isprintable():
        told = f"{str(folder or models)!r}: a folder with such characters in its name can't be mounted"
        raise InputError(told, hint="give it another name")
    if ":" in f"{models}{folder or ''}":
        raise InputError(f"{folder or models}: a folder with a colon can't be mounted", hint="give it another name")
    own = [f"{folder}:{presets.model_inside(preset.model)}:ro"] if folder else []
    return [f"{CACHE}:/cache", f"{models}:{presets.MODELS}", *own]


def choose(gpus: Sequence[tuple[int, str]], of: int) -> tuple[str, str]:
    """The variable and value that let ROCm see some of `of` GPUs: numbers in HIP's order and ids, "GPU-…" or "".

    Ids where all have one: numbers count from 0 again for whoever can open only some of the nodes.
    """
    if len(gpus) == of:
        return "", ""
    if all(unique for _, unique in gpus):
        return CHOOSING[0], ",".join(unique for _, unique in gpus)
    return CHOOSING[1], ",".join(str(index) for index, _ in gpus)


def owners(nodes: Sequence[str], root: Path = Path("/")) -> tuple[int, ...]:
    """The groups that own device nodes and may use them, root's left out; nodes that are not there are left out."""
    found: set[int] = set()
    for node in nodes:
        try:
            told = (root / node.lstrip("/")).stat()
        except OSError:
            continue
        if told.st_mode & stat.S_IWGRP and told.st_gid:
            found.add(told.st_gid)
    return tuple(sorted(found))


def enforcing(root: Path = Path("/")) -> bool:
    """Whether SELinux is enforcing."""
    try:
        return (root / "sys/fs/selinux/enforce").read_text(encoding="ascii").strip() == "1"
    except (OSError, ValueError):
        return False


def has_init(path: str, root: Path = Path("/")) -> bool:
    """Whether podman finds catatonit, without which it refuses --init: where it looks itself, and on PATH."""
    places = [
        *path.split(":"),
        "/usr/libexec/podman",
        "/usr/local/libexec/podman",
        "/usr/lib/podman",
        "/usr/local/lib/podman",
    ]
    return any((root / place.lstrip("/") / "catatonit").is_file() for place in places if place)


def groups(setting: Setting) -> list[str]:
    """The groups that the container is in, so that it may open the devices: by number, or the user's own, kept."""
    if not setting.devices:
        return []
    if setting.engine == "podman" and setting.rootless and setting.keep_groups:
        return ["keep-groups"]
    return [str(group) for group in setting.groups]


def _environment(preset: Preset, setting: Setting, secrets: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables as they are written out, and those that are only named."""
    env = dict(preset.env)
    hidden = {name: value for name, value in secrets.items() if name not in env}
    for name in [name for name, value in env.items() if masking.secret(name) or masking.text(value) != value]:
        hidden[name] = env.pop(name)
    variable, value = setting.visible
    if variable and not any(name in env for name in CHOOSING):
        env[variable] = value
    return env, hidden
