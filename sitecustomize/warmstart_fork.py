"""torch and vLLM imported once: what the server has imported, the engine's processes get by fork.

vLLM spawns the engine, because a process with threads or an open GPU can't be forked safely; the new Python then
imports for seconds what the server imported before. Here the server forks a helper as soon as its own imports are
done: it has one thread and no GPU open then. The helper (warmstart_forker) imports what only the engine needs while
the server goes on, and forks the engine and its workers when asked to. Whatever is in doubt, vLLM spawns.

What a spawned process gets from the server is sent along. Variables that libraries read when they are loaded must be
the same as when the helper was forked. For a worker on a CPU they are not: vLLM sets OpenMP's late. So what they were
is kept on the cache volume, and the next start has a second helper, a new Python with those variables that imports
beside the server. Standard library only.
"""

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import types
from multiprocessing import context, popen_spawn_posix, spawn, util
from typing import Any, NamedTuple

import warmstart_files as files  # type: ignore[import-not-found] # beside this file
import warmstart_request as request  # type: ignore[import-not-found]

# What the engine needs beyond the server. None of them opens a GPU when it is imported; a model's classes can.
PRELOAD = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
)
# Variables that torch, OpenMP and the GPU's libraries read once, when they are loaded.
READ_ONCE = tuple(
    "LD_ MALLOC_ TCMALLOC_ GLIBC_ PYTHON OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ TORCH PYTORCH_ TRITON_ "
    "CUDA_ NVIDIA_ HIP_ ROC HSA_ AMD_ GPU_".split()
)
DEVICES = ("/dev/kfd", "/dev/nvidia-uvm", "/dev/dxg")  # open in a process whose HIP or CUDA has begun
FORCE = "force"  # of WARMSTART_HOOK_FORK: for measuring where libraries that images lack have threads (pyarrow)
KEPT = "warmstart_helper.json"  # in VLLM_CACHE_ROOT: variables and modules of a worker that had to be spawned
PROGRAM = "import sys; sys.path[:] = {path!r}; import warmstart_forker; warmstart_forker.begin({fd}, {server})"


class Helper(NamedTuple):
    """A process that forks others."""

    channel: socket.socket  # requests are sent here
    env: dict[str, str]  # its variables when it was made
    processors: frozenset[int]  # those it might use then
    early: bool  # a new Python, started before the server's imports


helper = types.SimpleNamespace(all=[], socket=None)  # that this process may ask; the channel of the one that is forked
first = types.SimpleNamespace(env={})  # the server's environment before its imports


# ---- in the server ------------------------------------------------------------------------------------------------
def begin_early(module: Any) -> None:
    """Start the second helper if a worker had to be spawned the last time; `module` is vllm.version, vLLM's first."""
    if not serves():
        return
    importlib.import_module("warmstart_forker").find_title()
    first.env = dict(os.environ)
    found = kept()
    if not found or len(os.sched_getaffinity(0)) < 2 or overridden(found["env"]):
        return
    env = {name: value for name, value in {**first.env, **found["env"]}.items() if value is not None}
    ours, theirs = channel()
    program = PROGRAM.format(path=sys.path, fd=theirs.fileno(), server=os.getpid())
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined] # those of every spawned Python
    argv = [sys.executable, *flags, "-c", program, json.dumps(found["modules"])]
    subprocess.Popen(argv, env=env, pass_fds=(theirs.fileno(),))
    theirs.close()
    helper.all.append(Helper(ours, env, frozenset(os.sched_getaffinity(0)), True))


def overridden(env: "dict[str, str | None]") -> bool:
    """Whether the user now sets one of the kept variables otherwise: modules may have read it when imported.

    Those of READ_ONCE and vLLM's own are compared when a process is asked for.
    """
    others = {name: value for name, value in env.items() if not name.startswith((*READ_ONCE, "VLLM_"))}
    return any(first.env.get(name, value) != value for name, value in others.items())


def prepare(module: Any) -> None:
    """Fork the helper if nothing speaks against it; `module` is vllm.entrypoints.cli.serve, among the last imported."""
    if not serves() or helper.socket is not None or unsafe():
        return
    ours, theirs = channel()
    made = Helper(ours, dict(os.environ), frozenset(os.sched_getaffinity(0)), False)
    util._flush_std_streams()  # type: ignore[attr-defined]
    server = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            importlib.import_module("warmstart_forker").serve(theirs, made, PRELOAD, server)
        finally:
            os._exit(0)  # never back into the server's code
    theirs.close()
    helper.all.insert(0, made)
    helper.socket = ours


def serves() -> bool:
    """Whether this process is `vllm serve` itself, free to start its processes as it likes."""
    # Another program than Python starts what is bound to a NUMA node; and vLLM sets the variable only later.
    other = any(word == "-h" or word.startswith(("--help", "--numa-bind")) for word in sys.argv)
    chosen = other or "VLLM_WORKER_MULTIPROC_METHOD" in os.environ
    # A spawned process has its parent's arguments before it knows that it has a parent.
    spawned = mp.parent_process() is not None or getattr(mp.current_process(), "_inheriting", False)
    return sys.argv[1:2] == ["serve"] and not chosen and not spawned


