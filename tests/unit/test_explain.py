"""explain: what changed against another plan, and which layers that rebuilds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from warmstart import cuts, explain, lock, plan, profile, render
from warmstart.errors import InputError
from warmstart.plan import Plan
from warmstart.profile import Loaded, Profile

ROOT = Path(__file__).parents[2]


def make(changed: Profile | None = None) -> Plan:
    loaded = profile.load(ROOT, "cpu")
    locked = lock.parse(lock.committed(ROOT, "cpu"))
    return plan.make(ROOT, Loaded(changed or loaded.profile, {}), locked, cuts.load(ROOT, loaded.profile))


def keep(state: Path, planned: Plan) -> None:
    """Leave a plan as the last build's."""
    folder = state / planned.arch
    folder.mkdir(parents=True)
    (folder / "built-plan.json").write_bytes(msgspec.json.encode(planned))
    (folder / "Containerfile").write_text(render.render(ROOT, planned), encoding="utf-8")


def told(state: Path, planned: Plan, against: str = "") -> explain.Explained:
    return explain.explain(state, planned, render.render(ROOT, planned), against)


def test_nothing_was_built(tmp_path: Path) -> None:
    found = told(tmp_path, make())
    assert found.before == ""
    assert set(found.rebuilds) >= {"os", "python", "torch", "vllm", "runtime"}


def test_nothing_changed(tmp_path: Path) -> None:
    keep(tmp_path, make())
    found = told(tmp_path, make())
    assert (found.changes, found.rebuilds) == ((), {})
    assert explain.text(found).startswith("nothing changed")


def test_an_env_value_rebuilds_no_files_but_the_manifest(tmp_path: Path) -> None:
    real = profile.load(ROOT, "cpu").profile
    keep(tmp_path, make())
    found = told(tmp_path, make(msgspec.structs.replace(real, env=real.env | {"NEW": "1"})))
    assert [c.what for c in found.changes] == ["profile env.NEW"]
    assert list(found.rebuilds) == ["runtime"]
    assert not any("cp -a" in step for step in found.rebuilds["runtime"])
    assert found.same_cache_key


def test_another_torch_says_that_caches_are_new(tmp_path: Path) -> None:
    real = profile.load(ROOT, "cpu").profile
    versions = msgspec.structs.replace(real.versions, torch="9.9")
    keep(tmp_path, make())
    found = told(tmp_path, make(msgspec.structs.replace(real, versions=versions)))
    assert not found.same_cache_key
    assert "first start is cold" in explain.text(found)


def test_against_what_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is not a plan"):
        told(tmp_path, make(), str(tmp_path / "x.json"))
