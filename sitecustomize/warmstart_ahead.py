"""Kernels that the image before this one compiled for the same model are compiled while its weights are loaded.

Another image has another cache key and starts without a kernel, but most of those that a model needs are the same.
Which, and what each was specialised for, is described beside Triton's cache, in a small file for each kernel and a
folder for each model. WARMSTART_AHEAD names these folders of the key that was used last (the entry point sets it). All
of them, those of all autotuners, are given to worker processes at once, in the order in which they were needed. Later
each is found in the cache, or waited for while it is in work. Nothing is imported, launched or put where a launch finds
it; what does not fit this image's kernels any more costs a little time beside the load. Standard library only.
"""

import collections
import contextlib
import hashlib
import importlib
import json
import os
import sys
import threading
import types
from typing import Any

import warmstart_files as files  # type: ignore[import-not-found] # beside this file

FOLDER = "warmstart-used"  # below Triton's cache
DONE = "ahead"  # in a model's folder: what the image before knew was compiled
MOST = 1024  # kernels of one model that are described
LONGEST = 1 << 16  # characters of one description; they have about 2,000

# .folder: descriptions of the model that this process loads; .names: digests of what is described there already;
# .left: descriptions of the image before whose kernels are in modules that were not imported yet
state = types.SimpleNamespace(folder="", names=set(), left=[])


def install(module: Any) -> None:
    """Have vLLM's loader (vllm.model_executor.model_loader.default_loader) begin before it loads the weights."""
    loader = module.DefaultModelLoader
    load = loader.load_weights
    if hasattr(load, "warmstart_ahead"):
        return

    def load_weights(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            begin(str(model_config.model))
        except Exception as problem:
            warn(problem)
        return load(self, model, model_config, *args, **kwargs)

    load_weights.__dict__.update(getattr(load, "__dict__", {}), warmstart_ahead=True)
    loader.load_weights = load_weights


def begin(model: str) -> None:
    """From now on describe what is compiled, and have compiled what the image before described of this model."""
    root = os.environ.get("TRITON_CACHE_DIR")
    if not root or "triton.runtime._async_compile" not in sys.modules:
        return  # Triton 3.3 and 3.4, or a platform that does without
    folder = hashlib.sha256(model.encode()).hexdigest()[:16]
    if not state.folder:  # a draft model is loaded after the one it belongs to
        state.folder = os.path.join(root, FOLDER, folder)
        state.names = {name.removesuffix(".json") for name in listed(state.folder)}
        watch()
    before = os.environ.get("WARMSTART_AHEAD")
    if before and not os.path.exists(os.path.join(state.folder, DONE)):
        known = [os.path.join(before, folder, name) for name in listed(os.path.join(before, folder))]
        state.left += sorted(known, key=changed)[:MOST]
        more()


def more() -> None:
    """Have compiled what is left and can be found by now; an autotuner calls it that found no verdict."""
    compiler = importlib.import_module("warmstart_compile")
    if not state.left or os.environ.get("WARMSTART_HOOK_COMPILE") == "0" or not compiler.apart(compiler.compilers()):
        return
    driver = sys.modules["triton"].runtime.driver.active
    if driver.get_current_device() != 0:
        state.left.clear()  # the first rank compiles for the others
    jobs = collections.deque()  # type: ignore[var-annotated]
    find = importlib.import_module("warmstart_late").found
    to_compile = importlib.import_module("warmstart_spec").to_compile
    left, state.left = state.left, []
    for file in left:
        with contextlib.suppress(Exception):
            row = files.read_json(file)
            if row["module"] not in sys.modules:
                state.left.append(file)
            elif kernel := find(row["module"], row["kernel"]):
                jobs.append(to_compile(kernel, row, driver.get_current_target()))
    if jobs:
        importlib.import_module("warmstart_count").emit("ahead", kernels=len(jobs))
        running = [0] * min(len(jobs), compiler.compilers())
        for _ in [*running]:
            threading.Thread(target=work, args=(jobs, running), name="warmstart-ahead", daemon=True).start()


def work(jobs: Any, running: "list[int]") -> None:
    """In a thread: have one after the other compiled until none is left; the last thread notes that."""
    through = importlib.import_module("warmstart_workers").through
    turns = importlib.import_module("warmstart_turns")
    with contextlib.suppress(IndexError):
        while True:
            compile_fn = jobs.popleft()
            with contextlib.suppress(Exception):
                through(compile_fn, turns.LIMIT, urgent=False)
    running.pop()
    if not running:
        with contextlib.suppress(OSError):
            files.make(state.folder)
            files.put(os.path.join(state.folder, DONE), b"")


def watch() -> None:
    """Describe each kernel that is compiled, or loaded, from now on."""
    runtime = importlib.import_module("triton.knobs").runtime
    before = runtime.jit_post_compile_hook

    def compiled(**kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            describe(kwargs)
        return before(**kwargs) if before is not None else None

    runtime.jit_post_compile_hook = compiled


def describe(event: "dict[str, Any]") -> None:
    """Write the file for what Triton's hook is told, unless it is there: its name needs no reduction to be known."""
    told = event["compile"]["specialization_data"]
    name = hashlib.sha256(told.encode()).hexdigest()[:32]
    if name in state.names or len(state.names) >= MOST or len(told) > LONGEST:
        return
    state.names.add(name)
    kernel = event["fn"].jit_function
    recorder = importlib.import_module("warmstart_record")
    if not recorder.generated(kernel.fn.__module__):
        files.make(state.folder)
        row = recorder.described(kernel, event["compile"])
        files.put(os.path.join(state.folder, f"{name}.json"), json.dumps(row).encode())


def listed(folder: str) -> "list[str]":
    """The names of the descriptions in a folder; none when it is not there."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if name.endswith(".json")]
    return []


def changed(file: str) -> float:
    """When a file was written, which is the order of need; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return os.lstat(file).st_mtime
    return 0.0


def warn(problem: Exception) -> None:
    """One line on stderr."""
    importlib.import_module("warmstart_hooks").warn(
        f"kernels are not compiled ahead: {type(problem).__name__}: {problem}"
    )
