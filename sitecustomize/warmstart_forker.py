"""What a helper of warmstart_fork does: import, then fork a process for each request.

It has one thread, opens no GPU and ends with the server. Standard library only.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker, spawn, util
from typing import Any

import warmstart_fork as fork  # type: ignore[import-not-found] # beside this file
import warmstart_gc  # type: ignore[import-not-found]
import warmstart_request as request  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1  # linux/prctl.h: a signal for when the parent has ended; what this one forks does not inherit it


def begin(fd: int, server: int) -> None:
    """The second helper: a new Python, which got the modules to import as its argument."""
    find_title()
    os.set_inheritable(fd, False)
    channel = socket.socket(fileno=fd)
    made = fork.Helper(channel, dict(os.environ), frozenset(os.sched_getaffinity(0)), True)
    serve(channel, made, json.loads(sys.argv[1]), server)


def serve(channel: socket.socket, made: Any, modules: Iterable[str], server: int) -> None:
    """Import the modules, then fork a process for each request; `server` is the process id of the parent."""
    # Ctrl-C reaches all processes of a terminal: this one ends after those that ask it. Blocked and not ignored,
    # because a process that is being forked must not miss one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    name_process("warmstart-fork")
    with contextlib.suppress(Exception):  # at once, and not after its imports: it holds the server's stdout
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return  # it ended before that
    with warmstart_gc.rare():
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    if fork.unsafe():
        return  # closes the channel: vLLM spawns
    gc.freeze()  # the pages of what is there now stay shared
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: dict[int, int] = {}  # process id → where its exit code goes
    while True:
        readable = select.select([channel.fileno(), woken], [], [])[0]
        if woken in readable:
            os.read(woken, 4096)
            reap(children)
        if channel.fileno() in readable:
            asked, fds, _, _ = socket.recv_fds(channel, 16, request.MOST_FILES, socket.MSG_CMSG_CLOEXEC)
            if not asked:
                return
            try:
                pid = os.fork()
            except OSError:  # no more processes, no memory: who asked sees its pipes close, and spawns
                close(*fds)
                continue
            if pid == 0:
                run(made, mask, fds, [channel.detach(), woken, wake, *children.values()])
            read, status, *others = fds
            close(read, *others)
            children[pid] = status
            tell(status, pid)


def reap(children: dict[int, int]) -> None:
    """Send the exit codes of processes that have ended to whoever asked for them."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in children:
            fd = children.pop(pid)
            tell(fd, os.waitstatus_to_exitcode(status))
            os.close(fd)


def tell(fd: int, number: int) -> None:
    """Send a number to whoever asked, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        forkserver.write_signed(fd, number)


def close(*fds: int) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def find_title() -> None:
    """Have setproctitle find the process's title now: it looks beside the variables, which move when they change."""
    with contextlib.suppress(Exception):
        with open("/proc/self/comm", encoding="utf-8") as comm:
            name = comm.read().rstrip("\n")
        importlib.import_module("setproctitle").getproctitle()
        name_process(name)  # it was changed


def name_process(name: str) -> None:
    """What `top` and `ps -e` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as comm:
        comm.write(name[:15])  # the kernel keeps no more


# ---- in the forked process -----------------------------------------------------------------------------------------
def run(made: Any, mask: Iterable[int], fds: list[int], helpers_own: list[int]) -> None:
    """Be the process that was asked for, from its first line to its end."""
    code = 1
    try:
        close(*helpers_own)
        code = become(made, mask, fds)
    except EOFError:
        pass  # whoever asked has given up
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(code)


def become(made: Any, mask: Iterable[int], fds: list[int]) -> int:
    """Run what was asked for, as a spawned Python does; its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    name_process(os.path.basename(sys.executable))
    read, status, client, tracker = fds[:4]
    os.close(status)
    request.received[:] = fds[4:]
    fork.helper.socket = socket.socket(fileno=client)
    fork.helper.all.insert(0, made._replace(channel=fork.helper.socket))
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    return int(spawn._main(read, os.dup(read)))


def inherit(env: dict[str, str], mask: int, limits: dict[str, Any], processors: set[int], ignored: list[Any]) -> None:
    """Set what a spawned process would have got from its parent, and what it would have found while importing."""
    made = fork.helper.all[0]
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})
    os.umask(mask)
    for name, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), limit)
    if processors != made.processors:  # else OpenMP may have chosen among them since
        os.sched_setaffinity(0, processors)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and env.get("OMP_NUM_THREADS") != made.env.get("OMP_NUM_THREADS"):
        with contextlib.suppress(ValueError):
            torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or len(processors)))
    if numpy is not None:
        numpy.random.seed()  # unlike Python's own it does not see that it was forked
