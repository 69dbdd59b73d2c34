"""What becomes of one autotuner with 16 configurations while all events have a fault."""

from __future__ import annotations

import importlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.kit_gpu import torch, triton
from bench.kit_ranking import compiled, kernels, product, truth

FAULTS: dict[str, Callable[[float], float]] = {
    "none": lambda t: t,
    "zero": lambda t: 0.0,
    "negative": lambda t: -t,
    "nan": lambda t: math.nan,
    "raising": lambda t: t / 0,
    "thousandth": lambda t: t / 1000,  # the last, because stock is stopped then
}
STOCK_SECONDS = 8  # stock's loop with broken events is stopped after that


def each_fault() -> dict[str, Any]:
    """Each fault in turn on a softmax, with the loop that this process has; the last may be stopped half-way."""
    jitted = kernels()["softmax"]
    found: dict[str, Any] = {}
    x = torch.randn(8192, 4096, device="cuda")
    out = torch.empty_like(x)
    options = product(ROWS=[1, 2, 4, 8], num_warps=[2, 4, 8, 16])

    def launch(option: dict[str, int]) -> Callable[..., Any]:
        grid = (8192 // option["ROWS"],)
        same = {**option, "num_ctas": 1, "num_stages": 3}  # as the autotuner calls it, which else compiles anew
        return lambda warmup=False: jitted.run(x, out, 4096, grid=grid, warmup=warmup, BLOCK=4096, **same)

    real = truth(compiled([launch(option) for option in options]), 100, 10)
    count, elapsed = [0], torch.cuda.Event.elapsed_time
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    run = jit.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += not kwargs.get("warmup")
        return run(self, *args, **kwargs)

    jit.run = counted
    for name, wrong in FAULTS.items():
        ours = importlib.import_module("warmstart_bench")
        ours.devices.clear()
        ours.warned.clear()
        torch.cuda.Event.elapsed_time = lambda self, end, wrong=wrong: wrong(elapsed(self, end))
        configs = [triton.Config({"ROWS": o["ROWS"]}, num_warps=o["num_warps"]) for o in options]
        tuner = triton.autotune(configs, key=["n"], cache_results=True)(jitted)
        cache = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        count[0], began = 0, time.perf_counter()

        def result(count: Any = count, began: float = began, cache: str = cache, **more: Any) -> dict[str, Any]:
            kept = len(list(Path(cache).glob("*/*.autotune.json")))
            seconds = round(time.perf_counter() - began, 2)
            return {"launches": count[0], "seconds": seconds, "verdicts stored": kept, **more}

        def stop(result: Any = result, name: str = name) -> None:
            print(json.dumps({**found, name: result(stopped=f"after {STOCK_SECONDS} s")}), flush=True)
            os._exit(0)

        timer = threading.Timer(STOCK_SECONDS, stop)
        timer.daemon = True
        timer.start()
        try:
            tuner[lambda meta: (8192 // meta["ROWS"],)](x, out, 4096, BLOCK=4096)
            torch.cuda.synchronize()
        except Exception as problem:
            found[name] = result(raised=type(problem).__name__)
        else:
            chosen = next(iter(tuner.cache.values()))
            place = options.index({"ROWS": chosen.kwargs["ROWS"], "num_warps": chosen.num_warps})
            found[name] = {**result(), "regret %": round(100 * (real[place] / min(real) - 1), 3)}
        timer.cancel()
    return found
