"""Presets: how one model is served, as INI in `presets/`. `docs/presets.md` shows the convention by example.

Each key is a flag of `vllm serve` without its dashes, `env.X` is a variable; the few keys of ours are presetfiles.OURS.
A [global] section holds for all presets of its file. What is on the command line (`--set key=value`) is laid over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from warmstart import flags as vllm
from warmstart import hints, masking, presetfiles, toml
from warmstart.errors import PresetError, PresetUnfit, UnknownPreset, UsageError
from warmstart.profile import ARCH_NAME

PORT = 8000  # on the host; inside the container vLLM always listens on its own 8000
MODELS = "/models"  # HF_HOME in the image: the user's Hugging Face cache is mounted there
FOLDER_INSIDE = "/model"  # where a model that is a folder of the host is mounted, below this by its name

READ = (".json", ".safetensors", ".bin", ".pt", ".gguf", ".model")  # files of a model's folder that vLLM reads

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
    """The preset of that name with `sets` over it, its flags checked against that version of vLLM (any known one).

    Raises UnknownPreset, and PresetError for what is wrong in the file or in `sets`. A broken file matters only where
    no other one has the preset.
    """
    found, broken = presetfiles.scan(root)
    if name not in found and broken:
        raise next(iter(broken.values()))
    if name not in found:
        near = toml.nearest(name, found, cutoff=0.6) or next((n for n in found if name.lower() in n.lower()), "")
        hint = f"did you mean {hints.word('PRESET', near)}? " if near and name else ""
        told = f"`{hints.call('presets')}` lists all: {', '.join(sorted(found))}"
        raise UnknownPreset(f"unknown preset {name!r}", hint=f"{hint}{told}")
    file, own = found[name]
    return _preset(root, name, file, own, dict(sets or {}), version)


def names(root: Path) -> list[str]:
    """The names of all presets. Raises PresetError for a broken file."""
    found, broken = presetfiles.scan(root)
    for problem in broken.values():
        raise problem
    return sorted(found)


def sets(words: Sequence[str]) -> dict[str, str]:
    """The words of `--set key=value` as a mapping; a word without "=" is a switch. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key.strip():
            hint = hints.options("--set max-model-len=8192 --set env.NAME=value")
            raise UsageError(f"--set {word!r} names no key", hint=hint)
        found[key.strip()] = value.strip() if equals else "true"
    return found


def usable(preset: Preset, arch: str = "", *, force: bool = False) -> None:
    """Raise PresetUnfit for a preset that is for another arch than `arch`, or refused; PresetError for no model, or one
    that can't be served as it is named."""
    if preset.refused and not force:
        hint = f"`{hints.command('up', preset.name, '--force')}` tries all the same"
        raise PresetUnfit(f"{preset.name} is refused: {preset.refused}", hint=hint)
    if arch and preset.archs and arch not in preset.archs:
        hint = f"it is for {', '.join(preset.archs)}; `{hints.call('presets')}` shows which are for any arch"
        raise PresetUnfit(f"{preset.name} is not for {arch}", hint=hint)
    if not preset.model:
        hint = "a name on Hugging Face, or a folder of this machine"
        raise PresetError(f"{preset.name} names no model: {hints.options('--set model=…')}", hint=hint)
    _servable(preset.model)


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


def models_folder(env: Mapping[str, str] = os.environ) -> str:
    """The user's Hugging Face cache: HF_HOME, else where its own tools put it."""
    cache_home = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".cache")
    return str(Path(env.get("HF_HOME") or Path(cache_home) / "huggingface").expanduser().absolute())


def model_inside(model: str) -> str:
    """What the model is called in the container: a folder of the host is mounted below /model."""
    folder = model_folder(model)
    return f"{FOLDER_INSIDE}/{folder.name}" if folder else model


def model_folder(model: str) -> Path | None:
    """The folder of this machine that is the model; None for one that is fetched or lies in the mounted cache."""
    whole = f"{model}/"  # with its end, so that ".." and "/models" are no cases of their own
    if not model or not whole.startswith(("/", "~", "./", "../")) or whole.startswith(f"{MODELS}/"):
        return None
    try:
        return Path(os.path.abspath(Path(model).expanduser()))  # without "..": its last part is its name inside
    except RuntimeError:
        raise PresetError(f"model {model}: there is no such user", hint="write the whole path") from None


