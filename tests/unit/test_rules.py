"""Rules: every committed profile passes; each rule refuses a real profile that was broken in its one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import profile, rules
from warmstart.errors import RuleError
from warmstart.schema import Profile

ROOT = Path(__file__).parents[2]


def real(arch: str, lane: str = "") -> Profile:
    return profile.load(ROOT, arch, lane).profile


def broken(arch: str, changes: dict[str, Any], lane: str = "") -> Profile:
    """A committed profile with values replaced: dotted key → value; a table is merged into the one there."""
    data = msgspec.to_builtins(real(arch, lane))
    for key, value in changes.items():
        *path, last = key.split(".")
        table = data
        for name in path:
            table = table[name]
        table[last] = table[last] | value if isinstance(value, dict) else value
    return msgspec.convert(data, Profile)


def without(p: Profile, name: str) -> list[str]:
    return [r for r in p.wheels.requires if not r.startswith(name)]


def every() -> list[tuple[str, str]]:
    """All archs in all their lanes."""
    return [(arch, lane) for arch in profile.archs(ROOT) for lane in (real(arch).lane, *real(arch).lanes)]


@pytest.mark.parametrize(("arch", "lane"), every())
def test_every_committed_profile_passes(arch: str, lane: str) -> None:
    assert rules.findings(real(arch, lane)) == []
    rules.check(real(arch, lane))


OLD_INDEX = {"name": "old", "url": "https://rocm.nightlies.amd.com/v2/gfx1151/", "packages": ["vllm"]}
GFX942 = real("gfx942").wheels.requires
PINNED = {"GPU_PINNED_MIN_XFER_SIZE": "0"}

BREAKS: list[tuple[str, str, dict[str, Any]]] = [
    ("slow-warm-up", "gfx1151", {"versions.vllm": "0.21.0"}),
    ("slow-warm-up", "gfx1201", {"versions.vllm": "0.25.1"}),
    ("aiter-on-gfx11", "gfx1151", {"env": {"VLLM_ROCM_USE_AITER": "1"}}),
    ("python-of-the-wheel", "gfx942", {"versions.python": "3.13"}),
    ("old-rocm", "gfx1150", {"versions.rocm": "7.0.0"}),
    ("old-rocm", "gfx950", {"versions.rocm": "6.4.4"}),
    ("triton-breaks-aiter", "gfx942", {"versions.triton": "3.9.0"}),
    ("aiter-replaces-triton", "gfx942", {"wheels.from-source": {"amd-aiter": {}}}),
    ("aiter-without-flydsl", "gfx942", {"wheels.requires": without(real("gfx942"), "flydsl")}),
    ("aiter-mode", "gfx1100", {"aiter.mode": "core"}),
    ("aiter-mode", "gfx950", {"aiter.mode": "off"}),
    ("baked-variable", "gfx1102", {"env": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}),
    ("baked-variable", "gfx1151", {"env": {"GPU_ARCHS": "gfx1151"}}),
    ("baked-variable", "gfx1201", {"env": {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}}),
    ("unknown-set", "gfx1100", {"versions.torchvision": "0.27.0+rocm10.0.0"}),
    ("unknown-set", "gfx1100", {"versions.torchaudio": "2.13.0+rocm10.0.0"}),
    ("unknown-set", "gfx1100", {"versions.torch": "2.99.0+rocm10.0.0"}),
    ("mixed-rocm", "gfx90a", {"versions.torch": "2.13.0+rocm10.1.0"}),
    ("arch-not-in-wheel", "gfx1102", {"lane": "wheel"}),
    ("arch-not-in-wheel", "gfx1103", {"lane": "wheel"}),
    ("arch-not-in-wheel", "gfx1151", {"versions.vllm": "0.11.0"}),
    ("wrong-wave", "gfx1200", {"device.wave": 64}),
    ("wrong-wave", "gfx942", {"device.wave": 32}),
    ("gone-variable", "gfx1151", {"env": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}}),
    ("gone-variable", "gfx942", {"env": {"VLLM_ROCM_USE_AITER_PAGED_ATTN": "0"}}),
    ("needed-variable", "gfx1201", {"versions.vllm": "0.31.0"}),
    ("frozen-index", "gfx1151", {"wheels.indexes": [OLD_INDEX]}),
    ("all-devices", "gfx1151", {"device.extra": "device-all"}),
    ("all-devices", "gfx942", {"wheels.requires": [*GFX942, "torch[device-all]"]}),
    ("foreign-device", "gfx1151", {"device.extra": "device-gfx1150"}),
    ("foreign-device", "gfx942", {"wheels.requires": [*GFX942, "amd-torch-device-gfx950"]}),
    ("vllm-from-anywhere", "gfx1151", {"wheels.indexes": []}),
]


@pytest.mark.parametrize(("rule", "arch", "changes"), BREAKS)
def test_the_rule_refuses_what_it_is_for(rule: str, arch: str, changes: dict[str, Any]) -> None:
    found = rules.findings(broken(arch, changes))
    assert rule in {f.rule for f in found}
    for finding in found:
        assert finding.link.startswith("https://")
        assert "{" not in finding.reason


def test_every_rule_has_a_profile_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(rules._known().rule)


def test_what_only_looks_like_a_break_passes() -> None:
    fine: list[tuple[str, dict[str, Any]]] = [
        ("gfx1151", {"versions.vllm": "0.26.0", "env": PINNED}),
        ("gfx942", {"versions.vllm": "0.23.0", "env": PINNED}),  # the slow warm-up is RDNA's
        ("gfx1151", {"versions.vllm": "0.32.0"}),
        ("gfx1201", {"env": {"VLLM_ROCM_USE_AITER": "1"}}),  # vLLM has a switch for gfx12
        ("gfx1151", {"env": {"VLLM_ROCM_USE_AITER": "0"}}),
        ("gfx1151", {"versions.torchaudio": "2.11.0.2+rocm10.0.0"}),
        ("gfx942", {"wheels.from-source": {"amd-aiter": {"AITER_USE_SYSTEM_TRITON": "1"}}}),
    ]
    for arch, changes in fine:
        assert rules.findings(broken(arch, changes)) == [], (arch, changes)


def test_the_error_names_reason_link_and_all_others() -> None:
    both = broken("gfx1151", {"versions.vllm": "0.22.0", "env": {"GPU_ARCHS": "gfx1151"}})
    with pytest.raises(RuleError) as caught:
        rules.check(both)
    assert caught.value.code == 12
    assert "40 minutes" in caught.value.message
    assert "TheRock/issues/7896" in caught.value.hint
    assert "GPU_ARCHS" in caught.value.hint
    assert "\n" not in caught.value.message


def test_the_cpu_profile_is_not_judged_by_rules_of_gpus() -> None:
    assert rules.findings(broken("cpu", {"env": {"GPU_ARCHS": "gfx1151"}})) == []


def test_tables_of_the_data_are_in_order() -> None:
    known = rules._known()
    assert len({row.torch for row in known.set}) == len(known.set)
    assert len({row.name for row in known.gone}) == len(known.gone)
    assert {a for row in known.rocm for a in row.archs} == set(profile.archs(ROOT)) - {"cpu"}
