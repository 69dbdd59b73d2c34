"""A bounded triton.testing.do_bench: the same call, the same ranking, a few dozen launches instead of thousands.

Triton divides its budget by a time read from device events, in all versions from 3.3 to 3.9: events that read nearly
nothing make it launch a kernel hundreds of thousands of times, events that read zero kill the server, and wrong ones
choose a random winner that Triton then keeps on disk. Here the host clock around a synchronised probe sizes the loop;
events only rank, and are checked against the host clock. Where they fail the host clock ranks, and the verdict is not
stored.

Standard library only: torch comes in through Triton's driver. Times are milliseconds unless a name says otherwise.
"""

import importlib
import math
import os
import threading
from typing import Any

import warmstart_device as on  # type: ignore[import-not-found] # beside this file

# Repetitions of one call, and the time they may take. The floors hold where one launch is longer than the budget.
MIN_REPS, MAX_REPS, MIN_SLOW_REPS = 5, 64, 2
ENOUGH_REPS = 24  # from here on a median that is known well enough ends the loop
PRECISION = 0.005  # well enough: half the 95 % interval of the median
BATCH = 8  # repetitions between two synchronisations
TIMED = 30.0  # for the timed repetitions, unless `rep` is less
WALL = 400.0  # for all after the first launch, which may compile; MIN_SLOW_REPS may exceed it
SLOW = 25.0  # a launch that needs no warm-up: its probe already is a repetition
WARM_REPS = 4
IDLE, WAKE = 100.0, 15.0  # a device idle for longer than that has lowered its clocks; how long it is kept busy first
AHEAD = 2.0  # the flushes before a repetition take this many times as long as the host needs to put it into the queue
MAX_FLUSHES = 8  # before one repetition, to keep the device busy while the host prepares the launch
MIN_EVENT = 0.0002  # nothing runs in less
TICK = 0.001  # the host's clock is not asked for more
BAD_EVENTS = 1 / 8  # share of single bad readings that are left out: HIP's are sometimes just below zero
HOST_ROUNDS = 5  # of the host-timed measurement

testing: Any = None  # triton.testing
stock: Any = None  # its own do_bench
doubt = threading.local()  # .found: a measurement of this thread must not be stored
devices: dict[Any, "tuple[bool, float]"] = {}  # process and device → are its events right, time of one flush
last_used = -math.inf
warned: set[str] = set()


class NotStored(Exception):
    """Carries a doubtful verdict past the code that would store it."""


def replace(module: Any) -> None:
    """Put the bounded do_bench in the place of triton.testing's."""
    global testing, stock
    testing = module
    if module.do_bench is not do_bench:
        stock, module.do_bench = module.do_bench, do_bench


def guard(module: Any) -> None:
    """Keep Triton's autotuner (triton.runtime.autotuner) from storing a verdict that was measured in doubt."""
    check = getattr(module.Autotuner, "check_disk_cache", None)
    if check is None or hasattr(check, "warmstart"):
        return  # Triton 3.3 stores none

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> Any:
        def bench() -> None:
            doubt.found = False
            bench_fn()
            if doubt.found:
                raise NotStored  # bench_fn has set the winner for this process; the next line would store it

        try:
            return check(self, tuning_key, configs, bench)
        except NotStored:
            return False

    check_disk_cache.warmstart = True  # type: ignore[attr-defined]
    module.Autotuner.check_disk_cache = check_disk_cache


def do_bench(
    fn: Any,
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Any = None,
    quantiles: Any = None,
    return_mode: str = "mean",
) -> Any:
    """Milliseconds of `fn`, as triton.testing.do_bench gives them; `warmup` and `rep` are upper bounds."""
    assert return_mode in ["min", "max", "mean", "median", "all"]
    raised = []

    def call() -> None:
        try:
            fn()
        except BaseException:
            raised.append(True)
            raise

    try:
        times = measure(call, warmup, rep, grad_to_none if grad_to_none is not None else ())
    except Exception as problem:
        if raised:
            raise
        warn_once("stock", f"the bounded do_bench failed, Triton's own is used: {type(problem).__name__}: {problem}")
        return stock(fn, warmup, rep, grad_to_none, quantiles, return_mode)
    return testing._summarize_statistics(times, quantiles, return_mode)


def measure(call: Any, warmup: float, rep: float, grads: Any) -> list[float]:
    """Times of `call`, by events if they can be trusted, else by the host clock."""
    global last_used
    driver = testing.runtime.driver.active
    device = driver.get_device_interface()
    call()
    device.synchronize()
    began = on.clock()
    flush, whole = on.flusher(driver)
    key = (os.getpid(), on.current(driver))
    if key not in devices:
        devices[key] = on.known_load(device, flush)
    trusted, flush_time = devices[key]
    if not whole:
        doubt.found = True  # a warm cache ranks differently
    if began - last_used > IDLE:
        wake(device, flush, min(warmup, WAKE))
    try:
        if not trusted:
            raise on.EventError("they are wrong about a known load")
        times = by_events(device, call, flush, flush_time, began, min(rep, TIMED), warmup, grads)
    except on.EventError as problem:
        devices[key] = False, flush_time
        doubt.found = True
        warn_once(
            "events", f"device events can't be trusted ({problem}): the host times kernels, verdicts are not stored"
        )
        device.synchronize()
        times = by_host(device, call, flush, flush_time, began, grads)
    last_used = on.clock()
    return times


