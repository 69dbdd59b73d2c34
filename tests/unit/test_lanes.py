"""Other lanes of an arch, wheels that the build makes, and the GPU of the machine that builds."""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec
import pytest

from warmstart import cuts, devicecode, elf, host, lock, madewheels, plan, profile, render
from warmstart.errors import HostUnsupported, InputError
from warmstart.inputs import wheelhouse
from warmstart.plan import Plan
from warmstart.profile import Profile

ROOT = Path(__file__).parents[2]


def make_wheel(file: Path, arch: str) -> None:
    """A wheel whose library holds device code for `arch`, or none."""
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", "Name: vllm")
        code = devicecode.bundle({arch: b"code"}) if arch else b""
        wheel.writestr("vllm/_C.abi3.so", elf.library("_C.abi3.so", device_code=code))


def make(own: Profile, slug: str, **more: bool) -> Plan:
    locked = lock.parse(lock.committed(ROOT, slug))
    return plan.make(ROOT, profile.Loaded(own, {}), locked, cuts.load(ROOT, own), **more)


def test_another_lane_has_its_own_lock_and_tag() -> None:
    own = profile.load(ROOT, "gfx1151", "vendor").profile
    assert (own.slug, profile.load(ROOT, "gfx1151").profile.slug) == ("gfx1151.vendor", "gfx1151")
    assert profile.load(ROOT, "gfx1151", "wheel").profile == profile.load(ROOT, "gfx1151").profile
    tags = make(own, "gfx1151.vendor").tags
    assert tags[1].endswith(":gfx1151-vendor")
    assert tags[0].startswith(f"{tags[1]}-vllm{own.versions.vllm}-")
    assert lock.relocked(Path("s"), own.slug) == Path("s/gfx1151/vendor.lock.json")


def test_sources_are_made_in_the_stage_that_has_what_they_need() -> None:
    made = {m.name: m for m in plan.made(make(profile.load(ROOT, "gfx1102").profile, "gfx1102"))}
    assert {name: m.within for name, m in made.items()} == {
        "rocm": "python",
        "flash-attn": "toolchain",
        "vllm": "builder",
    }
    assert made["vllm"].env["VLLM_TARGET_DEVICE"] == "rocm"
    assert made["flash-attn"].env["FLASH_ATTENTION_TRITON_AMD_ENABLE"] == "TRUE"


def test_nothing_of_the_builder_reaches_the_image() -> None:
    text = render.render(ROOT, make(profile.load(ROOT, "gfx1102").profile, "gfx1102"))
    runtime = "\n".join(render.stages(text)["runtime"])
    assert "from=builder" not in runtime
    assert "from=toolchain" not in runtime
    assert "packages@" not in runtime
    assert "PYTORCH_ROCM_ARCH=gfx1102" in "\n".join(render.stages(text)["made-vllm"])


def test_a_made_wheel_is_installed_and_not_made_again(tmp_path: Path) -> None:
    own = profile.load(ROOT, "gfx1102").profile
    locked = lock.parse(lock.committed(ROOT, "gfx1102"))
    file = tmp_path / "vllm-0.33.0-cp312-cp312-linux_x86_64.whl"
    make_wheel(file, "gfx1102")
    content = file.read_bytes()
    wheels = madewheels.adopt(tmp_path / "state", own, locked.wheels, [file])
    place = wheelhouse(tmp_path / "state") / "vllm-0.33.0-0gfx1102-cp312-cp312-linux_x86_64.whl"
    assert place.read_bytes() == content
    assert next(w.file for w in wheels if w.name == "vllm") == place.name
    again = msgspec.structs.replace(locked, wheels=wheels)
    planned = plan.make(ROOT, profile.Loaded(own, {}), lock.validate(again, own), cuts.load(ROOT, own))
    assert "vllm" not in {m.name for m in plan.made(planned)}
    text = render.render(ROOT, planned)
    assert "made-vllm" not in text
    assert "FROM toolchain AS builder" not in text  # nothing is compiled, so no compilers are needed


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("vllm.whl", "gfx1102", "no name of a wheel"),
        ("vllm-0.32.0-cp312-cp312-linux_x86_64.whl", "gfx1102", "is not vllm 0.33.0"),
        ("vllm-0.33.0-cp311-cp311-linux_x86_64.whl", "gfx1102", "does not run on"),
        ("vllm-0.33.0-cp312-cp312-linux_x86_64.whl", "gfx1103", "is made for gfx1103, not for gfx1102"),
        ("vllm-0.33.0-cp312-cp312-linux_x86_64.whl", "", "is made for no GPU"),
        ("vllm-0.33.0-cp312-cp312-linux_x86_64.whl", "text", "is no wheel"),
        ("torch-2.13.0-cp312-cp312-linux_x86_64.whl", "gfx1102", "makes no torch from sources"),
        ("missing-1.0-py3-none-any.whl", "", "can't be read"),
    ],
)
def test_wheels_that_are_not_the_made_one(tmp_path: Path, name: str, code: str, told: str) -> None:
    own = profile.load(ROOT, "gfx1102").profile
    locked = lock.parse(lock.committed(ROOT, "gfx1102"))
    if code == "text":
        (tmp_path / name).write_text("no wheel", encoding="utf-8")
    elif not name.startswith("missing"):
        make_wheel(tmp_path / name, code)
    with pytest.raises(InputError, match=told):
        madewheels.adopt(tmp_path / "state", own, locked.wheels, [tmp_path / name])
    assert not wheelhouse(tmp_path / "state").exists()


def test_the_device_of_the_build(tmp_path: Path) -> None:
    assert not host.build_device("auto", tmp_path)
    assert not host.build_device("never", tmp_path)
    with pytest.raises(HostUnsupported, match="--device always"):
        host.build_device("always", tmp_path)
    (tmp_path / "dri").mkdir()
    (tmp_path / "kfd").touch()
    assert host.build_device("auto", tmp_path)
    assert host.build_device("always", tmp_path)
    assert not host.build_device("never", tmp_path)


def test_the_device_matters_only_where_aiters_core_is_built() -> None:
    own = profile.load(ROOT, "gfx942").profile
    assert make(own, "gfx942", device=True).plan_id == make(own, "gfx942").plan_id
    core = msgspec.structs.replace(own, aiter=profile.load(ROOT, "gfx942").profile.aiter.__class__(mode="core"))
    assert make(core, "gfx942", device=True).aiter == "device"
    assert "aiter_prebuild.py device" in render.render(ROOT, make(core, "gfx942", device=True))
    assert "aiter_prebuild.py core" in render.render(ROOT, make(core, "gfx942"))


def test_shared_layers_depend_on_no_arch() -> None:
    """Up to vLLM all archs of a lane have the same layers: their blobs are pushed and pulled once."""
    shared = ("python", "rocm", "torch", "vllm")
    plans = [make(profile.load(ROOT, arch).profile, arch) for arch in ("gfx1151", "gfx1201", "gfx942")]
    for layer in shared:
        assert len({plan.inputs[f"cuts/{layer}"] for plan in plans}) == 1, layer
    for layer in ("rocm", "torch", "vllm"):
        assert len({plan.inputs[f"lock/{layer}"] for plan in plans}) == 1, layer
