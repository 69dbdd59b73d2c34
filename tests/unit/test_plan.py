"""The plan: every profile field that reaches the image changes its id, and only what must changes the cache key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import cuts, lock, plan, profile, render
from warmstart.errors import ProfileError
from warmstart.plan import Plan
from warmstart.profile import NOT_IN_IMAGE, Loaded, Profile

ROOT = Path(__file__).parents[2]


def make(root: Path, loaded: Loaded, locked: lock.Lock | None = None) -> Plan:
    arch = loaded.profile.arch
    return plan.make(root, loaded, locked or lock.parse(lock.committed(ROOT, arch)), cuts.load(root, loaded.profile))


@pytest.fixture(scope="module")
def cpu() -> Plan:
    return make(ROOT, profile.load(ROOT, "cpu"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all that a plan digests."""
    for name in ("arch", "image", "sitecustomize", "caches", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Containerfile.j2", tmp_path)
    return tmp_path


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list() | tuple():
            return [*value, changed(value[0])] if value and isinstance(value[0], str) else [*value, *value] or ["x"]
    raise AssertionError(f"no other value for {value!r}")


def variants(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """(dotted key, a copy of the whole with that one value changed) for every value of a nested dict."""
    found = []
    for name, inner in value.items():
        dotted = f"{key}{name}"
        if isinstance(inner, dict) and inner:
            found += [(k, value | {name: v}) for k, v in variants(inner, f"{dotted}.")]
        elif inner is None or inner == {}:
            continue
        elif name == "schema":
            continue  # one value only
        else:
            found.append((dotted, value | {name: changed(inner)}))
    return found


CLOSED = {"lane", "base.kind", "family", "arch", "patches", "device.wave", "aiter.mode", "budget.basis", "default-lane"}


def loose(data: dict[str, Any], arch: str) -> Loaded:
    """A profile from data that may hold values outside of the allowed choices: the plan must not care."""
    real = profile.load(ROOT, arch).profile
    table = msgspec.convert({**data, "lane": real.lane, "base": {**data["base"], "kind": real.base.kind}}, Profile)
    return Loaded(table, {})


@pytest.mark.parametrize("arch", [a for a in ("cpu", "gfx1151") if a in profile.archs(ROOT)])
def test_every_field_that_reaches_the_image_changes_the_id(arch: str) -> None:
    real = profile.load(ROOT, arch)
    before = make(ROOT, real).plan_id
    walked = 0
    for key, data in variants(msgspec.to_builtins(real.profile)):
        if key in CLOSED:
            continue  # closed choices, covered below
        after = make(ROOT, loose(data, arch)).plan_id
        walked += 1
        if key.partition(".")[0] in NOT_IN_IMAGE:
            assert after == before, f"{key} changes no byte of the image, but its id"
        else:
            assert after != before, f"{key} reaches the image, but not the plan id"
    assert walked > 20


def test_closed_choices_change_the_id(cpu: Plan) -> None:
    real = profile.load(ROOT, "cpu").profile
    for other in (
        msgspec.structs.replace(real, lane="source"),
        msgspec.structs.replace(real, base=msgspec.structs.replace(real.base, kind="image")),
        msgspec.structs.replace(real, family="x"),
    ):
        assert make(ROOT, Loaded(other, {})).plan_id != cpu.plan_id


def test_every_profile_field_is_in_the_walk_or_named() -> None:
    """A new field can't be forgotten: it is either walked above or one of the closed choices."""
    data = msgspec.to_builtins(profile.load(ROOT, "cpu").profile)
    assert set(data) == {f.encode_name for f in msgspec.structs.fields(Profile)}


@pytest.mark.parametrize(
    "part", ["Containerfile.j2", "image/start", "sitecustomize/warmstart_hooks.py", "caches/caches.toml"]
)
def test_every_part_of_the_tree_changes_the_id(tree: Path, part: str, cpu: Plan) -> None:
    loaded = profile.load(ROOT, "cpu")
    assert make(tree, loaded).plan_id == cpu.plan_id
    with (tree / part).open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    assert make(tree, loaded).plan_id != cpu.plan_id


def test_byte_code_and_time_of_the_tree_do_not(tree: Path, cpu: Plan) -> None:
    (tree / "sitecustomize/__pycache__").mkdir(exist_ok=True)
    (tree / "sitecustomize/__pycache__/x.cpython-311.pyc").write_bytes(b"x")
    (tree / "image/start").touch()
    assert make(tree, profile.load(ROOT, "cpu")).plan_id == cpu.plan_id


def test_a_lock_with_another_hash_changes_the_id(cpu: Plan) -> None:
    locked = lock.parse(lock.committed(ROOT, "cpu"))
    first = msgspec.structs.replace(locked.wheels[0], sha256="0" * 64)
    other = make(ROOT, profile.load(ROOT, "cpu"), msgspec.structs.replace(locked, wheels=(first, *locked.wheels[1:])))
    assert other.plan_id != cpu.plan_id
    assert other.cache_key == cpu.cache_key


@pytest.mark.parametrize(("key", "same"), [("title", True), ("source", True)])
def test_a_label_throws_no_cache_away(cpu: Plan, key: str, same: bool) -> None:
    real = profile.load(ROOT, "cpu").profile
    image = msgspec.structs.replace(real.image, **{key: "other"})
    other = make(ROOT, Loaded(msgspec.structs.replace(real, image=image), {}))
    assert (other.cache_key == cpu.cache_key) is same
    assert other.plan_id != cpu.plan_id


@pytest.mark.parametrize("version", ["python", "vllm", "torch", "triton", "rocm", "aiter"])
def test_what_a_kernel_depends_on_changes_the_cache_key(cpu: Plan, version: str) -> None:
    real = profile.load(ROOT, "cpu").profile
    versions = msgspec.structs.replace(real.versions, **{version: "9.9"})
    other = make(ROOT, Loaded(msgspec.structs.replace(real, versions=versions), {}))
    assert other.cache_key != cpu.cache_key


def test_id_is_not_over_tags_and_labels(cpu: Plan) -> None:
    assert cpu.plan_id in cpu.labels["org.opencontainers.image.revision"]
    assert cpu.tags[0].endswith(cpu.plan_id[:12])


def test_a_plan_survives_json(cpu: Plan) -> None:
    assert msgspec.json.decode(msgspec.json.encode(cpu), type=Plan) == cpu


def test_first_change_names_the_stage_and_its_rest(tree: Path, cpu: Plan) -> None:
    (tree / "sitecustomize/warmstart_hooks.py").write_text("", encoding="utf-8")
    old = render.render(ROOT, cpu)
    new = render.render(tree, make(tree, profile.load(ROOT, "cpu")))
    changes = render.first_change(old, new)
    assert list(changes) == ["runtime"]
    stage = render.stages(new)["runtime"]
    assert "sitecustomize@" in stage[changes["runtime"][0]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('env = ["VLLM_CACHE_ROOT"]', 'env = "VLLM_CACHE_ROOT"'),
        ('path = "vllm"', 'path = "../../etc"'),
        ('volume = "/cache"', "volume = 3"),
        ('name = "vllm"', 'nam = "vllm"'),
        ('models = "/models"', 'models = "/models; touch /x"'),
    ],
)
def test_a_bad_table_of_caches_is_refused(tree: Path, old: str, new: str) -> None:
    file = tree / "caches/caches.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"caches\.toml"):
        make(tree, profile.load(ROOT, "cpu"))
