"""Emitted files: read back by the rules of the program that they are for, every value has to come out as it went in."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart import emit, lease, presets, runline
from warmstart.errors import PresetError, PresetUnfit, UsageError
from warmstart.presets import Preset
from warmstart.runline import RunLine, Setting

ROOT = Path(__file__).parents[2]
NOWHERE = Path("/nonexistent")
NASTY = "a b\"c'd%h$e${F}\\g`h`#i;j=k: {l} [m], é"
WHERE = Setting(
    image="localhost/warmstart/vllm:gfx1201",
    models="/home/me/my cache/100%/$x",
    devices=("/dev/kfd", "/dev/dri/renderD128"),
    visible=("ROCR_VISIBLE_DEVICES", "GPU-1"),
    groups=(44, 105),
    selinux=True,
)
PRESET = Preset(
    name="My-model.1",
    model="/data/a model/100%",
    port=8123,
    env={"NASTY": NASTY, "PLAIN": "1", "HF_TOKEN": "S3CRET"},
    flags={
        "chat-template": NASTY,
        "compilation-config": '{"cudagraph_mode": "FULL"}',
        "enforce-eager": True,
        "served-model-name": ("x", "y z"),
        "tensor-parallel-size": "2",
    },
)
LINE = runline.make(ROOT, PRESET, WHERE)


def of(line: RunLine, flag: str) -> list[str]:
    return [part.value for part in line.parts if part.flag == flag]


# ---- quadlet ------------------------------------------------------------------------------------------------------

# Keys that podman 5's Quadlet knows (podman-systemd.unit(5)), and systemd's own that are used.
KEYS = {
    "Unit": {"Description"},
    "Container": set(
        "AddDevice ContainerName DropCapability Environment Exec GroupAdd HealthCmd HealthInterval HealthStartPeriod "
        "HealthTimeout Image Label NoNewPrivileges Notify PodmanArgs PublishPort Pull ReadOnly RunInit Secret "
        "SecurityLabelDisable ShmSize Tmpfs User Volume".split()
    ),
    "Service": {"Restart", "RestartSec", "KillSignal", "TimeoutStopSec", "TimeoutStartSec"},
    "Install": {"WantedBy"},
}


def unit(text: str) -> dict[str, dict[str, list[str]]]:
    """A unit file by section and key, values as they stand."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        assert equals, line
        found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


def split(value: str) -> list[str]:
    """Words of a unit file's value: quotes and backslashes as systemd reads them."""
    words, word, quote, started = [], "", "", False
    letters = iter(value)
    for letter in letters:
        if letter == "\\":
            word += {"n": "\n", "t": "\t", "s": " "}.get(escaped := next(letters), escaped)
            started = True
        elif quote:
            quote = "" if letter == quote else quote
            word += "" if not quote else letter
        elif letter in "\"'":
            quote, started = letter, True
        elif letter == " ":
            words += [word] if started or word else []
            word, started = "", False
        else:
            word += letter
    assert not quote, value
    return words + ([word] if started or word else [])


def expanded(word: str) -> str:
    """What systemd makes of a word in ExecStart: no specifier and no variable may be left in it."""
    assert not re.search(r"(?<!%)(%%)*%(?!%)", word), word
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", word), word
    return word.replace("%%", "%").replace("$$", "$")


def words(values: list[str]) -> list[str]:
    return [expanded(word) for value in values for word in split(value)]


@pytest.mark.parametrize("kind", ["quadlet", "compose", "llama-swap", "distrobox"])
def test_every_file_says_what_up_does_besides(kind: str) -> None:
    file = emit.emit(ROOT, NOWHERE, kind, ["smoke-cpu"], {"model": "org/m"}, "cpu")
    assert [line for line in emit.data(ROOT).memory if f"# {line}\n" not in file] == []


