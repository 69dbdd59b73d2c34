"""Progress: quiet in a pipe, one live line on a terminal, one JSON object a line with --json."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator

import pytest

from warmstart import log


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    log.configure()
    yield
    log.configure()


def test_a_long_step_in_a_pipe_says_now_and_then_what_it_is_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with log.step("work") as step:
        for second in range(100, 140):
            now[0] = float(second)
            step.note(f"at {second}")
        step.note("")
    assert capsys.readouterr().err.splitlines()[1:-1] == ["  15 s  at 115", "  30 s  at 130"]
    log.configure(quiet=True)
    with log.step("work") as step:
        now[0] += 100
        step.note("quiet")
    assert capsys.readouterr().err == ""


def test_a_step_in_a_pipe_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with log.step("work"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "• work"
    assert err.splitlines()[1].startswith("✓ work  0.")


def test_a_failed_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), log.step("work"):
        raise ValueError("x")
    assert "✗ work" in capsys.readouterr().err


def test_two_steps_at_once_share_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(log, "TICK", 0.01)
    with log.step("first") as first, log.step("second"):
        first.note("a\x1b[2Jb\n" * 200)
        end = time.monotonic() + 30
        while "a [2Jb" not in screen.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    text = screen.getvalue()
    assert "· first" in text
    assert "a [2Jb" in text
    assert "\x1b[2J" not in text
    assert all(len(part) < 90 for part in text.split("\r"))
    assert text.endswith(" s\n")


def test_json_events(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(json=True)
    with log.step("work"):
        log.info("told")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["step", "info", "step"]
    assert lines[-1]["state"] == "done"


def test_groups_in_ci(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with log.step("work"):
        pass
    assert capsys.readouterr().err.splitlines()[0] == "::group::work"


def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(quiet=True)
    with log.step("work"):
        log.info("told")
        log.warn("mind this")
    assert capsys.readouterr().err == "warning: mind this\n"


def test_quiet_prints_no_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    log.configure(quiet=True)
    with log.step("work"):
        pass
    assert capsys.readouterr().err == ""
    log.configure()
    with log.step("work"):
        pass
    assert "::group::work" in capsys.readouterr().err
