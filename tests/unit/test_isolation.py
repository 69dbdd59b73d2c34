"""The fixture that keeps unit tests from starting processes and opening sockets works."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pty
import socket
import subprocess
from collections.abc import Callable

import pytest
import sh

WAYS: dict[str, Callable[[], object]] = {
    "subprocess.run": lambda: subprocess.run(["true"], check=False),
    "subprocess.Popen": lambda: subprocess.Popen(["true"]),
    "os.system": lambda: os.system("true"),
    "os.popen": lambda: os.popen("true"),
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "os.spawnv": lambda: os.spawnv(os.P_WAIT, "/bin/true", ["true"]),
    "os.execv": lambda: os.execv("/bin/true", ["true"]),
    "os.fork": lambda: os.fork() or os._exit(0),
    "pty.fork": lambda: pty.fork()[0] or os._exit(0),
    "sh": lambda: sh.Command("/bin/true")(),
    "multiprocessing": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
    "socket": socket.socket,
    "socketpair": socket.socketpair,
    "create_connection": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
    "getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
}


@pytest.mark.parametrize("way", WAYS)
def test_is_refused(way: str, attempts: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match="a unit test tried"):
        WAYS[way]()
    assert attempts
    attempts.clear()


def catches_everything() -> None:
    with contextlib.suppress(Exception):
        subprocess.run(["true"], check=False)


def test_is_refused_to_code_that_catches_every_exception(attempts: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        catches_everything()
    attempts.clear()


def test_reading_a_file_is_allowed() -> None:
    with open(__file__, encoding="utf-8") as here:
        assert here.readline()
