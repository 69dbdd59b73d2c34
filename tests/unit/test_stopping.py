"""`down` without podman: what the lease says while a container is stopped, and which container is meant."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.unit.test_engines import box, place, podman_lists, running
from warmstart import container, control, engines, holders, lease, run, runline, stopping
from warmstart.engine import Capabilities
from warmstart.errors import Interrupted, NoEngine

__all__ = ["place"]  # the fixture
ROOT = Path(__file__).parents[2]
CAPS = cast(Capabilities, None)  # what would need it is replaced


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The containers that are stopped, each with what `status` says meanwhile."""
    found: list[str] = []

    def stop(_: object, name: str, grace: int) -> None:
        rows = [row for row in engines.status(tmp_path)["engines"] if row["container"] == name]
        found.append(f"{name} {rows[0]['state']} {grace}")

    monkeypatch.setattr(container, "stop", stop)
    monkeypatch.setattr(container, "remove", lambda *_: None)
    return found


def test_the_lease_says_that_it_is_being_stopped(
    tmp_path: Path, place: Path, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    podman_lists(monkeypatch, tmp_path)
    lease.take(place, running("a", state="ready", devices=("0",)), {})
    lease.take(place, mine := running("b"), {})
    assert stopping.down(ROOT, tmp_path, CAPS, "a") == ["a"]
    stopping.undo(CAPS, place, mine)
    long = runline.data(ROOT).stop_seconds  # what the container itself was given
    assert stopped == [f"warmstart-a stopping {long}", f"warmstart-b stopping {stopping.SHORT}"]
    assert lease.read(place) == ()


def test_a_second_ctrl_c_kills_what_the_first_one_stops(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupted("stopped")

    removed: list[str] = []
    monkeypatch.setattr(container, "stop", interrupted)
    monkeypatch.setattr(container, "remove", lambda _, name: removed.append(name))
    lease.take(place, mine := running("b"), {})
    with pytest.raises(Interrupted):
        stopping.undo(CAPS, place, mine)
    assert (removed, lease.read(place)) == (["warmstart-b"], ())


def test_a_dry_down_says_what_it_would_run_and_that_alone(
    tmp_path: Path, place: Path, stopped: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lease.take(place, mine := running("a", state="ready"), {})
    monkeypatch.setattr(run.recorder, "on", True)
    assert stopping.down(ROOT, tmp_path, CAPS) == ["a"]
    assert (capsys.readouterr().err, len(stopped), lease.read(place)) == ("", 1, (mine,))


def test_ctrl_c_while_memory_comes_back_starts_services_again(
    tmp_path: Path, place: Path, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise Interrupted("stopped")

    started: list[str] = []
    monkeypatch.setattr(holders, "drained", interrupted)
    monkeypatch.setattr(holders, "start", started.append)
    podman_lists(monkeypatch, tmp_path)
    one = running("a", devices=("0000:03:00.0",), before={"0000:03:00.0": 1}, stopped=("llama.service",))
    lease.take(place, one, {})
    with pytest.raises(Interrupted):
        stopping.down(ROOT, tmp_path, CAPS)
    assert (len(stopped), started, lease.read(place)) == (1, ["llama.service"], ())


def test_down_takes_what_a_failed_start_left(
    tmp_path: Path, stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    podman_lists(monkeypatch, tmp_path)
    with pytest.raises(NoEngine):
        stopping.down(ROOT, tmp_path, CAPS)
    podman_lists(monkeypatch, tmp_path, box("a", name="other-name"))
    assert stopping.down(ROOT, tmp_path, CAPS) == ["a"]
    assert stopping.down(ROOT, tmp_path, CAPS, "a") == ["a"]
    assert stopped == [f"other-name ended {stopping.SHORT}"] * 2


def test_what_up_says_of_an_engine_that_still_starts() -> None:
    started = control.Up(
        preset="a", container="c", url="http://x/v1", image_id="", devices=(), ready=False, wall=0.0, record=None
    )
    told = control.text(started)
    assert told == "a starts: `.venv/bin/python build.py status` shows when it is ready, to answer at http://x/v1"
