"""Files for other ways to run a preset: systemd's Quadlet, compose, llama-swap, distrobox.

All come from the one run line (`runline`); the files themselves are templates in presets/emit/, which only lay out what
is made here. No value of a secret is ever written: a file names where the other program takes it from.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from warmstart import gpus, hints, host, lease, presets, profile, runline, starts, toml
from warmstart.errors import PresetError, UsageError
from warmstart.names import START
from warmstart.presets import Preset
from warmstart.runline import RunLine, Setting

FOLDER = "presets/emit"
PUBLISH = f"--publish=127.0.0.1:${{PORT}}:{runline.INSIDE}"  # llama-swap chooses the port on this machine
PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The content of presets/emit/emit.toml."""

    schema: int
    start_seconds: int
    start_factor: int
    health: str
    health_seconds: int
    idle_seconds: int
    python: str
    memory: tuple[str, ...]
    files: dict[str, str]
    quadlet: dict[str, str]


def data(root: Path) -> Data:
    """What `emit` needs besides the run line. Raises ProfileError."""
    return toml.read(root / FOLDER / "emit.toml", Data)


def emit(root: Path, state: Path, kind: str, names: Sequence[str], sets: Mapping[str, str], arch: str = "") -> str:
    """The file of a kind for presets; without names llama-swap gets all that its GPU can serve.

    `arch` is that of the machine with the file, by default this one's. Raises UnknownPreset, PresetError, PresetUnfit
    for what is wrong with a preset, and UsageError for a wrong number of them.
    """
    here = arch or host.default_arch(known=profile.archs(root))[0]
    if kind == "llama-swap" and not names:
        names = [name for name in presets.names(root) if _fits(presets.load(root, name), here)]
    if not names or (kind != "llama-swap" and len(names) > 1):
        wrong = f"emit {kind} takes one preset" if kind != "llama-swap" else f"no preset is for {here}"
        hint = f"`{hints.call('emit', KIND=kind, PRESET='…')}`; `{hints.call('presets')}` lists all"
        raise UsageError(wrong, hint=hint)
    wanted = [_load(root, name, sets, arch, here) for name in names]
    if kind == "llama-swap":
        return llama_swap(root, state, [(preset, where) for preset, where, _ in wanted])
    preset, where, used = wanted[0]
    if kind == "distrobox":
        return distrobox(root, state, preset, where, used)
    return (quadlet if kind == "quadlet" else compose)(root, state, preset, where)


def _fits(preset: Preset, arch: str) -> bool:
    return bool(preset.model) and not preset.refused and (not preset.archs or arch in preset.archs)


def _load(root: Path, name: str, sets: Mapping[str, str], wanted: str, here: str) -> tuple[Preset, Setting, str]:
    """A preset checked against its arch's vLLM, where it is used, and that arch: the one asked for, this machine's when
    the preset is for it, else the preset's first."""
    archs = presets.load(root, name, sets).archs
    arch = wanted or (here if not archs or here in archs else archs[0])
    known = profile.load(root, arch).profile
    preset = presets.load(root, name, sets, known.versions.vllm)
    presets.usable(preset, arch)
    return preset, setting(preset, arch, preset.image or known.tag), arch


def setting(preset: Preset, arch: str, image: str, root: Path = Path("/")) -> Setting:
    """Where the emitted file is to be used: this machine when it has a GPU of the arch, else any with one."""
    here = gpus.read(root)
    found = [gpu for gpu in here if gpu.arch == arch]
    chosen = found[: runline.count(preset)]
    nodes = tuple(["/dev/kfd", *(f"/dev/dri/{gpu.render}" for gpu in chosen)] if found else ["/dev/kfd", "/dev/dri"])
    return Setting(
        image=image,
        models=presets.models_folder(),
        devices=() if arch == "cpu" else nodes,
        visible=runline.choose([(gpu.index, gpu.unique_id) for gpu in chosen], len(here)) if chosen else ("", ""),
        groups=runline.owners(nodes, root) if found else (),
        selinux=runline.enforcing(root),
    )


def quadlet(root: Path, state: Path, preset: Preset, where: Setting) -> str:
    """A `.container` file for podman's Quadlet."""
    facts = data(root)
    line = runline.make(root, preset, where)
    keys, more = [], []
    for part in line.parts:
        if part.flag == "env" and "=" not in part.value:
            continue
        key = facts.quadlet.get(part.flag)
        if part.word == "--security-opt=no-new-privileges":
            keys.append(("NoNewPrivileges", "true"))
        elif part.word == "--security-opt=label=disable":
            keys.append(("SecurityLabelDisable", "true"))
        elif key:
            split = part.flag in ("env", "label", "cap-drop")  # Quadlet reads these as several quoted words
            keys.append((key, unit_word(part.value) if split else unit(part.value) if part.value else "true"))
        else:
            more.append(part.word)
    health = shlex.join([facts.python, "-IS", "-c", facts.health])
    return _render(root, facts, "quadlet", state, [preset], line, keys=keys, more=more, health=health)


