"""Compilers in processes of their own: threads that compile take turns at Python's lock.

The server is a new Python, so it never held a device open; it imports Triton alone, never torch. It forks a child for
every kernel, which compiles into Triton's own cache directory and ends. The caller then compiles as ever and finds
the result there, by Triton's own key: whatever differed or went wrong over there costs time, never a wrong kernel.
Standard library only.
"""

import contextlib
import hashlib
import importlib
import itertools
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import types
from concurrent.futures import Future
from typing import Any

import warmstart_pack  # type: ignore[import-not-found] # beside this file
import warmstart_turns as turns  # type: ignore[import-not-found]

PROGRAM = "import sys; sys.path[:] = {path!r}; import warmstart_workers; warmstart_workers.serve({reply})"
IDLE = 60.0  # seconds after which a server with nothing to do ends
JOB = struct.Struct("<IQ")  # number, bytes that follow
REPLY = struct.Struct("<I?")  # number, whether it was compiled; in one write, which is never torn
READY = 0  # the number of the server's own reply

lock = threading.Lock()
numbers = itertools.count(1)
server = types.SimpleNamespace(process=None, owner=0, jobs={}, ready=None, useless=0)
compiled = 0  # kernels that workers compiled for this process; Triton's listener reports those as cache hits


def forget() -> None:
    """In a forked process: the server is its parent's, and a thread that held the lock is not there."""
    global lock
    lock = threading.Lock()
    server.process, server.jobs = None, {}


os.register_at_fork(after_in_child=forget)


# ---- in the process that wants kernels ----------------------------------------------------------------------------
def running() -> bool:
    """Whether this process has a server, be it still starting."""
    return server.owner == os.getpid() and server.process is not None


def through(compile_fn: Any, patience: float, *, urgent: bool = True) -> bool:
    """Compile in a worker what `compile_fn` of Triton's asynchronous mode would compile here; True when it did.

    Waits `patience` seconds for a server that is still starting. What is not `urgent` gives way to what is.
    """
    found = None if server.useless == os.getpid() else parts(compile_fn)
    if found is None:
        return False
    key, there = cached(*found)
    if there or (job := packed(*found)) is None:
        return False
    with lock:
        if not running():
            start(found[1])
        ready = server.ready
    if not ready.wait(patience):
        return False
    with turns.turn(key or str(id(job)), urgent) as mine:
        return mine and not cached(*found)[1] and sent(job, found)


def sent(job: bytes, found: tuple[Any, ...]) -> bool:
    """Have the server compile a job; whether it did."""
    global compiled
    number, answer, jobs = next(numbers), Future(), {}  # type: ignore[var-annotated]
    try:
        with lock:
            jobs, pipe = server.jobs, server.process.stdin
            jobs[number] = answer
            pipe.write(JOB.pack(number, len(job)) + job)
            pipe.flush()
        done = bool(answer.result(turns.LIMIT))
    except (OSError, ValueError, AttributeError):  # the server has ended, and the pipe with it
        return False
    finally:
        jobs.pop(number, None)
    if done and not cached(*found)[1]:
        server.useless = os.getpid()  # it compiles something else, or elsewhere
        return False
    compiled += done
    return done


def start(target: Any) -> None:
    """Start the server of this process."""
    take, give = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-ISB", "-c", PROGRAM.format(path=sys.path, reply=give)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what it has to say, the caller meets again
            pass_fds=(give,),
            env={**os.environ, "WARMSTART_HOOKS": "0"},
        )
    except BaseException:
        os.close(take)
        raise
    finally:
        os.close(give)
    hello = pickle.dumps(target)
    process.stdin.write(JOB.pack(READY, len(hello)) + hello)  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    server.process, server.owner, server.jobs, server.ready = process, os.getpid(), {}, threading.Event()
    reader = threading.Thread(target=listen, args=(take, process, server.jobs, server.ready), daemon=True)
    reader.start()


def listen(take: int, process: Any, jobs: dict[int, Any], ready: Any) -> None:
    """Hand on the server's replies until it ends; what is open then was not compiled."""
    with open(take, "rb", buffering=0) as replies:
        while len(reply := replies.read(REPLY.size) or b"") == REPLY.size:
            number, done = REPLY.unpack(reply)
            if number == READY:
                ready.set()
            elif number in jobs:
                settle(jobs[number], done)
    with lock:
        if server.process is process:
            server.process = None
        with contextlib.suppress(OSError):
            process.stdin.close()
    ready.set()
    for answer in list(jobs.values()):
        settle(answer, False)
    process.wait()


def settle(answer: Any, done: bool) -> None:
    """Answer a caller, unless it has been."""
    if not answer.done():
        answer.set_result(done)


