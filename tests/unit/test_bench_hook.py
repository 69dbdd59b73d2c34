"""The bounded do_bench on a pretended device with a pretended clock, and the hooks' way into Triton's modules.

Nothing here is a measurement: the device only adds up what it is told that launches, flushes and events take.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import statistics
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
FILES = sorted(path.stem for path in HOOKS.glob("*.py"))
# triton.testing.do_bench of the wheels of these versions.
SIGNATURES = dict.fromkeys(
    ["3.3.0", "3.3.1", "3.4.0", "3.5.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"],
    "(fn, warmup=25, rep=100, grad_to_none=None, quantiles=None, return_mode='mean')",
)
LAUNCH, EVENT, CLEAR, SYNC, FLUSH = 0.04, 0.003, 0.006, 0.015, 0.06  # milliseconds; FLUSH is of 256 MiB
CONFIGS = 16
MOST_LAUNCHES = 160  # of one call, whatever the events read


class Device:
    """Host and device as two clocks: what is put into the queue runs when all before it has."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.launches = self.flushes = 0
        self.size = self.largest = 256 << 20
        self.fault: Callable[[float], float] = lambda t: t
        self.broken = ""
        self.jitter = random.Random(7)
        self.Event = self.event  # the name that torch.cuda has

    def queue(self, host: float, device: float) -> None:
        self.now += host
        self.free = max(self.now, self.free) + device

    def kernel(self, time: float, launch: float = LAUNCH) -> Callable[[], None]:
        def run() -> None:
            self.launches += 1
            self.queue(launch, time * self.jitter.uniform(1.0, 1.02))

        return run

    def synchronize(self) -> None:
        self.now = max(self.now, self.free) + SYNC

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        if self.broken == "making":
            raise RuntimeError("no events here")
        event = types.SimpleNamespace(at=math.nan)

        def record() -> None:
            if self.broken == "recording":
                raise RuntimeError("not recorded")
            self.now += EVENT
            event.at = max(self.now, self.free)

        def elapsed_time(end: Any) -> float:
            if self.broken == "reading":
                raise RuntimeError("not ready")
            return self.fault(end.at - event.at)

        event.record, event.elapsed_time = record, elapsed_time
        return event

    # --- what Triton's driver has ---
    def get_device_interface(self) -> Any:
        return self

    def get_current_device(self) -> int:
        return 0

    def get_empty_cache_for_benchmark(self) -> Any:
        return object()

    def clear_cache(self, buffer: Any) -> None:
        self.flushes += 1
        self.queue(CLEAR, FLUSH)


def summarize(times: list[float], quantiles: Any, return_mode: str) -> Any:
    """What Triton's _summarize_statistics returns."""
    if quantiles is not None:
        ordered = sorted(times)
        found = [ordered[round(q * (len(times) - 1))] for q in quantiles]
        return found[0] if len(found) == 1 else found
    return (
        times
        if return_mode == "all"
        else getattr(statistics, return_mode, getattr(__builtins__, return_mode, min))(times)
    )


def stock_time(kernel: float) -> float:
    """Milliseconds that Triton's loop takes with events that are right: by its formula, all versions."""
    estimate = kernel + max(FLUSH, LAUNCH + CLEAR + 2 * EVENT)
    repetitions = max(1, int(100 / estimate))
    return kernel + 5 * estimate + max(1, int(25 / estimate)) * max(kernel, LAUNCH) + repetitions * estimate


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hooks' files, freshly importable; sys.meta_path and sys.modules are put back."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(HOOKS))
    for name in list(sys.modules):
        if name in FILES or name.split(".")[0] == "triton":
            monkeypatch.delitem(sys.modules, name)
    for name in ("WARMSTART_HOOKS", "WARMSTART_HOOK_BENCH", "WARMSTART_HOOK_COMPILE", "WARMSTART_LLC_MIB"):
        monkeypatch.delenv(name, raising=False)
    before = set(sys.modules)
    yield lambda name: importlib.import_module(name)
    for name in set(sys.modules) - before:
        if name in FILES or name.split(".")[0] == "triton":
            del sys.modules[name]