def compose(root: Path, state: Path, preset: Preset, where: Setting) -> str:
    """A compose file."""
    line = runline.make(root, preset, where)
    return _render(root, data(root), "compose", state, [preset], line, groups=[str(group) for group in where.groups])


def llama_swap(root: Path, state: Path, wanted: Sequence[tuple[Preset, Setting]]) -> str:
    """llama-swap's configuration for some presets."""
    models, secrets = [], set()
    for preset, where in wanted:
        line = runline.make(root, preset, where)
        words = [*(PUBLISH if part.flag == "publish" else part.word for part in line.parts), line.image, *line.command]
        name = lease.container_name(preset.name)
        for word, shown in zip(line.words, line.shown, strict=True):
            if "${" in word:
                raise PresetError(f"{preset.name}: llama-swap would take {shown!r} for one of its macros")
        served = preset.flags.get("served-model-name")
        models.append(
            {
                "name": preset.name,
                # Its macro has to stand bare, not in the quotes that a shell would want.
                "cmd": shlex.join(["podman", "run", "--rm", "--replace", f"--name={name}", *words]).replace(
                    shlex.quote(PUBLISH), PUBLISH
                ),
                "stop": shlex.join(
                    ["podman", "stop", "--ignore", "--time", str(runline.data(root).stop_seconds), name]
                ),
                "served": served[0] if isinstance(served, tuple) else served,
            }
        )
        secrets |= set(line.secrets)
    line = RunLine((), "", (), dict.fromkeys(secrets, ""))
    return _render(root, data(root), "llama-swap", state, [preset for preset, _ in wanted], line, models=models)


def distrobox(root: Path, state: Path, preset: Preset, where: Setting, arch: str) -> str:
    """A file for `distrobox assemble`: the image of an arch as a box, with the preset's variables and devices.

    Raises PresetError for a value that distrobox would take apart.
    """
    line = runline.make(root, preset, where)
    kept = [part.word for part in line.parts if part.flag in ("device", "group-add", "env", "shm-size")]
    kept += [part.word for part in line.parts if part.word == "--security-opt=label=disable"]
    volumes = [part.value for part in line.parts if part.flag == "volume"]
    for word in [*kept, *volumes]:
        if not PLAIN.fullmatch(word):
            name = "=".join(word.split("=")[:2]) if word.startswith("--env=") else word
            hint = "it reads spaces, quotes and signs of a shell several times over: leave them out, or set it inside"
            raise PresetError(f"{preset.name}: distrobox can't take {name!r}", hint=hint)
    serve = shlex.join([START, "vllm", "serve", *line.command, "--port", str(preset.port)])
    more = {"arch": arch, "serve": serve, "words": kept, "volumes": volumes}
    return _render(root, data(root), "distrobox", state, [preset], line, **more)


def start_seconds(state: Path, facts: Data, names: Sequence[str]) -> tuple[int, str]:
    """Seconds that a start may take, and where the number comes from: records of earlier starts, else a default."""
    walls = [start.wall for name in names for start in starts.of(state, name) if start.wall > 0]
    if not walls:
        return facts.start_seconds, "no start is on record here yet: a first one can take this long"
    longest = max(walls)
    seconds = max(60, round(longest * facts.start_factor))
    return seconds, f"{facts.start_factor} times the longest of {len(walls)} starts on record, {longest:.0f} s"


def unit(value: str) -> str:
    """A value in a unit file, where % begins a specifier and $ a variable."""
    return value.replace("%", "%%").replace("$", "$$")


def unit_word(value: str) -> str:
    """One word of a list in a unit file, quoted where that is needed."""
    if PLAIN.fullmatch(value):
        return value
    return '"' + unit(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def yaml(value: str) -> str:
    """A string in YAML: JSON's form is one."""
    return json.dumps(value, ensure_ascii=False)


def compose_word(value: str) -> str:
    """A string in a compose file, where $ begins a variable."""
    return yaml(value.replace("$", "$$"))


def _render(
    root: Path, facts: Data, name: str, state: Path, wanted: Sequence[Preset], line: RunLine, **more: Any
) -> str:
    """A template of presets/emit/ filled in."""
    import jinja2  # 55 ms to import: only for verbs that render

    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters: dict[str, Callable[..., Any]] = {
        "unit": unit,
        "unit_word": unit_word,
        "yaml": yaml,
        "compose": compose_word,
    }
    engine.filters |= filters | {"flow": lambda words: f"[{', '.join(words)}]"}
    flags: dict[str, list[str]] = {flag: [] for flag in runline.data(root).why}
    for part in line.parts:
        flags[part.flag].append(part.value)
    seconds, why = start_seconds(state, facts, [preset.name for preset in wanted])
    first = wanted[0]
    return engine.get_template(facts.files[name]).render(
        preset=first,
        data=facts,
        container=lease.container_name(first.name),
        cache=runline.CACHE,
        image=line.image,
        command=line.command,
        flags=flags,
        security=flags["security-opt"],
        env=[value for value in flags["env"] if "=" in value],
        secrets=sorted(line.secrets),
        stop=runline.data(root).stop_seconds,
        start=seconds,
        why=why,
        **more,
    )