def by_events(
    device: Any, call: Any, flush: Any, flush_time: float, began: float, rep: float, warmup: float, grads: Any
) -> list[float]:
    """Event times of `call`; raises EventError when they can't be right."""
    pairs = [on.new_pair(device) for _ in range(BATCH)]
    seen: list[tuple[float, float]] = []  # of each batch: host time and time to enqueue, of one repetition

    def batch(count: int, flushes: int) -> list[float]:
        start = on.clock()
        for begin, end in pairs[:count]:
            for x in grads:
                x.grad = None
            for _ in range(flushes):
                flush()
            on.record(begin)
            call()
            on.record(end)
        queued = on.clock()
        device.synchronize()
        seen.append((max(on.clock() - start, TICK) / count, (queued - start) / count))
        return [on.read(*pair) for pair in pairs[:count]]

    flushes = 0 if flush is None else 1
    probe = batch(1, flushes)
    cost, _ = seen[0]
    times = probe if cost >= SLOW else []
    if cost < SLOW and (warm := min(WARM_REPS, int(warmup / cost))):
        batch(warm, flushes)
        cost, queued = seen[-1]
        if flushes and flush_time > 0:
            # Else the event before a short kernel passes while the host still prepares the launch, and all that take
            # less time than this look the same.
            flushes = min(MAX_FLUSHES, max(1, math.ceil(AHEAD * queued / flush_time)))
    if cost < SLOW:
        seen.clear()
    while not settled(times):
        wanted = min(MAX_REPS, max(MIN_REPS, int(rep / cost)))
        if on.elapsed(began) + cost > WALL:
            wanted = MIN_SLOW_REPS
        room = max(1, int((WALL - on.elapsed(began)) / cost))
        missing = wanted - len(times)
        # In two batches at least: the host may be held up during one, which then says nothing about the device.
        if missing < 1 and (len(seen) > 1 or cost >= SLOW):
            break
        count = max(1, min(BATCH, (wanted + 1) // 2, missing, room))
        times += batch(count, flushes)
        cost = min(seen)[0]
    return checked(times, seen, flushes * flush_time)


def settled(times: list[float]) -> bool:
    """Whether the median of these times is known well enough (binomial 95 % interval of a median)."""
    n = len(times)
    if n < ENOUGH_REPS:
        return False
    ordered, reach = sorted(times), math.ceil(0.98 * math.sqrt(n))
    middle = ordered[n // 2]
    return ordered[min(n - 1, n // 2 + reach)] - ordered[max(0, n // 2 - reach)] <= 2 * PRECISION * middle


def checked(times: list[float], seen: list[tuple[float, float]], flushing: float) -> list[float]:
    """The times without single bad readings; raises EventError when they can't be right.

    `seen` as by_events makes it; `flushing` is the host time of the flushes before each repetition.
    """
    good = [t for t in times if math.isfinite(t) and t >= MIN_EVENT]
    if len(times) - len(good) > BAD_EVENTS * len(times) or not good:
        bad = next(t for t in times if t not in good)
        raise on.EventError(f"one reads {bad} ms")
    middle = sorted(good)[len(good) // 2]
    host, queued = min(seen)
    if middle > on.MOST_SHARE * max(each for each, _ in seen):
        raise on.EventError(f"they read {middle:.3g} ms where the host's clock says {host:.3g}")
    # What a kernel took by the host's clock is only known where the device was the slower of the two, and the kernel
    # a fair part of its work.
    kernel = host - flushing
    if host > 1.5 * queued and kernel > 0.25 * host and middle < on.LEAST_SHARE * kernel:
        raise on.EventError(f"they read {middle:.3g} ms where the host's clock says {kernel:.3g}")
    return good


def by_host(device: Any, call: Any, flush: Any, flush_time: float, began: float, grads: Any) -> list[float]:
    """Host times of `call`: rounds with and without it between two synchronisations, with the same flushes."""

    def round_of(count: int, flushes: int, run: Any) -> "tuple[float, float]":
        start = on.clock()
        for _ in range(count):
            for x in grads:
                x.grad = None
            for _ in range(flushes):
                flush()
            if run:
                run()
        queued = on.clock()
        device.synchronize()
        return on.clock() - start, (queued - start) / count

    flushes = 0 if flush is None else 1
    cost, queued = round_of(1, flushes, call)
    cost = max(cost, TICK)
    if flushes and flush_time > 0:
        flushes = min(MAX_FLUSHES, max(1, math.ceil(AHEAD * queued / flush_time)))
    count = max(1, min(BATCH, int(TIMED / HOST_ROUNDS / cost)))
    times: list[float] = []
    for turn in range(HOST_ROUNDS):
        if turn >= MIN_SLOW_REPS and on.elapsed(began) + count * cost > WALL:
            break
        alone = round_of(count, flushes, None)[0] if flushes else 0.0
        both, _ = round_of(count, flushes, call)
        times.append(max((both - alone) / count, MIN_EVENT))
    return times


def wake(device: Any, flush: Any, long: float) -> None:
    """Keep the device busy for about `long`, so that the first kernel measured is not the slowest for that."""
    start = on.clock()
    for _ in range(MAX_REPS if flush is not None else 0):
        if on.clock() - start >= long:
            return
        for _ in range(BATCH):
            flush()
        device.synchronize()


def warn_once(kind: str, text: str) -> None:
    """One line on stderr, the first time for this kind of problem."""
    if kind not in warned:
        warned.add(kind)
        importlib.import_module("warmstart_hooks").warn(text)
