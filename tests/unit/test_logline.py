"""The clock and the texts of log lines: stamps, prefixes, colours, a year's end, or nothing of the kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from warmstart import logline, phases

DATA = Path(__file__).parent / "data" / "phases"
STAMP = re.compile(r" \d\d-\d\d \d\d:\d\d:\d\d ")


def lines(name: str) -> list[str]:
    """The lines of a log, carriage returns and colours kept."""
    return (DATA / f"{name}.log").read_bytes().decode().rstrip("\n").split("\n")


def seconds(record: phases.StartRecord) -> dict[str, float]:
    """Each phase's seconds, rounded."""
    return {phase.name: round(phase.seconds, 1) for phase in record.phases}


def test_no_text_in_the_data_is_dead() -> None:
    """Each text is in a log; its edge fits its other fields; it names phases that exist."""
    seen = {
        marker.text
        for path in DATA.glob("*.log")
        for line in lines(path.stem)
        for part in line.split("\r")
        for marker, _ in logline.matches(logline.plain(part))
    }
    names = {phase.name for phase in logline.formats().phase}
    for marker in logline.formats().marker:
        assert marker.text in seen, f"no log has: {marker.text}"
        assert bool(marker.then) == (marker.edge == "end"), marker.text
        assert {marker.phase, marker.then, marker.after} <= names | {"", "back"}, marker.text


@pytest.mark.parametrize("name", ["0.13.0-tp2", "0.20.0-container-stamps", "0.33.0-composed"])
def test_colours_change_nothing(name: str) -> None:
    coloured = [re.sub(r"(\d\d-\d\d \d\d:\d\d:\d\d)", "\x1b[90m\\1\x1b[0m", line) for line in lines(name)]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines(name)]
    assert coloured != plain
    assert phases.read(coloured) == phases.read(plain)


def test_the_new_year_and_the_leap_day() -> None:
    for old, new in (("11-29 ", "12-31 "), ("11-29 ", "02-28 ")):
        late = [line.replace(old + "09:0", new + "23:5") for line in lines("0.33.0-composed")]
        moved = []
        for line in late:  # 09:00-09:02 became 23:50-23:52; let the last eleven minutes lie after midnight
            moved.append(re.sub(r"\d\d-\d\d 23:52", "01-01 00:02" if new < "12" else "03-01 00:02", line))
        record = phases.read(moved)
        assert record.ready
        assert record.seconds == pytest.approx(phases.read(lines("0.33.0-composed")).seconds + 600)


def test_a_log_without_stamps_counts_what_was_reported() -> None:
    record = phases.read(re.sub(STAMP, " ", line) for line in lines("0.23.1-jit-while-serving"))
    assert record.clock == "reported"
    told = seconds(record)
    assert told["weights"] == pytest.approx(129.7, abs=0.1)
    assert told["compile"] == pytest.approx(75.3, abs=0.1)
    assert told["graphs"] == 3.0
    assert record.seconds == pytest.approx(129.7 + 443.2, abs=0.1)  # loading, and the engine's total after it


def test_container_stamps_win_over_those_of_another_zone() -> None:
    record = phases.read(lines("0.20.0-container-stamps"))
    assert record.clock == "prefix"
    inner = [line.split(" | ", 1)[-1] for line in lines("0.20.0-container-stamps")]
    assert phases.read(inner).seconds == pytest.approx(record.seconds, abs=1.5)


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-05-01T23:11:07.242123456Z ",
        "2026-05-01T23:11:07.242123456+02:00 stdout F ",
        "vllm-1  | ",
        "May 01 23:11:07 box vllm[123]: ",
        "[my-prefix] ",
    ],
)
def test_prefixes(prefix: str) -> None:
    record, plain = (
        phases.read(prefix + line for line in lines("0.13.0-tp2")),
        phases.read(lines("0.13.0-tp2")),
    )
    assert [phase.name for phase in record.phases] == [phase.name for phase in plain.phases]
    assert record.ready


def test_json_log() -> None:
    """A line of the JSON formatter reads like one of the text formatter; one that is cut off does no harm."""
    line = {
        "asctime": "2026-11-29 09:00:50,250",
        "levelname": "INFO",
        "name": "vllm.model_executor.model_loader.default_loader",
        "processName": "EngineCore",
        "process": 40,
        "message": "Loading weights took 5.00 seconds",
    }
    record = phases.read([json.dumps(line), json.dumps(line)[:-2]])
    detail = record.phases[-1].detail
    assert [(figure.seconds, figure.process) for figure in detail] == [(5, "EngineCore"), (5, "")]


