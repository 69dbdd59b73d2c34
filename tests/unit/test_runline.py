"""The run line: least privilege, each flag with its reason, no secret in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import presets, profile, runline, volume
from warmstart.errors import InputError
from warmstart.presets import Preset
from warmstart.runline import Setting

ROOT = Path(__file__).parents[2]
TINY = Preset(name="tiny", model="org/tiny")
CPU = Setting(image="localhost/warmstart/vllm:cpu", models="/home/me/.cache/huggingface")
GPU = Setting(
    image="localhost/warmstart/vllm:gfx1201",
    models="/home/me/.cache/huggingface",
    devices=("/dev/kfd", "/dev/dri/renderD129"),
    visible=("ROCR_VISIBLE_DEVICES", "GPU-1"),
    groups=(44, 105),
    uid=1000,
    gid=1000,
)


def values(line: runline.RunLine, flag: str) -> list[str]:
    return [part.value for part in line.parts if part.flag == flag]


def test_least_privilege() -> None:
    words = runline.make(ROOT, TINY, GPU).words
    for wanted in ("--cap-drop=all", "--security-opt=no-new-privileges", "--read-only", "--pull=never", "--init"):
        assert wanted in words
    text = " ".join(words)
    for unwanted in ("seccomp", "privileged ", "cap-add", "ipc=host", "keep-id", "userns", "pid=host", "network=host"):
        assert unwanted not in text, unwanted
    assert "--publish=127.0.0.1:8000:8000" in words
    assert "--stop-signal=SIGINT" in words
    assert "--stop-timeout=60" in words


def test_the_words_of_a_cpu_preset() -> None:
    line = runline.make(ROOT, TINY, CPU)
    assert not values(line, "device") + values(line, "group-add") + values(line, "env") + values(line, "user")
    assert values(line, "volume") == ["warmstart-cache:/cache", "/home/me/.cache/huggingface:/models"]
    assert line.words[-4:] == [CPU.image, "org/tiny", "--served-model-name", "tiny"]
    assert values(line, "label") == ["io.warmstart.preset=tiny"]


def test_only_the_chosen_device() -> None:
    line = runline.make(ROOT, TINY, GPU)
    assert values(line, "device") == ["/dev/kfd", "/dev/dri/renderD129"]
    assert values(line, "env") == ["ROCR_VISIBLE_DEVICES=GPU-1"]


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_the_presets_own_choice_stands_alone(name: str) -> None:
    line = runline.make(ROOT, Preset(name="a", model="m", env={name: "7"}), GPU)
    assert values(line, "env") == [f"{name}=7"]


@pytest.mark.parametrize(
    ("setting", "groups", "user"),
    [
        ({}, ["keep-groups"], []),
        ({"keep_groups": False}, ["44", "105"], []),
        ({"rootless": False}, ["44", "105"], ["1000:1000"]),
        ({"rootless": False, "uid": 0, "gid": 0}, ["44", "105"], []),
        ({"engine": "docker", "rootless": False}, ["44", "105"], ["1000:1000"]),
    ],
)
def test_groups_and_user(setting: dict[str, object], groups: list[str], user: list[str]) -> None:
    import msgspec

    line = runline.make(ROOT, TINY, msgspec.structs.replace(GPU, **setting))
    assert values(line, "group-add") == groups
    assert values(line, "user") == user


def test_selinux_only_where_it_is_enforcing() -> None:
    import msgspec

    assert values(runline.make(ROOT, TINY, GPU), "security-opt") == ["no-new-privileges"]
    enforcing = msgspec.structs.replace(GPU, selinux=True)
    assert values(runline.make(ROOT, TINY, enforcing), "security-opt") == ["no-new-privileges", "label=disable"]


def test_shared_memory_grows_with_the_gpus() -> None:
    two = Preset(name="two", model="m", flags={"tensor-parallel-size": "2"})
    assert values(runline.make(ROOT, TINY, GPU), "shm-size") == ["1g"]
    assert values(runline.make(ROOT, two, GPU), "shm-size") == ["16g"]


def test_secrets_are_named_and_handed_over_apart() -> None:
    preset = Preset(name="a", model="m", env={"HF_TOKEN": "S3CRET", "A": "1", "X": "hf_S3CRETS3CRET"})
    line = runline.make(ROOT, preset, CPU, {"MY_KEY": "S3CRET", "HF_TOKEN": "other"})
    assert "S3CRET" not in " ".join(line.words)
    assert values(line, "env") == ["A=1", "HF_TOKEN", "MY_KEY", "X"]
    assert line.secrets == {"HF_TOKEN": "S3CRET", "X": "hf_S3CRETS3CRET", "MY_KEY": "S3CRET"}


def test_the_shown_line_hides_what_a_flag_holds() -> None:
    preset = Preset(name="a", model="m", flags={"hf-token": "S3CRET"})
    line = runline.make(ROOT, preset, CPU)
    assert "S3CRET" in line.words
    assert "S3CRET" not in " ".join(line.shown)


def test_a_folder_is_mounted_read_only() -> None:
    line = runline.make(ROOT, Preset(name="a", model="/data/my tiny"), CPU)
    assert values(line, "volume")[-1] == "/data/my tiny:/model/my tiny:ro"
    assert line.command[0] == "/model/my tiny"
    with pytest.raises(InputError, match="colon"):
        runline.make(ROOT, Preset(name="a", model="/data/a:b"), CPU)


@pytest.mark.parametrize("models", ["/home/me\nExec=/bin/sh", "/home/me\r", "/home/\x1b[2J", "/home/\udcff"])
def test_a_folder_with_unprintable_characters_is_refused(models: str) -> None:
    with pytest.raises(InputError, match="can't be mounted") as told:
        runline.volumes(TINY, models)
    assert told.value.message.isprintable()


def test_without_a_network_of_its_own() -> None:
    import msgspec

    line = runline.make(ROOT, Preset(name="a", model="m", port=8001), msgspec.structs.replace(CPU, network="host"))
    assert values(line, "network") == ["host"]
    assert not values(line, "publish")
    assert line.command[-4:] == ("--host", "127.0.0.1", "--port", "8001")


def test_every_flag_has_a_reason_and_every_reason_a_flag() -> None:
    import msgspec

    preset = Preset(name="a", model="/data/tiny", env={"HF_TOKEN": "x"})
    settings = [GPU, msgspec.structs.replace(GPU, rootless=False, selinux=True, network="host")]
    flags = {part.flag for one in settings for part in runline.make(ROOT, preset, one).parts}
    assert flags == set(runline.data(ROOT).why)
    assert all(part.why for part in runline.make(ROOT, preset, GPU).parts)


def test_gpus_that_a_preset_takes() -> None:
    assert runline.count(Preset(name="a")) == 1
    assert runline.count(Preset(name="a", flags={"tensor-parallel-size": "4", "pipeline-parallel-size": "2"})) == 8
    assert runline.count(Preset(name="a", flags={"data-parallel-size": "2"})) == 2


def test_how_gpus_are_chosen() -> None:
    assert runline.choose([(0, "GPU-a")], 1) == ("", "")
    assert runline.choose([(1, "GPU-b")], 2) == ("ROCR_VISIBLE_DEVICES", "GPU-b")
    assert runline.choose([(1, "GPU-b"), (2, "GPU-c")], 3) == ("ROCR_VISIBLE_DEVICES", "GPU-b,GPU-c")
    assert runline.choose([(1, "")], 2) == ("HIP_VISIBLE_DEVICES", "1")


def test_where_models_lie() -> None:
    assert presets.models_folder({"HOME": "/home/me"}) == "/home/me/.cache/huggingface"
    assert presets.models_folder({"HOME": "/home/me", "XDG_CACHE_HOME": "/c"}) == "/c/huggingface"
    assert presets.models_folder({"HOME": "/home/me", "HF_HOME": "/big/hf"}) == "/big/hf"


def test_the_image_looks_for_models_and_caches_where_they_are_mounted() -> None:
    inside = volume.table(ROOT, profile.load(ROOT, "cpu").profile)
    assert runline.volumes(TINY, "/m") == [f"{runline.CACHE}:{inside.volume}", f"/m:{inside.models}"]


def test_what_is_read_from_a_machine(tmp_path: Path) -> None:
    node = tmp_path / "dev/dri/renderD128"
    node.parent.mkdir(parents=True)
    node.touch(mode=0o660)
    node.chmod(0o660)
    group = node.stat().st_gid
    assert runline.owners(["/dev/dri/renderD128", "/dev/kfd"], tmp_path) == ((group,) if group else ())
    node.chmod(0o600)
    assert runline.owners(["/dev/dri/renderD128"], tmp_path) == ()
    assert not runline.enforcing(tmp_path)
    enforce = tmp_path / "sys/fs/selinux/enforce"
    enforce.parent.mkdir(parents=True)
    enforce.write_text("1", encoding="ascii")
    assert runline.enforcing(tmp_path)
    enforce.write_text("0", encoding="ascii")
    assert not runline.enforcing(tmp_path)
    assert not runline.has_init("/usr/bin", tmp_path)
    (tmp_path / "usr/libexec/podman").mkdir(parents=True)
    (tmp_path / "usr/libexec/podman/catatonit").touch()
    assert runline.has_init("/usr/bin", tmp_path)


@pytest.mark.parametrize("name", presets.names(ROOT))
def test_every_shipped_preset_has_a_run_line(name: str) -> None:
    over = {} if presets.load(ROOT, name).model else {"model": "org/any"}
    line = runline.make(ROOT, presets.load(ROOT, name, over), GPU)
    assert line.words.index(GPU.image) < len(line.words) - 1
