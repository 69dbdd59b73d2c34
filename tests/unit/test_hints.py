"""Commands in hints, as the user gives them: by make, or by the command line."""

from __future__ import annotations

import pytest

from warmstart import hints

BUILD = ".venv/bin/python build.py"  # there is no other name of it on PATH


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
    assert hints.command("up", "x", "--force") == "make up PRESET=x ARGS='--force'"
    assert hints.call("seed", DO="make", ARCH="cpu") == "make seed DO=make ARCH=cpu"
    assert (hints.usage(), hints.usage("plan")) == ("make help", "make plan ARGS=--help")
    assert hints.usage("exec") == "make help"  # its ARGS would go nowhere
    assert (hints.word("ARCH", "cpu"), hints.presets(["a", "b"])) == ("ARCH=cpu", "PRESET=a or PRESET=b")


def test_by_the_command_line() -> None:
    assert hints.command("status") == f"{BUILD} status"
    assert hints.command("logs", "x") == f"{BUILD} logs x"
    assert hints.command("up", "x", "--force") == f"{BUILD} up x --force"
    assert hints.call("seed", DO="make", ARCH="cpu") == f"{BUILD} seed make cpu"
    assert (hints.usage(), hints.usage("plan")) == (f"{BUILD} --help", f"{BUILD} plan --help")
    assert (hints.word("ARCH", "cpu"), hints.presets(["a", "b"])) == ("cpu", "a or b")
    assert hints.options("--set port=8001") == "--set port=8001"
    assert hints.execute("vllm --version") == f"{BUILD} exec -- vllm --version"


TEXT = "run `warmstart gpu-check`, or `warmstart exec -- vllm serve --help`; `hf auth login`"


def test_texts_of_data_files(monkeypatch: pytest.MonkeyPatch) -> None:
    told = f"run `{BUILD} gpu-check`, or `{BUILD} exec -- vllm serve --help`; `hf auth login`"
    assert hints.reworded(TEXT) == told
    monkeypatch.setenv("MAKELEVEL", "0")
    assert hints.reworded(TEXT) == "run `make gpu-check`, or `make exec CMD='vllm serve --help'`; `hf auth login`"
