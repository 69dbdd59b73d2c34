"""vLLM's look at a model's class in a forked process: the answer, and vLLM's own way whenever there is none.

The helper is pretended by multiprocessing's fork; cloudpickle, which is inside images, by pickle.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"


def answer() -> dict[str, int]:
    return {"pid": os.getpid()}


def fail() -> None:
    raise RuntimeError("no such class")


def end() -> None:
    os._exit(3)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's registry module with the hook on it; `.own` holds the functions that vLLM's own way was asked for."""
    monkeypatch.syspath_prepend(str(HOOKS))
    plugins: Any = types.ModuleType("vllm.plugins")
    plugins.load_general_plugins = lambda: os.write(1, b"seen by nobody")
    pickler: Any = types.ModuleType("cloudpickle")
    pickler.dumps = pickle.dumps
    fork: Any = types.ModuleType("warmstart_fork")
    fork.helper = types.SimpleNamespace(socket=object())
    fork.Context = lambda: multiprocessing.get_context("fork")
    for module in (types.ModuleType("vllm"), plugins, pickler, fork):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Any = types.ModuleType("vllm.model_executor.models.registry")
    found.own = []

    def run_in_subprocess(fn: Any) -> str:
        found.own.append(fn)
        return "vLLM's own way"

    found._run_in_subprocess = run_in_subprocess
    found.fork = fork
    importlib.import_module("warmstart_inspect").install(found)
    return found


def test_the_answer_comes_from_another_process(registry: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert registry._run_in_subprocess(answer)["pid"] != os.getpid()
    assert registry.own == []
    assert "seen" not in capfd.readouterr().out


@pytest.mark.parametrize("broken", [fail, end])
def test_without_an_answer_vllm_asks_itself(registry: Any, broken: Any) -> None:
    assert registry._run_in_subprocess(broken) == "vLLM's own way"
    assert registry.own == [broken]


def test_one_that_does_not_answer_is_ended(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["warmstart_inspect"], "PATIENCE", 0.2)
    assert registry._run_in_subprocess(signal.pause) == "vLLM's own way"
    assert not multiprocessing.active_children()


def test_without_a_helper_vllm_asks_itself(registry: Any) -> None:
    registry.fork.helper.socket = None
    assert registry._run_in_subprocess(answer) == "vLLM's own way"


def test_a_function_that_can_not_be_sent_is_vllms(registry: Any) -> None:
    assert registry._run_in_subprocess(lambda: 1) == "vLLM's own way"
