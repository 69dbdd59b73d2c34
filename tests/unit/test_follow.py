"""A container's log as it grows, with what podman's log driver writes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.test_phases import DATA, lines
from warmstart import follow, phases
from warmstart.follow import Tail


def stamp(second: float) -> str:
    return datetime.fromtimestamp(1_800_000_000 + second, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000+00:00"


def put(path: Path, text: str, kind: str = "F", stream: str = "stdout", second: float = 0) -> None:
    with path.open("a") as file:
        file.write(f"{stamp(second)} {stream} {kind} {text}\n")


def test_lines_come_once_and_with_their_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.read() == []  # no file yet
    put(log, "one", second=1)
    put(log, "two  with spaces ", stream="stderr", second=2.5)
    assert [(line.at - 1_800_000_000, line.text) for line in tail.read()] == [(1, "one"), (2.5, "two  with spaces ")]
    assert tail.read() == []
    put(log, "", second=3)
    assert [line.text for line in tail.read()] == [""]


def test_pieces_are_joined_by_stream(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    put(log, "Capturing: 10%", "P", "stderr", 1)
    put(log, "from stdout", "F", "stdout", 2)
    assert [line.text for line in tail.read()] == ["from stdout"]
    put(log, "\rCapturing: 90%", "P", "stderr", 3)
    tail.read()
    assert tail.wrote == 1_800_000_003  # a piece is a sign of life, too
    put(log, "\rCapturing: 100%", "F", "stderr", 4)
    line = tail.read()[0]
    assert (line.at, line.text) == (1_800_000_004, "Capturing: 10%\rCapturing: 90%\rCapturing: 100%")


def test_a_line_that_is_half_written_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    whole = f"{stamp(1)} stdout F ein Wörtchen\n".encode()
    log.write_bytes(whole[:40])
    assert tail.read() == []
    with log.open("ab") as file:
        file.write(whole[40:])
    assert [line.text for line in tail.read()] == ["ein Wörtchen"]


def test_a_restart_appends_and_a_new_container_replaces(tmp_path: Path) -> None:
    log = tmp_path / "log"
    put(log, "first start")
    tail = Tail(log)
    assert len(tail.read()) == 1
    put(log, "second start")  # the same container once more
    assert [line.text for line in tail.read()] == ["second start"]
    log.unlink()
    put(log, "third start")  # another container, with a new file
    assert [line.text for line in tail.read()] == ["third start"]
    log.write_text("")
    put(log, "4th")  # emptied in place, shorter than before
    assert [line.text for line in tail.read()] == ["4th"]


def test_what_is_no_line_of_the_driver_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"garbage\n\xff\xfe\n" + f"{stamp(1)} stdout F good\n".encode())
    assert follow.lines(log) == ["good"]


def test_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in range(5):
        put(log, str(number))
    assert follow.lines(log, 2) == ["3", "4"]
    assert follow.lines(tmp_path / "none") == []


def test_a_stream_ends_with_what_the_engine_wrote_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    put(log, "one")

    def alive() -> bool:
        put(log, "last words")  # written between the look at the process and the look at the log
        return False

    assert list(follow.stream(log, alive)) == ["one", "last words"]


def test_a_real_start_followed_live_adds_up_to_the_caller_s_clock(tmp_path: Path) -> None:
    """A real log with the time at which each line was read; it answered 131.97 s after its process's start."""
    started, *times = map(float, (DATA / "0.32.0-cpu-cold.times").read_text().split())
    log = tmp_path / "log"
    tail, reader, kinds = Tail(log), phases.Reader(started), []
    for at, words in zip(times, lines("0.32.0-cpu-cold")[1:], strict=True):
        put(log, words, second=at - 1_800_000_000)
        for line in tail.read():
            kinds += [event.kind for event in reader.feed(line.text, line.at)]
    record = reader.record()
    assert kinds.count("ready") == 1
    assert record.seconds == pytest.approx(131.97, rel=0.01)
    assert sum(phase.seconds for phase in record.phases) == pytest.approx(record.seconds)
    assert [phase.name for phase in record.phases] == "import engine weights compile profile kv ready".split()
