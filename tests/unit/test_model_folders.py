"""A model that is a folder of this machine: how it is told from a name on Hugging Face, and what can't be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import presets
from warmstart.errors import PresetError


@pytest.mark.parametrize(
    ("model", "folder", "inside"),
    [
        ("Qwen/Qwen3-0.6B", None, "Qwen/Qwen3-0.6B"),
        ("/models/tiny", None, "/models/tiny"),
        ("/models", None, "/models"),
        ("/modelsX/tiny", "/modelsX/tiny", "/model/tiny"),
        ("/data/my tiny", "/data/my tiny", "/model/my tiny"),
        ("~/tiny", "/home/me/tiny", "/model/tiny"),
    ],
)
def test_where_a_model_lies(model: str, folder: str | None, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert presets.model_folder(model) == (Path(folder) if folder else None)
    assert presets.model_inside(model) == inside


def test_a_relative_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert presets.model_folder("./tiny") == tmp_path / "tiny"


def test_parts_of_a_relative_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert presets.model_folder("../tiny") == tmp_path / "tiny"
    assert presets.model_inside("..") == f"/model/{tmp_path.name}"
    assert presets.model_folder(".") == tmp_path / "a"
    assert presets.model_folder("") is None


def test_a_folder_named_like_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    presets.usable(presets.Preset(name="p", model="mine/tiny"))  # no such folder: a name on Hugging Face
    (tmp_path / "mine" / "tiny").mkdir(parents=True)
    with pytest.raises(PresetError, match=r"did you mean \./mine/tiny\?"):
        presets.usable(presets.Preset(name="p", model="mine/tiny"))
    presets.usable(presets.Preset(name="p", model="./mine/tiny"))
    presets.usable(presets.Preset(name="p", model="/models"))


@pytest.mark.parametrize("linked", ["config.json", "model.safetensors"])
def test_a_folder_of_links_out_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linked: str) -> None:
    cache = tmp_path / "hub" / "models--me--tiny"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "0").write_text("{}")
    (snapshot / "README.md").symlink_to("../../blobs/0")
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")  # within the folder
    (tmp_path / "alias").symlink_to(snapshot)
    for name in (snapshot, tmp_path / "alias"):
        presets.usable(presets.Preset(name="p", model=str(name)))
    (snapshot / linked).symlink_to("../../blobs/0")
    for name in (snapshot, tmp_path / "alias"):
        with pytest.raises(PresetError, match=r"its files are links into .*/models--me--tiny/blobs,") as raised:
            presets.usable(presets.Preset(name="p", model=str(name)))
        assert raised.value.hint == f"name the model instead: --set model=me/tiny, with HF_HOME={tmp_path}"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(PresetError) as raised:
        presets.usable(presets.Preset(name="p", model=str(snapshot)))
    assert raised.value.hint == "name the model instead: --set model=me/tiny"


def test_the_cache_that_the_tools_use_needs_no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "huggingface" / "hub" / "models--me--tiny"
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "blob").write_text("{}")
    (cache / "snapshots" / "abc" / "config.json").symlink_to("../../blob")
    with pytest.raises(PresetError) as raised:
        presets.usable(presets.Preset(name="p", model=str(cache / "snapshots" / "abc")))
    assert raised.value.hint == "name the model instead: --set model=me/tiny"


def test_links_elsewhere_can_be_copied(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiny" / "config.json").symlink_to("../config.json")
    with pytest.raises(PresetError) as raised:
        presets.usable(presets.Preset(name="p", model=f"{tmp_path}/tiny"))
    assert "cp -rL" in raised.value.hint
