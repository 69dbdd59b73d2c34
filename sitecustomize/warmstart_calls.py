"""The part of the hooks that is needed once a module was imported that they wait for, or one is missing.

Standard library only.
"""

import os
import sys
import time
from typing import Any

import warmstart_hooks as hooks  # type: ignore[import-not-found] # beside this file

# name of the hook, module that it waits for, file, function in it that takes the module once it is imported
WAITING = (
    ("bench", "triton.testing", "warmstart_bench", "replace"),
    ("bench", "triton.runtime.autotuner", "warmstart_bench", "guard"),
    ("bench", "torch._inductor.runtime.benchmarking", "warmstart_inductor", "watch"),
    ("bench", "torch._inductor.runtime.autotune_cache", "warmstart_inductor", "guard"),
    # Before the next, which compiles what is left.
    ("bans", "triton.runtime.autotuner", "warmstart_bans", "install"),
    ("compile", "triton.runtime.autotuner", "warmstart_compile", "install"),
    ("record", "triton.runtime.jit", "warmstart_record", "kernels"),
    ("record", "triton.compiler.compiler", "warmstart_record", "artefacts"),
    ("record", "triton.runtime.autotuner", "warmstart_record", "verdicts"),
    ("fork", "vllm.version", "warmstart_fork", "begin_early"),
    ("gc", "vllm.version", "warmstart_gc", "rarely"),
    ("gc", "vllm", "warmstart_gc", "as_before"),
    ("gc", "vllm.entrypoints.cli.main", "warmstart_gc", "rarely_in_server"),
    ("gc", "vllm.entrypoints.cli.serve", "warmstart_gc", "as_before"),
    ("fork", "vllm.utils.system_utils", "warmstart_fork", "install"),
    ("fork", "vllm.entrypoints.cli.serve", "warmstart_fork", "prepare"),
    ("fork", "vllm.model_executor.models.registry", "warmstart_inspect", "install"),
    ("headers", "torch._inductor.codecache", "warmstart_headers", "install"),
    ("late", "vllm.utils.jit_monitor", "warmstart_late", "install"),
    ("late", "vllm.triton_utils.jit_monitor", "warmstart_late", "install"),  # its name before 0.32
    # After the others on the same module, so that it counts what they do.
    ("count", "torch", "warmstart_count", "imported"),
    ("count", "triton", "warmstart_count", "imported"),
    ("count", "vllm", "warmstart_count", "imported"),
    ("count", "triton.knobs", "warmstart_count", "listen"),
    ("count", "triton.runtime.autotuner", "warmstart_count", "benches"),
    ("count", "warmstart_workers", "warmstart_count", "workers"),
    ("count", "torch.cuda.graphs", "warmstart_count", "captures"),
    ("ahead", "vllm.model_executor.model_loader.default_loader", "warmstart_ahead", "install"),
    ("pages", "vllm.model_executor.model_loader.default_loader", "warmstart_pages", "install"),
)
AWAITED = frozenset(row[1] for row in WAITING)
# hook → off without a value of this variable
NEEDS = {"record": "WARMSTART_RECORD", "count": "WARMSTART_START", "pages": "WARMSTART_DROP_PAGES"}

took: dict[str, tuple[float, float]] = {}  # module that was waited for → when its import began, and its seconds
messages: dict[str, dict[str, str]] = {}  # file of messages → module → what to say


def awaited(name: str, path: object, target: object) -> object:
    """The spec that the other finders have for a module, which calls the hooks; None when none waits for it."""
    if name not in AWAITED:
        return None
    others: list[object] = [*sys.meta_path]
    for finder in others:
        if finder is not hooks.AwaitedFinder and (find := getattr(finder, "find_spec", None)):
            spec = find(name, path, target)
            if spec is not None:
                return followed(spec)
    return None


def followed(spec: object) -> object:
    """The spec, its loader calling the hooks once the module's code has run."""
    loader = getattr(spec, "loader", None)
    try:
        run = loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: object) -> None:
            began = time.perf_counter()
            run(module)
            took[getattr(module, "__name__", "")] = began, time.perf_counter() - began
            call_hooks(module)

        # On the one loader of this one module, so that all else that asks a loader (its source, its data) is served.
        loader.exec_module = exec_module  # type: ignore[union-attr]
    except Exception as problem:
        warn(f"hooks on {getattr(spec, 'name', '?')} are off: {problem}")
    return spec


def call_hooks(module: object) -> None:
    """Call the hooks that wait for this module; one that fails leaves it as it is."""
    for hook, awaited, file, function in WAITING:
        if awaited == getattr(module, "__name__", "") and wanted(hook):
            try:
                getattr(__import__(file), function)(module)
            except Exception as problem:
                warn(f"hook {hook} is off: {problem}")


def imported_before(package: str) -> None:
    """Call the hooks on modules of a package that were imported before them."""
    for name in AWAITED & sys.modules.keys():
        if name.partition(".")[0] == package:
            call_hooks(sys.modules[name])


def wanted(hook: str) -> bool:
    """Whether a hook is not switched off by its variable, and has the one that it needs."""
    needed = NEEDS.get(hook)
    return os.environ.get(f"WARMSTART_HOOK_{hook.upper()}") != "0" and (not needed or bool(os.environ.get(needed)))


def warn(text: str) -> None:
    """One line on stderr: stdout belongs to the program."""
    try:
        sys.stderr.write(f"warmstart: {text}\n")
    except Exception:
        return  # stderr is closed


def lost(name: str) -> None:
    """Raise ModuleNotFoundError with the message for a module that the image leaves out."""
    if hooks.LOST not in messages:
        messages[hooks.LOST] = read_messages(hooks.LOST)
    # Only a real import is answered: importlib.util.find_spec asks whether a feature is there, and must hear no.
    if name in messages[hooks.LOST] and sys._getframe(3).f_code.co_name == "_find_and_load_unlocked":
        raise ModuleNotFoundError(messages[hooks.LOST][name], name=name)


def read_messages(file: str) -> dict[str, str]:
    """Module name → message; empty when there is no such file."""
    import json

    try:
        with open(file, encoding="utf-8") as text:
            found: Any = json.load(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
