"""vLLM's start log as phases, on real logs of ten versions and on what can go wrong with a log.

data/phases/: the first line of each log says where it is from. expected.toml holds what a person reads there:
the lines that mark a phase, the wall time as something else measured it, the order of the phases.
"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

import msgspec
import pytest

from warmstart import logline, phases
from warmstart.errors import InputError

DATA = Path(__file__).parent / "data" / "phases"
FAR = 0.05  # how far the sum of the phases may be from the wall time


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What expected.toml says of one log."""

    version: str
    reached: str
    phases: str
    marks: str
    ready: bool = True
    compile: str = "unknown"
    wall: float = 0.0  # seconds; 0 where nothing but the log itself measured it
    wall_from: str = ""
    error: str = ""

    def numbers(self) -> set[int]:
        """The line numbers of `marks`: single ones and ranges."""
        ends = (part.split("-") for part in self.marks.split())
        return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


TOLD = tomllib.loads((DATA / "expected.toml").read_text(encoding="utf-8"))
EXPECTED = msgspec.convert(TOLD, dict[str, Expected])


def lines(name: str) -> list[str]:
    """The lines of a log, carriage returns and colours kept."""
    return (DATA / f"{name}.log").read_bytes().decode().rstrip("\n").split("\n")


def seconds(record: phases.StartRecord) -> dict[str, float]:
    """Each phase's seconds, rounded."""
    return {phase.name: round(phase.seconds, 1) for phase in record.phases}


