"""Triton's autotuner with and without the start-up hooks, on a GPU: `python bench/startup_kit.py [--out DIR] [PART…]`.

Needs torch, Triton and `fla-core` for that GPU in the Python it runs with. Every part is a process of its own with an
empty Triton cache and leaves DIR/<part>.json; parts that are there are not run again, so that an interrupted run goes
on where it was. The last line is the summary: goals, figures, met or not. Figures hold for the GPU named in them alone.

- first-*: the first call of gated-delta-net's chunk kernels: stock, the article's 3 + 10 loop, the bounded loop, and
  that with parallel compilation, in threads and in processes.
- ranking: what each loop chooses among 16 and more configurations, against 500 repetitions of each: ten of one in a
  row, as every loop measures, and (`in turn`) one at a time after another kernel, which tells kernels of a few µs apart
  in another way.
- faults: events that read zero, negative, NaN, a thousandth, or raise.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ROOT / "sitecustomize"
MODES = {  # part → the variables that give it
    "first-stock": {"WARMSTART_HOOKS": "0"},
    "first-snippet": {"WARMSTART_HOOKS": "0", "BENCH_SNIPPET": "1"},
    "first-ours": {"WARMSTART_HOOK_COMPILE": "0"},
    "first-threads": {"WARMSTART_HOOK_WORKERS": "0"},
    "first-parallel": {},
}
PARTS = [*MODES, "ranking", "faults"]
TRUTH = 500  # repetitions of each configuration
ROUNDS = 3  # how often each loop chooses
FAULTS: dict[str, Callable[[float], float]] = {
    "none": lambda t: t,
    "zero": lambda t: 0.0,
    "negative": lambda t: -t,
    "nan": lambda t: math.nan,
    "raising": lambda t: t / 0,
    "thousandth": lambda t: t / 1000,  # the last, because stock is stopped then
}
STOCK_SECONDS = 8  # stock's loop with broken events is stopped after that

torch: Any = None
triton: Any = None
tl: Any = None


def load() -> None:
    """Import the hooks as an image does, then torch and Triton; BENCH_SNIPPET puts the article's loop in place."""
    global torch, triton, tl
    sys.path.insert(0, str(HOOKS))
    importlib.import_module("warmstart_hooks")
    torch = importlib.import_module("torch")
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    if os.environ.get("BENCH_SNIPPET"):
        setattr(importlib.import_module("triton.testing"), "do_bench", snippet)  # noqa: B010
    torch.zeros(1, device="cuda")


def snippet(
    fn: Any,
    warmup: Any = 25,
    rep: Any = 100,
    grad_to_none: Any = None,
    quantiles: Any = None,
    return_mode: str = "mean",
) -> Any:
    """Three launches to warm up, ten timed by events, no flush: the loop of the article this project began with."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        fn()
        pair[1].record()
        torch.cuda.synchronize()
        times.append(pair[0].elapsed_time(pair[1]))
    return triton.testing._summarize_statistics(times, quantiles, return_mode)


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    properties = torch.cuda.get_device_properties(0)
    maker = "AMD" if torch.version.hip else "NVIDIA"
    return {
        "gpu": f"{properties.name} ({maker})",
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


# ---- the first call -----------------------------------------------------------------------------------------------
def gdn_call() -> Callable[[], Any]:
    """The forward pass of a gated delta rule: 2048 tokens, 32 heads of 128."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    shape = (1, 2048, 32, 128)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    g = torch.nn.functional.logsigmoid(torch.randn(shape[:3], device="cuda"))
    beta = torch.rand(shape[:3], device="cuda").to(torch.bfloat16)

    def call() -> Any:
        with torch.no_grad():
            result = rule(q, k, v, g, beta, output_final_state=True)
        torch.cuda.synchronize()
        return result

    return call


def first() -> dict[str, Any]:
    """Seconds, launches, compilations and winners of the first call in this process."""
    load()
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


# ---- ranking ------------------------------------------------------------------------------------------------------
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
    load()
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


