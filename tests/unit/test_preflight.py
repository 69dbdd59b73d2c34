"""What `up` knows before it starts anything: which GPUs, room beside other engines, the model."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.hosts import plant
from tests.unit.test_lease import one
from warmstart import container, engine, gpus, host, limits, preflight, profile
from warmstart.engine import Capabilities, ImageInfo
from warmstart.errors import DeviceHeld, DiskFull, ImageMissing, MemoryShort, ModelMissing, PresetUnfit
from warmstart.preflight import Ready
from warmstart.presets import Preset

ROOT = Path(__file__).parents[2]
BOUNDS = limits.load(ROOT)
IMAGE = ImageInfo(image_id="sha256:1", size_bytes=1, layers=(), labels={}, env={}, created="", tags=())
GIB = 1 << 30


def used(root: Path, arch: str, env: dict[str, str] | None = None, count: str = "1") -> list[str]:
    preset = Preset("p", model="m", env=env or {}, flags={"tensor-parallel-size": count})
    return [gpu.pci for gpu in preflight.use(preset, arch, BOUNDS, (), root)]


def test_which_gpus(tmp_path: Path) -> None:
    root = plant(tmp_path / "pair", "r9700-igpu-first")
    assert used(root, "gfx1201") == ["0000:03:00.0"]  # the arch decides, not the order
    assert used(root, "gfx1036") == ["0000:7a:00.0"]
    assert used(root, "cpu") == []
    with pytest.raises(PresetUnfit, match=r"the image is for gfx942, .*: gfx1036, gfx1201"):
        used(root, "gfx942")
    eight = plant(tmp_path / "eight", "mi300x-8")
    assert len(used(eight, "gfx942", count="4")) == 4
    assert used(eight, "gfx942", {"HIP_VISIBLE_DEVICES": "0"}) == ["0000:0c:00.0"]
    assert len(used(eight, "gfx942", {"HIP_VISIBLE_DEVICES": "6,7"}, "2")) == 2


def test_a_gpu_that_no_engine_has_comes_first(tmp_path: Path) -> None:
    root = plant(tmp_path, "mi300x-8")
    preset = Preset("p", model="m", flags={"tensor-parallel-size": "2"})
    every = [gpu.pci for gpu in gpus.read(root)]
    other = one("other", every[0], every[2])
    assert [gpu.pci for gpu in preflight.use(preset, "gfx942", BOUNDS, (other,), root)] == [every[1], every[3]]


def model(folder: Path, gib: float) -> Path:
    """A model's folder that says how large it is; the weights themselves are a hole."""
    folder.mkdir(parents=True, exist_ok=True)
    size = int(gib * GIB)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "max_position_embeddings": 128,
                "num_key_value_heads": 2,
                "vocab_size": 512,
                "intermediate_size": 128,
            }
        )
    )
    return folder


def judged(root: Path, folder: Path, live: tuple[Any, ...] = (), force: bool = False) -> Ready:
    preset = Preset("p", model=str(folder))
    return preflight.judge(preset, IMAGE, "x:y", "gfx1102", Path("/none"), BOUNDS, live, force=force, root=root)


def test_room(tmp_path: Path) -> None:
    root, card = plant(tmp_path, "rx7600xt-desktop"), "0000:03:00.0"
    ready = judged(root, model(tmp_path / "small", 1))
    assert ready.devices == (card,)
    assert "kv-cache-memory-bytes" in ready.preset.flags  # what the guard sets is in the preset that is started
    with pytest.raises(MemoryShort):
        judged(root, model(tmp_path / "large", 15))
    assert judged(root, tmp_path / "large", force=True).judgement.notes
    inside, hub = Preset("p", model="/models/large"), tmp_path / "hub"  # in the mounted cache
    with pytest.raises(MemoryShort):
        preflight.judge(inside, IMAGE, "x:y", "gfx1102", hub, BOUNDS, (), force=False, root=root)


def test_a_model_of_unknown_size_gets_its_devices_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, card = plant(tmp_path, "rx7600xt-desktop"), "0000:03:00.0"
    ready = judged(root, tmp_path / "not fetched yet")
    assert (ready.devices, ready.judgement.need_bytes) == ((card,), 0)
    assert "nothing says how large" in capsys.readouterr().err
    assert ready.preset.flags == {}


