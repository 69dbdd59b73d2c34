"""The only module that starts a process. Always a list of arguments, never a shell line.

Each command runs in a small explicit environment, is echoed with --debug, can be recorded instead of run
(--dry-run), and leaves a log and a replay script behind when it fails. It never outlives us: a signal to us
stops its whole process group, and when we are killed the kernel stops it. The one exception says so: `detach`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import msgspec

from warmstart import log, masking, signals
from warmstart.errors import CommandFailed, EngineMissing

# What a tool may see of our environment: where things are, who we are, how to reach the network, and the
# engine's own settings (design §3: engine settings are environment, never flags).
PASSED = (
    "PATH HOME USER LOGNAME TMPDIR TERM XDG_RUNTIME_DIR XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME "
    "DBUS_SESSION_BUS_ADDRESS CONTAINERS_CONF CONTAINERS_CONF_OVERRIDE CONTAINERS_STORAGE_CONF "
    "CONTAINERS_REGISTRIES_CONF REGISTRY_AUTH_FILE BUILDAH_ISOLATION BUILDAH_RUNTIME STORAGE_DRIVER "
    "PODMAN_IGNORE_CGROUPSV1_WARNING "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE PIP_CERT CI "
    "http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY"
).split()

# Debian keeps runc and iptables here, outside of a user's PATH.
SBIN = ("/usr/sbin", "/sbin")

# How a process is stopped: each signal to its whole group, and the seconds it then gets to clean up.
STOPPING = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
GRACE = 2.0  # seconds for the rest of the group when its leader is gone

SIGNALS = {
    -signal.SIGKILL: "killed (SIGKILL): out of memory, or stopped by hand",
    -signal.SIGSEGV: "crashed (SIGSEGV)",
    -signal.SIGABRT: "aborted (SIGABRT)",
    -signal.SIGINT: "stopped (SIGINT)",
    -signal.SIGTERM: "stopped (SIGTERM)",
    126: "found but not executable",
    127: "a program inside the command was not found",
    134: "aborted (SIGABRT)",
    137: "killed (SIGKILL): out of memory, or stopped by hand",
    139: "crashed (SIGSEGV)",
}


class Result(msgspec.Struct, frozen=True):
    """What a finished command left: its output as text, its exit code and its seconds."""

    stdout: str
    stderr: str
    code: int
    seconds: float


class _Recorder:
    """With --dry-run: the commands that would have run."""

    on = False
    commands: list[list[str]]


recorder = _Recorder()
recorder.commands = []


def dry_run() -> None:
    """From now on record commands instead of running them (queries marked `always` still run)."""
    recorder.on = True


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a tool: PASSED from ours, a neutral locale, and `extra`."""
    env = {k: os.environ[k] for k in PASSED if k in os.environ}
    return env | {"PATH": _path(), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"} | dict(extra or {})


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ok: Sequence[int] = (0,),
    log_file: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    stdin: str | None = None,
    timeout: float | None = None,
    always: bool = False,
) -> Result:
    """Run one command and return its output.

    `log_file` collects stdout and stderr as they come; `on_line` sees each line of both live. `always` marks
    a query without side effects, run even with --dry-run. `timeout` is in seconds; no `stdin` means empty.
    Raises EngineMissing when the program isn't installed, CommandFailed when its exit code isn't in `ok` or
    the time is up, and Interrupted or Terminated when a signal to us stopped it.
    """
    words = [str(a) for a in argv]
    log.debug("+ " + shlex.join(words))
    if recorder.on and not always:
        recorder.commands.append(words)
        log.info("would run: " + shlex.join(words))
        log.event("command", argv=words, ran=False)
        return Result("", "", 0, 0.0)
    path = _installed(words[0])
    whole = environment(env)
    out: list[str] = []
    err: list[str] = []
    started = time.monotonic()
    if log_file:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("a", encoding="utf-8") if log_file else contextlib.nullcontext() as sink:
        collectors = _collector(out, sink, on_line), _collector(err, sink, on_line)
        code = _wait(path, words, whole, cwd, collectors, stdin, timeout)
    result = Result("".join(out), "".join(err), code, time.monotonic() - started)
    if code not in ok:
        raise _failure(words, whole, cwd, result, log_file)
    return result


def detach(argv: Sequence[str | Path], *, log_file: Path, env: Mapping[str, str] | None = None) -> int:
    """Start a process that outlives us, in a session of its own, its output in `log_file`; returns its pid.

    Raises EngineMissing when the program isn't installed. With --dry-run it is only told, and the pid is 0.
    """
    words = [str(a) for a in argv]
    log.debug("+ " + shlex.join(words) + " &")
    if recorder.on:
        recorder.commands.append(words)
        log.info("would run in the background: " + shlex.join(words))
        return 0
    path = _installed(words[0])
    log_file.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_file), append, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    unmask = signal.SIGINT, signal.SIGTERM
    return os.posix_spawn(path, words, environment(env), file_actions=files, setsid=True, setsigdef=unmask)


