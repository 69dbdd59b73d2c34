"""The committed profiles and locks: what an arch says, it says for a reason, and its lock agrees."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from warmstart import cuts, lock, profile
from warmstart.errors import ProfileError, UsageError
from warmstart.schema import Profile

ROOT = Path(__file__).parents[2]
ARCHS = [arch for arch in profile.archs(ROOT) if arch != "cpu"]
LANES = [(arch, lane) for arch in ARCHS for lane in ("", *profile.load(ROOT, arch).profile.lanes)]
FAMILIES = {
    "rdna3": {"gfx1100", "gfx1101", "gfx1102", "gfx1103"},
    "rdna3_5": {"gfx1150", "gfx1151"},
    "rdna4": {"gfx1200", "gfx1201"},
    "cdna": {"gfx90a", "gfx942", "gfx950"},
}


def real(arch: str, lane: str = "") -> Profile:
    return profile.load(ROOT, arch, lane).profile


def unusual(p: Profile) -> set[str]:
    """Keys of values that need a reason: what differs from defaults in ENV, and what surprises a reader."""
    defaults = real("cpu").env
    keys = {f"env.{name}" for name, value in p.env.items() if defaults.get(name) != value}
    keys |= {f"serve.{flag}" for flag in p.serve}
    keys |= {f"features.{name}" for name, feature in p.features.items() if feature.enabled}
    keys |= {"removals"} & ({"removals"} if p.removals else set())
    keys |= {"lane"} if p.lane != "wheel" else set()
    if p.device and p.device.min_kernel:
        keys.add("device.min-kernel")
    if p.device and p.device.bad_firmware:
        keys.add("device.bad-firmware")
    return keys


def test_every_arch_is_there_and_in_its_family() -> None:
    assert {family: {a for a in ARCHS if real(a).family == family} for family in FAMILIES} == FAMILIES


@pytest.mark.parametrize(("arch", "lane"), LANES)
def test_unusual_values_have_evidence(arch: str, lane: str) -> None:
    p = real(arch, lane)
    needed = unusual(p)
    if lane == "source":  # a user's own choice needs no reason
        needed -= {"lane"}
    assert needed - p.evidence.keys() == set()
    assert all(re.match(r"https://\S+$|docs/", link) for link in p.evidence.values())


def test_evidence_is_about_something() -> None:
    for arch, lane in LANES:
        p = real(arch, lane)
        known = profile.leaves(p).keys() | {"lane", "removals", "wheels.indexes", "features.aiter"}
        tables = {key.rpartition(".")[0] for key in known} | {".".join(k.split(".")[:2]) for k in known}
        assert p.evidence.keys() - known - tables == set(), arch


def test_a_value_without_evidence_would_be_noticed() -> None:
    p = real("gfx1151")
    assert {"device.min-kernel", "device.bad-firmware", "serve.attention-backend", "env.CC"} <= unusual(p)
    assert "removals" in unusual(real("gfx90a"))
    assert "lane" in unusual(real("gfx1102"))


def test_facts_of_the_arches() -> None:
    strix = real("gfx1151")
    assert strix.device
    assert strix.device.extra == "device-gfx1151"
    assert (strix.device.min_kernel, strix.device.bad_firmware) == ("6.18.4", ("20251125",))
    assert strix.serve["attention-backend"] == "TRITON_ATTN"
    assert (strix.budget.unpacked_mb, strix.budget.pull_mb) == (6000, 2000)
    assert real("gfx90a").removals == (
        "torch/.kpack/torch_gfx90a:xnack+.kpack",
        "torch/.kpack/torch_gfx90a:xnack-.kpack",
    )
    assert {a for a in ARCHS if real(a).lane == "source"} == {"gfx1102", "gfx1103"}
    shared = {a for a in ARCHS if (d := real(a).device) and d.unified_memory}
    assert shared == {"gfx1103", "gfx1150", "gfx1151"}
    assert {a for a in ARCHS if real(a).aiter.mode == "set"} == {"gfx942", "gfx950"}
    assert {a for a in ARCHS if real(a).env["VLLM_ROCM_USE_AITER"] == "1"} == {"gfx942", "gfx950"}


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_claimed_that_nobody_measured(arch: str) -> None:
    p = real(arch)
    assert not p.hardware_validated
    assert p.budget.basis == "computed"
    assert p.budget.pull_mb
    assert p.device
    assert p.device.products
    assert p.device.llc_mib


@pytest.mark.parametrize("arch", ARCHS)
def test_only_this_arch_is_asked_for(arch: str) -> None:
    p = real(arch)
    text = " ".join([*p.wheels.requires, *(n for names in p.wheels.layers.values() for n in names)])
    assert set(re.findall(r"gfx\d[0-9a-f]{2,3}\b(?![x-])", text)) == {arch}
    families = set(re.findall(r"amd-torch-device-(gfx\d+x|gfx12-0)", text))
    expected = {"rdna3": {"gfx110x"}, "rdna3_5": {"gfx115x"}, "rdna4": {"gfx12-0"}, "cdna": set()}
    assert families == expected[p.family]


@pytest.mark.parametrize("arch", ARCHS)
def test_vision_on_rdna_and_nodes_on_cdna(arch: str) -> None:
    p = real(arch)
    rdna = p.family.startswith("rdna")
    assert (p.env.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") == "TRUE") is rdna
    assert ("vision" in p.wheels.layers) is rdna
    nodes = {"ray", "flash-attn"} | (set() if arch == "gfx90a" else {"mori"})  # which has no code for gfx90a
    assert (nodes | {"mori"}) & p.wheels.layers.keys() == (set() if rdna else nodes)
    assert any(f.packages for f in p.features.values()) is not rdna


def test_a_feature_that_is_off_leaves_no_trace() -> None:
    p = real("gfx1151")
    assert not p.features["aiter"].enabled
    assert "aiter" not in p.wheels.layers
    assert not any("aiter" in requirement for requirement in p.wheels.requires)


def test_features_reach_the_wheels(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "arch", tmp_path / "arch")
    file = tmp_path / "arch" / "gfx1201.toml"
    switched = '\n[features.aiter]\nenabled = true\n[aiter]\nmode = "core"\n'
    file.write_text(file.read_text(encoding="utf-8") + switched, encoding="utf-8")
    p = profile.load(tmp_path, "gfx1201").profile
    assert p.wheels.layers["aiter"] == ("amd-aiter", "flydsl")
    assert "amd-aiter=={aiter}" in p.wheels.requires
    assert next(i for i in p.wheels.indexes if i.name == "vllm").packages[-1] == "amd-aiter"


def test_a_lane_is_chosen_by_name() -> None:
    own, vendor = real("gfx1151"), real("gfx1151", "vendor")
    assert (own.lane, set(own.lanes)) == ("wheel", {"source", "vendor"})
    assert (vendor.lane, set(vendor.lanes)) == ("vendor", {"source"})
    assert own.versions.vllm != vendor.versions.vllm
    assert {i.name for i in vendor.wheels.indexes} == {"rocm", "vllm-gfx11"}
    assert vendor.env["GPU_PINNED_MIN_XFER_SIZE"] == "4194304"
    origins = profile.load(ROOT, "gfx1151", "vendor").origins
    assert origins["versions.vllm"] == "arch/gfx1151.toml, lane vendor"


def test_source_lanes_build_vllm_and_say_with_what() -> None:
    for arch in ("gfx1102", "gfx1103"):
        p = real(arch)
        assert "vllm" in p.wheels.from_source
        assert not any("vllm" in index.packages for index in p.wheels.indexes)
        assert p.source_lane
        assert p.source_lane.archs == arch
        assert "TRITON_KERNELS_SRC_DIR" in p.source_lane.trees


def test_a_lane_that_is_not_offered_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        profile.load(ROOT, "gfx1102", "wheel")
    assert "source, vendor" in caught.value.hint


def test_a_misspelt_key_in_a_lane_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "arch", tmp_path / "arch")
    file = tmp_path / "arch" / "rdna3.toml"
    text = file.read_text(encoding="utf-8").replace("[lanes.vendor.versions]", "[lanes.vendor.version]")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        profile.load(tmp_path, "gfx1151")
    assert "lanes.vendor.version" in caught.value.message
    assert "versions" in caught.value.hint


@pytest.mark.parametrize("arch", ARCHS)
def test_the_committed_lock_fits_its_profile(arch: str) -> None:
    p = real(arch)
    dropped = cuts.load(ROOT, p).dropped
    found = lock.parse(lock.committed(ROOT, arch))
    assert found.state == "pins"
    assert found.profile == lock.wanted(p, dropped)
    assert not {w.name for w in found.wheels if w.layer != "builder"} & set(dropped)
    assert set(found.packages) == set(profile.packages(p))
    assert all(re.fullmatch(r"[0-9a-f]{64}", d.sha256) for debs in found.packages.values() for d in debs)
    sources = {name: index.name for index in p.wheels.indexes for name in index.packages}
    for wheel in found.wheels:
        assert wheel.source == sources.get(wheel.name, lock.PIP)
        if wheel.source == lock.PIP and wheel.name not in p.wheels.from_source:
            assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256), wheel.name
            assert wheel.file.endswith(".whl")
            assert wheel.size
        else:
            assert not wheel.sha256
    layers = {w.layer for w in found.wheels}
    assert layers == {"python", *p.wheels.layers}


@pytest.mark.parametrize("arch", ARCHS)
def test_pins_hold_the_versions_of_the_profile(arch: str) -> None:
    p = real(arch)
    pinned = {w.name: w.version for w in lock.parse(lock.committed(ROOT, arch)).wheels}
    v = p.versions
    assert pinned["torch"] == v.torch == "2.13.0+rocm10.0.0"
    assert pinned["triton"] == v.triton
    assert pinned["vllm"] == (v.vllm if p.lane == "source" else f"{v.vllm}+{v.variant}")
    assert pinned[f"rocm-sdk-device-{arch}"] == pinned["rocm"] == v.rocm
    assert {name for name, version in pinned.items() if not version} <= {"flash-attn"}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_base_brings_the_python_of_the_wheels(arch: str) -> None:
    p = real(arch)
    base = lock.parse(lock.committed(ROOT, arch)).base
    names = {package.name for package in base.packages}
    assert base.suite == p.base.suite
    assert set(p.base.packages) <= names
    assert f"python{p.versions.python}" in names
    assert not names & {"gcc", "gcc-13", "binutils"}
    assert (ROOT / "arch" / p.base.keyring).is_file()


def test_archs_of_one_base_share_time_and_python_layer() -> None:
    """The time stamp is in every file: with another one no layer is shared, whatever else is equal."""
    epochs: dict[str, set[int]] = {}
    layers = set()
    for arch in ARCHS:
        found = lock.parse(lock.committed(ROOT, arch))
        epochs.setdefault(repr(found.base), set()).add(found.epoch)
        layers.add(tuple(w for w in found.wheels if w.layer == "python"))
    assert all(len(found) == 1 for found in epochs.values())
    assert len(layers) == 1
