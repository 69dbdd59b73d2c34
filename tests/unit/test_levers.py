"""What makes a start short, as the plans of all archs have it: where caches lie, how weights are loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from warmstart import cuts, lock, plan, profile
from warmstart.plan import Plan

ROOT = Path(__file__).parents[2]
LANES = [(arch, lane) for arch in profile.archs(ROOT) for lane in ("", *profile.load(ROOT, arch).profile.lanes)]


def planned(arch: str, lane: str = "") -> Plan:
    """The plan of an arch in one of its lanes; with the lock of its own lane, which decides nothing here."""
    loaded = profile.load(ROOT, arch, lane)
    return plan.make(ROOT, loaded, lock.parse(lock.committed(ROOT, arch)), cuts.load(ROOT, loaded.profile))


@pytest.mark.parametrize(("arch", "lane"), LANES)
def test_tritons_cache_has_a_place_that_is_told(arch: str, lane: str) -> None:
    """Else vLLM and Inductor each choose one in their own caches, and the second start looks elsewhere."""
    made = planned(arch, lane)
    place = made.env["TRITON_CACHE_DIR"]
    assert place == made.caches["triton"] == f"/cache/{made.cache_key}/triton"
    assert not place.startswith((made.env["TORCHINDUCTOR_CACHE_DIR"], made.env["VLLM_CACHE_ROOT"]))


@pytest.mark.parametrize(("arch", "lane"), LANES)
def test_weights_are_loaded_as_the_memory_wants(arch: str, lane: str) -> None:
    made = planned(arch, lane)
    device = made.profile.device
    if device is None:
        assert "safetensors-load-strategy" not in made.profile.serve
        assert "WARMSTART_DROP_PAGES" not in made.env
    elif device.unified_memory:
        assert made.profile.serve["safetensors-load-strategy"] == "lazy"
        assert made.env["WARMSTART_DROP_PAGES"] == "1"
        assert made.env["VLLM_ENABLE_STARTUP_PLAN"] == "0"
    else:
        assert made.profile.serve["safetensors-load-strategy"] == "prefetch"
        assert "WARMSTART_DROP_PAGES" not in made.env
        assert made.env["VLLM_ENABLE_STARTUP_PLAN"] == "1"


def test_a_profile_can_switch_the_dropping_of_pages_off() -> None:
    """The profile's own ENV wins over what follows from its device."""
    loaded = profile.load(ROOT, "gfx1151")
    env = loaded.profile.env | {"WARMSTART_DROP_PAGES": "0"}
    loaded = msgspec.structs.replace(loaded, profile=msgspec.structs.replace(loaded.profile, env=env))
    locked = lock.parse(lock.committed(ROOT, "gfx1151"))
    assert plan.make(ROOT, loaded, locked, cuts.load(ROOT, loaded.profile)).env["WARMSTART_DROP_PAGES"] == "0"


def test_another_triton_has_another_key() -> None:
    """So a cache that another Triton filled is never looked into."""
    loaded = profile.load(ROOT, "gfx1151")
    versions = msgspec.structs.replace(loaded.profile.versions, triton="3.8.0+gitother")
    other = msgspec.structs.replace(loaded, profile=msgspec.structs.replace(loaded.profile, versions=versions))
    locked = lock.parse(lock.committed(ROOT, "gfx1151"))
    made = plan.make(ROOT, other, locked, cuts.load(ROOT, other.profile))
    assert made.cache_key != planned("gfx1151").cache_key
    assert made.env["TRITON_CACHE_DIR"] != planned("gfx1151").env["TRITON_CACHE_DIR"]
