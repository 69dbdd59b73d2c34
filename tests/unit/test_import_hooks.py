"""Two small hooks: garbage collection while vLLM is imported, and headers that Inductor need not precompile."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """warmstart_gc, in a process that is `vllm serve` or not: hook.serves."""
    monkeypatch.syspath_prepend(str(HOOKS))
    fork: Any = types.ModuleType("warmstart_fork")
    monkeypatch.setitem(sys.modules, "warmstart_fork", fork)
    monkeypatch.delitem(sys.modules, "warmstart_gc", raising=False)
    thresholds = gc.get_threshold()
    module = importlib.import_module("warmstart_gc")
    fork.serves = lambda: module.serves
    module.serves = False  # type: ignore[attr-defined]
    gc.set_threshold(700, 10, 10)
    yield module
    gc.set_threshold(*thresholds)
    sys.modules.pop("warmstart_gc", None)


@pytest.mark.parametrize("serves", [True, False])
def test_raised_while_vllm_is_imported(hook: Any, serves: bool) -> None:
    hook.serves = serves
    hook.rarely(None)
    assert gc.get_threshold() == hook.RARELY
    hook.as_before(None)
    assert gc.get_threshold() == (700, 10, 10)
    hook.rarely_in_server(None)
    assert gc.get_threshold() == (hook.RARELY if serves else (700, 10, 10))
    hook.as_before(None)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_somebody_else_set_stays(hook: Any) -> None:
    hook.rarely(None)
    gc.set_threshold(1, 2, 3)
    hook.as_before(None)
    assert gc.get_threshold() == (1, 2, 3)
    gc.set_threshold(0, 10, 10)  # switched off
    hook.rarely(None)
    hook.as_before(None)
    assert gc.get_threshold() == (0, 10, 10)


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_helper_raises_it_for_all_its_imports(hook: Any, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("WARMSTART_HOOK_GC", switch)
    with hook.rare():
        assert gc.get_threshold() == (hook.RARELY if switch == "1" else (700, 10, 10))
        if switch == "1":
            hook.rarely(None)  # vllm.version
            hook.as_before(None)  # vllm
            assert gc.get_threshold() == hook.RARELY
    assert gc.get_threshold() == (700, 10, 10)


def test_no_header_for_a_kernel_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's function asks with the kernel's source in a variable of its own."""
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.delitem(sys.modules, "warmstart_headers", raising=False)
    headers = importlib.import_module("warmstart_headers")
    module = types.SimpleNamespace(_precompile_header=lambda header, line, **more: (header, line, more))
    for _ in range(2):
        headers.install(module)

    def load(main_path: object) -> Any:
        return module._precompile_header("prefix.h", "g++", vec="avx2")

    made = ("prefix.h", "g++", {"vec": "avx2"})
    source = tmp_path / "abc.main.cpp"
    assert load(str(source)) == made
    (tmp_path / "abc.main.so").write_bytes(b"")
    assert load(str(source)) is None
    assert load(source) == module._precompile_header("prefix.h", "g++", vec="avx2") == made  # not as Inductor has it
    headers.install(other := types.SimpleNamespace())  # another torch
    assert vars(other) == {}
