"""The recorder: which kernels this process used, for which specialisation, and what its autotuners decided.

On only while WARMSTART_RECORD names a directory. Each process appends to a file of its own there, one JSON object a
line; caches/record.py makes one record of them, caches/replay.py compiles what it holds without a GPU. Kernels that
came from a cache count like those that were compiled, so that a warm start can be recorded.

Written down: names of modules and kernels, types and constants that a kernel was specialised for, options that differ
from the backend's, times of configurations, and facts of the GPU's kind. No argument's value beyond what the kernel was
compiled for, no path. What Inductor generates is an artefact of its own cache, not replayable, and only counted.
"""

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

# Found anew for the arch by whoever compiles; extern_libs holds paths.
DERIVED = ("extern_libs", "arch", "warp_size", "backend_name")
DERIVED_PREFIXES = ("supported_", "deprecated_", "allowed_")
PROPERTIES = ("max_shared_mem", "max_num_regs", "multiprocessor_count", "multiProcessorCount", "warpSize")

lock = threading.Lock()
files: "dict[int, int]" = {}  # process → descriptor of its file
written: "set[str]" = set()
warned: "set[str]" = set()


def kernels(module: Any) -> None:
    """Watch triton.runtime.jit: every kernel that was compiled or found in a cache is written down."""
    if os.environ.get("WARMSTART_RECORD"):
        importlib.import_module("warmstart_spec").on_use(module, used, left_out)


def used(kernel: Any, told: "dict[str, Any]", compiled: Any) -> None:
    """Write down one kernel."""
    put(kernel_row(kernel, told["compile"], compiled))