@pytest.fixture
def bench(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """warmstart_bench on the pretended device, which is its attribute `device`."""
    module, device = hooks("warmstart_bench"), Device()
    testing = types.SimpleNamespace(
        runtime=types.SimpleNamespace(driver=types.SimpleNamespace(active=device)),
        _summarize_statistics=summarize,
        do_bench=lambda *args, **kwargs: ("stock", args, kwargs),
    )
    module.replace(testing)
    monkeypatch.setattr(hooks("warmstart_device"), "clock", lambda: device.now)
    module.device, module.module = device, testing
    return module


def choose(bench: Any, times: list[float]) -> int:
    """Index of the configuration that an autotuner would take."""
    measured = [bench.do_bench(bench.device.kernel(t), quantiles=(0.5, 0.2, 0.8)) for t in times]
    return measured.index(min(measured))


# --- the call ---------------------------------------------------------------------


@pytest.mark.parametrize("version", SIGNATURES)
def test_the_signature_is_tritons(bench: Any, version: str) -> None:
    ours = inspect.signature(bench.do_bench)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in ours.parameters.values()]
    assert str(inspect.Signature(plain)) == SIGNATURES[version]


def test_it_takes_the_place_of_tritons_once(bench: Any) -> None:
    stock = bench.stock
    assert bench.module.do_bench is bench.do_bench
    bench.replace(bench.module)
    assert bench.stock is stock


def test_quantiles_win_over_the_return_mode(bench: Any) -> None:
    fn = bench.device.kernel(0.3)
    assert len(bench.do_bench(fn, quantiles=[0.5, 0.2, 0.8], return_mode="all")) == 3
    assert isinstance(bench.do_bench(fn, quantiles=[0.5]), float)


@pytest.mark.parametrize("mode", ["min", "max", "mean", "median"])
def test_return_modes(bench: Any, mode: str) -> None:
    assert bench.do_bench(bench.device.kernel(0.3), return_mode=mode) == pytest.approx(0.303, rel=0.05)


def test_all_times_are_a_list(bench: Any) -> None:
    times = bench.do_bench(bench.device.kernel(0.3), return_mode="all")
    assert bench.MIN_REPS <= len(times) <= bench.MAX_REPS


def test_an_unknown_return_mode_is_refused(bench: Any) -> None:
    with pytest.raises(AssertionError):
        bench.do_bench(bench.device.kernel(0.3), return_mode="best")


def test_gradients_are_taken_away_before_each_repetition(bench: Any) -> None:
    tensor = types.SimpleNamespace(grad=None)
    left = []
    fn = bench.device.kernel(0.3)

    def backward() -> None:
        left.append(tensor.grad)
        tensor.grad = "accumulated"
        fn()

    bench.do_bench(backward, grad_to_none=[tensor])
    assert left[1:] == [None] * (len(left) - 1)


