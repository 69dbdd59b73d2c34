"""All configurations compiled before the first is timed, on a pretended Triton; and kernels packed for a worker."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, as_completed
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
FILES = sorted(path.stem for path in HOOKS.glob("*.py"))


class Config:
    """What triton.Config has."""

    def __init__(self, number: int, pre_hook: Any = None) -> None:
        self.number, self.pre_hook = number, pre_hook

    def all_kwargs(self) -> dict[str, int]:
        return {"B": self.number}


class Kernel:
    """A JITFunction that notes what it compiles, where and how many at the same time."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.device_caches: dict[int, Any] = {}
        self.compiled: list[int] = []
        self.ready: set[int] = set()
        self.fails: set[int] = set()
        self.busy = self.most = 0
        self.lock = threading.Lock()
        self.together, self.patience = threading.Event(), 0.02
        self.calls: list[dict[str, Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.calls.append({"grid": grid, "warmup": warmup, **kwargs})
        if kwargs["B"] in self.ready:
            return None

        def async_compile() -> int:
            with self.lock:
                self.busy += 1
                self.most = max(self.most, self.busy)
            if self.busy > 1:
                self.together.set()
            self.together.wait(self.patience)
            with self.lock:
                self.busy -= 1
                self.compiled.append(kwargs["B"])
            if kwargs["B"] in self.fails:
                raise ValueError("can't be compiled")
            return int(kwargs["B"])

        active = self.mode.active_mode.get()
        if active is None:
            self.ready.add(async_compile())
            return None
        return active.submit(kwargs["B"], async_compile, self.ready.add)


def async_module() -> Any:
    """triton.runtime._async_compile as in 3.6: the mode is left active when one of its own hooks fails."""
    module = types.ModuleType("triton.runtime._async_compile")
    active: ContextVar[Any] = ContextVar("active", default=None)

    class AsyncCompileMode:
        def __init__(self, executor: Executor, *, ignore_errors: bool = False) -> None:
            self.executor, self.ignore_errors = executor, ignore_errors
            self.futures: dict[Future[Any], Callable[[Any], Any]] = {}

        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
            future = self.executor.submit(compile_fn)
            self.futures[future] = finalize_fn
            return future

        def __enter__(self) -> Any:
            if active.get() is not None:
                raise RuntimeError("Another AsyncCompileMode is already active")
            active.set(self)
            return self

        def __exit__(self, *problem: object) -> None:
            for future in as_completed(self.futures):
                if future.exception() is None:
                    self.futures[future](future.result())
                elif not self.ignore_errors:
                    future.result()
            active.set(None)

    module.active_mode, module.AsyncCompileMode = active, AsyncCompileMode  # type: ignore[attr-defined]
    return module


def autotuner_module() -> Any:
    """The parts of triton.runtime.autotuner that the hook changes, as in 3.3 to 3.9."""

    class Autotuner:
        def __init__(self, fn: Any, configs: list[Config], kept: bool = False) -> None:
            self.fn, self.configs, self.kept = fn, configs, kept
            self.timed: list[int] = []
            self.before: list[int] = []  # compiled when the first is timed
            self.nargs: dict[str, Any] = {}

        def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
            return self.configs

        def _bench(self, *args: Any, config: Config, **meta: Any) -> float:
            if not self.timed:
                self.before = sorted(self.fn.compiled)
            self.timed.append(config.number)
            try:
                self.fn.run(*args, **meta, **config.all_kwargs())
            except ValueError:
                return math.inf
            return float(config.number)

        def run(self, *args: Any, **kwargs: Any) -> int:
            self.nargs = {"x": args[0]}
            configs = self.prune_configs(kwargs)
            if self.kept:
                return 0
            times = {c.number: self._bench(*args, config=c, **kwargs) for c in configs}
            return min(times, key=lambda number: times[number])

    return types.SimpleNamespace(Autotuner=Autotuner)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The hooks' files, freshly importable, on a machine with 8 processors and much memory, compiling in threads."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(HOOKS))
    before = dict(sys.modules)
    for name in list(sys.modules):
        if name in FILES or name.split(".")[0] in {"triton", "torch"}:
            monkeypatch.delitem(sys.modules, name)
    for name in ("LOCAL_WORLD_SIZE", "VLLM_DP_SIZE", "WARMSTART_HOOKS", "WARMSTART_HOOK_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WARMSTART_HOOK_WORKERS", "0")  # a unit test starts no process
    yield lambda name: importlib.import_module(name)
    for name in set(sys.modules) - set(before):
        if name in FILES:
            del sys.modules[name]


@pytest.fixture
def hook(hooks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = hooks("warmstart_compile")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(module, "MEMORY", str(tmp_path / "meminfo"))
    monkeypatch.setattr(module, "CGROUP", str(tmp_path))
    return module


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch, hooks: Any) -> Any:
    module = async_module()
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", module)
    return module


def tuner(hook: Any, mode: Any, count: int = 6, **more: Any) -> Any:
    """An autotuner, hooked, over `count` configurations."""
    module = autotuner_module()
    hook.install(module)
    return module.Autotuner(Kernel(mode), [Config(n) for n in range(1, count + 1)], **more)


def test_all_are_compiled_before_the_first_is_timed(hook: Any, mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t = tuner(hook, mode)
    t.fn.patience = 30.0  # until two are at work
    assert t.run("x", grid=(1,), warmup=False) == 1
    assert t.before == [1, 2, 3, 4, 5, 6]
    assert t.timed == [1, 2, 3, 4, 5, 6]
    assert sorted(t.fn.compiled) == [1, 2, 3, 4, 5, 6]  # each once
    assert 2 <= t.fn.most <= 8
    assert capsys.readouterr() == ("", "")


def test_they_are_compiled_by_the_call_that_times_them(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode, 2)
    t.run("x", grid=(3,), warmup=False, C=5)
    first, *_, last = t.fn.calls
    assert {**first, "warmup": False} == {"grid": (3,), "warmup": False, "C": 5, "B": 1}
    assert first["warmup"] is True
    assert last["warmup"] is False


def test_installed_twice_is_once(hook: Any, mode: Any) -> None:
    module = autotuner_module()
    hook.install(module)
    bench = module.Autotuner._bench
    hook.install(module)
    assert module.Autotuner._bench is bench


def test_a_kept_verdict_compiles_nothing(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode, kept=True)
    t.run("x", grid=(1,), warmup=False)
    assert t.fn.calls == []


def test_the_next_key_is_compiled_too(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode, 3)
    t.run("x", grid=(1,), warmup=False)
    t.fn.ready.clear()
    t.fn.compiled.clear()
    t.timed.clear()
    t.run("y", grid=(1,), warmup=False)
    assert t.before == [1, 2, 3]


def test_one_that_cant_be_compiled_is_left_to_the_benchmark(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode)
    t.fn.fails = {1, 4}
    assert t.run("x", grid=(1,), warmup=False) == 2
    assert sorted(t.fn.compiled) == [1, 1, 2, 3, 4, 4, 5, 6]


def test_the_mode_of_triton_3_5_passes_over_nothing(
    hook: Any, mode: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(mode.AsyncCompileMode):  # type: ignore[misc]
        def __init__(self, executor: Executor) -> None:
            super().__init__(executor)
            del self.ignore_errors

        def __exit__(self, *problem: object) -> None:
            for future in as_completed(self.futures):
                self.futures[future](future.result())
            mode.active_mode.set(None)

    monkeypatch.setattr(mode, "AsyncCompileMode", Old)
    t = tuner(hook, mode)
    assert t.run("x", grid=(1,), warmup=False) == 1
    assert t.before == [1, 2, 3, 4, 5, 6]
    t.fn.ready.clear()
    t.fn.fails = {1, 4}
    assert t.run("y", grid=(1,), warmup=False) == 2
    assert mode.active_mode.get() is None
    assert capsys.readouterr() == ("", "")


def test_configurations_that_can_be_gone_through_once_are_left_to_triton(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode, 3)
    t.configs = (config for config in t.configs)
    assert t.run("x", grid=(1,), warmup=False) == 1
    assert t.before == []
    assert t.timed == [1, 2, 3]


def test_a_pre_hook_runs_before_its_configuration_is_compiled(hook: Any, mode: Any) -> None:
    t, seen = tuner(hook, mode, 2), []
    t.configs = [Config(n, pre_hook=lambda nargs: seen.append((nargs["x"], nargs["B"], nargs["C"]))) for n in (1, 2)]
    t.run("x", grid=(1,), warmup=False, C=5)
    assert seen == [("x", 1, 5), ("x", 2, 5)]


@pytest.mark.parametrize("without", ["mode", "kernel", "processors", "other mode"])
def test_where_it_can_not_be_done_triton_does_as_ever(
    hook: Any, mode: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without: str
) -> None:
    t = tuner(hook, mode)
    token = None
    if without == "mode":  # Triton 3.3 and 3.4
        monkeypatch.delitem(sys.modules, "triton.runtime._async_compile")
    elif without == "kernel":  # the interpreter's
        del t.fn.device_caches
    elif without == "processors":
        monkeypatch.setattr(hook.os, "sched_getaffinity", lambda pid: {0})
    else:
        other = mode.AsyncCompileMode(None)
        other.submit = lambda key, compile_fn, finalize_fn: finalize_fn(compile_fn())
        token = mode.active_mode.set(other)
    t.run("x", grid=(1,), warmup=False)
    if token is not None:
        mode.active_mode.reset(token)
    assert t.before == []
    assert t.fn.most == 1
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_its_own_is_told_once(
    hook: Any, mode: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> int:
        raise RuntimeError("no /proc")

    monkeypatch.setattr(hook, "compilers", broken)
    t = tuner(hook, mode, 3)
    for _ in range(2):
        assert t.run("x", grid=(1,), warmup=False) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "warmstart: configurations are compiled one after the other: RuntimeError: no /proc\n")


def test_the_mode_is_left_when_a_hook_of_triton_fails(hook: Any, mode: Any) -> None:
    t = tuner(hook, mode, 3)

    class Refuses(set[int]):
        def add(self, value: int) -> None:
            raise OSError("post-compile hook")

    t.fn.ready = Refuses()
    with pytest.raises(OSError, match="post-compile hook"):
        t.run("x", grid=(1,), warmup=False)
    assert mode.active_mode.get() is None


def test_two_tuners_in_two_threads(hook: Any, mode: Any) -> None:
    module = autotuner_module()
    hook.install(module)
    tuners = [module.Autotuner(Kernel(mode), [Config(n) for n in (1, 2, 3)]) for _ in range(2)]
    threads = [threading.Thread(target=t.run, args=("x",), kwargs={"grid": (1,), "warmup": False}) for t in tuners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t.before for t in tuners] == [[1, 2, 3]] * 2


# --- how many ---------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "ranks", "expected"),
    [
        ({}, {}, 8),
        ({"free": 16}, {}, 8),
        ({"free": 2}, {}, 4),
        ({"free": 0.1}, {}, 1),
        ({"free": 16, "limit": 3 * GIB, "used": 2 * GIB}, {}, 2),
        ({"free": 16, "limit": 3 * GIB, "used": 2 * GIB, "files": GIB}, {}, 4),
        ({"free": 16, "limit": "max", "used": 2 * GIB}, {}, 8),
        ({"quota": "300000 100000"}, {}, 3),
        ({"quota": "50000 100000"}, {}, 1),
        ({"quota": "max 100000"}, {}, 8),
        ({}, {"LOCAL_WORLD_SIZE": "2"}, 4),
        ({}, {"VLLM_DP_SIZE": "4"}, 2),
        ({}, {"LOCAL_WORLD_SIZE": "64"}, 1),
        ({}, {"LOCAL_WORLD_SIZE": "0"}, 8),
        ({}, {"LOCAL_WORLD_SIZE": "many"}, 8),
        ({"free": 4}, {"LOCAL_WORLD_SIZE": "2"}, 4),
    ],
)
def test_compilers_share_the_machine(
    hook: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    ranks: dict[str, str],
    expected: int,
) -> None:
    if "free" in facts:
        kib = int(facts["free"] * (1 << 20))
        (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n")
    for name, file in (("limit", "memory.max"), ("used", "memory.current"), ("quota", "cpu.max")):
        if name in facts:
            (tmp_path / file).write_text(f"{facts[name]}\n")
    if "files" in facts:
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {facts['files']}\nactive_file 7\n")
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert hook.compilers() == expected


def test_never_more_than_the_most(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.os, "sched_getaffinity", lambda pid: set(range(384)))
    assert hook.compilers() == hook.MOST_COMPILERS


@pytest.mark.parametrize(("world", "gpus", "expected"), [(2, 8, 4), (16, 8, 1), (1, 1, 8)])
def test_tensor_parallel_ranks(
    hook: Any, monkeypatch: pytest.MonkeyPatch, world: int, gpus: int, expected: int
) -> None:
    """vLLM sets no variable for them; torch's process group knows. Ranks on other machines don't count."""
    distributed = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: world
    )
    cuda = types.SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=distributed, cuda=cuda))
    assert hook.compilers() == expected


# --- workers ----------------------------------------------------------------------


def workers_module(answer: Any, running: bool = True) -> Any:
    """warmstart_workers, without processes; .asked is what it was asked for."""
    module = types.ModuleType("warmstart_workers")
    module.asked = []  # type: ignore[attr-defined]
    module.running = lambda: running  # type: ignore[attr-defined]

    def through(compile_fn: Any, patience: float) -> Any:
        module.asked.append(patience)
        if isinstance(answer, Exception):
            raise answer
        return answer

    module.through = through  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("answer", "running"), [(True, True), (False, True), (False, False), (OSError("no fork"), True)]
)
def test_what_workers_do_or_not_is_compiled_here(
    hook: Any,
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: Any,
    running: bool,
) -> None:
    """By the same function: it finds what a worker has compiled in Triton's cache."""
    monkeypatch.delenv("WARMSTART_HOOK_WORKERS")
    workers = workers_module(answer, running)
    monkeypatch.setitem(sys.modules, "warmstart_workers", workers)
    t = tuner(hook, mode)
    t.run("x", grid=(1,), warmup=False)
    assert t.before == [1, 2, 3, 4, 5, 6]
    assert workers.asked == [hook.PATIENCE if running else 0.0] * 6
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1 if isinstance(answer, Exception) else 0)


