"""Kernels of the image before, compiled while weights are loaded: with real Triton wheels and a pretended GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_seed_replay import CONFIGS, KERNELS, LATEST, Machine

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


def test_another_model_has_other_kernels(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    _, done = after(tmp_path / "new", used, MODEL="me/other")
    assert len(done["compiled"]) + done["apart"] == KERNELS
    assert "add" in str(done["compiled"])  # which no autotuner had compiled apart


def test_what_was_begun_and_broken_off_is_done_by_the_next_start(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    new, _ = after(tmp_path / "new", used)
    (folder,) = (new.volume / "triton/warmstart-used").iterdir()
    assert (folder / "ahead").read_bytes() == b""
    for entry in (new.volume / "triton").glob("*/add.hsaco"):
        shutil.rmtree(entry.parent)
    _, told = after(tmp_path / "new", used)
    assert "add" in str(told["compiled"])  # it is done: nothing is looked at a second time
    for entry in (new.volume / "triton").glob("*/add.hsaco"):
        shutil.rmtree(entry.parent)
    (folder / "ahead").unlink()
    _, told = after(tmp_path / "new", used)
    assert told["compiled"] == []


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


def test_off(tmp_path: Path) -> None:
    _, used = before(tmp_path / "old")
    _, done = after(tmp_path / "new", used, WARMSTART_HOOK_WORKERS="0")
    assert (len(done["compiled"]), done["apart"]) == (KERNELS, 0)
