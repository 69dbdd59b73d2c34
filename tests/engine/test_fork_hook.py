"""Processes that a helper forks instead of spawning them: as spawned ones, and spawned whenever something is in doubt.

A small package with vLLM's names stands in for it, so that no torch is needed: each test writes a server's program and
runs it as `vllm serve`. The image tests start the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmstart import processes

HOOKS = Path(__file__).parents[2] / "sitecustomize"
SYSTEM_UTILS = """
import multiprocessing, os
def get_mp_context():
    return multiprocessing.get_context(os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"))
"""
# What vLLM's engine and workers are here: they say what they see.
WORK = """
import multiprocessing, os, resource, signal, sys, threading, time
LOADED_BY = os.getpid()
def look():
    parent = multiprocessing.parent_process()
    return {
        "pid": os.getpid(), "ppid": os.getppid(), "loaded_by": LOADED_BY,
        "name": multiprocessing.current_process().name, "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "parent": parent.pid, "daemon": multiprocessing.current_process().daemon, "argv": sys.argv, "cwd": os.getcwd(),
        "env": {k: v for k, v in os.environ.items() if k.startswith(("T_", "OMP_"))}, "umask": os.umask(0o77),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "processors": sorted(os.sched_getaffinity(0)),
        "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "term": str(signal.getsignal(15)),
        "chld": str(signal.getsignal(17)), "usr1": str(signal.getsignal(10)), "threads": threading.active_count(),
        "stdin": os.readlink("/proc/self/fd/0"), "method": multiprocessing.get_start_method(),
        "comm": open("/proc/self/comm").read().strip(), "main": sys.modules["__main__"].__name__,
        "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}")),
    }
def tell(pipe, lock=None, queue=None):
    with lock or multiprocessing.Lock():
        if queue is not None:
            queue.put("by queue")
        pipe.send(look())
def fail(code): sys.exit(code)
def raises(): raise ValueError("seen on stderr")
def sleep(): time.sleep(60)
def outlive(pipe):
    pipe.send(os.getpid())
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    pipe.send("the server has ended")
def nested(pipe):
    from vllm.utils.system_utils import get_mp_context
    context = get_mp_context()
    child = context.Process(target=tell, args=(pipe,), name="VllmWorker-0", daemon=True)
    child.start(); child.join()
class MultiprocExecutor: pass
def engine(pipe, executor_class): tell(pipe)
class Config:
    class parallel_config: worker_cls = "vllm.work.Worker"
    class model_config: architecture = "TinyForCausalLM"
def worker(pipe, vllm_config): tell(pipe)
"""
PROGRAM = """
import sys
sys.path[:0] = {path!r}
import warmstart_hooks
def ask(context, target="tell", name="EngineCore", daemon=None, **kwargs):
    import vllm.work
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=getattr(vllm.work, target), args=(theirs,), kwargs=kwargs, name=name, daemon=daemon)
    process.start(); theirs.close()
    return process, ours
def told(context, **kwargs):
    process, pipe = ask(context, **kwargs)
    found = pipe.recv(); process.join()
    return found
def main():
    import json, os, signal, socket, sys, threading, time, multiprocessing, resource
    import vllm.version
    from vllm.utils.system_utils import get_mp_context
{before}
    import vllm.entrypoints.cli.serve
    context = get_mp_context()
{program}
if __name__ == "__main__":
    main()
