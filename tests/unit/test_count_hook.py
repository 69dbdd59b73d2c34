"""What a start does, counted: imports, compilations, benchmarks and graph captures; and pages dropped after a load."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
FILES = sorted(path.stem for path in HOOKS.glob("*.py"))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a hook's file as new, with Python's finders as they were afterwards."""
    for name in [*FILES, *(n for n in sys.modules if n.partition(".")[0] in ("triton", "torch", "vllm"))]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(HOOKS))
    yield importlib.import_module
    for name in [*FILES, *(n for n in sys.modules if n.partition(".")[0] in ("triton", "torch", "vllm"))]:
        sys.modules.pop(name, None)


class Record:
    """A start record."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, kind: str = "") -> list[dict[str, Any]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        found = [json.loads(line) for line in lines]
        assert all(event["pid"] == os.getpid() and event["t"] > 1e9 for event in found)
        return [
            {key: value for key, value in event.items() if key not in ("pid", "t", "event")}
            for event in found
            if not kind or event["event"] == kind
        ]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setenv("WARMSTART_START", str(tmp_path / "start.jsonl"))
    return Record(tmp_path / "start.jsonl")


@pytest.fixture
def count(hooks: Any, record: Record) -> Any:
    return hooks("warmstart_count")


# --- the record ---------------------------------------------------------------------------


def test_a_record_that_cannot_be_written_is_no_reason_to_fail(
    count: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMSTART_START", "/proc/version/no")
    count.emit("compile", name="x")
    count.emit("compile", name="x")
    assert capsys.readouterr() == ("", "")
    assert count.off == {os.getpid()}


def test_a_full_disk_ends_it(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    count.emit("compile", name="x")
    assert count.off == {os.getpid()}


def test_a_pipe_that_nobody_reads_is_not_waited_for(
    count: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("WARMSTART_START", str(tmp_path / "pipe"))
    count.emit("compile", name="x")
    assert count.off == {os.getpid()}


@pytest.mark.parametrize("setting", [None, ""])
def test_without_a_record_nothing_is_loaded(
    hooks: Any, packages: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting is None:
        monkeypatch.delenv("WARMSTART_START", raising=False)
    else:
        monkeypatch.setenv("WARMSTART_START", setting)
    hooks("warmstart_hooks")
    hooks("torch")
    assert "warmstart_count" not in sys.modules


# --- imports ------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch and vllm, which takes 2 seconds and imports torch, which takes 8, by a clock that only they advance."""
    clock: Any = types.ModuleType("clock")
    clock.now = 0.0
    monkeypatch.setitem(sys.modules, "clock", clock)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    for name, text in {"torch": "import clock; clock.now += 8", "vllm": "import clock, torch; clock.now += 2"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_each_import_is_told_once_with_its_own_seconds(hooks: Any, packages: Path, record: Record) -> None:
    hooks("warmstart_hooks")
    hooks("vllm")
    hooks("torch")
    torch, vllm = record("import")
    assert (torch["module"], torch["seconds"]) == ("torch", 8)
    assert (vllm["module"], vllm["seconds"]) == ("vllm", 2)


def test_what_was_imported_before_the_hooks_is_not_told(
    hooks: Any, packages: Path, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks("torch")
    hooks("warmstart_hooks")
    assert (record(), capsys.readouterr().err) == ([], "")


def test_one_switch_for_this_hook(hooks: Any, packages: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTART_HOOK_COUNT", "0")
    hooks("warmstart_hooks")
    hooks("torch")
    assert record() == []


# --- compilations -------------------------------------------------------------------------------


def knobs(listener: Any = None) -> Any:
    return types.SimpleNamespace(compilation=types.SimpleNamespace(listener=listener))


def compilation(hit: bool, name: str = "softmax") -> dict[str, Any]:
    """What Triton tells its listener."""
    times = types.SimpleNamespace(total=250_000)  # microseconds
    return {"src": types.SimpleNamespace(name=name), "metadata": {}, "times": times, "cache_hit": hit}


def test_what_triton_compiles_is_told_and_what_it_finds_is_not(count: Any, record: Record) -> None:
    module = knobs()
    count.listen(module)
    module.compilation.listener(**compilation(True))
    module.compilation.listener(**compilation(False))
    assert record("compile") == [{"name": "softmax", "seconds": 0.25, "where": "process"}]


def test_a_listener_that_is_there_is_asked_as_ever(count: Any, record: Record) -> None:
    heard: list[bool] = []
    module = knobs(lambda **told: heard.append(told["cache_hit"]))
    count.listen(module)
    module.compilation.listener(**compilation(True))
    module.compilation.listener(**compilation(False))
    assert heard == [True, False]
    assert len(record("compile")) == 1


@pytest.mark.parametrize("told", [{"cache_hit": False}, {"cache_hit": False, "src": None, "times": None}])
def test_another_tritons_words_are_counted_too(count: Any, record: Record, told: dict[str, Any]) -> None:
    module = knobs()
    count.listen(module)
    module.compilation.listener(**told)
    assert [(event["where"], event["seconds"]) for event in record("compile")] == [("process", None)]


@pytest.mark.parametrize(("done", "urgent"), [(True, True), (True, False), (False, True)])
def test_what_a_worker_compiles_is_told(count: Any, record: Record, done: bool, urgent: bool) -> None:
    source = types.SimpleNamespace(name="matmul")
    module = types.SimpleNamespace(through=lambda fn, patience, urgent: done, parts=lambda fn: (source, None))
    count.workers(module)
    assert module.through(None, 0.0, urgent=urgent) is done
    told = [("matmul", "worker" if urgent else "ahead")] if done else []
    assert [(e["name"], e["where"]) for e in record("compile")] == told


# --- benchmarks ----------------------------------------------------------------------------------


class Config:
    def __init__(self, pre_hook: Any = None) -> None:
        self.pre_hook = pre_hook


def autotuner(keeps: bool = True, kept: bool = False) -> Any:
    """triton.runtime.autotuner with what matters here of its Autotuner."""

    class Autotuner:
        base_fn = types.SimpleNamespace(__name__="chunk_o")

        def __init__(self, *configs: Config) -> None:
            self.configs = configs or (Config(), Config())

        def check_disk_cache(self, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
            if not kept:
                bench_fn()
            return kept

        def _bench(self, config: Any) -> float:
            return 1.0

        def run(self) -> Any:
            def benchmark() -> None:
                self.times = [self._bench(config) for config in self.configs]

            return self.check_disk_cache("key", self.configs, benchmark) if keeps else benchmark()

    return types.SimpleNamespace(Autotuner=Autotuner)


def test_a_benchmark_is_told_once(count: Any, record: Record) -> None:
    module = autotuner()
    count.benches(module)
    tuner = module.Autotuner()
    assert tuner.run() is False
    assert tuner.times == [1.0, 1.0]
    (event,) = record("bench")
    assert (event["name"], event["configs"], event["stored"]) == ("chunk_o", 2, True)
    assert 0 <= event["seconds"] < 1


def test_a_verdict_that_was_kept_is_no_benchmark(count: Any, record: Record) -> None:
    module = autotuner(kept=True)
    count.benches(module)
    assert module.Autotuner().run() is True
    assert record() == []


def test_where_no_verdicts_are_kept_each_configuration_is_told(count: Any, record: Record) -> None:
    module = autotuner(keeps=False)
    count.benches(module)
    module.Autotuner().run()
    assert [(e["configs"], e["stored"]) for e in record("bench")] == [(1, False), (1, False)]


def test_doubtful_verdicts_are_not_stored(
    count: Any, record: Record, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the guard of the bench hook below, as the rows of the hooks have it."""
    bench = hooks("warmstart_bench")
    module = autotuner()
    bench.guard(module)
    count.benches(module)
    tuner = module.Autotuner()
    measure = tuner._bench

    def doubted(config: Any) -> Any:
        bench.doubt.found = True
        return measure(config)

    monkeypatch.setattr(tuner, "_bench", doubted)
    assert tuner.run() is False
    assert [e["stored"] for e in record("bench")] == [False]
    assert module.Autotuner(Config(pre_hook=print), Config()).run() is False
    assert [e["stored"] for e in record("bench")] == [False, False]


def test_an_error_while_tuning_is_the_callers(count: Any, record: Record) -> None:
    module = autotuner()
    count.benches(module)
    tuner = module.Autotuner()
    tuner._bench = lambda config: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tuner.run()
    assert record() == []
    assert count.state.inside is False


def test_it_counts_on_top_of_the_other_hooks(hooks: Any) -> None:
    rows = [row for row in hooks("warmstart_hooks").WAITING if row[1] == "triton.runtime.autotuner"]
    assert rows[-1][0] == "count"


# --- graphs ----------------------------------------------------------------------------------------


def test_each_capture_is_told(count: Any, record: Record) -> None:
    class CUDAGraph:
        def capture_begin(self, pool: Any = None) -> str:
            return "began"

        def capture_end(self) -> str:
            return "ended"

    count.captures(types.SimpleNamespace(CUDAGraph=CUDAGraph))
    graph = CUDAGraph()
    for _ in range(3):
        assert (graph.capture_begin(pool=1), graph.capture_end()) == ("began", "ended")
    assert [event["graphs"] for event in record("capture")] == [1, 1, 1]


# --- a hook that fails ---------------------------------------------------------------------------------


def test_a_hook_that_raises_leaves_the_module_as_it_is(
    hooks: Any, packages: Path, record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks("warmstart_hooks")

    def imported(module: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(hooks("warmstart_count"), "imported", imported)
    assert hooks("vllm").torch is sys.modules["torch"]
    assert capsys.readouterr().err.splitlines() == ["warmstart: hook count is off: broken"] * 2


# --- pages of weights ------------------------------------------------------------------------------------


def loader(files: list[str], fails: bool = False) -> Any:
    """vllm.model_executor.model_loader.default_loader with what matters here."""

    class DefaultModelLoader:
        def _prepare_weights(self, source: str) -> tuple[Any, ...]:
            return "folder", files, True

        def load_weights(self, model: Any, config: Any) -> str:
            self._prepare_weights("a")
            if fails:
                raise MemoryError
            return "loaded"

    return types.SimpleNamespace(DefaultModelLoader=DefaultModelLoader)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def advise(fd: int, start: int, size: int, advice: int) -> None:
        assert (start, size, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        found.append(Path(f"/proc/self/fd/{fd}").resolve().name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_pages_are_dropped_after_the_load(
    hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: list[str], fails: bool
) -> None:
    monkeypatch.setenv("WARMSTART_DROP_PAGES", "1")
    (tmp_path / "a.safetensors").write_text("weights")
    module = loader([str(tmp_path / "a.safetensors"), str(tmp_path / "gone.safetensors")], fails)
    pages = hooks("warmstart_pages")
    pages.install(module)
    pages.install(module)  # once is enough
    if fails:
        with pytest.raises(MemoryError):
            module.DefaultModelLoader().load_weights(None, None)
    else:
        assert module.DefaultModelLoader().load_weights(None, None) == "loaded"
    assert dropped == ["a.safetensors"]


def test_pages_stay_unless_the_image_says_so(hooks: Any, monkeypatch: pytest.MonkeyPatch, dropped: list[str]) -> None:
    monkeypatch.setenv("WARMSTART_DROP_PAGES", "0")
    module = loader(["x"])
    before = module.DefaultModelLoader.load_weights
    hooks("warmstart_pages").install(module)
    assert module.DefaultModelLoader.load_weights is before
    monkeypatch.delenv("WARMSTART_DROP_PAGES")
    assert not hooks("warmstart_hooks").wanted("pages")