def test_followed_live() -> None:
    """Fed at the times at which the lines really came; the file's first time is the process's start."""
    name = "0.32.0-cpu-cold"
    started, *times = map(float, (DATA / f"{name}.times").read_text(encoding="utf-8").split())
    reader, events = phases.Reader(started), []
    for line, at in zip(lines(name)[1:], times, strict=True):
        events += reader.feed(line, at)
    record = reader.record()
    assert record.seconds == pytest.approx(131.97, rel=0.01)  # as the caller measured it
    ready = [event for event in events if event.kind == "ready"]
    assert len(ready) == 1
    begun = [event.phase for event in events if event.kind == "begin"]
    assert begun == ["engine", "weights", "compile", "profile", "kv", "profile", "ready"]
    assert record.phases[0].seconds > times[0] - started  # what passed before the first line is import


def test_live_without_stamps_uses_the_clock_of_the_reader() -> None:
    reader = phases.Reader(started=100.0)
    reader.feed("Loading model from scratch...", 110.0)
    assert reader.record(now=125.0).phases[-1].seconds == 15
    reader.feed("Model loading took 1.0 GiB memory and 20.0 seconds", 130.0)
    reader.feed("INFO:     Application startup complete.", 131.5)
    record = reader.record(now=999.0)
    assert (record.clock, record.seconds, record.ready) == ("wall", 31.5, True)
    assert seconds(record) == {"import": 10, "weights": 20, "profile": 1.5}


def test_attached_late() -> None:
    """The log so far comes in one go: its stamps count, not when it was read."""
    reader = phases.Reader()
    for line in lines("0.33.0-composed"):
        reader.feed(line, 5_000.0)
    assert reader.record().seconds == pytest.approx(134, abs=1)


def test_started_is_known_for_a_saved_log() -> None:
    """Zones are multiples of a quarter of an hour, so that the seconds before the first stamp are known."""
    record = phases.read(lines("0.17.0-composed-cached-graphs"), started=1_000_000_800.0 - 12.0)
    assert record.seconds == pytest.approx(32 + 12)
    assert seconds(record)["import"] == 14


def test_a_bar_without_a_stamp_does_not_say_when_the_graphs_began() -> None:
    """The bar is read right after a line four minutes older; the reported duration corrects that."""
    record = phases.read(
        [
            "(EngineCore pid=1) INFO 11-29 10:00:00 [kv_cache_utils.py:1] GPU KV cache size: 1,024 tokens",
            "Capturing CUDA graphs (decode, FULL): 100%|███| 7/7 [00:03<00:00,  2.33it/s]",
            "INFO 11-29 10:04:00 [a.py:1] Graph capturing finished in 3 secs, took 0.6 GiB",
        ]
    )
    assert seconds(record)["graphs"] == 3


def test_a_duration_without_a_stamp_ends_before_the_next_stamp() -> None:
    record = phases.read(
        [
            "INFO 11-29 10:00:00 [model.py:1] Resolved architecture: X",
            "[aiter] start build [module_aiter_core] under /x",
            "[aiter] finish build [module_aiter_core], cost 30.0s",  # said to be longer than it can have been
            "INFO 11-29 10:00:20 [core.py:1] Initializing a V1 LLM engine (v0.33.0) with config: …",
            "INFO 11-29 10:00:25 [model_runner.py:1] Loading model from scratch...",
        ]
    )
    assert seconds(record) == {"import": 0, "engine": 5, "compile": 20, "weights": 0}


def test_a_stamp_of_whole_seconds_gets_its_fraction_from_the_reader() -> None:
    reader = phases.Reader()
    reader.feed("INFO 11-29 10:00:00 [a.py:1] Using max model len 1024", 1000.25)
    reader.feed("INFO 11-29 10:00:01 [a.py:1] Loading model from scratch...", 1001.75)
    reader.feed("INFO:     Application startup complete.", 1002.25)
    assert seconds(reader.record()) == {"import": 1.5, "weights": 0.5}


def test_a_start_by_a_clock_that_stands_wrong() -> None:
    """A lead that is longer than what has passed since the process's start can't be true."""
    reader = phases.Reader(started=900.0 * 1000)
    reader.feed("INFO 11-29 10:11:40 [a.py:1] Loading model from scratch...", 900.0 * 1000 + 20)
    assert seconds(reader.record())["import"] == 20


def test_a_line_without_the_container_stamp_that_all_others_have() -> None:
    """Its own stamp may be of another zone, here two hours away."""
    some = lines("0.20.0-container-stamps")
    some[23] = some[23].split(" | ", 1)[1]
    assert "Model loading took" in some[23]
    assert seconds(phases.read(some))["weights"] == pytest.approx(27.1, abs=1)
