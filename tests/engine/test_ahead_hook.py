"""Kernels of the image before, compiled while weights are loaded: with real Triton wheels and a pretended GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_seed_replay import CONFIGS, KERNELS, LATEST, ROOT, Machine, tool

pytestmark = pytest.mark.net
FOUND = KERNELS - 1  # the kernel that a function makes has no name to find it by


def before(folder: Path, version: str = LATEST) -> tuple[Machine, Path]:
    """A machine whose image has served the model, and what that left for the next image."""
    machine = Machine(folder, version, "gfx1151", 32)
    first = machine.use(MODEL="me/tiny")
    assert (len(first["compiled"]), first["said"]) == (KERNELS, [])
    return machine, machine.volume / "triton" / "warmstart-used"


def after(folder: Path, used: Path, version: str = LATEST, **env: str) -> tuple[Machine, Any]:
    """The next image's first start of the model on a machine with some processors, and what it did."""
    machine = Machine(folder, version, "gfx1151", 32)
    apart = {"APART": "1", "WARMSTART_HOOK_WORKERS": "1", "MODEL": "me/tiny", "SLOWLY": "1"}
    return machine, machine.use(**{**apart, "WARMSTART_AHEAD": str(used), **env})


def names(used: Path) -> list[str]:
    """The names of all descriptions of the one model."""
    (folder,) = used.iterdir()
    return sorted(path.name for path in folder.glob("*.json"))


@pytest.mark.parametrize("version", [LATEST, "3.6.0"])
def test_all_that_the_image_before_used_is_compiled_before_it_is_needed(tmp_path: Path, version: str) -> None:
    """Also where that had another Triton, whose keys are other ones."""
    old, used = before(tmp_path / "old", version)
    new, done = after(tmp_path / "new", used)
    assert [row.partition(" ")[0] for row in done["compiled"]] == ["scale"]
    assert (done["apart"], len(done["benched"]), done["said"]) == (FOUND, CONFIGS, [])
    assert done["winners"] == old.use()["winners"]
    assert (len(names(used)), len(names(new.volume / "triton/warmstart-used"))) == (KERNELS, KERNELS)
    again = new.use(MODEL="me/tiny", WARMSTART_AHEAD=str(used))
    assert (again["compiled"], again["benched"], again["apart"]) == ([], [], 0)