def cached_folder(model: str, hub: Path) -> Path | None:
    """The folder of this machine that a model of the mounted cache lies in (/models/…); None for any other model."""
    if not f"{model}/".startswith(f"{MODELS}/"):
        return None
    return hub.parent / model.removeprefix(MODELS).lstrip("/")


def _servable(model: str) -> None:
    """Raise PresetError for a folder that is named as if it were on Hugging Face, and for one of links out of it."""
    folder = model_folder(model)
    if folder is None:
        if not model.startswith("/") and Path(model).is_dir():
            raise PresetError(f"model {model}: did you mean ./{model}?", hint="a folder begins with /, ~, ./ or ../")
        return
    top = folder.resolve()
    files = [file for file in sorted(top.glob("*")) if file.suffix in READ]
    if outside := next((file for file in files if not file.resolve().is_relative_to(top)), None):
        told = f"model {folder}: its files are links into {outside.resolve().parent}, which the container does not see"
        raise PresetError(told, hint=_named(top) or f"`cp -rL {folder} …` copies it whole, with its files")


def _named(folder: Path) -> str:
    """How to name a model by its folder in a Hugging Face cache; empty for a folder elsewhere."""
    for place in folder.parents:
        if place.name.startswith("models--"):
            home = place.parents[1]
            other = "" if Path(models_folder()).resolve() == home else f", with HF_HOME={home}"
            name = place.name.removeprefix("models--").replace("--", "/")
            return f"name the model instead: {hints.options(f'--set model={name}')}{other}"
    return ""


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

    def where(*keys: str) -> str:
        return presetfiles.SET if over.keys() & set(keys) else f"{file} [{name}]"

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
            raise presetfiles.bad(where(key), bad.what, bad.hint) from None
    if {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= env.keys():
        hint = "the second counts within the first and hides GPUs that were meant"
        told = "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are both set"
        raise presetfiles.bad(where("env.HIP_VISIBLE_DEVICES", "env.ROCR_VISIBLE_DEVICES"), told, hint)
    image, model = merged.get("image", ""), merged.get("model", "")
    if image and not _IMAGE.fullmatch(image):
        hint = "image = localhost/warmstart/vllm:gfx1151"
        raise presetfiles.bad(where("image"), f"{masking.text(image)!r} is no image", hint)
    if model.startswith("-") or ":" in model:
        raise presetfiles.bad(where("model"), f"model can't be {masking.text(model)!r}", presetfiles.OURS["model"])
    return Preset(
        name=name,
        image=image,
        archs=_archs(where("archs"), merged.get("archs", "")),
        model=model,
        port=_port(where("port"), merged.get("port", str(PORT))),
        env=env,
        flags=flags,
        notes=merged.get("notes", ""),
        weights_gb=_number(where("weights-gb"), merged.get("weights-gb", "")),
        prequantised=merged.get("prequantised", ""),
        refused=merged.get("refused", ""),
        file=file,
        warnings=_warnings(root, flags, merged.get("prequantised", ""), version),
    )


def _archs(where: str, value: str) -> tuple[str, ...]:
    found = tuple(value.replace(",", " ").split())
    for arch in found:
        if not ARCH_NAME.fullmatch(arch):
            hint = f"archs = gfx1100 gfx1101; `{hints.call('archs')}` lists all"
            raise presetfiles.bad(where, f"{arch!r} is no arch", hint)
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
        instead = hints.options(f"--set model={better} --set quantization=")
        advice = f"; {instead} is quantised already" if better else ""
        found.append(f"{kept.on_the_fly_cost}{advice}")
    if vllm.known(root, version) is None:
        newest = next(iter(vllm.versions(root)), "none")
        found.append(f"flags are not checked: those of vLLM {version} are not known here (the newest known: {newest})")
    return tuple(found)


def _takes_value(root: Path, key: str, version: str) -> bool:
    """Whether `--set key=` takes the key out of the preset; for a switch it is a way to switch it on."""
    known = vllm.known(root, version)
    return known is None or key not in known.switch | known.plain
