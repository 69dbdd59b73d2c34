"""How a start came out: which error it is, and what is kept of a good one. The container is made up here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.test_follow import put
from tests.unit.test_lease import one
from warmstart import container, lease, outcome, processes, starts, startup
from warmstart.container import Seen
from warmstart.engine import Capabilities
from warmstart.errors import EngineStopped, MemoryPressure, StartFailed
from warmstart.startup import Startup

CAPS = cast(Capabilities, None)  # what would need it is replaced
BEGIN = 1_800_000_000.0


def seen(log: Path, **facts: Any) -> Seen:
    known: dict[str, Any] = {
        "id": "c1",
        "status": "exited",
        "pid": 0,
        "code": 1,
        "oom": False,
        "started": BEGIN,
        "cache": "",
    }
    return Seen(log=str(log), **(known | facts))


def followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *texts: str, found: Seen | None = None, **facts: Any
) -> Startup:
    """A start that was followed to its end; `found` is what is left of its container."""
    log = tmp_path / "log"
    for second, text in enumerate(texts, start=1):
        put(log, text, second=second)
    monkeypatch.setattr(container, "look", lambda *_: found)
    monkeypatch.setattr(startup, "RETURN", 0.0)
    follows = Startup(CAPS, seen(log, **facts), 1)
    follows.step()
    return follows


def test_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lease.take(tmp_path, one("a"), {})
    lines = "Starting to load model x...", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.37 GiB."
    follows = followed(tmp_path, monkeypatch, *lines, found=seen(tmp_path / "log"))
    assert follows.state == "ended"
    failure = outcome.ended(tmp_path, "a", follows)
    assert isinstance(failure, StartFailed)
    assert failure.message == (
        "a ended in the phase weights (exit code 1): the device's memory ran out while the model was loaded or profiled"
    )
    assert "kv-cache-memory-bytes" in failure.hint
    assert failure.hint.endswith("; `.venv/bin/python build.py logs a` shows its whole log")
    assert "Starting to load model" in capsys.readouterr().err


def test_killed_for_memory_as_podman_saw_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.take(tmp_path, one("a"), {})
    follows = followed(tmp_path, monkeypatch, "x", found=seen(tmp_path / "log", code=1, oom=True))
    assert "because memory ran out" in outcome.ended(tmp_path, "a", follows).message


def test_it_ended_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.take(tmp_path, one("a"), {})
    failure = outcome.ended(tmp_path, "a", followed(tmp_path, monkeypatch, found=seen(tmp_path / "log", code=3)))
    assert failure.message == "a ended in the phase import (exit code 3): exit code 3"
    assert failure.hint == "`.venv/bin/python build.py logs a` shows its whole log"


def test_commands_are_told_as_the_user_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.take(tmp_path, one("a"), {})
    monkeypatch.setenv("MAKELEVEL", "1")
    follows = followed(tmp_path, monkeypatch, "Failed to infer device type, please", found=seen(tmp_path / "log"))
    hint = outcome.ended(tmp_path, "a", follows).hint
    assert "`make doctor`" in hint
    assert "`make logs PRESET=a`" in hint
    assert "warmstart" not in hint


def test_before_its_first_line_a_start_lasts_as_long_as_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's imports alone take ten seconds in which nothing is written."""
    monkeypatch.setattr(processes, "began", lambda *_: 7)
    began = time.time() - 9
    follows = Startup(CAPS, seen(tmp_path / "log", status="running", pid=42, started=began), 1)
    follows.step()
    (phase,) = follows.record().phases
    assert phase.name == "import"
    assert phase.seconds == pytest.approx(9, abs=0.4)
    assert startup.live(follows.record(), {"import": 20.0}).startswith("import 9 s, about 11 s left")