def test_an_exception_of_the_kernel_is_the_callers(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for good in (0, 1, 5, 20):  # the launch that fails
        left = iter(range(good))

        def fails(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise MemoryError("out of resources")

        with pytest.raises(MemoryError, match="out of resources"):
            bench.do_bench(fails)
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_its_own_leaves_tritons(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.device.get_device_interface = lambda: None
    for _ in range(2):
        name, arguments, _ = bench.do_bench(bench.device.kernel(1), 5, rep=7)
        assert (name, arguments[1:]) == ("stock", (5, 7, None, None, "mean"))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Triton's own is used" in err


# --- how long it takes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "share"),
    [(0.0005, 0.2), (0.002, 0.2), (0.02, 0.2), (0.09, 0.2), (0.3, 0.5), (0.9, 0.5), (2, 1.1), (8, 1.1), (15, 1.1)]
    + [(24, 1.1), (26, 1.1), (60, 1.1), (150, 1.1), (399, 1.1), (2000, 1.1)],
)
def test_time_and_launches_are_bounded(bench: Any, time: float, share: float) -> None:
    bench.do_bench(bench.device.kernel(1))  # the first call of a process also looks at the events
    device = bench.device
    began, device.launches = device.now, 0
    assert bench.do_bench(device.kernel(time), quantiles=(0.5,)) == pytest.approx(time * 1.01, rel=0.05)
    assert device.now - began <= share * stock_time(time)
    assert device.launches <= 1 + 1 + bench.WARM_REPS + bench.MAX_REPS
    assert device.now - began <= max(bench.WALL, 2 * time) + 2 * time + 20


def test_warmup_and_rep_are_upper_bounds(bench: Any) -> None:
    bench.do_bench(bench.device.kernel(1))
    counts = []
    for warmup, rep in ((25, 100), (25, 1), (0, 1), (10**6, 10**6)):
        bench.device.launches = 0
        bench.do_bench(bench.device.kernel(0.9), warmup, rep)
        counts.append(bench.device.launches)
    assert counts[1] == 2 + bench.WARM_REPS + bench.MIN_REPS
    assert counts[2] == 2 + bench.MIN_REPS
    assert counts[3] == counts[0]


def test_a_device_that_was_idle_is_woken(bench: Any) -> None:
    bench.do_bench(bench.device.kernel(0.05))
    counts = []
    for pause in (0, bench.IDLE + 1):
        bench.device.now += pause
        bench.device.flushes = 0
        bench.do_bench(bench.device.kernel(0.05))
        counts.append(bench.device.flushes)
    assert counts[1] - counts[0] >= bench.WAKE / FLUSH / 2


# --- ranking and faults -----------------------------------------------------------

FAULTS: dict[str, Callable[[float], float]] = {
    "zero": lambda t: 0.0,
    "negative": lambda t: -t,
    "nan": lambda t: math.nan,
    "infinite": lambda t: math.inf,
    "thousandth": lambda t: t / 1000,
    "thousandfold": lambda t: t * 1000,
    "constant": lambda t: 0.0001,
}


@pytest.mark.parametrize("scale", [0.02, 0.3, 3, 40])
def test_the_best_is_chosen(bench: Any, scale: float) -> None:
    times = [scale * (1 + 0.04 * i) for i in range(CONFIGS)]
    random.Random(3).shuffle(times)
    assert choose(bench, times) == times.index(min(times))
    assert not hasattr(bench.doubt, "found")


def test_short_kernels_are_told_apart_though_a_launch_takes_longer(bench: Any) -> None:
    """The host prepares a launch for 40 µs; the device has to be busy that long, or all kernels look like that."""
    assert choose(bench, [0.004, 0.003, 0.005]) == 1
    assert bench.do_bench(bench.device.kernel(0.004)) < 0.012


@pytest.mark.parametrize("scale", [0.02, 0.3, 3, 40])
@pytest.mark.parametrize("fault", [*FAULTS, "making", "recording", "reading"])
def test_wrong_events(bench: Any, capsys: pytest.CaptureFixture[str], fault: str, scale: float) -> None:
    device = bench.device
    device.fault, device.broken = FAULTS.get(fault, device.fault), fault
    times = [scale * (1 + 0.25 * i) for i in range(CONFIGS)]
    random.Random(3).shuffle(times)
    assert choose(bench, times) == times.index(min(times))
    assert bench.doubt.found
    assert device.launches <= CONFIGS * MOST_LAUNCHES
    assert device.now <= CONFIGS * (2 * bench.WALL)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("warmstart: device events can't be trusted")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scale", [0.8, 5, 40])
def test_events_wrong_about_kernels_alone(bench: Any, fault: str, scale: float) -> None:
    """The load that is looked at first reads right; the kernels do not."""
    bench.do_bench(bench.device.kernel(scale))
    bench.device.fault, bench.device.launches = FAULTS[fault], 0
    bench.do_bench(bench.device.kernel(scale))
    assert bench.doubt.found
    assert bench.device.launches <= MOST_LAUNCHES


def test_a_single_bad_reading_is_left_out(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.do_bench(bench.device.kernel(0.3))
    turn = iter(range(10**6))
    bench.device.fault = lambda t: -0.001 if next(turn) % 16 == 5 else t
    assert min(bench.do_bench(bench.device.kernel(0.3), return_mode="all")) == pytest.approx(0.3, rel=0.1)
    assert not hasattr(bench.doubt, "found")
    assert capsys.readouterr() == ("", "")


def test_a_host_that_is_held_up_once_is_no_reason_for_doubt(bench: Any) -> None:
    synchronize, turn = bench.device.synchronize, iter(range(10**6))

    def late() -> None:
        synchronize()
        bench.device.now += 30 if next(turn) % 3 == 1 else 0

    bench.device.synchronize = late
    for _ in range(20):
        bench.do_bench(bench.device.kernel(0.01))
    assert not hasattr(bench.doubt, "found")


def test_a_slow_host_is_no_reason_for_doubt(bench: Any) -> None:
    """A launch that takes the host 2 ms, of a kernel that takes the device 5 µs."""
    bench.do_bench(bench.device.kernel(0.005, launch=2.0))
    assert not hasattr(bench.doubt, "found")


# --- the flush --------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("setting", "size"),
    [("2", 32), ("32", 64), ("96", 192), ("256", 256), ("1e9", 256), ("0", 256), ("-3", 256), ("nan", 256), ("x", 256)],
)
def test_the_flush_is_sized_by_the_arch(hooks: Any, monkeypatch: pytest.MonkeyPatch, setting: str, size: int) -> None:
    monkeypatch.setenv("WARMSTART_LLC_MIB", setting)
    assert hooks("warmstart_device").flush_bytes() == size * MIB


@pytest.mark.parametrize(("hip", "cache", "size"), [(None, 60, 120), (None, 4, 32), ("7.0", 4, 256)])
def test_without_the_setting_the_device_is_asked(
    hooks: Any, monkeypatch: pytest.MonkeyPatch, hip: str | None, cache: int, size: int
) -> None:
    properties = types.SimpleNamespace(L2_cache_size=cache * MIB)
    cuda = types.SimpleNamespace(get_device_properties=lambda n: properties, current_device=lambda: 0)
    torch = types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(hip=hip))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert hooks("warmstart_device").flush_bytes() == size * MIB


def test_with_little_memory_less_is_flushed_and_nothing_stored(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def empty(count: int, dtype: Any, device: Any) -> Any:
        made.append(count * 4 // MIB)
        if made[-1] > 100:
            raise RuntimeError("out of memory")
        return object()

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(empty=empty, int="int", version=None))
    bench.do_bench(bench.device.kernel(0.3))
    assert made == [256, 128, 64]
    assert bench.doubt.found


def test_without_memory_it_ranks_all_the_same(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(empty=empty, int="int", version=None))
    assert choose(bench, [0.4, 0.3, 0.5]) == 1
    assert bench.doubt.found


# --- verdicts ---------------------------------------------------------------------


def autotuner_module() -> Any:
    """The parts of triton.runtime.autotuner that store a verdict (3.4 to 3.9), with a store that is a list."""

    class Autotuner:
        kept = False

        def __init__(self) -> None:
            self.stored: list[Any] = []

        def check_disk_cache(self, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
            if self.kept:
                return True
            bench_fn()
            self.stored.append(tuning_key)
            return False

    return types.SimpleNamespace(Autotuner=Autotuner)


def test_a_doubtful_verdict_is_not_stored(bench: Any) -> None:
    module = autotuner_module()
    bench.guard(module)
    bench.guard(module)  # twice is once
    tuner, ran = module.Autotuner(), []

    def benchmark() -> None:
        ran.append(choose(bench, [0.3, 0.5]))

    assert tuner.check_disk_cache("good", [], benchmark) is False
    bench.device.fault = FAULTS["zero"]
    assert tuner.check_disk_cache("bad", [], benchmark) is False
    bench.device.fault = lambda t: t
    assert tuner.check_disk_cache("still", [], benchmark) is False  # once wrong, not trusted again
    assert (ran, tuner.stored) == ([0, 0, 0], ["good"])


def test_a_stored_verdict_is_used(bench: Any) -> None:
    module = autotuner_module()
    bench.guard(module)
    module.Autotuner.kept = True
    assert module.Autotuner().check_disk_cache("key", [], None) is True


def test_an_error_while_tuning_is_the_callers(bench: Any) -> None:
    module = autotuner_module()
    bench.guard(module)

    def benchmark() -> None:
        raise ValueError("conflicting meta-parameters")

    with pytest.raises(ValueError, match="conflicting"):
        module.Autotuner().check_disk_cache("key", [], benchmark)


def test_triton_that_stores_nothing_stays_as_it_is(bench: Any) -> None:
    bench.guard(types.SimpleNamespace(Autotuner=types.SimpleNamespace))
    assert not hasattr(types.SimpleNamespace, "check_disk_cache")


# --- the hooks --------------------------------------------------------------------


@pytest.fixture
def triton(tmp_path: Path, hooks: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with Triton's names, importable; its folder."""
    package = tmp_path / "triton"
    (package / "runtime").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import testing\n")
    (package / "testing.py").write_text("def do_bench(fn): return 'stock'\n")
    (package / "runtime/__init__.py").write_text("")
    (package / "runtime/autotuner.py").write_text("class Autotuner:\n  prune_configs = _bench = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_nothing_is_loaded_or_changed_at_start(hooks: Any) -> None:
    hooks("warmstart_hooks")
    assert not {name for name in FILES if name != "warmstart_hooks"} & set(sys.modules)


def test_the_start_imports_nothing(hooks: Any) -> None:
    """Every module that is not there anyway costs each process of the image some hundred microseconds."""
    source = compile((HOOKS / "warmstart_hooks.py").read_text(encoding="utf-8"), "hooks", "exec")
    names = {name for code in [source] for name in code.co_names}
    assert names & set(sys.stdlib_module_names) == {"os", "sys"}


def test_every_row_leads_to_a_function(hooks: Any) -> None:
    for hook, module, file, function in hooks("warmstart_hooks").WAITING:
        assert hook.isidentifier()
        assert module.partition(".")[0] in hooks("warmstart_hooks").PACKAGES
        assert callable(getattr(hooks(file), function))


def test_a_hook_is_called_after_the_module_it_waits_for(hooks: Any, triton: Path) -> None:
    hooks("warmstart_hooks")
    testing = hooks("triton.testing")
    assert testing.do_bench is hooks("warmstart_bench").do_bench
    assert hooks("warmstart_bench").stock(None) == "stock"
    assert inspect.getsource(testing).startswith("def do_bench")  # its loader still does all that loaders do
    assert importlib.reload(testing).do_bench is hooks("warmstart_bench").do_bench


def test_a_module_that_was_imported_before_is_changed_too(hooks: Any, triton: Path) -> None:
    testing = hooks("triton.testing")
    hooks("warmstart_hooks")
    assert testing.do_bench is hooks("warmstart_bench").do_bench


@pytest.mark.parametrize("variable", ["WARMSTART_HOOKS", "WARMSTART_HOOK_BENCH"])
def test_switched_off(hooks: Any, triton: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    hooks("warmstart_hooks")
    assert hooks("triton.testing").do_bench(None) == "stock"
    assert "warmstart_bench" not in sys.modules


def test_a_hook_that_fails_leaves_the_module(hooks: Any, triton: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (triton / "testing.py").write_text("def __getattr__(name): raise RuntimeError('another Triton')\n")
    hooks("warmstart_hooks")
    assert hooks("triton.testing").__name__ == "triton.testing"
    assert capsys.readouterr() == ("", "warmstart: hook bench is off: another Triton\n")


def test_an_error_of_the_module_itself_is_the_importers(hooks: Any, triton: Path) -> None:
    (triton / "testing.py").write_text("raise ImportError('no libtriton')\n")
    hooks("warmstart_hooks")
    with pytest.raises(ImportError, match="no libtriton"):
        hooks("triton.testing")


def test_hooks_are_there_once(hooks: Any) -> None:
    module = hooks("warmstart_hooks")
    module.install()
    for finder in (module.LostFinder, module.AwaitedFinder):
        assert sys.meta_path.count(finder) == 1
    assert sys.meta_path[0] is module.AwaitedFinder
    assert sys.meta_path[-1] is module.LostFinder


def test_a_module_that_is_not_there_stays_so(hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks("warmstart_hooks")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'triton\.testing'"):
        hooks("triton.testing")
    assert importlib.util.find_spec("triton.testing") is None


def test_threads_that_import_at_the_same_time(hooks: Any, triton: Path) -> None:
    hooks("warmstart_hooks")
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(hooks("triton.testing").do_bench)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [hooks("warmstart_bench").do_bench] * 8
