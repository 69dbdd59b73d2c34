"""`status`, `logs` and `exec`, as far as they need no container."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from tests.unit.test_follow import put
from tests.unit.test_lease import DEAD, dead, one
from warmstart import boxes, engines, lease, masking, processes, run
from warmstart.boxes import Listed
from warmstart.errors import NoEngine, UsageError
from warmstart.names import PRESET


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where leases lie."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "warmstart"


def running(preset: str, **facts: object) -> lease.Lease:
    me = os.getpid()
    base = one(preset, port=8000, bytes=3 << 30)
    return msgspec.structs.replace(base, process=me, process_began=processes.began(me), **facts)


def test_nothing_runs(tmp_path: Path) -> None:
    told = engines.status(tmp_path)
    assert told["engines"] == []
    assert engines.text(told).startswith("no engine\nmemory: ")


def test_an_engine_that_runs(tmp_path: Path) -> None:
    lease.take(tmp_path / "warmstart", running("a", state="ready", warning="1.0 GiB went to swap"), {})
    told = engines.status(tmp_path)
    line = engines.text(told).splitlines()[0]
    assert line.startswith("a: ready since ")
    assert line.endswith("cpu (3.0 GiB), http://127.0.0.1:8000/v1; 1.0 GiB went to swap")


def podman_lists(monkeypatch: pytest.MonkeyPatch, state: Path, *found: Listed) -> None:
    """podman knows these containers of presets."""
    rows = [
        {
            "Id": one.id,
            "Names": [one.name],
            "Labels": {PRESET: one.preset},
            "Pid": one.pid,
            "ExitCode": one.code,
            "StartedAt": one.started,
            "Created": 1_700_000_000,
            "Ports": None,
        }
        for one in found
    ]
    (state / "engine.json").write_text('{"key": "x", "capabilities": {"conf": "/c.conf", "variable": "CONF"}}')
    told = json.dumps(rows) if rows else ""

    def glance(words: list[str], *, env: dict[str, str]) -> str:
        assert (words[:2], env) == (["podman", "ps"], {"CONF": "/c.conf"})
        return told

    monkeypatch.setattr(run, "glance", glance)


@pytest.fixture
def no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman_lists(monkeypatch, tmp_path)


def box(preset: str, pid: int = 0, code: int = 1, **facts: str) -> Listed:
    known = {"name": lease.container_name(preset), "id": "c1"} | facts
    return Listed(preset=preset, pid=pid, code=code, started=1_800_000_000, **known)


def test_what_a_failed_start_left_is_listed_and_its_log_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    podman_lists(monkeypatch, tmp_path, box("a"))
    file = engines.new_log(tmp_path, "a")
    file.parent.mkdir(parents=True)
    put(file, "the end")
    told = engines.status(tmp_path)
    assert [(row["preset"], row["state"], row["log"]) for row in told["engines"]] == [("a", "ended", str(file))]
    line = engines.text(told).splitlines()[0]
    assert line.startswith("a: ended since ")
    assert line.endswith("; exit code 1; `.venv/bin/python build.py logs a` shows its end")
    engines.show_log(tmp_path, "", follow=False)
    engines.show_log(tmp_path, "", follow=True)
    assert capsys.readouterr().out.count("the end") == 2


def test_a_container_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman_lists(monkeypatch, tmp_path, box("a", pid=42, name="quadlet-a"))
    assert engines.text(engines.status(tmp_path)).splitlines()[0].endswith("; not by a lease here")
    with pytest.raises(NoEngine) as none:
        engines.show_log(tmp_path, "", follow=False)
    assert none.value.hint == "`podman logs quadlet-a` may have it"


def test_which_container_without_a_lease_is_meant(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quadlet, ours, other = box("a", pid=42, name="quadlet-a"), box("a"), box("b")
    podman_lists(monkeypatch, tmp_path, quadlet, ours, other)
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(UsageError, match="several containers") as several:
        boxes.stray(tmp_path, place)
    assert several.value.hint == "name one: PRESET=a or PRESET=b"
    assert boxes.stray(tmp_path, place, "a") == ours
    assert boxes.stray(tmp_path, place, "c") is None
    lease.take(place, running("c"), {})
    assert boxes.stray(tmp_path, place) is None  # an engine has a lease: that one is meant
    assert boxes.stray(tmp_path, place, "b") == other
    lease.take(place, running("b", devices=("0",)), {})
    assert boxes.stray(tmp_path, place, "b") is None
    shown = [(row["preset"], row["state"]) for row in engines.status(tmp_path)["engines"]]
    assert shown == [("c", "starting"), ("b", "starting"), ("a", "running"), ("a", "ended")]


def test_without_podman_leases_are_told_alone(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman_lists(monkeypatch, tmp_path, box("a"))

    lease.take(place, dead("b", container_id="c2"), {})
    for answer in (None, "nonsense", "[{}]"):
        monkeypatch.setattr(run, "glance", lambda *_, answer=answer, **__: answer)
        (row,) = engines.status(tmp_path)["engines"]
        assert (row["preset"], row["state"], row["bytes"]) == ("b", "ended", 0)
        assert "can't be asked" in row["why"]
    assert len(lease.read(place)) == 1  # it is not known to be gone


def test_a_container_that_never_ran() -> None:
    row = {"Id": "c", "Names": ["n"], "Labels": {PRESET: "a"}, "Pid": 0, "ExitCode": 0, "Created": 7}
    (found,) = boxes.read(json.dumps([row | {"StartedAt": -62135596800}]))
    assert found.started == 7


def test_an_engine_never_used_here_is_not_put_to_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman_lists(monkeypatch, tmp_path, box("a"))
    (tmp_path / "engine.json").unlink()
    assert engines.status(tmp_path)["engines"] == []


@pytest.mark.usefixtures("no_container")
def test_what_is_being_stopped_is_not_gone(tmp_path: Path, place: Path) -> None:
    """`down` removed the container, and has the lease still."""
    me = os.getpid()
    by = {"stopper": me, "stopper_began": processes.began(me)}
    held = dead("a", container_id="c1", state="stopping", **by)
    lease.take(place, msgspec.structs.replace(held, expires=time.time() + 9), {})
    assert "a: stopping since" in engines.text(engines.status(tmp_path))
    lease.update(place, held, stopper_began=1)  # it was killed over that
    assert "its container was removed" in engines.text(engines.status(tmp_path))
    assert lease.read(place) == ()


@pytest.mark.usefixtures("no_container")
def test_a_stop_that_was_broken_off_is_told(tmp_path: Path, place: Path) -> None:
    lease.take(place, running("a", state="stopping", stopper=os.getpid(), stopper_began=1), {})
    assert "a: stopping since" in engines.text(engines.status(tmp_path))
    assert "who stopped it was stopped too" in engines.text(engines.status(tmp_path))


@pytest.mark.usefixtures("no_container")
def test_a_start_that_was_killed_before_it_had_a_container_is_forgotten(tmp_path: Path) -> None:
    stale = msgspec.structs.replace(one("a"), owner=DEAD, owner_began=1)
    lease.take(tmp_path / "warmstart", stale, {})
    assert "a: gone since" in engines.text(engines.status(tmp_path))
    assert lease.read(tmp_path / "warmstart") == ()


@pytest.mark.usefixtures("no_container")
def test_what_down_has_to_put_right_is_kept(tmp_path: Path) -> None:
    stale = msgspec.structs.replace(one("a", stopped=("llama.service",)), owner=DEAD, owner_began=1)
    lease.take(tmp_path / "warmstart", stale, {})
    assert "`.venv/bin/python build.py down a` starts llama.service again" in engines.text(engines.status(tmp_path))
    assert len(lease.read(tmp_path / "warmstart")) == 1


def test_an_engine_that_was_stopped_for_its_memory_says_so(tmp_path: Path) -> None:
    lease.take(tmp_path / "warmstart", dead("a", container_id="x", reason="only 0.3 GiB of memory is available"), {})
    assert "a: stopped since" in engines.text(engines.status(tmp_path))
    assert "only 0.3 GiB" in engines.text(engines.status(tmp_path))


def test_logs_are_masked_and_outlive_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engines.log_file(tmp_path, "a") is None
    file = engines.new_log(tmp_path, "a")
    with pytest.raises(NoEngine):
        engines.show_log(tmp_path, "a", follow=False)
    file.parent.mkdir(parents=True)
    put(file, "token hf_abcdefghijklmnop here")
    engines.show_log(tmp_path, "a", follow=False)
    engines.show_log(tmp_path, "a", follow=True)  # nothing runs: it ends at once
    shown = capsys.readouterr().out
    assert shown.count(f"token hf_{masking.MASK} here") == 2


def test_exec_takes_its_command_from_behind_the_dashes() -> None:
    assert engines.split(["--", "ls", "-l"]) == ("", ["ls", "-l"])
    assert engines.split(["a", "--", "vllm", "--", "x"]) == ("a", ["vllm", "--", "x"])
    for words in ([], ["a"], ["a", "--"], ["a", "b", "--", "ls"], ["ls", "-l"]):
        with pytest.raises(UsageError):
            engines.split(words)


def test_exec_needs_an_engine_that_runs(tmp_path: Path) -> None:
    lease.take(tmp_path / "warmstart", dead("a"), {})
    with pytest.raises(NoEngine, match="does not run any more"):
        engines.execute(tmp_path, "", ["ls"], {})