def glance(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> str | None:
    """The stdout of a query that takes milliseconds, without importing sh for it; None when it fails."""
    path = program(argv[0])
    if path is None:
        return None
    log.debug("+ " + shlex.join(argv))
    ours, theirs = os.pipe()
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    with open(ours, encoding="utf-8", errors="replace") as out:
        with open(theirs, "wb"):
            pid = os.posix_spawn(path, list(argv), environment(env), file_actions=files)
        text = out.read()
    return text if os.waitpid(pid, 0)[1] == 0 else None


def become(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Let a command take the place of this process, terminal and all. Raises EngineMissing when it isn't installed."""
    words = [str(a) for a in argv]
    log.debug("+ exec " + shlex.join(words))
    os.execve(_installed(words[0]), words, environment(env))


def program(name: str) -> str | None:
    """Absolute path of a program on PATH or in sbin, or None."""
    import shutil

    return shutil.which(name, path=_path())


def _installed(name: str) -> str:
    if path := program(name):
        return path
    hint = "run `make image` or `tools/setup`, which installs what is missing"
    raise EngineMissing(f"{name} is not installed", hint=hint)


def _path() -> str:
    known = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*known, *(folder for folder in SBIN if folder not in known)])


def _collector(into: list[str], sink: TextIO | None, on_line: Callable[[str], None] | None) -> Callable[[str], None]:
    def line(text: str) -> None:
        into.append(text)
        if sink:
            sink.write(text)
            sink.flush()
        if on_line:
            on_line(text.rstrip("\n"))

    return line


def _wait(
    path: str,
    words: list[str],
    env: dict[str, str],
    cwd: Path | None,
    collectors: tuple[Callable[[str], None], Callable[[str], None]],
    stdin: str | None,
    timeout: float | None,
) -> int:
    """Start the process, see it to its end, and return its exit code. Whatever is raised, it is gone then."""
    import sh  # 60 ms to import: only for verbs that really run something

    process: Any = None
    command = sh.Command(path)
    tie = signals.tied()
    with open(os.devnull, encoding="utf-8") as nothing:
        try:
            with signals.starting() as started:
                process = command(
                    *words[1:],
                    _env=env,
                    _cwd=str(cwd) if cwd else None,
                    _in=nothing if stdin is None else stdin,
                    _out=collectors[0],
                    _err=collectors[1],
                    _ok_code=[*range(256), *(-n for n in range(1, 65))],
                    _bg=True,
                    _bg_exc=False,
                    _return_cmd=True,
                    _decode_errors="replace",
                    _tty_out=False,
                    _new_session=True,
                    _preexec_fn=tie,
                )
                started(process.pid)
            process.wait(timeout=timeout)
            process.process.wait()  # with a time limit sh is back before all of the output is
            if number := signals.passed_on(process.pid):
                raise signals.error(number)
            return int(process.exit_code)
        except sh.TimeoutException:
            _end(process)
            told = f"{words[0]} took longer than {timeout:.0f} s and was stopped"
            raise CommandFailed(told, hint=shlex.join(words)) from None
        except BaseException:
            _end(process)
            raise
        finally:
            if process is not None:
                signals.ended(process.pid)


def _end(process: Any) -> None:
    """Ask the whole process group to stop and wait for its leader; then kill what is left of it."""
    import sh

    if process is None:
        return
    for number, seconds in STOPPING:
        if number != signal.SIGINT or not signals.passed_on(process.pid):
            signals.send(process.pid, number)
        with contextlib.suppress(sh.TimeoutException):
            process.wait(timeout=seconds)
            break
    signals.end(process.pid, GRACE)


def _failure(
    words: list[str], env: dict[str, str], cwd: Path | None, result: Result, log_file: Path | None
) -> CommandFailed:
    meaning = SIGNALS.get(result.code, "")
    last = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()][-1:]
    message = f"{Path(words[0]).name} failed with exit code {result.code}"
    message += f" ({meaning})" if meaning else ""
    message += f": {last[0].strip()}" if last else ""
    hint = shlex.join(words)
    if log_file:
        replay = log_file.with_suffix(".sh")
        replay.write_text(_replay(words, env, cwd), encoding="utf-8")
        replay.chmod(0o700)
        hint = f"log {log_file}, again with {replay}"
    failure = CommandFailed(message, hint=hint)
    failure.result = result  # type: ignore[attr-defined]
    return failure


def _replay(words: list[str], env: dict[str, str], cwd: Path | None) -> str:
    # Proxy addresses can hold passwords, so the replay file takes them from the shell that runs it, and secrets too.
    shown = {k: v for k, v in env.items() if "proxy" not in k.lower() and not masking.secret(k)}
    exports = "\n".join(f"export {k}={shlex.quote(v)}" for k, v in sorted(shown.items()))
    return f"#!/bin/sh\n{exports}\ncd {shlex.quote(str(cwd or Path.cwd()))} &&\nexec {shlex.join(words)}\n"
