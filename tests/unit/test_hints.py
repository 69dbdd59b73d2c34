"""Commands in hints, as the user gives them: by make, or by the command line."""

from __future__ import annotations

import pytest

from warmstart import hints


@pytest.fixture
def by_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")


@pytest.mark.usefixtures("by_make")
def test_by_make() -> None:
    assert hints.command("status") == "make status"
    assert hints.command("logs", "x") == "make logs PRESET=x"
    assert hints.options("--set port=8001") == "ARGS='--set port=8001'"
    assert hints.execute("vllm --version") == "make exec CMD='vllm --version'"
    assert hints.execute("ls", "x") == "make exec PRESET=x CMD='ls'"


def test_by_the_command_line() -> None:
    assert hints.command("status") == "warmstart status"
    assert hints.command("logs", "x") == "warmstart logs x"
    assert hints.options("--set port=8001") == "--set port=8001"
    assert hints.execute("vllm --version") == "warmstart exec -- vllm --version"


TEXT = "run `warmstart gpu-check`, or `warmstart exec -- vllm serve --help`; `hf auth login`"


def test_texts_of_data_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hints.reworded(TEXT) == TEXT
    monkeypatch.setenv("MAKELEVEL", "0")
    assert hints.reworded(TEXT) == "run `make gpu-check`, or `make exec CMD='vllm serve --help'`; `hf auth login`"
