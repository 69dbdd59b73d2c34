"""What a silent engine does: readings from a made /proc, and what two of them mean."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit import proctree
from warmstart import processes, watchdog
from warmstart.processes import Process
from warmstart.watchdog import Reading, classify

ENGINE = "VLLM::EngineCore"


def process(pid: int = 10, name: str = ENGINE, cpu: float = 0.0, read: int = 0, command: str = "") -> Process:
    return Process(pid=pid, parent=1, name=name, command=command or name, cpu=cpu, read=read, began=5)


def reading(at: float, *found: Process, **facts: Any) -> Reading:
    return Reading(at=at, processes=found or (process(),), **facts)


def test_a_compiler_that_runs() -> None:
    told = classify(reading(0), reading(5, process(), process(11, "cc1plus", cpu=4.9)))
    assert told.kind == "compiles"
    assert "cc1plus" in told.evidence
    assert "1.0 cores" in told.evidence


@pytest.mark.parametrize(
    "name", "clang clang-19 ld.lld cc1plus hipcc ptxas ninja amdclang++ g++ x86_64-linux-gn".split()
)
def test_compilers_by_name(name: str) -> None:
    found = name.replace("gn", "gnu-g++") if name.endswith("linux-gn") else name
    assert classify(reading(0, process(11, found)), reading(5)).kind == "compiles"  # it ended meanwhile


def test_workers_that_compile_in_python_count_only_when_they_work() -> None:
    words = "python -m torch._inductor.compile_worker --pickler"
    idle = process(12, "python", cpu=3.0, command=words)
    busy = process(12, "python", cpu=7.5, command=words)
    assert classify(reading(0, process(), idle), reading(5, process(), busy)).kind == "compiles"
    assert classify(reading(0, process(), idle), reading(5, process(), idle)).kind == "hangs"
    ours = "python -c import sys; import warmstart_workers; warmstart_workers.serve(3)"
    first, then = process(13, "python", command=ours), process(13, "python", cpu=2.0, command=ours)
    assert classify(reading(0, first), reading(5, then)).kind == "compiles"


def test_a_cache_that_grows() -> None:
    after = reading(5, process(cpu=5.0), files=3, cache=4_000_000)
    assert classify(reading(0, files=1, cache=1_000_000), after).kind == "compiles"
    assert classify(reading(0, newest=1.0), reading(5, process(cpu=5.0), newest=2.0)).kind == "compiles"  # rewritten
    # Somebody else's write, while this engine does nothing, is no work of it.
    assert classify(reading(0), reading(5, files=1, cache=9)).kind == "hangs"


def test_a_busy_gpu() -> None:
    told = classify(reading(0, gpu_busy=0), reading(5, process(cpu=0.2), gpu_busy=97))
    assert told.kind == "benches"
    assert "97 %" in told.evidence


def test_disk_and_network() -> None:
    loads = classify(reading(0), reading(5, process(read=2_000_000_000, cpu=2.0)))
    assert (loads.kind, "400 MB/s read from disk" in loads.evidence) == ("loads", True)
    fetches = classify(reading(0, received=10), reading(5, received=60_000_010))
    assert (fetches.kind, "12 MB/s received" in fetches.evidence) == ("loads", True)
    assert classify(reading(0), reading(5, process(read=100_000))).kind == "hangs"  # a log line now and then


def test_processor_time_without_any_of_that() -> None:
    assert classify(reading(0), reading(5, process(cpu=5.0))).kind == "works"


def test_nothing_at_all() -> None:
    told = classify(reading(0, process(cpu=50.0), gpu_busy=0), reading(5, process(cpu=50.05), gpu_busy=0))
    assert told.kind == "hangs"
    assert "GPU 0 % busy" in told.evidence
    assert classify(reading(0), Reading(at=5, processes=())).kind == "gone"


def test_a_pid_that_another_process_got_counts_from_zero() -> None:
    before = Process(pid=10, parent=1, name="a", command="a", cpu=100.0, read=0, began=5)
    after = Process(pid=10, parent=1, name="b", command="b", cpu=2.0, read=0, began=9)
    assert classify(reading(0, before), reading(5, after)).kind == "works"


def test_a_reading(tmp_path: Path) -> None:
    """The whole tree below the container's first process, and nothing beside it."""
    proctree.add(tmp_path, 10, name="catatonit")
    proctree.add(tmp_path, 11, 10, name=ENGINE, ticks=250, read=4096, command="VLLM::EngineCore x")
    proctree.add(tmp_path, 12, 11, name="a (b) c", ticks=50)
    proctree.add(tmp_path, 99, 1, name="other", ticks=10_000)
    net = tmp_path / "proc/10/net"
    net.mkdir()
    (net / "dev").write_text("Inter-|\n face |\n    lo: 77 1 0\n  eth0: 4242 9 0\n")
    device = tmp_path / "sys/class/drm/card1/device"
    device.mkdir(parents=True)
    (device / "gpu_busy_percent").write_text("63\n")
    cache = tmp_path / "cache"
    (cache / "a" / "b").mkdir(parents=True)
    (cache / "a" / "b" / "x.so").write_bytes(b"12345")
    os.utime(cache / "a" / "b" / "x.so", (1000, 1000))
    (cache / "loop").symlink_to(cache)
    found = watchdog.read(10, 3.0, cache=cache, card="card1", root=tmp_path)
    assert [p.pid for p in found.processes] == [10, 11, 12]
    assert [p.name for p in found.processes] == ["catatonit", ENGINE, "a (b) c"]
    assert found.processes[1].cpu == 250 / processes.TICKS
    assert found.processes[1].read == 4096
    assert (found.gpu_busy, found.received) == (63, 4242)
    assert found.files == 2  # the link is a file, not followed
    empty = watchdog.read(77, 3.0, cache=tmp_path / "none", root=tmp_path)
    assert (empty.processes, empty.gpu_busy, empty.files) == ((), None, 0)


def test_what_may_not_be_read_is_zero(tmp_path: Path) -> None:
    folder = proctree.add(tmp_path, 10, read=5)
    (folder / "io").unlink()
    (folder / "cmdline").unlink()
    found = watchdog.read(10, 0.0, root=tmp_path)
    assert (found.processes[0].read, found.processes[0].command) == (0, "")


def test_when_a_process_began(tmp_path: Path) -> None:
    proctree.add(tmp_path, 10, began=4711)
    proctree.add(tmp_path, 11, began=5, state="Z")
    assert processes.began(10, tmp_path) == 4711
    assert processes.began(11, tmp_path) == 0  # dead, only not yet waited for
    assert processes.began(12, tmp_path) == 0
    assert processes.began(os.getpid()) > 0
    assert processes.when(processes.began(os.getpid())) <= time.time()
    assert processes.when(processes.began(os.getpid())) > time.time() - 86400 * 365
