"""Records of starts, and the estimate that they give."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from tests.unit.test_phases import DATA
from warmstart import phases, starts, startup
from warmstart.phases import Phase, StartRecord
from warmstart.starts import Start

COLD, WARM = "0.32.0-cpu-cold", "0.32.0-cpu-warm"


def record(compile_state: str = "warm", ready: bool = True, reached: str = "ready", **seconds: float) -> StartRecord:
    return of(seconds, compile_state, ready, reached)


def of(seconds: dict[str, float], compile_state: str = "warm", ready: bool = False, reached: str = "") -> StartRecord:
    found, at = [], 0.0
    for name, long in seconds.items():
        found.append(Phase(name, long, at, at + long))
        at += long
    told = StartRecord("0.33.0", tuple(found), at, ready, reached)
    return msgspec.structs.replace(told, compile=compile_state)


def start(one: StartRecord, image: str = "sha256:" + "a" * 64, began: float = 1.0, preset: str = "p") -> Start:
    return Start(preset=preset, image=image, began=began, wall=one.seconds, record=one)


def test_kept_by_image_and_cache_state(tmp_path: Path) -> None:
    cold = starts.add(tmp_path, start(record("cold", compile=60.0)))
    warm = starts.add(tmp_path, start(record("warm", compile=5.0), began=2.0))
    starts.add(tmp_path, start(record("warm", compile=9.0), image="sha256:" + "b" * 64, began=3.0))
    assert cold.relative_to(tmp_path) == Path("starts/p/aaaaaaaaaaaa-cold.jsonl")
    assert warm.name == "aaaaaaaaaaaa-warm.jsonl"
    assert [s.began for s in starts.of(tmp_path, "p")] == [1.0, 2.0, 3.0]
    assert [s.began for s in starts.of(tmp_path, "p", "sha256:" + "a" * 64, "warm")] == [2.0]
    assert starts.of(tmp_path, "other") == ()


def test_a_real_start_survives_the_file(tmp_path: Path) -> None:
    one = start(phases.read_file(DATA / f"{COLD}.log"))
    starts.add(tmp_path, one)
    assert starts.of(tmp_path, "p") == (one,)


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for number in range(starts.KEPT + 5):
        starts.add(tmp_path, start(record(compile=1.0), began=float(number)))
    kept = [s.began for s in starts.of(tmp_path, "p")]
    assert kept == [float(n) for n in range(5, starts.KEPT + 5)]


def test_a_spoiled_line_costs_only_itself(tmp_path: Path) -> None:
    file = starts.add(tmp_path, start(record(compile=1.0)))
    file.write_bytes(b'{"preset": 1}\nnonsense\n' + file.read_bytes())
    assert len(starts.of(tmp_path, "p")) == 1


def test_the_next_start_of_an_image_is_expected_to_be_warm(tmp_path: Path) -> None:
    image, other = "sha256:" + "a" * 64, "sha256:" + "c" * 64
    assert starts.expected(tmp_path, "p", image) == {}
    starts.add(tmp_path, start(record("cold", compile=60.0)))
    assert starts.expected(tmp_path, "p", image) == {}  # it won't compile again
    for number, seconds in enumerate((5.0, 7.0, 6.0)):
        starts.add(tmp_path, start(record("warm", compile=seconds), began=float(number)))
    assert starts.expected(tmp_path, "p", image) == {"compile": 6.0}  # the median
    assert starts.expected(tmp_path, "p", other) == {}  # a new image: its caches may be empty, or from a seed


def test_a_start_that_compiles_nothing_is_expected_to_be_such_again(tmp_path: Path) -> None:
    image = "sha256:" + "a" * 64
    starts.add(tmp_path, start(record("warm", compile=5.0), began=1.0))
    starts.add(tmp_path, start(record("eager", weights=3.0), began=2.0))
    assert starts.expected(tmp_path, "p", image) == {"weights": 3.0}


def test_starts_that_failed_are_no_measure(tmp_path: Path) -> None:
    starts.add(tmp_path, start(record(ready=False, reached="weights", weights=1.0)))
    assert starts.expected(tmp_path, "p", "sha256:" + "a" * 64) == {}


def test_what_remains_gets_less_while_a_real_start_goes_on() -> None:
    """On the lines of a real warm start, expected to take what it took."""
    lines = (DATA / f"{WARM}.log").read_text().splitlines()
    whole = phases.read(lines)
    expectation = starts.typical([whole])
    reader, left = phases.Reader(), []
    for line in lines:
        if any(event.kind == "ready" for event in reader.feed(line)):
            break
        left.append(starts.remaining(expectation, reader.record()))
    told = [seconds for seconds in left if seconds is not None]
    assert told[0] == pytest.approx(whole.seconds)
    assert all(later <= before + 1e-6 for before, later in itertools.pairwise(told))
    assert told[-1] < 0.1 * whole.seconds


def test_a_late_phase_does_not_shorten_the_rest() -> None:
    expectation = {"import": 10.0, "weights": 5.0, "compile": 20.0}
    now = of({"import": 30.0, "weights": 9.0}, reached="weights")
    assert starts.remaining(expectation, now) == 20.0
    assert starts.remaining({}, now) is None


def test_the_live_line() -> None:
    now = of({"import": 3.0, "weights": 2.0}, reached="weights")
    assert startup.live(now, {}) == "weights 2 s (nothing to compare with)"
    assert startup.live(now, {"weights": 5.0, "compile": 20.0}) == "weights 2 s, about 23 s left"
    assert startup.live(now, {"weights": 2.2}) == "weights 2 s, any moment now"