"""

Serve = Callable[..., Any]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The stand-in; its folder."""
    package = tmp_path / "site" / "vllm"
    for folder in (package, package / "utils", package / "entrypoints", package / "entrypoints/cli"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (package / "version.py").write_text("")
    (package / "work.py").write_text(WORK)
    (package / "utils/system_utils.py").write_text(SYSTEM_UTILS)
    (package / "entrypoints/cli/serve.py").write_text("import vllm.work\n")
    return package


@pytest.fixture
def start(tmp_path: Path, package: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a server's program; what it leaves running is ended."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *, before: str = "pass", **env: str) -> subprocess.Popen[str]:
        script = tmp_path / "vllm.py"
        indented = ["\n".join(f"    {line}" for line in text.splitlines()) for text in (before, program)]
        script.write_text(
            PROGRAM.format(path=[str(package.parent), str(HOOKS)], before=indented[0], program=indented[1])
        )
        variables = {
            "PATH": os.environ["PATH"],
            "VLLM_CACHE_ROOT": str(tmp_path),
            "WARMSTART_START": str(record(tmp_path)),
        }
        server = subprocess.Popen(
            [sys.executable, script, "serve", "/models/m"],
            env={**variables, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        running.append(server)
        return server

    yield start
    for server in running:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def serve(start: Callable[..., subprocess.Popen[str]]) -> Serve:
    """Run a server's program to its end; what it printed, as JSON. Nothing may be on stderr."""

    def serve(program: str, *, stderr: str = "", **options: str) -> Any:
        server = start(program, **options)
        out, err = server.communicate(timeout=120)
        assert server.returncode == 0, err
        assert stderr in err if stderr else not err, err
        return json.loads(out) if out else None

    return serve


def record(tmp_path: Path) -> Path:
    return tmp_path / "start.jsonl"


def events(tmp_path: Path) -> list[tuple[str, str]]:
    """What the start record says of processes: (event, name), or of a helper that may not be: (event, why)."""
    lines = record(tmp_path).read_text().splitlines() if record(tmp_path).exists() else []
    found = [json.loads(line) for line in lines]
    return [(event["event"], event.get("name") or event["why"]) for event in found if event["event"] != "import"]


TELL = "print(json.dumps([os.getpid(), told(context)]))"
OFF = {"WARMSTART_HOOK_FORK": "0"}
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def test_the_engine_is_forked_with_what_the_server_imported(serve: Serve, tmp_path: Path) -> None:
    pid, seen = serve(TELL)
    assert seen["loaded_by"] == pid  # not imported again
    assert seen["ppid"] not in (pid, seen["pid"])  # by the helper, not by the server
    assert seen["parent"] == pid
    assert events(tmp_path) == [("fork", "EngineCore")]


@pytest.mark.parametrize("env", [OFF, {"WARMSTART_HOOKS": "0"}, *({METHOD: how} for how in ("fork", "spawn"))])
def test_otherwise_it_starts_as_ever(serve: Serve, tmp_path: Path, env: dict[str, str]) -> None:
    pid, seen = serve(TELL, **env)
    assert seen["ppid"] == pid
    assert events(tmp_path) == []


def test_it_sees_what_a_spawned_one_sees(serve: Serve) -> None:
    """Where it differs is named here: who its parent is, and when its modules were loaded."""
    change = """
os.environ.update(T_NEW="x", T_CHANGED="new", OMP_NUM_THREADS="3"); del os.environ["T_GONE"]
os.umask(0o27); os.chdir("/"); os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.signal(signal.SIGTERM, lambda *_: None)
sys.argv.append("--flag")
print(json.dumps(told(context, daemon=True)))
"""
    env = {"T_CHANGED": "old", "T_GONE": "x", "T_SAME": "x"}
    forked, spawned = serve(change, **env), serve(change, **env, **OFF)
    own = {"pid", "ppid", "parent", "loaded_by"}
    differ = {name for name in spawned if forked[name] != spawned[name]} - own
    # Its way to the helper; and the program is not run again as __mp_main__, because it was already.
    assert differ == {"sockets", "main"}, (forked, spawned)
    assert forked["env"] == {"T_NEW": "x", "T_CHANGED": "new", "T_SAME": "x", "OMP_NUM_THREADS": "3"}
    assert (forked["files"], forked["umask"], forked["cwd"]) == (300, 0o27, "/")


def test_pipes_locks_and_queues_are_shared(serve: Serve) -> None:
    program = """
lock, queue = context.Lock(), context.Queue()
process, pipe = ask(context, lock=lock, queue=queue)
found = queue.get(timeout=20), pipe.recv()["name"]
process.join()
print(json.dumps([*found, process.exitcode]))
"""
    assert serve(program) == ["by queue", "EngineCore", 0]


def test_exit_codes_and_signals_come_back(serve: Serve) -> None:
    program = """
import vllm.work
codes = []
work = vllm.work
for target, args, how in ((work.fail, (7,), None), (work.raises, (), None), (work.sleep, (), "terminate"),
                          (work.sleep, (), "kill")):
    process = context.Process(target=target, args=args); process.start()
    assert process.is_alive() or how is None
    if how: getattr(process, how)()
    multiprocessing.connection.wait([process.sentinel], 20)
    process.join(20); codes.append(process.exitcode)
print(json.dumps(codes))
"""
    assert serve(program, stderr="ValueError: seen on stderr") == [7, 1, -15, -9]


def test_the_engines_own_workers_are_forked_too(serve: Serve, tmp_path: Path) -> None:
    pid, seen = serve("print(json.dumps([os.getpid(), told(context, target='nested')]))")
    assert seen["loaded_by"] == pid
    assert seen["name"] == "VllmWorker-0"
    assert seen["daemon"]
    assert events(tmp_path) == [("fork", "EngineCore"), ("fork", "VllmWorker-0")]


def test_each_process_has_its_own_random_numbers(serve: Serve, package: Path) -> None:
    (package / "work.py").write_text(WORK + "\nimport random\ndef draw(pipe): pipe.send(random.random())\n")
    first, second = serve("print(json.dumps([told(context, target='draw'), told(context, target='draw')]))")
    assert first != second


# --- when it may not be forked ----------------------------------------------------


def test_a_server_with_threads_is_not_forked(serve: Serve, tmp_path: Path) -> None:
    pid, seen = serve(TELL, before="threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    assert seen["ppid"] == pid
    assert events(tmp_path) == [("helper", "it has threads")]


def test_threads_that_come_later_do_not_matter(serve: Serve) -> None:
    program = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n" + TELL
    pid, seen = serve(program)
    assert seen["ppid"] != pid
    assert seen["threads"] == 1


@pytest.mark.parametrize("where", ["server", "helper"])
def test_an_open_gpu_is_not_forked(serve: Serve, package: Path, tmp_path: Path, where: str) -> None:
    """/dev/kfd open in the server before, or by what the helper imports; a file of that name stands in for it."""
    device = tmp_path / "kfd"
    device.write_text("")
    before = f"import warmstart_fork; warmstart_fork.DEVICES = ({str(device)!r},)\n"
    opens = f"import os\nkept = os.open({str(device)!r}, os.O_RDONLY)\n"
    if where == "helper":
        for name in ("v1", "v1/engine"):
            (package / name).mkdir()
            (package / name / "__init__.py").write_text("")
        (package / "v1/engine/core.py").write_text(opens)
    pid, seen = serve(TELL, before=before + (opens if where == "server" else ""))
    assert seen["ppid"] == pid
    own_way = [("spawn", "EngineCore")] if where == "helper" else []
    assert events(tmp_path) == [("helper", "it has opened the GPU"), *own_way]


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "GOMP_CPU_AFFINITY", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "HIP_VISIBLE_DEVICES"]
)
def test_what_libraries_read_once_must_be_the_same(serve: Serve, tmp_path: Path, name: str) -> None:
    pid, seen = serve(f"os.environ[{name!r}] = '0'\n" + TELL, stderr="" if name != "LD_PRELOAD" else "LD_PRELOAD")
    assert seen["ppid"] == pid
    assert events(tmp_path) == [("spawn", "EngineCore")]


def test_an_engine_that_only_schedules_may_differ_there(serve: Serve, tmp_path: Path) -> None:
    program = """
os.environ["GOMP_CPU_AFFINITY"] = "0"
import vllm.work
print(json.dumps([os.getpid(), told(context, target="engine", executor_class=vllm.work.MultiprocExecutor)]))
"""
    pid, seen = serve(program)
    assert seen["ppid"] != pid
    assert events(tmp_path) == [("fork", "EngineCore")]


def test_another_program_than_python_starts_it(serve: Serve, tmp_path: Path) -> None:
    """vLLM pins processes to NUMA nodes by a program that starts Python."""
    program = """
wrapper = os.path.abspath("wrapper")
with open(os.open(wrapper, os.O_CREAT | os.O_WRONLY, 0o755), "w") as text:
    text.write("#!/bin/sh\\nT_WRAPPED=1 exec %s \\"$@\\"\\n" % sys.executable)
multiprocessing.spawn.set_executable(wrapper)
print(json.dumps([os.getpid(), told(context)]))
"""
    pid, seen = serve(program)
    assert seen["env"] == {"T_WRAPPED": "1"}
    assert seen["ppid"] == pid


def test_without_the_helper_it_is_spawned(serve: Serve, tmp_path: Path) -> None:
    program = (
        """
import warmstart_fork
name = "/proc/self/task/%d/children" % os.getpid()
for pid in open(name).read().split():
    os.kill(int(pid), signal.SIGKILL)
"""
        + TELL
    )
    pid, seen = serve(program)
    assert seen["ppid"] == pid
    assert events(tmp_path) == [("spawn", "EngineCore")]


def test_a_helper_that_does_not_answer_is_not_waited_for(serve: Serve, tmp_path: Path) -> None:
    program = """
import warmstart_request
warmstart_request.PATIENCE = 0.2
for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split():
    os.kill(int(pid), signal.SIGSTOP)
found = told(context)
for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split():
    os.kill(int(pid), signal.SIGCONT)
print(json.dumps([os.getpid(), found]))
"""
    pid, seen = serve(program)
    assert seen["ppid"] == pid
    assert events(tmp_path) == [("spawn", "EngineCore")]


SURVIVOR = """
process, pipe = ask(context, target="outlive")
engine = pipe.recv()
for pid in map(int, open("/proc/self/task/%d/children" % os.getpid()).read().split()):
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
early = multiprocessing.connection.wait([process.sentinel], 0.5), process.is_alive(), process.exitcode
os.kill(engine, signal.SIGKILL)
noticed = bool(multiprocessing.connection.wait([process.sentinel], 20))
process.join(20)
print(json.dumps([early, noticed, process.is_alive(), process.exitcode]))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no descriptors of processes")
def test_an_engine_outlives_its_helper(serve: Serve) -> None:
    assert serve(SURVIVOR) == [[[], True, None], True, False, 255]


def test_without_descriptors_of_processes_the_pipe_says_it(serve: Serve) -> None:
    program = """
process, pipe = ask(context, target="outlive")
found = pipe.recv(), multiprocessing.connection.wait([process.sentinel], 0.2), process.is_alive()
process.kill(); process.join(20)
print(json.dumps([*found[1:], process.exitcode]))
"""
    assert serve(program, before="if hasattr(os, 'pidfd_open'): del os.pidfd_open") == [[], True, -9]


def test_a_helper_that_cannot_fork_goes_on(serve: Serve, tmp_path: Path) -> None:
    """The first request is turned down at once; the next is served."""
    before = """
import types, warmstart_forker
fails = [BlockingIOError(11, "no more processes")]
def fork():
    if fails: raise fails.pop()
    return os.fork()
warmstart_forker.os = types.SimpleNamespace(**{**vars(os), "fork": fork})
"""
    program = """
import warmstart_fork
one = warmstart_fork.helper.all[0]
kept = one._replace(channel=one.channel.dup())
first = told(context)["ppid"]
warmstart_fork.helper.all.append(kept)
print(json.dumps([os.getpid(), first, told(context)["ppid"]]))
"""
    pid, first, second = serve(program, before=before)
    assert first == pid
    assert second != pid
    assert events(tmp_path) == [("spawn", "EngineCore"), ("fork", "EngineCore")]


# --- the end ----------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    """Processes below one."""
    return {process.pid for process in processes.tree(pid)} - {pid}


def all_end(pids: set[int], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while any(map(processes.began, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(processes.began, pids))


WAIT = """
process, pipe = ask(context, target="outlive")
try:
    print(pipe.recv(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(process.is_alive(), flush=True)
"""


def test_ctrl_c_ends_the_server_and_the_helper_after_it(start: Callable[..., subprocess.Popen[str]]) -> None:
    server = start(WAIT)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    below = descendants(server.pid)
    assert engine in below
    helpers = below - {engine}
    for pid in helpers:
        os.kill(pid, signal.SIGINT)  # as a terminal does to all of them
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert processes.began(engine)
    assert server.poll() is None
    server.send_signal(signal.SIGINT)
    assert server.stdout.readline() == "True\n"
    os.kill(engine, signal.SIGKILL)  # vLLM's server ends its engine itself
    assert all_end(below)


LATE = """
import warmstart_forker
server = os.getpid()
def wait(name):
    while os.getppid() == server:
        time.sleep(0.01)
warmstart_forker.name_process = wait
"""


@pytest.mark.parametrize("before", ["pass", LATE], ids=["as ever", "the server ends before it can be noticed"])
def test_a_helper_that_still_imports_ends_with_the_server(
    start: Callable[..., subprocess.Popen[str]], package: Path, before: str
) -> None:
    """It holds the server's stdout, which whoever reads it waits for."""
    for name in ("v1", "v1/engine"):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text("")
    (package / "v1/engine/core.py").write_text("import time; time.sleep(300)\n")
    server = start("sys.exit('no such model')", before=before)
    _, err = server.communicate(timeout=60)
    assert err == "no such model\n"


def test_nothing_outlives_a_killed_server(start: Callable[..., subprocess.Popen[str]]) -> None:
    server = start(WAIT)
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    below = descendants(server.pid)
    assert engine in below
    server.kill()
    server.wait()
    assert all_end(below)  # the engine saw its parent end by multiprocessing's sentinel


# --- the second helper ------------------------------------------------------------

WORKER = """
import types
import vllm.work
stand_in = types.SimpleNamespace
tiny = stand_in(module_name="vllm.model_executor.models.tiny")
sys.modules["vllm.platforms"] = stand_in(current_platform=stand_in(is_cpu=lambda: "GPU" not in os.environ))
sys.modules["vllm.model_executor.models.registry"] = stand_in(ModelRegistry=stand_in(models={"TinyForCausalLM": tiny}))
os.environ.update(OMP_NUM_THREADS="1", GOMP_CPU_AFFINITY="0", VLLM_LATE="1")
print(json.dumps([os.getpid(), told(context, target="worker", name="VllmWorker-0", vllm_config=vllm.work.Config)]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it is worth a second processor")
def test_what_a_worker_needed_is_imported_by_a_second_helper(serve: Serve, tmp_path: Path) -> None:
    secret = {"HF_TOKEN": "secret"}
    pid, seen = serve(WORKER, **secret)
    assert seen["ppid"] == pid
    kept = tmp_path / "warmstart_helper.json"
    found = json.loads(kept.read_text())
    assert found["env"] == {"OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "0", "VLLM_LATE": "1"}
    assert found["modules"][-2:] == ["vllm.work", "vllm.model_executor.models.tiny"]
    pid, seen = serve(WORKER, **secret)
    assert seen["ppid"] != pid
    assert seen["loaded_by"] != pid  # by a Python that had the variables from the start
    assert events(tmp_path) == [("spawn", "VllmWorker-0"), ("fork", "VllmWorker-0")]
    pid, seen = serve(WORKER.replace('AFFINITY="0"', 'AFFINITY="1"'), **secret)
    assert seen["ppid"] == pid  # another machine: it is kept anew
    assert json.loads(kept.read_text())["env"]["GOMP_CPU_AFFINITY"] == "1"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it is worth a second processor")
def test_what_the_user_sets_otherwise_now_stands(serve: Serve, tmp_path: Path, package: Path) -> None:
    """A module reads a variable when it is imported: no helper that imported it under the kept value is asked."""
    reads = WORK.replace('"parent": parent.pid', '"parent": parent.pid, "endpoint": ENDPOINT')
    (package / "work.py").write_text(reads + "ENDPOINT = os.environ.get('HF_ENDPOINT')\n")
    env = {"OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "0", "VLLM_LATE": "1", "HF_ENDPOINT": "old"}
    kept = json.dumps({"env": env, "modules": ["vllm.work"]})
    (tmp_path / "warmstart_helper.json").write_text(kept)
    pid, seen = serve(WORKER, before="os.environ['HF_ENDPOINT'] = 'old'")
    assert (seen["endpoint"], seen["ppid"] == pid) == ("old", False)
    (tmp_path / "warmstart_helper.json").write_text(kept)
    pid, seen = serve(WORKER, HF_ENDPOINT="new")
    assert (seen["endpoint"], seen["ppid"] == pid) == ("new", True)


def test_a_models_module_is_not_imported_beside_a_gpu(serve: Serve, tmp_path: Path) -> None:
    serve(WORKER, GPU="1")
    assert json.loads((tmp_path / "warmstart_helper.json").read_text())["modules"][-1] == "vllm.work"


def test_a_pipe_in_the_place_of_what_is_kept_is_not_waited_for(serve: Serve, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "warmstart_helper.json")
    pid, seen = serve(TELL)
    assert seen["loaded_by"] == pid


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"env": 1, "modules": []}', '{"env": {"A": 1}, "modules": []}', "[" * 100000]
)
def test_what_is_kept_may_be_broken(serve: Serve, tmp_path: Path, text: str) -> None:
    (tmp_path / "warmstart_helper.json").write_text(text)
    pid, seen = serve(TELL)
    assert seen["loaded_by"] == pid