def left_out(kernel: Any, problem: Exception) -> None:
    """Write down that there was one which can't be described."""
    put({"left out": f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", "why": type(problem).__name__})


def artefacts(module: Any) -> None:
    """Watch triton.compiler.compiler: what Inductor made is counted."""
    if not os.environ.get("WARMSTART_RECORD") or hasattr(module.CompiledKernel.__init__, "warmstart"):
        return
    init = module.CompiledKernel.__init__

    def __init__(self: Any, src: Any, *args: Any, **kwargs: Any) -> None:
        init(self, src, *args, **kwargs)
        try:
            where = str(getattr(getattr(src, "fn", None), "__module__", ""))
            if generated(where):
                put({"artefact": str(self.hash)[:16]})
        except Exception as problem:
            warn_once(problem)

    __init__.warmstart = True  # type: ignore[attr-defined]
    module.CompiledKernel.__init__ = __init__


def verdicts(module: Any) -> None:
    """Watch triton.runtime.autotuner: every verdict that was made or found in a cache is written down."""
    check = getattr(module.Autotuner, "check_disk_cache", None)
    if check is None or not os.environ.get("WARMSTART_RECORD") or hasattr(check, "warmstart_record"):
        return

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> Any:
        measured = []

        def bench() -> None:
            measured.append(True)
            bench_fn()

        found = check(self, tuning_key, configs, bench)
        try:
            bench_module = sys.modules.get("warmstart_bench")
            if measured and bench_module and getattr(bench_module.doubt, "found", False):
                put({"left out": name_of(self), "why": "measured in doubt"})
            else:
                put(verdict_row(self, tuning_key, configs))
        except Exception as problem:
            put({"left out": name_of(self), "why": type(problem).__name__})
        return found

    check_disk_cache.warmstart = True  # type: ignore[attr-defined]
    check_disk_cache.warmstart_record = True  # type: ignore[attr-defined]
    module.Autotuner.check_disk_cache = check_disk_cache


def kernel_row(kernel: Any, compiled: "dict[str, Any]", result: Any) -> "dict[str, Any]":
    """What a record has of a kernel that was compiled."""
    if generated(kernel.fn.__module__):
        return {"artefact": str(result.hash)[:16]}
    return {**described(kernel, compiled), "hash": str(result.hash)[:16]}


def described(kernel: Any, compiled: "dict[str, Any]") -> "dict[str, Any]":
    """Triton's own specialisation of a kernel, its options reduced to what was asked for."""
    spec = json.loads(compiled["specialization_data"])
    backend = kernel.device_caches[compiled["device"]][-2]
    usual = json.loads(json.dumps(backend.parse_options({}).__dict__, default=str))
    options = {
        name: value
        for name, value in spec.pop("options").items()
        if value is not None and value != usual.get(name) and not derived(name)
    }
    for name in ("key", "target"):
        spec.pop(name, None)
    return {
        "module": kernel.fn.__module__,
        "kernel": kernel.fn.__qualname__,
        "spec": spec,
        "options": options,
    }


def verdict_row(tuner: Any, key: Any, configs: Any) -> "dict[str, Any]":
    """All configurations an autotuner chose from, in its order, with the time of each; None for one that failed."""
    if not key or any(config.pre_hook for config in configs):
        return {"left out": name_of(tuner), "why": "not kept by Triton"}
    times = {str(config): first(found) for config, found in tuner.configs_timings.items()}
    if json.loads(json.dumps(key)) != listed(key):
        raise TypeError("key")
    return {
        "module": tuner.base_fn.__module__,
        "tuner": tuner.base_fn.__qualname__,
        "key": listed(key),
        "configs": [settings(config) for config in configs],
        "times": [times[str(config)] for config in configs],
        "winner": [str(config) for config in configs].index(str(tuner.cache[key])),
    }


def settings(config: Any) -> "dict[str, Any]":
    """What a triton.Config is made from."""
    found = {name: value for name, value in config.__dict__.items() if name != "pre_hook" and value is not None}
    if json.loads(json.dumps(found)) != found:
        raise TypeError("configuration")
    return found


def listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return [listed(each) for each in value] if isinstance(value, (tuple, list)) else value


def first(times: Any) -> "float | None":
    """The time that ranks a configuration, in milliseconds to five digits."""
    time_ms = float(times[0] if isinstance(times, (list, tuple)) else times)
    return float(f"{time_ms:.5g}") if time_ms < float("inf") else None


def name_of(tuner: Any) -> str:
    """Module and name of an autotuner's kernel."""
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"


def generated(module: str) -> bool:
    """Whether Inductor wrote this module."""
    return module.startswith("torch._inductor")


def derived(name: str) -> bool:
    """Whether an option follows from the arch or the place of installation."""
    return name in DERIVED or name.startswith(DERIVED_PREFIXES)


def target_row() -> "dict[str, Any]":
    """What the rows after it hold for."""
    triton = sys.modules["triton"]
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    properties: dict[str, Any] = {}
    try:
        every = driver.utils.get_device_properties(driver.get_current_device())
        properties = {name: every[name] for name in PROPERTIES if name in every}
    except Exception as problem:
        warn_once(problem)
    told = os.environ.get("WARMSTART_CU", "")
    arch = target.arch.split(":")[0] if isinstance(target.arch, str) else target.arch
    return {
        "target": {"backend": target.backend, "arch": arch, "warp_size": target.warp_size},
        "cu": int(told) if told.isascii() and told.isdecimal() else 0,
        "properties": properties,
        "versions": {"triton": triton.__version__, "vllm": version("vllm"), "torch": version("torch")},
    }


def version(name: str) -> str:
    """Version of an installed distribution; empty when it is not there."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(name))
    except Exception:
        return ""


def put(row: "dict[str, Any]") -> None:
    """Append a row to the file of this process, once; the first is what the others hold for."""
    try:
        text = json.dumps(row)
        with lock:
            if os.getpid() not in files:
                header = json.dumps(target_row())
                written.clear()
                files[os.getpid()] = create()
                os.write(files[os.getpid()], header.encode() + b"\n")
            if text not in written:
                written.add(text)
                os.write(files[os.getpid()], text.encode() + b"\n")
    except Exception as problem:
        warn_once(problem)


def create() -> int:
    """A file of this process; its descriptor."""
    folder = os.environ["WARMSTART_RECORD"]
    os.makedirs(folder, exist_ok=True)
    name = f"{time.time_ns():x}-{os.getpid()}.jsonl"
    return os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)


def renew() -> None:
    """In a forked process: a file of its own, and a lock that nobody holds."""
    global lock
    lock = threading.Lock()
    files.clear()


os.register_at_fork(after_in_child=renew)


def warn_once(problem: Exception) -> None:
    """One line on stderr, the first time for this kind of problem."""
    kind = type(problem).__name__
    if kind not in warned:
        warned.add(kind)
        importlib.import_module("warmstart_hooks").warn(f"the recorder left something out: {kind}: {problem}")
