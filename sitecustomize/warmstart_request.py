"""A request to a helper of warmstart_fork for a process, as multiprocessing starts one. Standard library only."""

import contextlib
import importlib
import io
import os
import resource
import signal
import socket
from multiprocessing import connection, context, forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

LIMITS = ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK", "RLIMIT_MEMLOCK", "RLIMIT_AS")
PATIENCE = 60.0  # seconds for a helper to be done with its imports, which take a few
GRACE = 5.0  # seconds for a helper to tell the exit code of a process that has ended
UNKNOWN = 255  # an exit code that nobody can tell, as multiprocessing's own fork server has it
MOST_FILES = 200  # descriptors in one request; the kernel takes 253

received: list[int] = []  # in a forked process: the descriptors that came with the request for it


class Received:
    """A descriptor in a request: its place among those that were sent along."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return received[self.place]


class Popen(popen_forkserver.Popen):
    """A process that a helper forked. Its exit code comes through a pipe.

    It goes on when the helper ends, so a descriptor of the process itself says when it has ended. Where the kernel has
    none, that is when the pipe can be read.
    """

    DupFd = Received  # type: ignore[assignment]
    _fds: list[int]

    def __init__(self, process: Any, channel: socket.socket) -> None:
        self.channel = channel
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: Any) -> None:
        data = self.packed(process)
        read, write = os.pipe()
        self.codes, status = os.pipe()
        kept = [os.dup(write), self.codes]  # the child sees the first close when this process has ended
        self.finalizer = util.Finalize(self, lambda: util.close_fds(*kept))  # type: ignore[attr-defined]
        try:
            with open(write, "wb") as pipe:
                try:
                    fds: list[Any] = [read, status, self.channel.fileno(), resource_tracker.getfd(), *self._fds]
                    if len(fds) > MOST_FILES:
                        raise OSError("too many descriptors")
                    socket.send_fds(self.channel, [b"fork"], fds)
                finally:
                    os.close(read)
                    os.close(status)
                if not connection.wait([self.codes], PATIENCE):
                    raise TimeoutError("no answer")
                self.pid = forkserver.read_signed(self.codes)
                self.sentinel = self.codes
                with contextlib.suppress(AttributeError, OSError):
                    self.sentinel = os.pidfd_open(self.pid)
                    kept.append(self.sentinel)
                pipe.write(data)
        except BaseException:
            self.finalizer()
            raise

    def poll(self, flag: int = os.WNOHANG) -> "int | None":
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            self.returncode = self.exit_code()
        return self.returncode

    def exit_code(self) -> int:
        """The exit code of the process, which has ended; UNKNOWN when the helper ended before it."""
        with contextlib.suppress(OSError, EOFError):
            if connection.wait([self.codes], GRACE):
                return int(forkserver.read_signed(self.codes))
        return UNKNOWN

    def packed(self, process: Any) -> memoryview:
        """What multiprocessing sends to a new process, before it what else comes from this one."""
        packed = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            data = spawn.get_preparation_data(process.name)
            ForkingPickler(packed, None).dump({"warmstart": Inherited(), **data})
            ForkingPickler(packed, None).dump(process)
        finally:
            context.set_spawning_popen(None)
        return packed.getbuffer()


class Inherited:
    """What a spawned process gets from its parent without being told; unpickling it sets all of it."""

    def __reduce__(self) -> Any:
        mask = os.umask(0o077)
        os.umask(mask)
        limits = {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        inherit = importlib.import_module("warmstart_forker").inherit
        return inherit, (dict(os.environ), mask, limits, os.sched_getaffinity(0), ignored)
