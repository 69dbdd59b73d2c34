"""Presets: how one model is served, as INI in `presets/`. `docs/presets.md` shows the convention by example.

Each key is a flag of `vllm serve` without its dashes, `env.X` is a variable; the few keys of ours are presetfiles.OURS.
A [global] section holds for all presets of its file. What is on the command line (`--set key=value`) is laid over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from warmstart import flags as vllm
from warmstart import masking, presetfiles
from warmstart.errors import PresetError, PresetUnfit, UnknownPreset, UsageError
from warmstart.profile import ARCH_NAME

PORT = 8000  # on the host; inside the container vLLM always listens on its own 8000
MODELS = "/models"  # HF_HOME in the image: the user's Hugging Face cache is mounted there
FOLDER_INSIDE = "/model"  # where a model that is a folder of the host is mounted, below this by its name

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


class Preset(msgspec.Struct, frozen=True):
    """A preset as it is used. `flags`: by name without dashes; True for a switch, a tuple for several values."""

    name: str
    image: str = ""
    archs: tuple[str, ...] = ()
    model: str = ""
    port: int = PORT
    env: dict[str, str] = {}
    flags: dict[str, vllm.Value] = {}
    notes: str = ""
    weights_gb: str = ""
    prequantised: str = ""
    refused: str = ""
    file: str = ""
    warnings: tuple[str, ...] = ()


def load(root: Path, name: str, sets: Mapping[str, str] | None = None, version: str = "") -> Preset:
    """The preset of that name with `sets` over it, its flags checked against that version of vLLM (the newest known).

    Raises UnknownPreset, and PresetError for what is wrong in the file or in `sets`.
    """
    found = presetfiles.sections(root)
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.4) or [
            n for n in found if name.lower() in n.lower()
        ]
        hint = f"did you mean {near[0]}? " if near and name else ""
        raise UnknownPreset(f"unknown preset {name!r}", hint=f"{hint}`presets` lists all: {', '.join(sorted(found))}")
    file, own = found[name]
    return _preset(root, name, file, own, dict(sets or {}), version)


def names(root: Path) -> list[str]:
    """The names of all presets. Raises PresetError for a broken file."""
    return sorted(presetfiles.sections(root))


def sets(words: Sequence[str]) -> dict[str, str]:
    """The words of `--set key=value` as a mapping; a word without "=" is a switch. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key.strip():
            raise UsageError(f"--set {word!r} names no key", hint="--set max-model-len=8192, --set env.NAME=value")
        found[key.strip()] = value.strip() if equals else "true"
    return found


def usable(preset: Preset, arch: str = "", *, force: bool = False) -> None:
    """Raise PresetUnfit for a preset that is for another arch than `arch`, or refused; PresetError without a model."""
    if preset.refused and not force:
        raise PresetUnfit(f"{preset.name} is refused: {preset.refused}", hint="--force tries all the same")
    if arch and preset.archs and arch not in preset.archs:
        hint = f"it is for {', '.join(preset.archs)}; `presets` lists those for any arch"
        raise PresetUnfit(f"{preset.name} is not for {arch}", hint=hint)
    if not preset.model:
        raise PresetError(f"{preset.name} names no model", hint="name it: --set model=a/model, or a folder")