def test_it_was_removed_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = one("a")
    lease.take(tmp_path, mine, {})
    assert isinstance(outcome.ended(tmp_path, "a", followed(tmp_path, monkeypatch, found=None)), EngineStopped)
    still = seen(tmp_path / "log")
    lease.update(tmp_path, mine, state="stopping")
    assert isinstance(outcome.ended(tmp_path, "a", followed(tmp_path, monkeypatch, found=still)), EngineStopped)
    lease.release(tmp_path, mine)
    assert isinstance(outcome.ended(tmp_path, "a", followed(tmp_path, monkeypatch, found=still)), EngineStopped)


def test_it_was_stopped_for_the_machine_s_sake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = one("a")
    lease.take(tmp_path, mine, {})
    lease.update(tmp_path, mine, reason="only 0.3 GiB of memory is available")
    failure = outcome.ended(tmp_path, "a", followed(tmp_path, monkeypatch, found=seen(tmp_path / "log")))
    assert isinstance(failure, MemoryPressure)
    assert failure.message == "a was stopped: only 0.3 GiB of memory is available"


def test_a_good_start_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = one("a", image="sha256:abc")
    lease.take(tmp_path / "run", mine, {})
    lines = "Starting to load model x...", "INFO:     Application startup complete."
    follows = followed(tmp_path, monkeypatch, *lines)
    assert (follows.state, follows.answered) == ("ready", BEGIN + 2)
    outcome.finish(tmp_path, tmp_path / "run", mine, follows, keep=True)
    assert lease.read(tmp_path / "run")[0].state == "ready"
    assert [(start.began, start.wall) for start in starts.of(tmp_path, "a")] == [(BEGIN, 2.0)]


def test_lines_of_the_start_before_are_not_this_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was restarted has both in one file."""
    put(tmp_path / "log", "INFO:     Application startup complete.", second=-5)
    put(tmp_path / "log", "written while podman noted the time of the start", second=-0.1)
    follows = followed(tmp_path, monkeypatch, "later", found=seen(tmp_path / "log"))
    assert follows.state == "ended"
    assert [*follows.lines] == ["written while podman noted the time of the start", "later"]


def test_the_first_lines_count_however_late_podman_notes_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine that takes it seconds."""
    monkeypatch.setattr(processes, "began", lambda *_: 7)
    monkeypatch.setattr(processes, "when", {7: BEGIN - 4.0}.__getitem__)
    put(tmp_path / "log", "of the start before", second=-4.1)
    put(tmp_path / "log", "Starting to load model x...", second=-3.9)
    follows = followed(tmp_path, monkeypatch, "INFO:     Application startup complete.", status="running", pid=42)
    assert follows.state == "ready"
    assert [*follows.lines] == ["Starting to load model x...", "INFO:     Application startup complete."]


@pytest.mark.parametrize("status", startup.UNSETTLED)
def test_it_has_not_ended_until_podman_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Its process is gone, but not yet noticed, or the container is just being removed."""
    found = seen(tmp_path / "log", status=status, code=0)
    follows = followed(tmp_path, monkeypatch, "one", found=found)
    assert follows.state == "starting"
    monkeypatch.setattr(container, "look", lambda *_: seen(tmp_path / "log", code=137))
    follows.step()
    assert (follows.state, follows.seen.code) == ("ended", 137)


def test_a_restart_is_a_new_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = seen(tmp_path / "log", status="running", pid=42, started=BEGIN + 10)
    monkeypatch.setattr(processes, "began", lambda pid, *_: 7 if pid == 42 else 0)
    monkeypatch.setattr(processes, "when", {7: BEGIN + 9.9}.__getitem__)
    put(tmp_path / "log", "Starting to load model x...", second=12)
    follows = followed(tmp_path, monkeypatch, "Resolved architecture: X", found=again)
    assert (follows.state, follows.process) == ("starting", (42, 7))
    put(tmp_path / "log", "INFO:     Application startup complete.", second=15)
    follows.step()
    assert follows.state == "ready"
    assert follows.record().seconds == pytest.approx(5.0)


def test_silence_is_counted_from_the_last_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follows = followed(tmp_path, monkeypatch, "one", found=seen(tmp_path / "log"))
    assert follows.silent == pytest.approx(time.time() - BEGIN - 1, abs=5)
