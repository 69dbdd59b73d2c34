"""What run.py does around a process: recording, environment, how failures are told. tests/engine/ has the processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmstart import log, run, signals
from warmstart.errors import EngineMissing, Interrupted, Terminated
from warmstart.run import Result


@pytest.fixture(autouse=True)
def no_recording() -> Iterator[None]:
    yield
    run.recorder.on, run.recorder.commands = False, []
    log.configure()


def failure(
    code: int, *, stdout: str = "", stderr: str = "", log_file: Path | None = None
) -> tuple[str, str]:
    env = {"PATH": "/bin", "https_proxy": "http://user:secret@proxy:3128", "A": "it's", "HF_TOKEN": "a secret"}
    told = run._failure(
        ["/usr/bin/buildah", "a b"], env, Path("/"), Result(stdout, stderr, code, 1.0), log_file
    )
    return told.message, told.hint


def test_dry_run_records_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run.dry_run()
    assert run.run(["rm", "-rf", Path("/x y")]) == Result("", "", 0, 0.0)
    assert run.recorder.commands == [["rm", "-rf", "/x y"]]
    assert "would run: rm -rf '/x y'" in capsys.readouterr().err


def test_dry_run_is_an_event_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True)
    run.dry_run()
    run.run(["true"])
    assert {"event": "command", "argv": ["true"], "ran": False} in map(
        json.loads, capsys.readouterr().out.splitlines()
    )


def test_a_query_is_not_recorded(attempts: list[str]) -> None:
    run.dry_run()
    with pytest.raises(pytest.fail.Exception):
        run.run(["true"], always=True)
    assert attempts
    attempts.clear()
    assert run.recorder.commands == []


def test_a_missing_program_is_named() -> None:
    with pytest.raises(EngineMissing, match="no-such-program is not installed") as caught:
        run.run(["no-such-program", "x"])
    assert "tools/setup" in caught.value.hint


def test_only_named_variables_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("CONTAINERS_CONF", "/x.conf")
    env = run.environment({"B": "1"})
    assert "AWS_SECRET_ACCESS_KEY" not in env
    assert env["CONTAINERS_CONF"] == "/x.conf"
    assert env["B"] == "1"
    assert env["LANG"] == "C.UTF-8"


def test_sbin_is_added_to_the_path_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/usr/sbin")
    assert run.environment()["PATH"] == "/usr/bin:/usr/sbin:/sbin"


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (137, "out of memory"),
        (139, "SIGSEGV"),
        (-9, "out of memory"),
        (-11, "SIGSEGV"),
        (127, "not found"),
        (-15, "SIGTERM"),
    ],
)
def test_signals_are_explained(code: int, meaning: str) -> None:
    message, _ = failure(code)
    assert message.startswith(f"buildah failed with exit code {code} (")
    assert meaning in message


def test_the_last_line_of_stderr_is_told() -> None:
    message, hint = failure(1, stdout="output\n", stderr="first\nError: the reason\n\n")
    assert message == "buildah failed with exit code 1: Error: the reason"
    assert hint == "/usr/bin/buildah 'a b'"


def test_the_last_line_of_stdout_is_told_when_stderr_is_empty() -> None:
    assert failure(1, stdout="a\nb\n")[0].endswith(": b")


def test_a_replay_script_lies_beside_the_log(tmp_path: Path) -> None:
    _, hint = failure(1, log_file=tmp_path / "build.log")
    script = tmp_path / "build.sh"
    assert str(script) in hint
    assert os.access(script, os.X_OK)
    assert script.stat().st_mode & 0o077 == 0
    text = script.read_text()
    assert "exec /usr/bin/buildah 'a b'" in text
    assert "export A='it'\"'\"'s'" in text
    assert "secret" not in text


def test_a_signal_becomes_an_error() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals.catch()
        with pytest.raises(Interrupted, match="Ctrl-C"):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Terminated, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_waits_until_a_command_is_known() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached = []

    def start() -> None:
        with signals.starting():
            signal.raise_signal(signal.SIGTERM)
            reached.append(True)

    try:
        signals.catch()
        with pytest.raises(Terminated):
            start()
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert reached
