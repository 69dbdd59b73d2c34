"""Keeps Inductor from storing what it measured with device events that are wrong.

Inductor has a benchmark of its own, bounded, but ranked by the same events as Triton's: where those read nothing, it
chooses at random and keeps the choice on disk. Its measurements stay as they are; after one that can't be right, or on
a device whose events are wrong about a known load, the choice holds for this process only. Standard library only.
"""

import functools
import importlib
import math
import os
import threading
from typing import Any

import warmstart_bench  # type: ignore[import-not-found] # beside this file
import warmstart_device as on  # type: ignore[import-not-found]

doubt = threading.local()  # .found: something that this thread measured since the last choice was in doubt


def watch(module: Any) -> None:
    """Look at what torch._inductor.runtime.benchmarking's benchmark says."""
    benchmarker = module.InductorBenchmarker
    stock = benchmarker.benchmark_gpu
    if hasattr(stock, "warmstart"):
        return

    @functools.wraps(stock)
    def benchmark_gpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        times = stock(self, *args, **kwargs)
        try:
            doubt.found = getattr(doubt, "found", False) or impossible(times) or not events_are_right()
        except Exception as problem:
            warmstart_bench.warn_once(
                "inductor", f"Inductor's times are not checked: {type(problem).__name__}: {problem}"
            )
        return times

    benchmark_gpu.warmstart = True  # type: ignore[attr-defined]
    benchmarker.benchmark_gpu = benchmark_gpu


def guard(module: Any) -> None:
    """Keep torch._inductor.runtime.autotune_cache from storing a choice that was made in doubt."""
    stock = module.AutotuneCache.save
    if hasattr(stock, "warmstart"):
        return

    @functools.wraps(stock)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, doubt.found = getattr(doubt, "found", False), False
        if found:
            warmstart_bench.warn_once("kept", "device events can't be trusted: Inductor's choices are not stored")
            return None
        return stock(self, *args, **kwargs)

    save.warmstart = True  # type: ignore[attr-defined]
    module.AutotuneCache.save = save


def impossible(times: Any) -> bool:
    """Whether no kernel takes such a time, in milliseconds. Infinite is what can't be launched."""
    every = times if isinstance(times, (list, tuple)) else [times]
    return any(math.isnan(time) or time < warmstart_bench.MIN_EVENT for time in map(float, every))


def events_are_right() -> bool:
    """Whether the events of the device in use agree with the host's clock about a known load, looked at once."""
    driver = importlib.import_module("triton").runtime.driver.active
    key = (os.getpid(), on.current(driver))
    devices = warmstart_bench.devices
    if key not in devices:
        flush, _ = on.flusher(driver)
        devices[key] = on.known_load(driver.get_device_interface(), flush)
    return bool(devices[key][0])