def test_quadlet_round_trip() -> None:
    file = unit(emit.quadlet(ROOT, NOWHERE, PRESET, WHERE))
    assert {section: set(keys) for section, keys in file.items() if not set(keys) <= KEYS[section]} == {}
    box = file["Container"]
    assert words(box["Exec"]) == list(LINE.command)
    assert words(box["Environment"]) == [value for value in of(LINE, "env") if "=" in value]
    assert f"NASTY={NASTY}" in words(box["Environment"])
    assert [expanded(v) for v in box["Volume"]] == of(LINE, "volume")
    assert [expanded(v) for v in box["Image"]] == [WHERE.image]
    assert box["AddDevice"] == list(WHERE.devices)
    assert box["GroupAdd"] == ["keep-groups"]
    assert box["PublishPort"] == ["127.0.0.1:8123:8000"]
    assert words(box["Label"]) == of(LINE, "label")
    assert box["ContainerName"] == [lease.container_name(PRESET.name)]
    assert words(box["PodmanArgs"]) == ["--stop-signal=SIGINT", "--stop-timeout=60"]
    for key in ("NoNewPrivileges", "ReadOnly", "RunInit", "SecurityLabelDisable"):
        assert box[key] == ["true"], key
    assert (box["DropCapability"], box["Pull"], box["ShmSize"]) == (["all"], ["never"], ["16g"])
    assert box["Secret"] == ["warmstart-HF_TOKEN,type=env,target=HF_TOKEN"]
    assert file["Service"]["KillSignal"] == ["SIGINT"]
    assert int(file["Service"]["TimeoutStopSec"][0]) > 60
    health = shlex.split(expanded(box["HealthCmd"][0]))
    compile(health[-1], "health", "exec")


def test_every_flag_of_the_run_line_is_in_the_quadlet() -> None:
    facts = emit.data(ROOT)
    box = unit(emit.quadlet(ROOT, NOWHERE, PRESET, WHERE))["Container"]
    for part in LINE.parts:
        found = facts.quadlet.get(part.flag) in box or part.word in words(box["PodmanArgs"])
        assert found or part.flag == "security-opt", part


# ---- compose and llama-swap -----------------------------------------------------------------------------------------