@pytest.mark.parametrize("running", [True, False])
def test_few_processors_use_threads_unless_workers_run_already(
    hook: Any, mode: Any, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    monkeypatch.delenv("WARMSTART_HOOK_WORKERS")
    workers = workers_module(True, running)
    monkeypatch.setitem(sys.modules, "warmstart_workers", workers)
    monkeypatch.setattr(hook.os, "sched_getaffinity", lambda pid: set(range(hook.FEWEST_WORKERS - 1)))
    t = tuner(hook, mode)
    t.run("x", grid=(1,), warmup=False)
    assert len(workers.asked) == (6 if running else 0)
    assert len(t.before) == 6


def test_a_worker_that_ends_answers_all_that_wait(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """listen() on the end of the replies, as a server that was killed leaves it."""
    workers = hooks("warmstart_workers")
    taken, given = workers.os.pipe()
    process = types.SimpleNamespace(stdin=types.SimpleNamespace(close=lambda: None), wait=lambda: None)
    ready, jobs = threading.Event(), {n: Future[bool]() for n in (1, 2, 3)}
    for number, done in ((workers.READY, True), (1, True), (2, False)):
        workers.os.write(given, workers.REPLY.pack(number, done))
    workers.os.write(given, b"\1\0")  # torn
    workers.os.close(given)
    workers.listen(taken, process, jobs, ready)
    assert ready.is_set()
    assert [jobs[n].result(0) for n in (1, 2, 3)] == [True, False, False]


def test_a_compilation_of_another_triton_is_not_sent(hooks: Any) -> None:
    """The names inside Triton's own function are all that is known about it."""
    unknown = 1
    assert hooks("warmstart_workers").parts(lambda: unknown) is None
    assert hooks("warmstart_workers").through(lambda: unknown, 0.0) is False


# A module with kernels, as models have them.
MODULE = """
import math
import torch

SCALE = 3
HOST = torch.Tensor()
SHAPES = [torch.Tensor(), 2]
RATIO = math.tau


@jit
def helper(x, y=2):
    return x * SCALE + y


@jit
def even(n):
    return True if n == 0 else odd(n - 1)


@jit
def odd(n):
    return False if n == 0 else even(n - 1)


def factory(offset):
    @jit
    def kernel(x, B: int = 4):
        if B < 0:
            HOST.launch(SHAPES)
        return helper(x) + offset + B + math.floor(RATIO) + (100 if even(x) else 0)

    return kernel
"""


@pytest.fixture
def packed(hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """warmstart_pack beside a pretended triton.runtime.jit, and a kernel of a module that needs torch."""

    class JITFunction:
        def __init__(self, fn: Any, **options: Any) -> None:
            self.fn, self.options, self._repr = fn, options, None
            self.__module__, self.__qualname__ = fn.__module__, fn.__qualname__
            self.starting_line_number = fn.__code__.co_firstlineno
            self.debug, self.noinline = options.get("debug"), options.get("noinline")

        def parse(self) -> Any:
            import ast
            import inspect
            import textwrap

            return ast.parse(textwrap.dedent(inspect.getsource(self.fn)))

        def __call__(self, *args: Any) -> Any:
            return self.fn(*args)

    jit = types.ModuleType("triton.runtime.jit")
    jit.JITFunction = JITFunction  # type: ignore[attr-defined]
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {"__module__": "torch"})  # type: ignore[attr-defined]
    for name, module in (("triton", types.ModuleType("triton")), ("triton.runtime.jit", jit), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    file = tmp_path / "model_kernels.py"
    file.write_text(MODULE)
    module = types.ModuleType("model_kernels")
    module.jit = lambda fn: JITFunction(fn, debug=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model_kernels", module)
    exec(compile(MODULE, str(file), "exec", dont_inherit=True), module.__dict__)
    return types.SimpleNamespace(pack=hooks("warmstart_pack"), module=module, torch=torch)


def test_a_kernel_arrives_without_its_module(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = packed.module.factory(1000)
    sent = packed.pack.dumps((kernel, {"B": 4}))
    for name in ("torch", "model_kernels"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    arrived, _ = pickle.loads(sent)
    assert arrived is not kernel
    assert [arrived(4), arrived(5)] == [kernel(4), kernel(5)] == [1124, 1027]
    assert set(arrived.fn.__globals__) >= {"helper", "even", "math", "RATIO"}
    assert not {"HOST", "SHAPES", "torch", "jit"} & set(arrived.fn.__globals__)


def test_it_keeps_what_its_key_is_made_of(packed: Any) -> None:
    kernel = packed.module.factory(1)
    kernel.starting_line_number -= 1  # that of its decorator, as Triton has it
    arrived = pickle.loads(packed.pack.dumps(kernel))
    assert arrived.starting_line_number == kernel.starting_line_number
    assert arrived.fn.__code__.co_filename == kernel.fn.__code__.co_filename
    assert (arrived.__module__, arrived.__qualname__) == ("model_kernels", "factory.<locals>.kernel")
    assert arrived.fn.__annotations__ == {"B": int}
    assert arrived.fn.__defaults__ == (4,)
    assert arrived.debug is True


def test_a_kernel_that_calls_itself_through_another(packed: Any) -> None:
    arrived = pickle.loads(packed.pack.dumps(packed.module.even))
    assert arrived(10) is True
    assert arrived.fn.__globals__["odd"].fn.__globals__["even"] is arrived


def test_what_brings_torch_in_is_not_packed(packed: Any) -> None:
    for value in (packed.torch.Tensor, packed.torch, packed.torch.Tensor(), pytest.fixture):
        with pytest.raises(pickle.PicklingError):
            packed.pack.dumps(value)


def test_a_kernel_named_by_a_function_is_not_packed(packed: Any) -> None:
    packed.module.helper._repr = lambda: "name"
    with pytest.raises(pickle.PicklingError):
        packed.pack.dumps(packed.module.helper)
