"""Watching a running engine: what lasts counts, a dip does not, and the last resort is at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import MIB, plant
from warmstart import gpus, limits, pressure
from warmstart.pressure import Reading, State

WATCH = limits.load(Path(__file__).parents[2]).watch
GIB = 1 << 30


def run(*readings: tuple[float, float, float, float]) -> State:
    """The state after readings of (second, GiB available, GiB of swap, GiB of GTT)."""
    state = None
    for at, available, swap, gtt in readings:
        now = Reading(at=at, available=int(available * GIB), swap_used=int(swap * GIB), gtt_used=int(gtt * GIB))
        state = pressure.watch(state, now, WATCH)
    assert state is not None
    return state


def test_all_is_well() -> None:
    assert run((0, 20, 0, 0), (5, 19, 0, 0), (10, 20, 0.2, 0.1)).level == "ok"


def test_a_short_dip_stops_nothing() -> None:
    assert run((0, 20, 0, 0), (5, 0.8, 0, 0), (9, 20, 0, 0), (60, 20, 0, 0)).level == "ok"


def test_a_dip_that_lasts_is_warned_about_then_stopped() -> None:
    assert run((0, 20, 0, 0), (5, 0.8, 0, 0), (11, 0.8, 0, 0)).level == "warn"
    stopped = run((0, 20, 0, 0), (5, 0.8, 0, 0), (11, 0.8, 0, 0), (20, 0.8, 0, 0))
    assert stopped.level == "stop"
    assert stopped.reason == "only 0.8 GiB of memory is available, for 15 s"


def test_between_both_limits_there_is_only_a_warning() -> None:
    assert run((0, 20, 0, 0), (5, 1.5, 0, 0), (600, 1.5, 0, 0)).level == "warn"


def test_the_last_resort_does_not_wait() -> None:
    assert run((0, 20, 0, 0), (5, 0.3, 0, 0)).level == "stop"


def test_growth_counts_from_the_first_reading() -> None:
    assert run((0, 20, 3, 3), (5, 20, 3.4, 3.4), (60, 20, 3.4, 3.4)).level == "ok"
    assert "went to swap" in run((0, 20, 3, 0), (5, 20, 5.5, 0), (21, 20, 5.5, 0)).reason
    assert "2.5 GiB of GTT" in run((0, 20, 0, 3), (5, 20, 0, 5.5), (21, 20, 0, 5.5)).reason


def test_a_warning_ends_after_some_calm() -> None:
    warned = ((0, 20, 0, 0), (5, 1.5, 0, 0), (11, 1.5, 0, 0))
    assert run(*warned, (15, 20, 0, 0), (30, 20, 0, 0)).level == "warn"
    assert run(*warned, (15, 20, 0, 0), (46, 20, 0, 0)).level == "ok"
    assert run(*warned, (15, 20, 0, 0), (46, 20, 0, 0)).reason == ""


def test_up_and_down_is_no_calm_and_no_stop() -> None:
    wave = [(float(at), 0.8 if at % 20 < 10 else 20.0, 0.0, 0.0) for at in range(5, 300, 5)]
    assert run((0, 20, 0, 0), *wave).level == "warn"


def test_stop_is_final() -> None:
    assert run((0, 20, 0, 0), (5, 0.3, 0, 0), (100, 20, 0, 0), (200, 20, 0, 0)).level == "stop"


def test_a_reading_that_failed_changes_nothing() -> None:
    assert run((0, 20, 0, 0), (5, 0, 0, 0), (60, 0, 0, 0)).level == "ok"


@pytest.mark.parametrize(
    ("name", "leaked"), [("rx7600xt-desktop", 150), ("strix-halo-0.5g", 0), ("strix-halo-64g", 90)]
)
def test_gtt_counts_only_where_it_is_not_the_engines_own(tmp_path: Path, name: str, leaked: int) -> None:
    plant(tmp_path, name)
    found = pressure.reading(1.0, gpus.memory(tmp_path), gpus.read(tmp_path))
    assert found.gtt_used == leaked * MIB
