"""run.py with real processes: output, time limits, and that nothing outlives us, however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from warmstart.errors import CommandFailed
from warmstart.run import glance, run

ROOT = Path(__file__).parents[2]

# Runs a family of processes, in a thread or not: a shell, a child, a child that ignores SIGINT. Each writes
# its pid into the folder.
FAMILY = """
import sys, threading
from pathlib import Path
from warmstart import signals
from warmstart.errors import WarmstartError
from warmstart.run import run

folder, threaded = Path(sys.argv[1]), sys.argv[2] == "thread"
script = f'''
echo $$ > {folder}/shell
sh -c "trap '' INT; echo \\\\$\\\\$ > {folder}/deaf; sleep 180" &
sh -c "echo \\\\$\\\\$ > {folder}/child; sleep 180"
wait
'''

def work():
    try:
        run(["sh", "-c", script], log_file=folder / "run.log")
    except WarmstartError as failure:
        print("run:", type(failure).__name__, flush=True)
        raise

signals.catch()
try:
    if threaded:
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    else:
        work()
except WarmstartError as failure:
    print("main:", type(failure).__name__, flush=True)
    sys.exit(failure.code)
"""


def until(true: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second when it went between opening and reading
        return False


def family(folder: Path, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(folder), how], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    files = [folder / name for name in ("shell", "deaf", "child")]
    assert until(lambda: all(f.is_file() and f.read_text().strip() for f in files))
    return process, [int(f.read_text()) for f in files]


def test_output_is_collected_live_and_in_the_log(tmp_path: Path) -> None:
    seen: list[str] = []
    result = run(
        ["sh", "-c", "echo one; echo two >&2; exit 3"],
        ok=(3,),
        log_file=tmp_path / "new" / "x.log",
        on_line=seen.append,
    )
    assert (result.stdout, result.stderr, result.code) == ("one\n", "two\n", 3)
    assert sorted(seen) == ["one", "two"]
    assert sorted((tmp_path / "new" / "x.log").read_text().split()) == ["one", "two"]


def test_a_command_that_reads_gets_the_end_of_file() -> None:
    assert run(["cat"], timeout=10).stdout == ""
    assert run(["cat"], stdin="text", timeout=10).stdout == "text"


def test_output_that_is_no_text_is_no_failure() -> None:
    assert run(["printf", r"\377x"]).stdout.endswith("x")


def test_a_killed_command_is_explained() -> None:
    with pytest.raises(CommandFailed, match="SIGKILL"):
        run(["sh", "-c", "kill -9 $$"])


def test_the_replay_script_runs_the_command_again(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(
            ["sh", "-c", 'echo "$GREETING from $PWD"; exit 7'],
            env={"GREETING": "it's me"},
            cwd=tmp_path,
            log_file=tmp_path / "x.log",
        )
    assert str(tmp_path / "x.sh") in caught.value.hint
    again = subprocess.run([tmp_path / "x.sh"], env={}, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (7, f"it's me from {tmp_path}\n")


def test_a_command_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 90 & echo $! > {tmp_path}/pid; sleep 90; echo > {tmp_path}/end"
    with pytest.raises(CommandFailed, match="took longer than 5 s"):
        run(["sh", "-c", script], timeout=5)
    assert not (tmp_path / "end").exists()
    assert until(lambda: not alive(int((tmp_path / "pid").read_text())), 30)


@pytest.mark.parametrize("how", ["main", "thread"])
@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGINT, "Interrupted", 130), (signal.SIGTERM, "Terminated", 143)]
)
def test_a_signal_stops_the_whole_family(tmp_path: Path, number: int, error: str, code: int, how: str) -> None:
    process, pids = family(tmp_path, how)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert process.stdout
    assert process.stdout.read().splitlines() == [f"run: {error}", f"main: {error}"]
    assert until(lambda: not any(map(alive, pids)), 30)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """The first would wait for ten minutes here: it only makes the command write a file."""
    script = f"trap 'echo > {tmp_path}/first' INT; echo > {tmp_path}/up; while :; do sleep 0.1; done"
    program = f"""
import signal
from warmstart import run, signals
run.STOPPING = ((signal.SIGINT, 600.0),)
signals.catch()
run.run(["sh", "-c", {script!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        for name in ("up", "first"):
            assert until((tmp_path / name).is_file)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


# Waits for a command that a thread starts, and gets the signal while it does: before the command is there (early)
# or when it is. Another thread gets it, which wakes nobody, as little as a signal does just before a sleep.
ELSEWHERE = """
import signal, sys, threading, time
from warmstart import signals
from warmstart.errors import WarmstartError

order, early = [], sys.argv[1] == "early"

def send(group, number):
    order.append((group, number))
    over.set()

over = threading.Event()
signals.send = send
signals.catch()

def work():
    with signals.starting() as started:
        begun.set()
        if early:
            raised.wait()
        started(7)
        if early:
            assert not order
    if not early:
        time.sleep(0.2)  # the main thread sleeps by then
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    over.wait()

begun, raised = threading.Event(), threading.Event()
thread = threading.Thread(target=work)
try:
    thread.start()
    if early:
        begun.wait()
        signal.raise_signal(signal.SIGINT)
    threading.Event().wait()
except WarmstartError as failure:
    raised.set()
    thread.join()
    print(type(failure).__name__, [(group, signal.Signals(number).name) for group, number in order])
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_signal_that_does_not_wake_the_main_thread_reaches_it(when: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, when], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "Interrupted [(7, 'SIGINT')]\n", ran.stderr


def test_when_we_are_killed_the_command_is_stopped(tmp_path: Path) -> None:
    process, pids = family(tmp_path, "main")
    process.kill()
    process.wait()
    assert until(lambda: not alive(pids[0]), 30)
    for pid in pids[1:]:  # the kernel stops the command itself; tools see to their own children
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_glance_has_the_output_of_what_succeeds() -> None:
    assert glance(["sh", "-c", "echo $ONE; echo hidden >&2"], env={"ONE": "x"}) == "x\n"
    assert glance(["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' y"]) == "y" * 300_000  # more than a pipe
    assert glance(["sh", "-c", "echo x; exit 3"]) is None
    assert glance(["no-such-program"]) is None
