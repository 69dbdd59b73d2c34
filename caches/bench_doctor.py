#!/usr/bin/env python3
"""Is the device's clock to be trusted? Kernels of known length, timed by events and by the host.

    bench_doctor.py [--json]

Triton ranks the configurations of a kernel by device events and keeps the verdict on disk. This says, in one line,
whether events tell the truth here, and what Triton's own benchmark would make of them. Ends with 0: they can be
trusted, 1: they can't, 2: wrong use, 3: there is no GPU. Needs torch, as any image has it, and nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXIT_DOUBT, EXIT_NO_GPU = 1, 3
MIB = 1 << 20

SPINS = (20.0, 40.0)  # milliseconds that the spin kernel shall take: launching and waiting are nothing beside them
SPIN_TRIES = 3  # the host may be busy with something else in one of them
SPIN_AGREES = 0.05  # share by which events and the host may differ about it
CALIBRATION = 2_000_000  # clock ticks of the first spin, about 1 ms
TINY = 200  # launches of the tiny kernel with an event on both sides
BAD_EVENTS = 1 / 8  # share of single bad readings that the hooks leave out: HIP's are sometimes just below zero
QUEUED = 2000  # launches of it in one go, timed by the host
LEAST_TINY = 0.2  # share of the host's time per launch in a full queue that an event may read of one
FLUSHES, FLUSH_TIME = 20, 10.0  # at least that many, for about that many milliseconds
FLUSH_AGREES, FLUSH_SLACK = 0.2, 0.1  # share and milliseconds by which they may differ: waiting counts for the host
ESTIMATED = 5  # repetitions from which Triton's do_bench computes its loop
ESTIMATE_FLUSH = 256 * MIB  # what it clears before each
STOCK_WARMUP, STOCK_REP = 25, 100  # milliseconds, its defaults
MANY = 10_000  # launches per configuration above which a first start hangs


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="bench_doctor.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print all that was measured, as one JSON object")
    options = parser.parse_args(argv)
    torch, why = device()
    if torch is None:
        told: dict[str, Any] = {"schema": 1, "trusted": None, "summary": f"no GPU: {why}"}
        print(json.dumps(told) if options.json else told["summary"])
        return EXIT_NO_GPU
    told = measure(torch)
    doubts = judge(told)
    told = finite(told) | {"trusted": not doubts, "doubts": doubts, "summary": summary(told, doubts)}
    print(json.dumps(told, indent=1) if options.json else told["summary"])
    return EXIT_DOUBT if doubts else 0


def device() -> tuple[Any, str]:
    """torch with a GPU that works, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return None, "torch sees none"
        torch.empty(1, device="cuda")
    except Exception as problem:
        return None, f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    return torch, ""


# ---- measuring ----------------------------------------------------------------------------------------------------
def measure(torch: Any) -> dict[str, Any]:
    """All figures, times in milliseconds."""
    properties = torch.cuda.get_device_properties(0)
    flush = flush_bytes()
    told = {
        "schema": 1,
        "gpu": properties.name,
        "arch": arch(torch, properties),
        "compute_units": properties.multi_processor_count,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "spin": spins(torch),
        "tiny": tiny(torch),
        "flush": flushes(torch, flush),
    }
    told["estimate"] = estimate(torch)
    return told


def arch(torch: Any, properties: Any) -> str:
    """The name that compilers have for the GPU's architecture."""
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def timed(torch: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """Times of some work by events, and by the host from the first launch until the device is idle again."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    host = (time.perf_counter() - start) * 1e3
    return elapsed(begin, end), host


def elapsed(begin: Any, end: Any) -> float:
    """What two events read, not a number where that fails."""
    try:
        return float(begin.elapsed_time(end))
    except Exception:
        return math.nan


def spins(torch: Any) -> list[dict[str, float]]:
    """A kernel that only waits for clock ticks, of two lengths: how events and host read each in the best try."""
    timed(torch, lambda: torch.cuda._sleep(CALIBRATION))  # the first launch loads the kernel
    _, host = timed(torch, lambda: torch.cuda._sleep(CALIBRATION))
    found = []
    for wanted in SPINS:
        ticks = int(CALIBRATION * wanted / max(host, 0.01))
        tries = [timed(torch, lambda: torch.cuda._sleep(ticks)) for _ in range(SPIN_TRIES)]  # noqa: B023
        read, by_host = min(tries, key=lambda pair: apart(*pair))
        found.append({"wanted": wanted, "events": read, "host": by_host})
    return found


def apart(read: float, host: float) -> float:
    """By which share of the host's time an event differs from it; infinite for no number."""
    return abs(read - host) / host if math.isfinite(read) else math.inf


def tiny(torch: Any) -> dict[str, float]:
    """The smallest kernel: events around single launches, and the host's time per launch in a full queue."""
    x = torch.zeros(1, device="cuda")
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(TINY)]
    for _ in range(QUEUED):
        x.add_(1)
    for begin, end in pairs:
        begin.record()
        x.add_(1)
        end.record()
    torch.cuda.synchronize()
    read = [elapsed(begin, end) for begin, end in pairs]
    good = [each for each in read if math.isfinite(each) and each > 0]
    _, host = timed(torch, lambda: [x.add_(1) for _ in range(QUEUED)])
    return {
        "events": statistics.median(good) if good else math.nan,
        "least": min(good, default=math.nan),
        "bad": len(read) - len(good),
        "launches": TINY,
        "host": host / QUEUED,
    }


