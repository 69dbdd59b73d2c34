"""Kernels that the image before this one compiled for the same model are compiled while its weights are loaded.

Another image has another cache key and starts without a kernel, but most of those that a model needs are the same.
Which, and what each was specialised for, is described beside Triton's cache, in a small file for each kernel and a
folder for each model. WARMSTART_AHEAD names these folders of other keys, the last used first (the entry point sets it).
All kernels of the model's, those of all autotuners, are given to worker processes at once, in the order in which they
were needed. Later an autotuner finds its configurations in the cache, or waits for those in work, and so does a kernel
without one. Nothing is imported, launched or put where a launch finds it; what does not fit this image's kernels any
more costs a little time beside the load. Standard library only.
"""

import collections
import contextlib
import fcntl
import hashlib
import importlib
import inspect
import json
import os
import sys
import threading
import types
from typing import Any

import warmstart_files as files  # type: ignore[import-not-found] # beside this file

FOLDER = "warmstart-used"  # below Triton's cache
MARK = "ahead"  # in a model's folder: BEGUN while it is done for the first time, then empty
BEGUN = b"begun"
MOST = 1024  # kernels of one model that are described
LONGEST = 1 << 16  # bytes of one description; they have about 2,000

# .folder: descriptions of the model that this process loads; .names: digests of what is described there already;
# .wanted: whether this process compiles ahead; .left: what the image before described of modules that were not imported
# yet; .given: what workers were given; .running: an item for each thread that does so; .claim: descriptor of the lock
# that says that this process does it
state = types.SimpleNamespace(folder="", names=set(), wanted=False, left=[], given=[], running=[], claim=-1)
os.register_at_fork(after_in_child=state.running.clear)  # the parent's threads are not there


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
        importlib.import_module("warmstart_spec").on_use(sys.modules["triton.runtime.jit"], describe)
        state.wanted = wanted()
    if not state.wanted:
        return
    for other in filter(None, os.environ.get("WARMSTART_AHEAD", "").split(os.pathsep)):
        if names := listed(os.path.join(other, folder)):
            known = sorted((os.path.join(other, folder, name) for name in names), key=changed)
            state.left += [row for row in (files.read_json(file, LONGEST) for file in known[:MOST]) if row]
            break
    more()


def wanted() -> bool:
    """Whether this is the first start of the model under this key, or the one after a first that was broken off.

    A key that has descriptions of its own knows better than another. One process does it for all on this volume.
    """
    mark = os.path.join(state.folder, MARK)
    begun = content(mark)
    if begun == b"" or (begun is None and state.names) or not os.environ.get("WARMSTART_AHEAD"):
        return False
    files.make(state.folder)
    if not claimed(f"{mark}.lock"):
        return False
    files.put(mark, b"" if begun == BEGUN else BEGUN)  # one that breaks off may do so once
    return True


def claimed(file: str) -> bool:
    """Whether no other process holds this lock; it is held until this one ends. True where there are no locks."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            state.claim = os.open(file, flags)
        except FileNotFoundError:
            state.claim = os.open(file, flags | os.O_CREAT, 0o666)
        fcntl.flock(state.claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return not isinstance(problem, BlockingIOError)
    return True


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
    rows, state.left = state.left, []
    for row in rows:
        with contextlib.suppress(Exception):
            if row["module"] not in sys.modules:
                state.left.append(row)
            elif kernel := find(row["module"], row["kernel"]):
                jobs.append(to_compile(kernel, row, driver.get_current_target()))
    if jobs:
        importlib.import_module("warmstart_count").emit("ahead", kernels=len(jobs))
        state.given += jobs
        with contextlib.suppress(AttributeError):
            compile_once(sys.modules["triton.runtime.jit"])
        threads = range(min(len(jobs), compiler.compilers()))
        state.running += threads
        for _ in threads:
            threading.Thread(target=work, args=(jobs,), name="warmstart-ahead", daemon=True).start()


def work(jobs: Any) -> None:
    """In a thread: have one after the other compiled until none is left; the last thread marks that all are there."""
    workers = importlib.import_module("warmstart_workers")
    turns = importlib.import_module("warmstart_turns")
    with contextlib.suppress(IndexError):
        while True:
            compile_fn = jobs.popleft()
            with contextlib.suppress(Exception):
                workers.through(compile_fn, turns.LIMIT, urgent=False)
    state.running.pop()
    with contextlib.suppress(Exception):
        if not state.running and not state.left and all(workers.cached(*workers.parts(job))[1] for job in state.given):
            files.put(os.path.join(state.folder, MARK), b"")


def compile_once(jit: Any) -> None:
    """Have triton.runtime.jit compile nothing beside a worker that compiles the same: the second one waits."""
    compile_now = jit.JITFunction._do_compile
    if hasattr(compile_now, "warmstart_ahead"):
        return
    asked = inspect.signature(compile_now)

    def _do_compile(*args: Any, **kwargs: Any) -> Any:
        key = key_of(jit, lambda: asked.bind(*args, **kwargs).arguments) if state.running else ""
        if not key:
            return compile_now(*args, **kwargs)
        with importlib.import_module("warmstart_turns").turn(key, urgent=False, here=True):
            return compile_now(*args, **kwargs)  # what a worker has compiled is in the cache

    _do_compile.warmstart_ahead = True  # type: ignore[attr-defined]
    jit.JITFunction._do_compile = _do_compile


def key_of(jit: Any, asked: Any) -> str:
    """The key of what Triton is about to compile now; empty where workers would not compile it, or have."""
    with contextlib.suppress(Exception):
        if sys.modules["triton.runtime._async_compile"].active_mode.get() is None:
            workers, told = importlib.import_module("warmstart_workers"), asked()
            kernel, target = told["self"], told["self"].device_caches[told["device"]][2]
            src = kernel.ASTSource(kernel, told["signature"], told["constexprs"], told["attrs"])
            key, there = workers.cached(src, target, told["options"], jit.get_cache_invalidating_env_vars())
            return "" if there or type(src) is not workers.src_class() else str(key)
    return ""


def describe(kernel: Any, told: "dict[str, Any]", compiled: Any) -> None:
    """Write the file of a kernel, unless it is there: its name needs no reduction to be known."""
    text = told["compile"]["specialization_data"]
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    if name in state.names or len(state.names) >= MOST or len(text) > LONGEST // 2:
        return
    state.names.add(name)
    recorder = importlib.import_module("warmstart_record")
    if not recorder.generated(kernel.fn.__module__):
        files.make(state.folder)
        row = recorder.described(kernel, told["compile"])
        files.put(os.path.join(state.folder, f"{name}.json"), json.dumps(row).encode())


def listed(folder: str) -> "list[str]":
    """The names of the descriptions in a folder; none when it is not there."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if name.endswith(".json")]
    return []


def content(file: str) -> "bytes | None":
    """The first bytes of a file; None when it is not there."""
    with contextlib.suppress(OSError), files.opened(file) as data:
        return bytes(data.read(16))
    return None


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
