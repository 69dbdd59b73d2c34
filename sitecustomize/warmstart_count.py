"""Counts what a start does: imports, compilations, benchmarks, graph captures, one JSON line each in its start record.

WARMSTART_START names the record, which the image's entry point begins; without it nothing here is loaded. A process
that does none of these things writes nothing and pays nothing. Standard library only.
"""

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

counted: list[tuple[float, float]] = []  # imports so far: when each began, and seconds without other counted ones
state = threading.local()  # .inside: whether check_disk_cache is around the benchmark that runs in this thread
off: set[int] = set()  # processes that could not write; for them it is over


def emit(event: str, **facts: Any) -> None:
    """Add an event to the record. Opened each time: what a forked process closes and opens itself is not ours.

    A pipe of the user's that nobody reads is not waited for.
    """
    if os.getpid() in off:
        return
    try:
        line = json.dumps({"event": event, "pid": os.getpid(), "t": time.time(), **facts}) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(os.environ["WARMSTART_START"], flags, 0o666)
        try:
            os.write(fd, line.encode())  # one write, so that lines of several processes are never mixed
        finally:
            os.close(fd)
    except Exception:  # a full disk, a read-only one: no reason to disturb a start, or to try again
        off.add(os.getpid())


# ---- imports ------------------------------------------------------------------------------------------------------
def imported(module: Any) -> None:
    """Tell that a package was imported, and how long that took without the counted packages inside."""
    known = importlib.import_module("warmstart_hooks").took.get(module.__name__)
    if known is None:
        return  # it was there before the hooks
    began, seconds = known
    seconds -= sum(inner for start, inner in counted if start >= began)
    counted.append((began, seconds))
    emit("import", module=module.__name__, seconds=round(seconds, 4))


# ---- compilations -------------------------------------------------------------------------------------------------
def listen(module: Any) -> None:
    """Hear of Triton's compilations (triton.knobs, from 3.4 on); a listener that is there is asked as ever."""
    compilation = module.compilation
    others = compilation.listener

    def listener(**told: Any) -> Any:
        if not told.get("cache_hit", True):
            compiled(told)
        return others(**told) if others is not None else None

    compilation.listener = listener


def compiled(told: Any) -> None:
    """Tell of one compilation, from what Triton tells its listener."""
    try:
        name, seconds = str(getattr(told["src"], "name", "")), told["times"].total / 1e6
    except Exception:
        name, seconds = "", None
    emit("compile", name=name, seconds=seconds, where="process")


def workers(module: Any) -> None:
    """Count what worker processes compile (warmstart_workers): Triton tells of it as of something found."""
    through = module.through

    def counting(compile_fn: Any, patience: float, *, urgent: bool = True) -> Any:
        began = time.perf_counter()
        done = through(compile_fn, patience, urgent=urgent)
        if done:
            found = module.parts(compile_fn)
            name = str(getattr(found[0], "name", "")) if found else ""
            seconds = round(time.perf_counter() - began, 4)
            emit("compile", name=name, seconds=seconds, where="worker" if urgent else "ahead")
        return done

    module.through = counting


# ---- benchmarks ---------------------------------------------------------------------------------------------------
def benches(module: Any) -> None:
    """Tell when an autotuner of triton.runtime.autotuner has measured its configurations."""
    tuner = module.Autotuner
    check: Any = getattr(tuner, "check_disk_cache", None)
    bench = tuner._bench
    if hasattr(bench, "counted"):
        return

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> Any:
        def timed() -> None:
            began = time.perf_counter()
            state.inside = True
            try:
                bench_fn()
            finally:
                state.inside = False
            stored = bool(tuning_key) and not any(config.pre_hook for config in configs) and not doubtful()
            told(self, len(configs), time.perf_counter() - began, stored)

        return check(self, tuning_key, configs, timed)

    def _bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(state, "inside", False):
            return bench(self, *args, **kwargs)
        began = time.perf_counter()  # nobody keeps verdicts here, so each configuration is told of by itself
        try:
            return bench(self, *args, **kwargs)
        finally:
            told(self, 1, time.perf_counter() - began, False)

    # What the hooks before this one look for on Triton's function is on this one too.
    _bench.__dict__.update(getattr(bench, "__dict__", {}), counted=True)
    tuner._bench = _bench
    if check is not None:
        check_disk_cache.__dict__.update(getattr(check, "__dict__", {}))
        tuner.check_disk_cache = check_disk_cache


def told(tuner: Any, configs: int, seconds: float, stored: bool) -> None:
    """Tell of one benchmark."""
    name = getattr(getattr(tuner, "base_fn", None), "__name__", "")
    emit("bench", name=str(name), configs=configs, seconds=round(seconds, 4), stored=stored)


def doubtful() -> bool:
    """Whether the bounded do_bench doubts what this thread measured, so that it is not stored."""
    bench = sys.modules.get("warmstart_bench")
    return bool(getattr(getattr(bench, "doubt", None), "found", False))


# ---- graphs -------------------------------------------------------------------------------------------------------
def captures(module: Any) -> None:
    """Tell of each graph that torch.cuda.graphs captures."""
    graph = module.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        state.capture = time.perf_counter()
        return begin(self, *args, **kwargs)

    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = end(self, *args, **kwargs)
        began = getattr(state, "capture", None)
        if began is not None:
            state.capture = None
            emit("capture", graphs=1, seconds=round(time.perf_counter() - began, 4))
        return done

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
