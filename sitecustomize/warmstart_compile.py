"""All configurations of one autotuner compiled at the same time, before the first is timed.

Triton compiles each when its turn to be timed comes, one after the other, which is most of a first start. Its own
asynchronous mode (3.5 and later) is entered around the same calls that the benchmark will make; a configuration that
can't be compiled is met again by the benchmark, which deals with it as ever. Where the mode is missing, or there is
room for one compiler only, nothing changes. Standard library only.
"""

import importlib
import os
import sys
import threading
from typing import Any

GIB = 1 << 30
COMPILER_BYTES = GIB // 2  # a process peaked at 0.25 GiB for a matrix product (Triton 3.8, gfx1151)
MOST_COMPILERS = 16  # autotuners have few more configurations
RANKS = ("LOCAL_WORLD_SIZE", "VLLM_DP_SIZE")  # tensor-parallel ranks of vLLM are known to torch.distributed alone
PATIENCE = 3.0  # seconds to wait for workers that are starting: importing Triton takes about one
FEWEST_WORKERS = 3  # processes pay once more for importing Triton; two threads hardly wait for each other
MEMORY = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"

waiting = threading.local()  # .tuner, .configs: what this thread's autotuner has chosen from, until one is timed

warned: set[str] = set()


def install(module: Any) -> None:
    """Let triton.runtime.autotuner's Autotuner compile what it is going to time."""
    tuner = module.Autotuner
    prune, bench = tuner.prune_configs, tuner._bench
    if hasattr(bench, "warmstart"):
        return

    def prune_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = prune(self, *args, **kwargs)
        # A generator can be gone through only once, which is Triton's.
        waiting.tuner, waiting.configs = self, configs if isinstance(configs, (list, tuple)) else ()
        return configs

    def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        # Only a tuner that found no verdict comes here.
        configs = getattr(waiting, "configs", ()) if getattr(waiting, "tuner", None) is self else ()
        waiting.tuner, waiting.configs = None, ()
        if len(configs) > 1:
            try:
                if "warmstart_ahead" in sys.modules:
                    sys.modules["warmstart_ahead"].more()
                compile_all(self, configs, args, meta)
            except Exception as problem:
                warn_once(f"configurations are compiled one after the other: {type(problem).__name__}: {problem}")
        return bench(self, *args, config=config, **meta)

    _bench.warmstart = True  # type: ignore[attr-defined]
    tuner.prune_configs, tuner._bench = prune_configs, _bench


def compile_all(tuner: Any, configs: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Compile the kernel of `tuner` for all `configs` in threads and wait for them."""
    triton_mode = sys.modules.get("triton.runtime._async_compile")
    workers = min(len(configs), compilers())
    if triton_mode is None or triton_mode.active_mode.get() is not None or workers < 2 or interpreted(tuner):
        return
    with pool_of(workers) as pool:
        mode = passing_over(triton_mode.AsyncCompileMode, pool)
        try:
            with mode:
                for config in configs:
                    submit(tuner, config, args, meta)
        except Exception:
            if hasattr(mode, "ignore_errors"):
                raise
        finally:
            triton_mode.active_mode.set(None)  # older Triton leaves it set when one of its own hooks fails


def passing_over(mode: Any, pool: Any) -> Any:
    """Triton's mode, which passes over what can't be compiled; that of 3.5 can only raise it, when all is done."""
    try:
        return mode(pool, ignore_errors=True)
    except TypeError:
        return mode(pool)


def pool_of(workers: int) -> Any:
    """Threads for Triton's asynchronous mode, each of which has a process compile what it is given.

    Where that fails, and with few processors, the thread compiles itself.
    """
    from concurrent.futures import ThreadPoolExecutor

    class Pool(ThreadPoolExecutor):
        def submit(self, compile_fn: Any) -> Any:  # type: ignore[override]
            return super().submit(compile_one, compile_fn)

    others = apart(workers)
    # While the workers of the first autotuner start, threads get as far; for the next it is worth waiting.
    patience = PATIENCE if others and others.running() else 0.0

    def compile_one(compile_fn: Any) -> Any:
        if others:
            try:
                others.through(compile_fn, patience)
            except Exception as problem:
                warn_once(f"kernels are compiled in threads: {type(problem).__name__}: {problem}")
        return compile_fn()  # finds in Triton's cache what a worker has compiled

    return Pool(workers, thread_name_prefix="warmstart-compile")


def apart(workers: int) -> Any:
    """warmstart_workers where that many compilers are worth processes of their own, or these run already, else None."""
    others = sys.modules.get("warmstart_workers")
    enough = workers >= FEWEST_WORKERS or (others is not None and others.running())
    if not enough or os.environ.get("WARMSTART_HOOK_WORKERS") == "0":
        return None
    return importlib.import_module("warmstart_workers")


def submit(tuner: Any, config: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Put one configuration into the queue. One that can't be is left to the benchmark, which then meets the error."""
    current = {**meta, **config.all_kwargs(), "warmup": True}
    try:
        if config.pre_hook:  # it may set what the kernel is specialised for, the block shape of a descriptor
            config.pre_hook({**tuner.nargs, **meta, **config.all_kwargs()})
        tuner.fn.run(*args, **current)
    except Exception:
        return


def interpreted(tuner: Any) -> bool:
    """Whether the kernel is run by Triton's interpreter, which compiles nothing."""
    kernel = tuner.fn
    while not hasattr(kernel, "device_caches") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return not hasattr(kernel, "device_caches")


def compilers() -> int:
    """How many may run at the same time: processors and memory, shared with the other ranks on this machine."""
    share = min(processors(), free_memory() // COMPILER_BYTES) // ranks()
    return int(max(1, min(MOST_COMPILERS, share)))


def processors() -> int:
    """Processors this process may use; less where a control group's quota says so."""
    usable = len(os.sched_getaffinity(0))
    quota = words(f"{CGROUP}/cpu.max")
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal():
        usable = min(usable, max(1, int(quota[0]) // max(1, int(quota[1]))))
    return usable


def free_memory() -> float:
    """Bytes that may be taken without pushing anything out; less where a control group's limit says so."""
    found = words(MEMORY)
    free = float("inf")
    if "MemAvailable:" in found:
        free = int(found[found.index("MemAvailable:") + 1]) * 1024.0
    limit, used = words(f"{CGROUP}/memory.max"), words(f"{CGROUP}/memory.current")
    if limit and used and limit[0].isdecimal() and used[0].isdecimal():
        stat = words(f"{CGROUP}/memory.stat")
        cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0  # model files just read
        free = min(free, float(int(limit[0]) - int(used[0]) + cached))
    return free


def words(file: str) -> list[str]:
    """The words of a small file; none when it can't be read."""
    try:
        with open(file, encoding="ascii") as text:
            return text.read().split()
    except (OSError, ValueError):
        return []


def ranks() -> int:
    """Processes on this machine that compile the same kernels at the same time."""
    numbers = [int(value) for name in RANKS if (value := os.environ.get(name, "")).isdecimal()]
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            numbers.append(min(torch.distributed.get_world_size(), torch.cuda.device_count()))
    except Exception:
        return max([1, *numbers])
    return max([1, *numbers])


def warn_once(text: str) -> None:
    """One line on stderr, the first time."""
    if text not in warned:
        warned.add(text)
        importlib.import_module("warmstart_hooks").warn(text)