def test_every_log_is_expected() -> None:
    assert {path.stem for path in DATA.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_log(name: str) -> None:
    want, record = EXPECTED[name], phases.read_file(DATA / f"{name}.log")
    assert (record.version, record.ready, record.reached) == (want.version, want.ready, want.reached)
    assert [phase.name for phase in record.phases] == want.phases.split()
    assert record.compile == want.compile
    assert want.error in record.error
    assert bool(want.error) == bool(record.error)
    assert sum(phase.seconds for phase in record.phases) == pytest.approx(record.seconds)
    if want.wall:
        assert record.seconds == pytest.approx(want.wall, rel=FAR)


def test_lines_that_mark_a_phase_are_found() -> None:
    """At least 95 % of them in each real log; and no other line of a start is taken for one."""
    wrong: dict[str, list[int]] = {}
    for name, want in EXPECTED.items():
        found = set()
        for number, line in enumerate(lines(name), start=1):
            hits = [m for part in line.split("\r") for m, _ in logline.matches(logline.plain(part))]
            if any(marker.edge != "failure" for marker in hits):
                found.add(number)
            if any(marker.edge == "ready" for marker in hits):
                break
        marks = want.numbers()
        assert len(found & marks) >= 0.95 * len(marks), f"{name}: missed {sorted(marks - found)}"
        if found - marks:
            wrong[name] = sorted(found - marks)
    assert wrong == {}


REAL = [name for name, want in EXPECTED.items() if want.ready and "composed" not in name]


def test_versions_of_real_logs() -> None:
    """The phases are held against another clock (below, and `wall`) on real logs of six versions."""
    assert len({".".join(EXPECTED[name].version.split(".")[:2]) for name in REAL}) >= 6


@pytest.mark.parametrize("name", REAL)
def test_the_engine_needed_what_it_says(name: str) -> None:
    """What lies between the loaded model and the ready engine is what vLLM's own counter reports.

    The counter has hundredths of a second, the stamps whole ones: two stamps may be wrong by a second each.
    """
    record = phases.read(lines(name))
    inner = [phase for phase in record.phases if phase.name in ("profile", "compile", "kv", "graphs")]
    figures = {figure.name: figure.seconds for phase in record.phases for figure in phase.detail}
    reported = figures["init engine (profile, create kv cache, warmup model) took"]
    assert sum(phase.seconds for phase in inner) == pytest.approx(reported, rel=FAR, abs=2.0)


@pytest.mark.parametrize("name", EXPECTED)
def test_pieces_of_any_size_give_the_same(name: str) -> None:
    text, dice = "\n".join(lines(name)) + "\n", random.Random(name)
    reader, at = phases.Reader(), 0
    while at < len(text):
        size = dice.choice((1, 7, 80, 1000))
        reader.write(text[at : at + size])
        at += size
    assert reader.record() == phases.read(lines(name))


def test_the_slowest_worker_is_the_critical_path() -> None:
    record = phases.read(lines("0.33.0-composed"))
    told = seconds(record)
    assert told["weights"] == 1 + 13  # until worker 1 has loaded (09:00:58), without the 20 s of the download
    assert told["download"] == 20
    assert told["compile"] == 17 + 5  # until worker 1 has compiled (09:01:15), and the size compiled later
    loading = next(phase for phase in record.phases if phase.name == "weights").detail
    took = {figure.process: figure.seconds for figure in loading if figure.name == "Loading weights took"}
    assert took == {"Worker_TP0": 5.0, "Worker_TP1": 10.8}


def test_what_is_counted() -> None:
    record = phases.read(lines("0.33.0-composed"))
    assert record.counters["graphs_captured"] == 11 + 7
    assert record.counters["graphs_compiled"] == 1  # two workers compile the same graph
    assert record.counters["aot_load_failed"] == 1
    assert record.counters["kv_cache_tokens"] == 262_144
    warm = phases.read(lines("0.26.0-composed-warm")).counters
    assert warm["aot_loaded"] == warm["startup_plan"] == 1
    served = phases.read(lines("0.23.1-jit-while-serving"))
    assert served.counters["jit_during_inference"] == 4
    assert served.jit_kernels[0] == "_zero_kv_blocks_kernel"


def test_a_reported_duration_places_the_border_that_no_line_marks() -> None:
    """Between KV and graphs this start tuned for four minutes and said nothing; the graphs took 3 s."""
    told = seconds(phases.read(lines("0.23.1-jit-while-serving")))
    assert told["graphs"] == 3.0
    assert told["profile"] > 350


def test_cut_anywhere() -> None:
    """A log without its head or tail (rotated, or the disk was full) is still read; its phases add up."""
    whole = "\n".join(lines("0.20.0-container-stamps"))
    for at in range(0, len(whole), 997):
        for text in (whole[:at], whole[at:]):
            reader = phases.Reader()
            reader.write(text + "\n")
            record = reader.record()
            assert sum(phase.seconds for phase in record.phases) == pytest.approx(record.seconds)


def test_a_killed_start_says_what_it_had_reached() -> None:
    for reached in ("engine", "weights", "compile", "profile", "graphs"):
        reader = phases.Reader()
        for line in lines("0.33.0-composed"):
            reader.feed(line)
            if reader.phase == reached:
                break
        record = reader.record()
        assert (record.ready, record.reached, record.error) == (False, reached, "")
        assert f"the log ends in {reached[:5]}" in phases.table(record).replace("autotune/", "")


def test_failures_one_after_the_other_in_one_log() -> None:
    reader, hints = phases.Reader(), []
    for line in lines("0.33.0-composed-failures"):
        before = reader.record()
        if any(event.kind == "restart" for event in reader.feed(line)):
            assert before.error
            hints.append(before.hint)
    assert len(hints) == reader.record().restarts == 7
    assert len(set(hints)) == 7  # each failure has a hint of its own
    assert reader.record().ready


def test_the_cause_is_told_rather_than_what_followed() -> None:
    record = phases.read(lines("0.13.0-out-of-memory"))
    assert record.error.startswith("torch.OutOfMemoryError: HIP out of memory")
    assert "device memory" in record.hint


@pytest.mark.parametrize("texts", [[], [""], ["hello", "world"], ["\x00\x01" * 50]])
def test_not_a_vllm_log(texts: list[str]) -> None:
    with pytest.raises(InputError, match="no line of vLLM's start log"):
        phases.read(texts)


def test_unreadable(tmp_path: Path) -> None:
    for path in (tmp_path / "none.log", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            phases.read_file(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(b"\xff\xfe\x00\n" + "\n".join(lines("0.12.0")).encode())
    assert phases.read_file(path).ready


def test_table_and_json() -> None:
    record = phases.read_file(DATA / "0.20.0-container-stamps.log")
    text = phases.table(record)
    assert "autotune/profile" in text
    assert "216.7" in text
    assert msgspec.json.decode(msgspec.json.encode(record), type=phases.StartRecord) == record
    assert msgspec.to_builtins(record)["phases"][0]["name"] == "import"


def test_a_prompt_that_quotes_a_banner_is_no_restart() -> None:
    reader = phases.Reader()
    for line in lines("0.12.0"):
        reader.feed(line)
    quoted = "prompt: 'Why does it print vLLM API server version 0.12.0 and ▄▄ ▄█ █ ▀▄▀ █  version 0.12.0?'"
    reader.feed(f"(APIServer pid=4826) INFO 12-10 10:14:00 [logger.py:47] Received request 1: {quoted}")
    assert reader.record() == phases.read(lines("0.12.0"))


@pytest.mark.parametrize("until", [2, 6])  # killed while importing, and while loading
def test_started_again_after_it_was_killed(until: int) -> None:
    """The log of a container goes on when it is started again; the first start said nothing when it died."""
    again = lines("0.26.0-composed-warm")
    record = phases.read([*again[:until], *again])
    assert record == msgspec.structs.replace(phases.read(again), restarts=1)


SAVED = "INFO 11-30 05:00:09 [decorators.py:700] saved AOT compiled function to /cache/vllm/torch_aot_compile/x/model"
LOADED = "INFO 11-30 05:00:09 [decorators.py:299] Directly load AOT compilation from path /cache/vllm/x/model"


@pytest.mark.parametrize(
    ("lines", "state"),
    [([SAVED], "cold"), ([LOADED], "warm"), ([LOADED, SAVED], "warm"), ([], "unknown")],
)
def test_what_was_saved_was_compiled(lines: list[str], state: str) -> None:
    """The CPU runner says nothing else of its compiling."""
    assert phases.read(["INFO 11-30 05:00:01 [x.py:1] Starting to load model m...", *lines]).compile == state
