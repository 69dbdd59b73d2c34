"""`status`, `logs` and `exec`, as far as they need no container."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.unit.test_follow import put
from tests.unit.test_lease import DEAD, dead, one
from warmstart import container, engines, lease, masking, probe, processes
from warmstart.errors import NoEngine, UsageError


@pytest.fixture(autouse=True)
def no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def running(preset: str, **facts: object) -> lease.Lease:
    me = os.getpid()
    base = one(preset, port=8000, bytes=3 << 30)
    return msgspec.structs.replace(base, process=me, process_began=processes.began(me), **facts)


def test_nothing_runs(tmp_path: Path) -> None:
    told = engines.status(tmp_path)
    assert told["engines"] == []
    assert engines.text(told).startswith("no engine\nmemory: ")


def test_an_engine_that_runs(tmp_path: Path) -> None:
    lease.take(tmp_path / "run", running("a", state="ready", warning="1.0 GiB went to swap"), {})
    told = engines.status(tmp_path)
    line = engines.text(told).splitlines()[0]
    assert line.startswith("a: ready since ")
    assert line.endswith("cpu (3.0 GiB), http://127.0.0.1:8000/v1; 1.0 GiB went to swap")


@pytest.fixture
def no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """podman knows of none."""
    monkeypatch.setattr(probe, "probe", lambda _: None)
    monkeypatch.setattr(container, "look", lambda *_: None)


@pytest.mark.usefixtures("no_container")
def test_a_start_that_was_killed_before_it_had_a_container_is_forgotten(tmp_path: Path) -> None:
    stale = msgspec.structs.replace(one("a"), owner=DEAD, owner_began=1)
    lease.take(tmp_path / "run", stale, {})
    assert "a: gone since" in engines.text(engines.status(tmp_path))
    assert lease.read(tmp_path / "run") == ()


@pytest.mark.usefixtures("no_container")
def test_what_down_has_to_put_right_is_kept(tmp_path: Path) -> None:
    stale = msgspec.structs.replace(one("a", stopped=("llama.service",)), owner=DEAD, owner_began=1)
    lease.take(tmp_path / "run", stale, {})
    assert "`warmstart down a` starts llama.service again" in engines.text(engines.status(tmp_path))
    assert len(lease.read(tmp_path / "run")) == 1


def test_an_engine_that_was_stopped_for_its_memory_says_so(tmp_path: Path) -> None:
    lease.take(tmp_path / "run", dead("a", container_id="x", reason="only 0.3 GiB of memory is available"), {})
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
    lease.take(tmp_path / "run", dead("a"), {})
    with pytest.raises(NoEngine, match="does not run any more"):
        engines.execute(tmp_path, "", ["ls"], {})