# ---- faults -------------------------------------------------------------------------------------------------------
def faults() -> dict[str, Any]:
    """What becomes of one autotuner with 16 configurations while all events have a fault, with ours and with stock."""
    found = {}
    for mode, env in (("ours", {}), ("stock", {"WARMSTART_HOOKS": "0"})):
        with tempfile.TemporaryDirectory() as cache:
            found[mode] = child(["--faults"], cache, env)
    return found


def each_fault() -> dict[str, Any]:
    """Each fault in turn on a softmax, with the loop that this process has; the last may be stopped half-way."""
    load()
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


# ---- the whole ----------------------------------------------------------------------------------------------------
def child(arguments: list[str], cache: str, env: dict[str, str]) -> dict[str, Any]:
    """Run this file on one part in a Python of its own; what it prints last, as JSON."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WARMSTART_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**clean, "TRITON_CACHE_DIR": cache, "TRITON_CACHE_AUTOTUNING": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": done.returncode, "said": lines[-3:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def summary(out: Path) -> dict[str, Any]:
    """The goals and what was reached."""
    parts = {part: json.loads((out / f"{part}.json").read_text()) for part in PARTS if (out / f"{part}.json").exists()}
    goals: dict[str, Any] = {}
    if "first-stock" in parts and "first-parallel" in parts:
        goals["first call, of stock"] = [
            round(parts["first-parallel"]["seconds"] / parts["first-stock"]["seconds"], 3),
            0.25,
        ]
    rows = parts.get("ranking", {}).get("cases", {})
    if rows:
        mean = {
            kind: {
                loop: round(statistics.mean(statistics.mean(row[loop][kind]) for row in rows.values()), 3)
                for loop in ("stock", "snippet", "ours")
            }
            for kind in ("regret %", "in turn")
        }
        regret = mean["regret %"]
        goals["mean regret above stock's, points"] = [round(regret["ours"] - regret["stock"], 3), 0.5]
        sizes: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows.values():
            size = "under 100 µs" if row["best ms"] < 0.1 else "under 1 ms" if row["best ms"] < 1 else "longer"
            sizes[size].append(row["ours"]["ms"] / row["stock"]["ms"])
        for size, limit in (("under 100 µs", 0.2), ("under 1 ms", 0.5), ("longer", 1.1)):
            if sizes[size]:
                goals[f"benching a configuration {size}, of stock, worst case"] = [round(max(sizes[size]), 3), limit]
        goals["mean regret, %, by both truths"] = mean
    for value in goals.values():
        if isinstance(value, list):
            value.append("met" if value[0] <= value[1] else "missed")
    first_calls = {
        part: {k: parts[part][k] for k in ("seconds", "launches", "in do_bench")} for part in MODES if part in parts
    }
    return {
        "machine": next((p["machine"] for p in parts.values() if "machine" in p), None),
        "goals": goals,
        "first call": first_calls,
    }


def main() -> None:
    """Run what is asked for and not there yet; print the summary."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    options.add_argument("--out", type=Path, default=ROOT / ".warmstart" / "startup_kit")
    options.add_argument("--minutes", type=float, default=9, help="no case of the ranking is begun after that")
    options.add_argument("--here", help=argparse.SUPPRESS)
    options.add_argument("--faults", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.faults:
        result = each_fault()
        print(json.dumps({"machine": machine(), **result}))
        return
    if asked.here:
        result = first() if asked.here in MODES else {"cases": ranking(time.monotonic() + 60 * asked.minutes)}
        print(json.dumps({"machine": machine(), **result}))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    for part in asked.parts or PARTS:
        file = asked.out / f"{part}.json"
        if file.exists():
            continue
        with tempfile.TemporaryDirectory() as cache:
            here = ["--here", part, "--minutes", str(asked.minutes)]
            result = faults() if part == "faults" else child(here, cache, MODES.get(part, {}))
        if "failed" not in result:
            file.write_text(json.dumps(result, indent=1), encoding="utf-8")
        print(part, json.dumps({k: v for k, v in result.items() if k != "compiled"}), file=sys.stderr, flush=True)
    print(json.dumps(summary(asked.out), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