def test_what_is_in_work_is_waited_for_and_compiled_once(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    start = tmp_path / "start.jsonl"
    new, done = after(tmp_path / "new", used, SLOWLY="", WARMSTART_START=str(start))
    told = [json.loads(line) for line in start.read_text().splitlines()]
    assert [event["kernels"] for event in told if event["event"] == "ahead"] == [FOUND]
    compiled = [event for event in told if event["event"] == "compile"]
    tuned = [event for event in compiled if event["name"] == "tuned"]
    assert len(tuned) == CONFIGS
    assert {event["where"] for event in tuned} <= {"ahead", "worker"}
    assert len(list((new.volume / "triton").glob("*/tuned.hsaco"))) == CONFIGS
    assert len(done["benched"]) == CONFIGS


@pytest.mark.parametrize("version", [LATEST, "3.6.0"])
def test_a_kernel_without_an_autotuner_is_not_compiled_beside_a_worker(tmp_path: Path, version: str) -> None:
    _, used = before(tmp_path / "old", version)
    _, done = after(tmp_path / "new", used, version, SLOWLY="", PAUSE="2")
    assert [row.partition(" ")[0] for row in done["compiled"]] == ["scale"]
    assert (done["apart"], done["launched"] > CONFIGS, done["said"]) == (FOUND, True, [])


def test_another_model_has_other_kernels(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    _, done = after(tmp_path / "new", used, MODEL="me/other")
    assert len(done["compiled"]) + done["apart"] == KERNELS
    assert "add" in str(done["compiled"])  # which no autotuner had compiled apart


def test_what_was_broken_off_is_done_by_the_next_start(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    new, _ = after(tmp_path / "new", used)
    (mark,) = (new.volume / "triton/warmstart-used").glob("*/ahead")
    assert mark.read_bytes() == b""

    def without_add() -> Any:
        for entry in (new.volume / "triton").glob("*/add.hsaco"):
            shutil.rmtree(entry.parent)
        return after(tmp_path / "new", used)[1]["compiled"]

    assert "add" in str(without_add())  # it was done: nothing is looked at a second time
    mark.write_text("begun")
    assert without_add() == []


def test_what_could_not_be_compiled_is_not_done(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    (folder,) = used.iterdir()
    row = json.loads(next(folder.glob("*.json")).read_text())
    row["spec"]["signature"]["x"] = "*nonsense"
    (folder / "0.json").write_text(json.dumps(row))
    new, done = after(tmp_path / "new", used)
    assert done["apart"] == FOUND
    (mark,) = (new.volume / "triton/warmstart-used").glob("*/ahead")
    assert mark.read_text() == "begun"
    after(tmp_path / "new", used)  # once more, and that is all
    assert mark.read_text() == ""


def test_what_is_no_description_is_passed_over(tmp_path: Path) -> None:
    """A volume can hold anything: other kernels, things that are no JSON, a pipe."""
    _, used = before(tmp_path / "old")
    (folder,) = used.iterdir()
    good = json.loads(next(folder.glob("*.json")).read_text())
    for number, row in enumerate(
        [{}, [], good | {"kernel": "gone"}, good | {"module": "gone"}, good | {"spec": {}}, good | {"options": 1}]
    ):
        (folder / f"{number}.json").write_text(json.dumps(row))
    (folder / "broken.json").write_text("[" * 100_000)
    os.mkfifo(folder / "pipe.json")
    _, done = after(tmp_path / "new", used)
    assert (done["apart"], done["said"]) == (FOUND, [])


OWN = """
import triton
import triton.language as tl

@triton.jit
def own(x, {parameters}, B: tl.constexpr):
    at = tl.arange(0, B)
    value = tl.load(x + at)
    tl.store(x + at, {value})

def use(x):
    own[(1,)](x, {arguments}, B=64)
"""
AMBIGUOUS = {  # what Triton's key does not tell apart: parameters and value in the old image, and in the new one
    "a string that names a type": (
        ("KIND: tl.constexpr", "value * 2 if KIND == 'fp16' else value * 3", "KIND='fp16'"),
        ("KIND: tl.constexpr", "value * 2 if KIND == 'fp16' else value * 3", "KIND='fp16'"),
    ),
    "parameters in another order": (
        ("scale, shift", "value if scale is None else value * 5", "shift=7, scale=None"),
        ("shift, scale", "value if shift is None else value + shift", "shift=7, scale=None"),
    ),
}


@pytest.mark.parametrize("version", [LATEST, "3.6.0"])
@pytest.mark.parametrize("what", AMBIGUOUS)
def test_no_kernel_has_the_code_of_another(tmp_path: Path, what: str, version: str) -> None:
    """Compiled ahead, from a record, or when it is launched: the same key, the same code."""
    here = tmp_path / "own_kernels.py"  # one place: code holds the path of its source
    old, new, alone, seeded = (Machine(tmp_path / name, version, "gfx1151", 32) for name in "abcd")
    for machine in (old, new, alone, seeded):
        machine.folder.mkdir()
        machine.path += f":{tmp_path}"
    texts = [OWN.format(parameters=p, value=v, arguments=a) for p, v, a in AMBIGUOUS[what]]
    here.write_text(texts[0])
    old.use("own", MODEL="me/tiny", WARMSTART_RECORD=str(old.folder / "rows"))
    tool(old.python(ROOT / "caches/record.py", old.folder / "rows", "-o", old.folder / "record.json"))
    here.write_text(texts[1])
    apart = {"APART": "1", "WARMSTART_HOOK_WORKERS": "1", "SLOWLY": "1"}
    new.use("own", MODEL="me/tiny", WARMSTART_AHEAD=str(old.volume / "triton/warmstart-used"), **apart)
    seeded.replayed(old.folder / "record.json")
    for machine in (alone, seeded):
        machine.use("own")
    right = code(alone.volume)
    assert len(right) == 1
    for machine in (new, seeded):
        assert {key: code(machine.volume).get(key) for key in right} == right, machine.folder.name


def code(volume: Path) -> dict[str, bytes]:
    """Triton's key of each kernel in a cache → its code."""
    return {file.parent.name: file.read_bytes() for file in (volume / "triton").glob("*/*.hsaco")}


@pytest.mark.parametrize("version", [LATEST, "3.6.0"])
def test_what_json_can_not_hold_is_launched_all_the_same(tmp_path: Path, version: str) -> None:
    machine = Machine(tmp_path, version, "gfx1151", 32)
    parameters, value = "KINDS: tl.constexpr", "value.to(KINDS[0]).to(tl.float32)"
    text = OWN.format(parameters=parameters, value=value, arguments="KINDS=(tl.float16, tl.bfloat16)")
    (tmp_path / "own_kernels.py").write_text(text)
    machine.path += f":{tmp_path}"
    for env in ({"MODEL": "me/tiny"}, {"WARMSTART_RECORD": str(tmp_path / "rows"), "MODEL": "me/other"}):
        assert machine.use("own", **env)["launched"] == 1
    assert not list((machine.volume / "triton/warmstart-used").glob("*/*.json"))
    assert "left out" in next((tmp_path / "rows").iterdir()).read_text()


def test_off(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    _, done = after(tmp_path / "new", used, WARMSTART_HOOK_WORKERS="0")
    assert (len(done["compiled"]), done["apart"]) == (KERNELS, 0)
