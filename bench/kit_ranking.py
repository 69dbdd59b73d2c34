"""What each loop chooses among 16 and more configurations, against 500 repetitions of each.

Ten of one in a row, as every loop measures, and (`in turn`) one at a time after another kernel, which tells kernels of
a few µs apart in another way.
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.kit_gpu import gdn_call, snippet, tl, torch, triton

TRUTH = 500  # repetitions of each configuration
ROUNDS = 3  # how often each loop chooses


def kernels() -> dict[str, Any]:
    """Kernels of the kinds that tutorials and models have."""

    @triton.jit  # type: ignore[untyped-decorator]
    def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

    @triton.jit  # type: ignore[untyped-decorator]
    def softmax(x, out, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        at = tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + rows * n + at, at < n, -float("inf")).to(tl.float32)
        value = tl.exp(value - tl.max(value, 1)[:, None])
        tl.store(out + rows * n + at, value / tl.sum(value, 1)[:, None], at < n)

    @triton.jit  # type: ignore[untyped-decorator]
    def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
        tile = tl.program_id(0)
        across = tl.cdiv(N, BN)
        rows = (tile // across) * BM + tl.arange(0, BM)
        columns = (tile % across) * BN + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            left = tl.load(a + (rows % M)[:, None] * K + (k + depth)[None, :])
            right = tl.load(b + (k + depth)[:, None] * N + (columns % N)[None, :])
            total = tl.dot(left, right, total)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), inside)

    return {"add": add, "softmax": softmax, "matmul": matmul}


def product(**values: list[int]) -> list[dict[str, int]]:
    """All combinations, each as keyword arguments."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def cases() -> dict[str, list[Callable[..., Any]]]:
    """Name → the launches to choose from, one for each configuration that can be launched; `warmup=True` compiles."""
    jitted, made = kernels(), {}

    def launch(kernel: Any, grid: Any, *args: Any, **config: int) -> Callable[..., Any]:
        return lambda warmup=False: kernel.run(*args, grid=grid, warmup=warmup, **config)

    for exponent in (14, 20, 26):
        n = 1 << exponent
        x, y, out = (torch.randn(n, device="cuda") for _ in range(3))
        options = product(BLOCK=[128, 256, 512, 1024, 2048], num_warps=[1, 2, 4, 8])
        made[f"add {n * 4 // 1024} KiB"] = [
            launch(jitted["add"], (triton.cdiv(n, o["BLOCK"]),), x, y, out, n, **o) for o in options
        ]
    for rows, n in ((512, 1024), (8192, 4096)):
        x = torch.randn(rows, n, device="cuda")
        out = torch.empty_like(x)
        options = product(ROWS=[1, 2, 4, 8], num_warps=[1, 2, 4, 8, 16])
        made[f"softmax {rows}×{n}"] = [
            launch(jitted["softmax"], (rows // o["ROWS"],), x, out, n, BLOCK=n, **o)
            for o in options
            if n // o["num_warps"] * o["ROWS"] <= 8192
        ]
    for size in (256, 1024, 4096, 16384):
        a, b, c = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(3))
        options = product(BM=[64, 128], BN=[64, 128], BK=[32, 64], num_warps=[4, 8], num_stages=[2, 3])
        made[f"matmul {size}"] = [
            launch(
                jitted["matmul"],
                (triton.cdiv(size, o["BM"]) * triton.cdiv(size, o["BN"]),),
                a,
                b,
                c,
                size,
                size,
                size,
                **o,
            )
            for o in (options if size < 16384 else options[::4])
        ]
    return made | gdn_cases()


def gdn_cases() -> dict[str, list[Callable[..., Any]]]:
    """The autotuned kernels of the gated delta rule with real arguments and more configurations than they have."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    seen: dict[str, Any] = {}
    tune = autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The first configuration is enough to get through the pass.
        seen.setdefault(self.base_fn.__name__, (self, args, dict(kwargs)))
        all_configs, self.configs = self.configs, self.configs[:1]
        try:
            return tune(self, *args, **kwargs)
        finally:
            self.configs = all_configs

    autotuner.run = run
    try:
        gdn_call()()
    finally:
        autotuner.run = tune
    made = {}
    for name, (tuner, args, kwargs) in seen.items():
        shapes = [dict(row) for row in sorted({tuple(sorted(c.kwargs.items())) for c in tuner.configs})]
        options = [
            {**shape, "num_warps": warps, "num_stages": stages}
            for shape, warps, stages in itertools.product(shapes, [1, 2, 4, 8], [1, 2, 3, 4])
        ]

        def launch(
            option: dict[str, int], tuner: Any = tuner, args: Any = args, kwargs: Any = kwargs
        ) -> Callable[..., Any]:
            return lambda warmup=False: tuner.fn.run(*args, **{**kwargs, **option, "warmup": warmup})

        if name in ("chunk_fwd_kernel_o", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "recompute_w_u_fwd_kernel"):
            made[name] = [launch(option) for option in options[:24]]
    return made


def compiled(launches: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Those that compile and can be launched, compiled at the same time."""
    hook = importlib.import_module("warmstart_compile")
    with hook.pool_of(hook.compilers()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in launches:
            launch(warmup=True)
    good = []
    for launch in launches:
        try:
            launch()
            torch.cuda.synchronize()
            good.append(launch)
        except Exception as problem:
            print(type(problem).__name__, str(problem)[:80], file=sys.stderr)
    return good


def truth(launches: list[Callable[..., Any]], repetitions: int, together: int) -> list[float]:
    """Median time of each launch, `together` of one in a row, then the next, so that drift hits all alike.

    Triton's own flush is before each, twice, because the host must be ahead of the device. The first of a row is not
    counted where there are several: it fetches its code.
    """
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    times: list[list[float]] = [[] for _ in launches]
    skipped = int(together > 1)
    for _ in range(-(-repetitions // together)):
        for launch, row in zip(launches, times, strict=True):
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(together + skipped)]
            for begin, end in pairs:
                driver.clear_cache(cache)
                driver.clear_cache(cache)
                begin.record()
                launch()
                end.record()
            torch.cuda.synchronize()
            row += [begin.elapsed_time(end) for begin, end in pairs[skipped:]]
    return [statistics.median(row) for row in times]


def ranking(deadline: float) -> dict[str, Any]:
    """For each case and loop: regret of what it chooses, and wall milliseconds for one configuration."""
    ours = importlib.import_module("warmstart_bench")
    loops = {"stock": ours.stock, "snippet": snippet, "ours": ours.do_bench}
    found: dict[str, Any] = {}
    for name, every in cases().items():
        launches = compiled(every)
        once = min(truth(launches, 3, 1))
        repetitions = TRUTH if once < 5 else 10
        truths = {"regret %": truth(launches, repetitions, 10), "in turn": truth(launches, repetitions, 1)}
        real = truths["regret %"]
        rows: dict[str, Any] = {"configs": len(launches), "best ms": round(min(real), 5), "repetitions": repetitions}
        rows["worst to best"] = round(max(real) / min(real), 2)
        for loop, bench in loops.items():
            regrets, walls = defaultdict(list), []
            for _ in range(ROUNDS if once < 5 else 1):
                measured = []
                for launch in launches:
                    began = time.perf_counter()
                    measured.append(bench(launch, quantiles=(0.5, 0.2, 0.8)))
                    walls.append((time.perf_counter() - began) * 1e3)
                for kind, known in truths.items():
                    regrets[kind].append(round(100 * (known[measured.index(min(measured))] / min(known) - 1), 3))
            rows[loop] = {**regrets, "ms": round(statistics.mean(walls), 2)}
        found[name] = rows
        print(name, json.dumps(rows), file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
    return found