def yaml(text: str) -> Any:
    """The part of YAML that is emitted: indented mappings, JSON, plain words, comments on lines of their own."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]

    def level(line: str) -> int:
        return len(line) - len(line.lstrip())

    def read(depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while lines and level(lines[0]) == depth:
            match = re.fullmatch(r'("(?:[^"\\]|\\.)*"|[\w.-]+):(?: (.+))?', lines.pop(0).strip())
            assert match, text
            key = json.loads(match[1]) if match[1].startswith('"') else match[1]
            assert key not in found, key
            if match[2] is None:
                found[key] = read(level(lines[0])) if lines and level(lines[0]) > depth else None
            else:
                found[key] = json.loads(match[2]) if match[2][0] in '"[' else match[2]
        assert not lines or level(lines[0]) <= depth, lines[0]
        return found

    whole = read(0)
    assert not lines
    return whole


def interpolated(value: Any) -> Any:
    """What compose makes of a value: $$ is a dollar, and no variable may be left."""
    if isinstance(value, list):
        return [interpolated(one) for one in value]
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", value), value
    return value.replace("$$", "$")


def test_compose_round_trip() -> None:
    file = yaml(emit.compose(ROOT, NOWHERE, PRESET, WHERE))
    (service,) = file["services"].values()
    assert interpolated(service["command"]) == list(LINE.command)
    assert interpolated(service["environment"]) == of(LINE, "env")
    assert interpolated(service["volumes"]) == of(LINE, "volume")
    assert service["devices"] == list(WHERE.devices)
    assert service["group_add"] == ["44", "105"]
    assert service["security_opt"] == ["no-new-privileges", "label=disable"]
    assert (service["cap_drop"], service["read_only"], service["init"]) == (["ALL"], "true", "true")
    assert (service["stop_signal"], service["stop_grace_period"]) == ("SIGINT", "60s")
    assert (service["shm_size"], service["ports"]) == ("16g", ["127.0.0.1:8123:8000"])
    assert service["labels"] == of(LINE, "label")
    compile(interpolated(service["healthcheck"]["test"])[-1], "health", "exec")
    assert file["volumes"] == {"warmstart-cache": {"name": "warmstart-cache"}}


def test_compose_without_a_gpu_here_asks_for_the_group() -> None:
    file = yaml(emit.compose(ROOT, NOWHERE, PRESET, msgspec.structs.replace(WHERE, groups=())))
    (service,) = file["services"].values()
    assert service["group_add"][0].startswith("${RENDER_GID:?")
    cpu = yaml(emit.compose(ROOT, NOWHERE, PRESET, msgspec.structs.replace(WHERE, devices=(), groups=())))
    (service,) = cpu["services"].values()
    assert "devices" not in service
    assert "group_add" not in service


def test_llama_swap_round_trip() -> None:
    preset = msgspec.structs.replace(
        PRESET, env={"A": "b c", "HF_TOKEN": "S3CRET"}, flags={"chat-template": "a 'b\" $c"}
    )
    other = Preset(name="other", model="m")
    file = yaml(emit.llama_swap(ROOT, NOWHERE, [(preset, WHERE), (other, WHERE)]))
    assert set(file["models"]) == {"My-model.1", "other"}
    assert file["groups"]["warmstart"]["members"] == ["My-model.1", "other"]
    assert (file["groups"]["warmstart"]["swap"], file["groups"]["warmstart"]["exclusive"]) == ("true", "true")
    one = file["models"]["My-model.1"]
    line = runline.make(ROOT, preset, WHERE)
    command = shlex.split(one["cmd"].replace("${PORT}", "8123"))
    assert command[:5] == ["podman", "run", "--rm", "--replace", f"--name={lease.container_name(preset.name)}"]
    assert command[5:] == line.words
    assert shlex.split(one["cmdStop"])[-1] == lease.container_name(preset.name)
    assert one["proxy"] == "http://127.0.0.1:${PORT}"
    assert int(one["ttl"]) > 0


def test_the_health_check_asks_the_port_that_the_server_has() -> None:
    assert f"http://127.0.0.1:{runline.INSIDE}/health" in emit.data(ROOT).health


def test_llama_swap_asks_for_the_name_that_the_server_has() -> None:
    file = yaml(
        emit.llama_swap(ROOT, NOWHERE, [(Preset(name="a", model="m", flags={"served-model-name": ("x", "y")}), WHERE)])
    )
    assert file["models"]["a"]["useModelName"] == "x"


def test_llama_swap_has_macros_of_its_own() -> None:
    with pytest.raises(PresetError, match="macros"):
        emit.llama_swap(ROOT, NOWHERE, [(PRESET, WHERE)])


def test_a_secret_is_no_macro_of_llama_swap_and_not_told() -> None:
    preset = Preset(name="a", model="m", env={"HF_TOKEN": "S3${CRET}"})
    assert "S3${" not in emit.llama_swap(ROOT, NOWHERE, [(preset, WHERE)])
    token = msgspec.structs.replace(preset, flags={"chat-template": "${x} hf_S3CRETS3CRET"})
    with pytest.raises(PresetError, match="macros") as raised:
        emit.llama_swap(ROOT, NOWHERE, [(token, WHERE)])
    assert "S3CRET" not in raised.value.message


# ---- distrobox ------------------------------------------------------------------------------------------------------


def test_distrobox_round_trip() -> None:
    where = msgspec.structs.replace(WHERE, models="/home/me/hf")
    preset = msgspec.structs.replace(PRESET, model="m", env={"A": "b=c,d", "HF_TOKEN": "S3CRET"})
    line = runline.make(ROOT, preset, where)
    text = emit.distrobox(ROOT, NOWHERE, preset, where, "gfx1201")
    box = unit(text)[lease.container_name(PRESET.name)]
    told = box["additional_flags"][0].strip('"').split(" ")
    assert {"--env=A=b=c,d", "--env=HF_TOKEN", "--device=/dev/kfd", "--device=/dev/dri/renderD128"} <= set(told)
    assert {"--group-add=keep-groups", "--shm-size=16g", "--security-opt=label=disable"} <= set(told)
    assert [volume.strip('"') for volume in box["volume"]] == of(line, "volume")
    assert box["image"] == [where.image]
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(text)
    assert parser.sections() == [lease.container_name(PRESET.name)]


@pytest.mark.parametrize("value", ["a b", "a'b", 'a"b', "a$b", "a;b", "a\\b", "a`b`", "a*"])
def test_distrobox_is_given_nothing_that_it_takes_apart(value: str) -> None:
    where = msgspec.structs.replace(WHERE, models="/m")
    with pytest.raises(PresetError, match="distrobox can't take '--env=A'"):
        emit.distrobox(ROOT, NOWHERE, Preset(name="a", model="m", env={"A": value}), where, "gfx1201")
    with pytest.raises(PresetError, match="distrobox can't take"):
        emit.distrobox(ROOT, NOWHERE, Preset(name="a", model=f"/x/{value}"), where, "gfx1201")


# ---- all of them ----------------------------------------------------------------------------------------------------


def files(preset: Preset) -> list[str]:
    plain = msgspec.structs.replace(preset, env={"HF_TOKEN": "S3CRET"}, flags={})
    plain_where = msgspec.structs.replace(WHERE, models="/m")
    return [
        emit.quadlet(ROOT, NOWHERE, preset, WHERE),
        emit.compose(ROOT, NOWHERE, preset, WHERE),
        emit.distrobox(ROOT, NOWHERE, msgspec.structs.replace(plain, model="m"), plain_where, "gfx1201"),
        emit.llama_swap(ROOT, NOWHERE, [(plain, WHERE)]),
    ]


def test_no_secret_is_written() -> None:
    for text in files(PRESET):
        assert "S3CRET" not in text
        assert "HF_TOKEN" in text


values = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=30
)


@given(value=values)
def test_any_value_comes_out_as_it_went_in(value: str) -> None:
    preset = Preset(name="a", model="m", env={"A": value}, flags={"chat-template": value})
    where = msgspec.structs.replace(WHERE, visible=("", ""), models="/m")
    expect = f"A={value}"
    shown = [v for v in of(runline.make(ROOT, preset, where), "env") if "=" in v]
    if shown != [expect]:  # it looks like a token
        return
    box = unit(emit.quadlet(ROOT, NOWHERE, preset, where))["Container"]
    assert words(box["Environment"]) == [expect]
    assert value in {word.removeprefix("--chat-template=") for word in words(box["Exec"])}
    (service,) = yaml(emit.compose(ROOT, NOWHERE, preset, where))["services"].values()
    assert interpolated(service["environment"]) == [expect]


def test_the_start_may_take_what_starts_have_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = emit.data(ROOT)
    seconds, why = emit.start_seconds(tmp_path, facts, ["a"])
    assert seconds == facts.start_seconds
    assert "no start is on record" in why

    class Seen:
        def __init__(self, wall: float) -> None:
            self.wall = wall

    monkeypatch.setattr("warmstart.starts.of", lambda state, name: (Seen(97.0), Seen(300.0), Seen(0.0)))
    seconds, why = emit.start_seconds(tmp_path, facts, ["a"])
    assert seconds == 900
    assert "3 times the longest of 2 starts on record, 300 s" in why


@pytest.mark.parametrize("kind", ["quadlet", "compose", "distrobox", "llama-swap"])
def test_a_shipped_preset_as_every_kind(kind: str) -> None:
    text = emit.emit(ROOT, NOWHERE, kind, ["Qwen3.6-35B-A3B-AWQ"], {}, "gfx1151")
    assert "vllm:gfx1151" in text
    assert "8192" in text


def test_the_presets_arch_is_taken_when_this_machine_has_another() -> None:
    assert "vllm:gfx1201" in emit.emit(ROOT, NOWHERE, "quadlet", ["R9700-pair"], {"model": "m"})


def test_llama_swap_takes_all_that_the_arch_can_serve() -> None:
    models = yaml(emit.emit(ROOT, NOWHERE, "llama-swap", [], {}, "gfx1102"))["models"]
    assert set(models) == {"Qwen3-0.6B-smoke", "Qwen3.5-9B-w4a16"}


def test_what_can_not_be_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="one preset"):
        emit.emit(ROOT, NOWHERE, "quadlet", [], {}, "cpu")
    with pytest.raises(UsageError, match="one preset"):
        emit.emit(ROOT, NOWHERE, "compose", ["instinct", "mi200"], {}, "cpu")
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(UsageError) as raised:
        emit.emit(ROOT, NOWHERE, "compose", [], {}, "cpu")
    assert raised.value.hint == "`make emit KIND=compose PRESET=…`; `make presets` lists all"
    with pytest.raises(PresetUnfit):
        emit.emit(ROOT, NOWHERE, "quadlet", ["gemma-4-E4B-it-w4a16"], {}, "gfx1102")
    with pytest.raises(PresetUnfit):
        emit.emit(ROOT, NOWHERE, "quadlet", ["Qwen3.6-35B-A3B-AWQ"], {}, "gfx942")
    with pytest.raises(PresetError, match="names no model"):
        emit.emit(ROOT, NOWHERE, "quadlet", ["mi200"], {}, "gfx90a")


def test_every_shipped_preset_can_be_emitted() -> None:
    for name in presets.names(ROOT):
        one = presets.load(ROOT, name, {} if presets.load(ROOT, name).model else {"model": "m"})
        if not one.refused:
            over = {} if presets.load(ROOT, name).model else {"model": "m"}
            assert emit.emit(ROOT, NOWHERE, "compose", [name], over, (one.archs or ("cpu",))[0])
