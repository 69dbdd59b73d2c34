"""The first call of gated-delta-net's chunk kernels in a process: seconds, launches, compilations, winners."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from bench.kit_gpu import gdn_call, torch, triton


def first() -> dict[str, Any]:
    """Seconds, launches, compilations and winners of the first call in this process."""
    call = gdn_call()
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    testing: Any = importlib.import_module("triton.testing")
    launches, benched, tuned = [0], [0.0], {}
    compiled: list[dict[str, Any]] = []
    run, bench, tune = jit.JITFunction.run, testing.do_bench, autotuner.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[0] += not kwargs.get("warmup")
        return run(self, *args, **kwargs)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return bench(*args, **kwargs)
        finally:
            benched[0] += time.perf_counter() - began

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = set(self.cache)
        began = time.perf_counter()
        result = tune(self, *args, **kwargs)
        for key in set(self.cache) - before:
            seconds = round(time.perf_counter() - began, 3)
            tuned[self.base_fn.__name__] = {"winner": str(self.cache[key]), "of": len(self.configs), "seconds": seconds}
        return result

    def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        stages = {"ir": times.ir_initialization, **dict(times.lowering_stages), "store": times.store_results}
        row = {name: round(value / 1e6, 3) for name, value in stages.items()}
        compiled.append({"kernel": src.name, "hit": cache_hit, "seconds": round(sum(row.values()), 3), "stages": row})

    jit.JITFunction.run, testing.do_bench, autotuner.run = counted, timed, watched
    triton.knobs.compilation.listener = listener
    began = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    call()
    inside = sum(row["seconds"] for row in compiled)
    apart = getattr(sys.modules.get("warmstart_workers"), "compiled", 0)
    return {
        "seconds": round(seconds, 2),
        "launches": launches[0],
        "in do_bench": round(benched[0], 2),
        "compilations": sum(not row["hit"] for row in compiled) + apart,
        "of them in workers": apart,
        "compiling, summed over threads": round(inside, 2),
        "second call": round(time.perf_counter() - began, 4),
        "finite": bool(torch.isfinite(result[0]).all()),
        "tuned": tuned,
        "compiled": compiled,
    }