def parts(compile_fn: Any) -> tuple[Any, ...] | None:
    """Source, target, options and variables of a compilation; None for what has to be compiled here."""
    cells = dict(zip(compile_fn.__code__.co_freevars, compile_fn.__closure__ or (), strict=True))
    try:
        # The names in Triton 3.5 to 3.9.
        src, target, options, env_vars = (cells[n].cell_contents for n in ("src", "target", "options", "env_vars"))
        compilation = sys.modules["triton.knobs"].compilation
        # A result in the cache would not be used, or the source is Gluon's.
        here = compilation.always_compile or compilation.override or compilation.dump_ir
        return None if here or type(src) is not src_class() else (src, target, options, env_vars)
    except Exception:
        return None


def cached(src: Any, target: Any, options: Any, env_vars: Any) -> tuple[str, bool]:
    """Triton's key of a kernel, empty where it can't be told, and whether Triton will find it in its cache."""
    try:
        cache, compiler = sys.modules["triton.runtime.cache"], sys.modules["triton.compiler.compiler"]
        backend = compiler.make_backend(target)
        key = hashlib.sha256(cache.get_cache_key(src, backend, options, env_vars).encode()).hexdigest()
        manager = cache.get_cache_manager(key)
        name = f"{src.name[:150]}.json"
        return key, name in (manager.get_group(name) or {})
    except Exception:
        return "", False


def packed(src: Any, target: Any, options: Any, env_vars: Any) -> bytes | None:
    """All that a worker needs to compile the same; None for what can't be sent."""
    try:
        where = sys.modules["triton.knobs"].cache.dir
        job = src.fn, src.signature, src.constants, src.attrs, target, options.__dict__, env_vars, where
        return bytes(warmstart_pack.dumps(job))
    except Exception:
        return None


def src_class() -> Any:
    """Triton's class for kernels made from Python."""
    return sys.modules["triton.compiler.compiler"].ASTSource


# ---- in the server and its children -------------------------------------------------------------------------------
def compile_packed(job: bytes) -> None:
    """Compile into Triton's cache; raises whatever Triton does."""
    fn, signature, constants, attrs, target, options, env_vars, where = pickle.loads(job)
    os.environ["TRITON_CACHE_DIR"] = where
    triton = importlib.import_module("triton")
    triton.compile(src_class()(fn, signature, constants, attrs), target=target, options=options, _env_vars=env_vars)


def serve(reply: int) -> None:
    """Fork a child for each job on stdin and tell on `reply` what became of it, until stdin closes."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("500")  # when memory runs out, a compiler goes before the engine
    warm_up(read_exactly(JOB.unpack(read_exactly(JOB.size))[1]))
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    os.write(reply, REPLY.pack(READY, True))
    children: dict[int, int] = {}
    try:
        answer(reply, woken, children)
    finally:
        for pid in children:  # nobody is there any more for what they compile
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def answer(reply: int, woken: int, children: dict[int, int]) -> None:
    """Do jobs until stdin closes, or there was none for a while; `children` are process ids and numbers of jobs."""
    waiting = b""
    while True:
        readable = select.select([0, woken], [], [], None if children else IDLE)[0]
        if not readable:
            return
        if woken in readable:
            os.read(woken, 4096)
        for number, done in ended(children):
            os.write(reply, REPLY.pack(number, done))
        if 0 in readable:
            data = os.read(0, 1 << 20)
            if not data:
                return
            waiting += data
            while len(waiting) >= JOB.size and len(waiting) >= JOB.size + (size := JOB.unpack_from(waiting)[1]):
                number, job = JOB.unpack_from(waiting)[0], waiting[JOB.size : JOB.size + size]
                waiting = waiting[JOB.size + size :]
                children[fork(job)] = number


def read_exactly(size: int) -> bytes:
    """The next bytes of stdin."""
    data = b""
    while len(data) < size and (more := os.read(0, size - len(data))):
        data += more
    return data


def nothing(x):  # type: ignore[no-untyped-def]
    """A kernel."""


def warm_up(target: bytes) -> None:
    """Import and set up what every compilation needs, once instead of in each child."""
    triton = importlib.import_module("triton")
    with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as nowhere:
        kept, os.environ["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR"), nowhere
        kernel = triton.jit(nothing)
        triton.compile(src_class()(kernel, {"x": "*fp32"}, {}, {}), target=pickle.loads(target))
        os.environ.pop("TRITON_CACHE_DIR")
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept


def ended(children: dict[int, int]) -> list[tuple[int, bool]]:
    """Take the children that ended out of the table: job's number, whether it was compiled."""
    found = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in children:
            found.append((children.pop(pid), status == 0))
    return found


def fork(job: bytes) -> int:
    """A child that compiles `job`, or ends when nobody waits for it any more; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the assembler is a child of this one
        signal.alarm(int(turns.LIMIT))
        compile_packed(job)
        code = 0
    finally:
        os._exit(code)
