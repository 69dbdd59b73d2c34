"""What the bounded do_bench asks of a device: a flush of its caches, events, and whether those can be trusted.

Times are milliseconds unless a name says otherwise.
"""

import functools
import math
import os
import sys
import time
from typing import Any

MIB = 1 << 20
# Flushing the last-level cache: twice its size, so that no replacement policy keeps a part; Triton's own amount where
# the size is not known. HIP reports the second level alone, which the Infinity Cache lies behind.
MIN_FLUSH, MAX_FLUSH = 32 * MIB, 256 * MIB
# The load that events and the host's clock are compared on: flushes for KNOWN_TIME, one of the tries has to agree.
KNOWN_FLUSHES, MOST_FLUSHES, KNOWN_TIME, KNOWN_TRIES = 8, 256, 2.0, 4
LEAST_SHARE, MOST_SHARE = 0.2, 1.5  # what an event may read of a known load's host time


class EventError(Exception):
    """Device events can't be used."""


def flusher(driver: Any) -> "tuple[Any, bool]":
    """A function that puts one flush of the last-level cache into the queue, and whether it flushes all of it.

    With no memory left it is None; with little it flushes a part.
    """
    wanted = size = flush_bytes()
    while size >= MIB:
        try:
            return functools.partial(driver.clear_cache, allocate(driver, size)), size == wanted
        except Exception:  # out of memory: what is tuned while a model is running finds little
            size //= 2
    return None, False


def allocate(driver: Any, size: int) -> Any:
    """A buffer of `size` bytes that the driver can clear; the driver's own where torch is not there."""
    torch = sys.modules.get("torch")
    if torch is None:
        return driver.get_empty_cache_for_benchmark()
    try:
        where = driver.get_active_torch_device()
    except Exception:
        where = "cuda"
    return torch.empty(size // 4, dtype=torch.int, device=where)


def flush_bytes() -> int:
    """Bytes to write for one flush: from WARMSTART_LLC_MIB, which the image sets from its arch, else the device's."""
    try:
        cache = float(os.environ["WARMSTART_LLC_MIB"]) * MIB
    except (KeyError, ValueError):
        cache = reported_cache()
    if not 0 < cache < math.inf:
        return MAX_FLUSH
    return int(min(MAX_FLUSH, max(MIN_FLUSH, 2 * cache)))


def reported_cache() -> float:
    """Bytes of the last-level cache as the device reports it; 0 when that is not known."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or torch.version.hip:
            return 0.0
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    except Exception:
        return 0.0


def current(driver: Any) -> Any:
    """The number of the device in use; 0 where the driver has none."""
    try:
        return driver.get_current_device()
    except Exception:
        return 0


def known_load(device: Any, flush: Any) -> "tuple[bool, float]":
    """Whether events agree with the host's clock about some flushes, and the host time of one flush.

    One of several tries is enough, because the host may be busy with something else. Without a flush nothing is known,
    and the events are judged by the kernels alone.
    """
    if flush is None:
        return True, 0.0
    count = KNOWN_FLUSHES
    _, host = flushes(device, flush, count)
    count = min(MOST_FLUSHES, max(count, math.ceil(count * KNOWN_TIME / max(host, 1e-3))))
    tries = [flushes(device, flush, count) for _ in range(KNOWN_TRIES)]
    right = any(LEAST_SHARE <= read_time / host <= MOST_SHARE for read_time, host in tries if host > 0)
    return right, min(host for _, host in tries) / count


def flushes(device: Any, flush: Any, count: int) -> "tuple[float, float]":
    """Time of some flushes by events, not a number where those fail, and by the host's clock."""
    pair = None
    device.synchronize()
    start = clock()
    try:
        pair = new_pair(device)
        record(pair[0])
    except EventError:
        pair = None
    for _ in range(count):
        flush()
    try:
        if pair:
            record(pair[1])
        device.synchronize()
        return read(*pair) if pair else math.nan, clock() - start
    except EventError:
        device.synchronize()
        return math.nan, clock() - start


def new_pair(device: Any) -> Any:
    """Two events; raises EventError."""
    try:
        return device.Event(enable_timing=True), device.Event(enable_timing=True)
    except Exception as problem:
        raise EventError(f"making one fails: {problem}") from problem


def record(event: Any) -> None:
    """Put an event into the queue; raises EventError."""
    try:
        event.record()
    except Exception as problem:
        raise EventError(f"recording one fails: {problem}") from problem


def read(begin: Any, end: Any) -> float:
    """The time between two events; raises EventError."""
    try:
        return float(begin.elapsed_time(end))
    except Exception as problem:
        raise EventError(f"reading one fails: {problem}") from problem


def clock() -> float:
    """The host's clock."""
    return time.perf_counter() * 1e3


def elapsed(began: float) -> float:
    """Host time since `began`."""
    return clock() - began