def channel() -> tuple[socket.socket, socket.socket]:
    """Where requests go in, and where they come out, each whole whoever sends it."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def unsafe() -> bool:
    """Whether this process can't be forked safely; told in the start record, because vLLM's own way is silent."""
    if os.environ.get("WARMSTART_HOOK_FORK") == FORCE:
        return False
    why = "it has opened the GPU" if opened_devices() else "" if alone() else "it has threads"
    if why:
        note("helper", why=why)
    return bool(why)


def opened_devices() -> bool:
    """Whether HIP or CUDA has begun in this process."""
    torch = sys.modules.get("torch")
    try:
        open_files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
        return bool(torch and torch.cuda.is_initialized()) or any(file.startswith(DEVICES) for file in open_files)
    except Exception:
        return True


def alone() -> bool:
    """Whether a fork copies all threads of this process, that is one. Some libraries end theirs at a fork: OpenBLAS."""
    if threads() == 1:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return threads() == 1


def threads() -> int:
    """Threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


# ---- in the server, and in the engine for its workers --------------------------------------------------------------
def install(module: Any) -> None:
    """Let get_mp_context of vllm.utils.system_utils answer with a context that asks the helpers."""
    original = module.get_mp_context

    def get_mp_context() -> Any:
        found = original()
        return Context() if helper.all and found.get_start_method() == "spawn" else found

    module.get_mp_context = get_mp_context


class Process(context.SpawnProcess):
    """A process that a helper forks if one can, and that is spawned if not."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        why = "no helper"
        for one in list(helper.all):
            why = unfit(process, one)
            if not why:
                try:
                    popen = request.Popen(process, one.channel)
                    note("fork", name=process.name, child=popen.pid)
                    return popen
                except (OSError, EOFError) as problem:
                    forget(one)  # it has ended, or does not answer
                    why = f"{type(problem).__name__}: {problem}"
        with contextlib.suppress(Exception):
            keep(process)
        popen = popen_spawn_posix.Popen(process)
        note("spawn", name=process.name, child=popen.pid, why=why)
        return popen


class Context(context.SpawnContext):
    """vLLM's context for spawning, its processes made by the helpers."""

    Process = Process


def forget(one: Helper) -> None:
    """Ask this helper no more."""
    helper.all.remove(one)
    if helper.socket is one.channel:
        helper.socket = None
    one.channel.close()


def unfit(process: Any, one: Helper) -> str:
    """Why the helper's child would differ from a spawned one; empty when it would not."""
    if os.fsdecode(spawn.get_executable()) != sys.executable:
        return "another program starts Python"
    executor = getattr(process, "_kwargs", {}).get("executor_class")
    if getattr(executor, "__name__", "") == "MultiprocExecutor" and not one.early:
        return ""  # an engine that computes and compiles nothing: its workers do
    names = {name for name in os.environ.keys() | one.env.keys() if os.environ.get(name) != one.env.get(name)}
    if one.early:
        names = {name for name in names if name.startswith((*READ_ONCE, "VLLM_"))}
    else:
        names = {name for name in names - {"OMP_NUM_THREADS"} if name.startswith(READ_ONCE)}
    return f"changed since: {', '.join(sorted(names))}" if names else ""


# ---- kept for the next start, and told of this one -------------------------------------------------------------------
def kept() -> Any:
    """Variables (None: removed) and modules of the worker that was spawned the last time; None when nothing is kept."""
    try:
        found = files.read_json(os.path.join(os.environ["VLLM_CACHE_ROOT"], KEPT))
        right = all(value is None or isinstance(value, str) for value in found["env"].values())
        return found if right and all(isinstance(name, str) for name in found["modules"]) else None
    except (KeyError, TypeError, AttributeError):
        return None


def keep(process: Any) -> None:
    """Keep what vLLM changed in the environment of a worker, and which modules it begins with."""
    config = process._kwargs.get("vllm_config")
    if not process.name.endswith("Worker-0") or config is None or not first.env:
        return
    # The difference alone: what the user set, a token perhaps, stays out of it.
    names = sorted(os.environ.keys() | first.env.keys())
    env = {name: os.environ.get(name) for name in names if os.environ.get(name) != first.env.get(name)}
    modules = [*PRELOAD, config.parallel_config.worker_cls.rpartition(".")[0]]
    with contextlib.suppress(Exception):
        if sys.modules["vllm.platforms"].current_platform.is_cpu():  # elsewhere a model's module can open the GPU
            models = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
            modules.append(models[config.model_config.architecture].module_name)
    if kept() != (found := {"env": env, "modules": modules}):
        files.put(os.path.join(os.environ["VLLM_CACHE_ROOT"], KEPT), json.dumps(found, indent=1).encode())


def note(event: str, **facts: object) -> None:
    """Append to the start record, where there is one."""
    if os.environ.get("WARMSTART_START"):
        with contextlib.suppress(Exception):
            importlib.import_module("warmstart_count").emit(event, **facts)