def command(preset: Preset) -> list[str]:
    """The words after the image: the model, then every flag, in the order of their names."""
    words = [model_inside(preset.model)]
    if "served-model-name" not in preset.flags:
        words += ["--served-model-name", preset.name]
    for name, value in sorted(preset.flags.items()):
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *value]
        else:
            words += [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
    return words


def model_inside(model: str) -> str:
    """What the model is called in the container: a folder of the host is mounted below /model."""
    folder = model_folder(model)
    return f"{FOLDER_INSIDE}/{folder.name}" if folder else model


def model_folder(model: str) -> Path | None:
    """The folder of this machine that is the model; None for one that is fetched or lies in the mounted cache."""
    if not model.startswith(("/", "~", "./", "../")) or model == MODELS or model.startswith(f"{MODELS}/"):
        return None
    try:
        return Path(model).expanduser().absolute()
    except RuntimeError:
        raise PresetError(f"model {model}: there is no such user", hint="write the whole path") from None


def masked(preset: Preset) -> Preset:
    """The preset as it may be shown."""

    def shown(name: str, value: vllm.Value) -> vllm.Value:
        if isinstance(value, tuple):
            return tuple(masking.value(name, one) for one in value)
        return masking.value(name, value) if isinstance(value, str) else value

    flags = {name: shown(name, value) for name, value in preset.flags.items()}
    texts = {key: masking.text(getattr(preset, key)) for key in ("image", "model", "notes")}
    return msgspec.structs.replace(preset, env=masking.env(preset.env), flags=flags, **texts)


def _preset(root: Path, name: str, file: str, own: dict[str, str], over: dict[str, str], version: str) -> Preset:
    """One preset from its keys. Raises PresetError, naming `--set` for what came from there."""
    over = presetfiles.spelled(presetfiles.SET, over)
    merged = own | over
    flags: dict[str, vllm.Value] = {}
    env: dict[str, str] = {}
    for key, value in merged.items():
        if key in presetfiles.OURS or (over.get(key) == "" and _takes_value(root, key, version)):
            continue
        try:
            if key.startswith("env."):
                vllm.check_env(root, key[4:], version)
                env[key[4:]] = value
            else:
                flag, held = vllm.check(root, key, value, version, tuple(presetfiles.OURS))
                flags.pop(flag.removeprefix("no-"), None)
                flags |= {} if held is None else {flag: held}
        except vllm.Bad as bad:
            raise presetfiles.bad(presetfiles.SET if key in over else f"{file} [{name}]", bad.what, bad.hint) from None
    if {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= env.keys():
        hint = "the second counts within the first and hides GPUs that were meant"
        raise presetfiles.bad(f"{file} [{name}]", "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are both set", hint)
    where = f"{file} [{name}]"
    image, model = merged.get("image", ""), merged.get("model", "")
    if image and not _IMAGE.fullmatch(image):
        raise presetfiles.bad(where, f"{masking.text(image)!r} is no image", "image = localhost/warmstart/vllm:gfx1151")
    if model.startswith("-") or ":" in model:
        raise presetfiles.bad(where, f"model can't be {masking.text(model)!r}", presetfiles.OURS["model"])
    return Preset(
        name=name,
        image=image,
        archs=_archs(where, merged.get("archs", "")),
        model=model,
        port=_port(where, merged.get("port", str(PORT))),
        env=env,
        flags=flags,
        notes=merged.get("notes", ""),
        weights_gb=_number(where, merged.get("weights-gb", "")),
        prequantised=merged.get("prequantised", ""),
        refused=merged.get("refused", ""),
        file=file,
        warnings=_warnings(root, flags, merged.get("prequantised", ""), version),
    )


def _archs(where: str, value: str) -> tuple[str, ...]:
    found = tuple(value.replace(",", " ").split())
    for arch in found:
        if not ARCH_NAME.fullmatch(arch):
            raise presetfiles.bad(where, f"{arch!r} is no arch", "archs = gfx1100 gfx1101; `archs` lists all")
    return found


def _number(where: str, value: str) -> str:
    if value and not re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", value):
        raise presetfiles.bad(where, f"weights-gb can't be {value!r}", "weights-gb = 11.0")
    return value


def _port(where: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 65535:
        raise presetfiles.bad(where, f"port can't be {value!r}", "a number from 1 to 65535")
    return int(value)


def _warnings(root: Path, flags: Mapping[str, vllm.Value], better: str, version: str) -> tuple[str, ...]:
    """What the user should know before a start."""
    found = []
    kept = vllm.kept(root)
    if flags.get("quantization") in kept.on_the_fly:
        advice = f"; --set model={better} --set quantization= is quantised already" if better else ""
        found.append(f"{kept.on_the_fly_cost}{advice}")
    if vllm.known(root, version) is None:
        newest = next(iter(vllm.versions(root)), "none")
        found.append(f"flags are not checked: those of vLLM {version} are not known here (the newest known: {newest})")
    return tuple(found)


def _takes_value(root: Path, key: str, version: str) -> bool:
    """Whether `--set key=` takes the key out of the preset; for a switch it is a way to switch it on."""
    known = vllm.known(root, version)
    return known is None or key not in known.switch | known.plain
