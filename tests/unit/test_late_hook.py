"""Kernels met while serving are loaded before the next start is ready; on a pretended Triton and vLLM."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.unit import pretended_triton

HOOKS = Path(__file__).parents[2] / "sitecustomize"


class Kernel:
    """A JITFunction that notes what is loaded ahead."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def preload(self, specialization: str) -> None:
        if specialization == "broken":
            raise RuntimeError("for another kernel")
        self.loaded.append(specialization)


class Wrapped:
    """An autotuner around a kernel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


class Monitor(types.ModuleType):
    """vLLM's module: its hook goes around the one that is there, as vLLM's does."""

    def __init__(self, runtime: Any) -> None:
        super().__init__("vllm.utils.jit_monitor")
        self.runtime, self.told = runtime, list[str]()

    def activate(self, *, verbose: bool = False) -> str:
        inner = self.runtime.jit_post_compile_hook

        def compiled(**event: Any) -> Any:
            self.told.append(event["fn"].name)
            return inner(**event) if inner else None

        self.runtime.jit_post_compile_hook = compiled
        return "activated"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(HOOKS))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("WARMSTART_SEED", raising=False)
    runtime = pretended_triton.install(monkeypatch)
    model: Any = types.ModuleType("model")
    model.plain, model.inner = Kernel(), Kernel()
    model.tuned = Wrapped(Wrapped(model.inner))
    monkeypatch.setitem(sys.modules, "model", model)
    found = importlib.import_module("warmstart_late")
    found_any: Any = types.SimpleNamespace(
        hook=found, runtime=runtime, model=model, folder=tmp_path / "triton" / found.FOLDER
    )
    return found_any


def start(late: Any) -> Monitor:
    """One process up to where vLLM is ready."""
    late.runtime.jit_post_compile_hook = None
    takers = getattr(sys.modules["triton.runtime.jit"].JITFunction._call_hook, "takers", [])
    takers.clear()
    monitor = Monitor(late.runtime)
    late.hook.install(monitor)
    assert monitor.activate(verbose=False) == "activated"
    return monitor


def compile_now(late: Any, name: str, specialization: Any, *, warmup: bool = False) -> None:
    pretended_triton.kernel("model", name).compile(specialization, warmup=warmup)


def test_what_one_start_met_late_the_next_loads_ahead(late: Any) -> None:
    monitor = start(late)
    compile_now(late, "plain", "one")
    compile_now(late, "tuned", "two")
    assert monitor.told == ["plain", "tuned"]  # vLLM's own hook is there, too
    start(late)
    assert late.model.plain.loaded == ["one"]
    assert late.model.inner.loaded == ["two"]


def test_a_seed_brings_them_too(late: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(late)
    compile_now(late, "plain", "one")
    (tmp_path / "triton").rename(tmp_path / "seed-triton")
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed-triton").rename(tmp_path / "seed" / "triton")
    monkeypatch.setenv("WARMSTART_SEED", str(tmp_path / "seed"))
    start(late)
    assert late.model.plain.loaded == ["one"]


def test_another_user_can_add_to_them_where_the_volume_is_open(late: Any) -> None:
    late.folder.parent.mkdir(parents=True)
    late.folder.parent.chmod(0o1777)
    start(late)
    compile_now(late, "plain", "one")
    assert late.folder.stat().st_mode & 0o7777 == 0o1777


def test_the_same_kernel_is_described_once(late: Any) -> None:
    start(late)
    compile_now(late, "plain", "one")
    compile_now(late, "plain", "one")
    assert len(list(late.folder.glob("*.json"))) == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"module": "model"}', '{"module": 1, "name": 2, "specialization": 3}']
)
def test_a_broken_description_stops_nothing(late: Any, content: str) -> None:
    late.folder.mkdir(parents=True)
    (late.folder / "00.json").write_text(content, encoding="utf-8")
    good = {"module": "model", "name": "plain", "specialization": "one"}
    (late.folder / "01.json").write_text(json.dumps(good), encoding="utf-8")
    start(late)
    assert late.model.plain.loaded == ["one"]


def test_pipes_and_huge_files_stop_nothing(late: Any) -> None:
    late.folder.mkdir(parents=True)
    os.mkfifo(late.folder / "00.json")
    with open(late.folder / "01.json", "wb") as sparse:
        sparse.truncate(20_000_000_000)
    good = {"module": "model", "name": "plain", "specialization": "one"}
    (late.folder / "02.json").write_text(json.dumps(good), encoding="utf-8")
    start(late)
    assert late.model.plain.loaded == ["one"]


def test_no_link_leads_what_is_written_elsewhere(late: Any, tmp_path: Path) -> None:
    start(late)
    compile_now(late, "plain", "one")
    (written,) = late.folder.iterdir()
    written.unlink()
    (late.folder / f"{written.name}.{os.getpid()}").symlink_to(tmp_path / "outside")
    start(late)
    compile_now(late, "plain", "one")
    assert written.is_file()
    assert not (tmp_path / "outside").exists()


def test_a_kernel_that_is_not_there_or_fails_stops_nothing(late: Any) -> None:
    start(late)
    for name, specialization in (("gone", "one"), ("plain", "broken"), ("plain", "two")):
        compile_now(late, name, specialization)
    start(late)
    assert late.model.plain.loaded == ["two"]


def test_no_module_is_imported(late: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unwanted.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    late.folder.mkdir(parents=True)
    wanted = {"module": "unwanted", "name": "kernel", "specialization": "one"}
    (late.folder / "00.json").write_text(json.dumps(wanted), encoding="utf-8")
    start(late)
    assert "unwanted" not in sys.modules


def test_manual_warm_up_is_not_late(late: Any) -> None:
    start(late)
    compile_now(late, "plain", "one", warmup=True)
    assert not late.folder.exists()


def test_what_can_not_be_told_is_launched_all_the_same(late: Any) -> None:
    """A layout as a constant, say: with a hook of Triton's own set, its launch would fail."""
    late.hook.watch(str(late.folder), set())
    compile_now(late, "plain", TypeError("Object of type BlockedLayout is not JSON serializable"))
    assert not late.folder.exists()


def test_there_is_a_most(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late.hook, "MOST", 3)
    start(late)
    for number in range(5):
        compile_now(late, "plain", str(number))
    assert len(list(late.folder.glob("*.json"))) == 3
    start(late)
    assert len(late.model.plain.loaded) == 3


def test_a_cache_that_can_not_be_written_stops_nothing(late: Any) -> None:
    late.folder.parent.mkdir(parents=True, exist_ok=True)
    late.folder.write_text("a file where the folder should be", encoding="utf-8")
    monitor = start(late)
    compile_now(late, "plain", "one")
    assert monitor.told == ["plain"]


def test_without_a_cache_nothing_is_kept(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    start(late)
    compile_now(late, "plain", "one")
    assert not late.folder.exists()