def flush_bytes() -> int:
    """Bytes that the hooks' benchmark clears before each repetition: from the arch's last-level cache."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "sitecustomize"))  # in the project's tree
    try:
        return int(importlib.import_module("warmstart_device").flush_bytes())
    except Exception:
        return ESTIMATE_FLUSH


def flushes(torch: Any, size: int) -> dict[str, float]:
    """How fast that much memory is cleared, by events and by the host."""
    buffer = torch.empty(size // 4, dtype=torch.int, device="cuda")
    timed(torch, buffer.zero_)
    _, host = timed(torch, lambda: [buffer.zero_() for _ in range(FLUSHES)])
    count = max(FLUSHES, int(FLUSH_TIME * FLUSHES / max(host, 0.01)))
    read, host = timed(torch, lambda: [buffer.zero_() for _ in range(count)])
    rate = size * count / 1e6  # 10^9 bytes per second from milliseconds
    return {"mib": size / MIB, "events": read / count, "host": host / count, "gb_per_s": rate / host}


def estimate(torch: Any) -> dict[str, Any]:
    """What Triton's own do_bench would take a tiny kernel's repetition for, and how often it would then launch it."""
    x = torch.zeros(1, device="cuda")
    buffer = torch.empty(ESTIMATE_FLUSH // 4, dtype=torch.int, device="cuda")

    def five() -> None:
        for _ in range(ESTIMATED):
            buffer.zero_()
            x.add_(1)

    timed(torch, five)
    read, host = timed(torch, five)
    each = read / ESTIMATED
    launches = None
    if math.isfinite(each) and each != 0:
        launches = max(1, int(STOCK_WARMUP / each)) + max(1, int(STOCK_REP / each)) + ESTIMATED + 1
    return {"events": each, "host": host / ESTIMATED, "launches": launches}


# ---- judging ------------------------------------------------------------------------------------------------------
def judge(told: dict[str, Any]) -> list[str]:
    """Why events can't be trusted; empty when they can."""
    doubts = []
    for spin in told["spin"]:
        if apart(spin["events"], spin["host"]) > SPIN_AGREES:
            doubts.append(f"a kernel of {spin['host']:.1f} ms reads {spin['events']:.3g} ms")
    small = told["tiny"]
    if small["bad"] > BAD_EVENTS * small["launches"]:
        doubts.append(
            f"{small['bad']} of {small['launches']} readings of a tiny kernel are zero, negative or no number"
        )
    elif small["events"] < LEAST_TINY * small["host"] and small["events"] < 1e-3:
        doubts.append(f"a tiny kernel reads {small['events'] * 1e3:.2g} µs")
    for name, what in (("flush", "clearing {mib:.0f} MiB"), ("estimate", "a flushed tiny kernel")):
        one = told[name]
        if not abs(one["events"] - one["host"]) <= max(FLUSH_AGREES * one["host"], FLUSH_SLACK):
            doubts.append(f"{what.format(**one)} takes {one['host']:.3g} ms and reads {one['events']:.3g} ms")
    launches = told["estimate"]["launches"]
    if launches is None:
        doubts.append("Triton's own benchmark would fail")
    elif launches > MANY:
        doubts.append(f"Triton's own benchmark would launch each configuration {launches:,} times")
    return doubts


def finite(value: Any) -> Any:
    """The same with null for what is no number: JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(told: dict[str, Any], doubts: Sequence[str]) -> str:
    """One line for people."""
    if doubts:
        return (
            f"device events can't be trusted on {told['gpu']}: {'; '.join(doubts)}. Verdicts stored by stock Triton on "
            "this machine are doubtful; with the hooks kernels are timed by the host and such verdicts not stored"
        )
    spin, small, flush = told["spin"][-1], told["tiny"], told["flush"]
    return (
        f"device events can be trusted on {told['gpu']}: {spin['host']:.1f} ms read {spin['events']:.1f}, a tiny "
        f"kernel {small['events'] * 1e3:.1f} µs, {flush['mib']:.0f} MiB are flushed at {flush['gb_per_s']:.0f} GB/s; "
        f"Triton's own benchmark would launch a tiny kernel {told['estimate']['launches']} times. "
        "Stored verdicts can be trusted"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