def test_a_model_that_is_not_here_is_judged_by_its_name(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")

    def by_name(name: str) -> Ready:
        preset = Preset("p", model=name)
        return preflight.judge(preset, IMAGE, "x:y", "gfx1102", Path("/none"), BOUNDS, (), force=False, root=root)

    assert by_name("org/Small-0.6B").judgement.need_bytes > 0
    with pytest.raises(MemoryShort):
        by_name("org/Large-70B-Instruct")


def test_no_room_beside_another_engine_names_it(tmp_path: Path) -> None:
    root, card = plant(tmp_path, "rx7600xt-desktop"), "0000:03:00.0"
    other = one("other", card, bytes=10 * GIB)
    with pytest.raises(DeviceHeld, match="no room beside other"):
        judged(root, model(tmp_path / "m", 6), (other,))
    # An engine that is ready has taken its memory: what is free is free.
    assert judged(root, tmp_path / "m", (msgspec.structs.replace(other, state="ready"),)).devices == (card,)


def test_what_all_engines_together_may_take(tmp_path: Path) -> None:
    root, card = plant(tmp_path, "rx7600xt-desktop"), "0000:03:00.0"
    other = one("other", card, bytes=3 * GIB, state="ready")
    ready = judged(root, model(tmp_path / "m", 1), (other,))
    assert preflight.capacity(ready, (other,)) == {card: ready.judgement.budget_bytes + 3 * GIB}


def test_the_model_s_folder(tmp_path: Path) -> None:
    preflight.model_there(Preset("p", model=str(model(tmp_path / "m", 0.001))), tmp_path, 0)
    with pytest.raises(ModelMissing, match="there is no model in"):
        preflight.model_there(Preset("p", model=str(tmp_path / "none")), tmp_path, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelMissing, match=r"no config\.json"):
        preflight.model_there(Preset("p", model=str(tmp_path / "empty")), tmp_path, 0)
    with pytest.raises(ModelMissing, match=str(tmp_path / "hf" / "mine")):
        preflight.model_there(Preset("p", model="/models/mine"), tmp_path / "hf" / "hub", 0)
    model(tmp_path / "hf" / "mine", 0.001)
    preflight.model_there(Preset("p", model="/models/mine"), tmp_path / "hf" / "hub", 0)


def test_room_for_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda _: 5_000_000_000)
    preset = Preset("p", model="Qwen/Qwen3-8B")
    preflight.model_there(preset, tmp_path, 4_000_000_000)
    with pytest.raises(DiskFull, match=r"Qwen/Qwen3-8B needs 16\.0 GB below .*, 5\.0 GB are free"):
        preflight.model_there(preset, tmp_path, 16_000_000_000)
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    preflight.model_there(preset, tmp_path, 16_000_000_000)  # it is there already


def test_a_hub_without_an_address_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def none(name: str, port: int) -> None:
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def told(model: str = "org/m", **env: str) -> str:
        preflight.hub_there(Preset("p", model=model, env=env), tmp_path)
        return capsys.readouterr().err

    for name in (*preflight.PROXIES, *(name.upper() for name in preflight.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", none)
    assert "warning: org/m is not in" in (line := told())
    assert "huggingface.co can't be resolved here" in line
    assert "mirror.example can't be resolved here" in told(HF_ENDPOINT="https://mirror.example/hf")
    assert asked == ["huggingface.co", "mirror.example"]
    # Nothing is asked, and nothing told, where it may not matter.
    assert told(HF_HUB_OFFLINE="1") + told(str(tmp_path)) + told("/models/x") + told(HTTPS_PROXY="http://p:1") == ""
    monkeypatch.setenv("https_proxy", "http://p:1")
    assert told() == ""
    monkeypatch.delenv("https_proxy")
    (tmp_path / "models--org--m" / "snapshots" / "abc").mkdir(parents=True)
    assert told() == ""
    assert len(asked) == 2


def test_a_hub_with_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*preflight.PROXIES, *(name.upper() for name in preflight.PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    preflight.hub_there(Preset("p", model="org/m"), tmp_path)
    assert capsys.readouterr().err == ""


def test_a_container_s_options(tmp_path: Path) -> None:
    words = container.options("a/b", tmp_path / "x.log")
    assert "--name=warmstart-a-b" in words
    assert f"--log-opt=path={tmp_path}/x.log" in words


def test_the_image_of_an_arch_is_the_one_that_its_profile_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(_: object, ref: str) -> None:
        asked.append(ref)
        raise ImageMissing(ref)

    monkeypatch.setattr(engine, "inspect", missing)
    monkeypatch.setattr(host, "default_arch", lambda **_: ("gfx1151", "by the test"))
    loaded = profile.load(ROOT, "gfx1151")
    own = msgspec.structs.replace(loaded.profile.image, repository="registry.example/mine")
    named = msgspec.structs.replace(loaded.profile, image=own)
    monkeypatch.setattr(profile, "load", lambda *_: msgspec.structs.replace(loaded, profile=named))
    with pytest.raises(ImageMissing) as none:
        preflight.choose(cast(Capabilities, None), ROOT, "Qwen3-0.6B-smoke", {}, force=True)
    assert asked == ["registry.example/mine:gfx1151"]
    assert none.value.hint == "`make image ARCH=gfx1151` builds it"
