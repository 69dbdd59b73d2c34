"""Kernels that the last start met only while it served are loaded before this one is ready.

vLLM's warm-up does not reach every kernel: the first requests compile some, or load them from the cache, and wait for
it. Which ones these were is kept beside Triton's cache, one small file each: the kernel's name and Triton's own
description of what it was specialised for. Before vLLM starts to watch for such kernels, those files are gone through
and each kernel is put where a launch finds it. Standard library only.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import sys
from typing import Any

import warmstart_files as files  # type: ignore[import-not-found] # beside this file

FOLDER = "warmstart-late"
MOST = 256  # kernels; each takes some milliseconds to load
LONGEST = 1 << 16  # characters of one description; they have about 2,000


def install(module: Any) -> None:
    """Wrap `activate` of vLLM's monitor of late compilations, which is called when all warm-up is done."""
    activate = module.activate
    if hasattr(activate, "warmstart"):
        return

    def activated(*args: Any, **kwargs: Any) -> Any:
        try:
            folders = places()
            known = load(folders)
            if folders:
                watch(folders[0], known)
        except Exception as problem:
            importlib.import_module("warmstart_hooks").warn(f"late kernels are not loaded ahead: {problem}")
        return activate(*args, **kwargs)

    activated.warmstart = True  # type: ignore[attr-defined]
    module.activate = activated


def places() -> list[str]:
    """Folders of the descriptions: the volume's, which is written to, and the seed's."""
    roots = [os.environ.get("TRITON_CACHE_DIR", ""), os.environ.get("WARMSTART_SEED", "")]
    found = [os.path.join(roots[0], FOLDER)] if roots[0] else []
    return found + [os.path.join(root, "triton", FOLDER) for root in roots[1:] if root and found]


def load(folders: list[str]) -> set[str]:
    """Load the kernels described in the folders; the names of the files. One that can't be loaded costs nothing."""
    known: set[str] = set()
    for folder in folders:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        for name in names[: MOST - len(known)]:
            known.add(name)
            with contextlib.suppress(Exception):
                load_one(os.path.join(folder, name))
    return known


def load_one(file: str) -> None:
    """Load one kernel, compiled or from the cache; raises whatever Triton does."""
    described = files.read_json(file)
    kernel = found(described["module"], described["name"])
    if kernel is not None:
        kernel.preload(described["specialization"])


def found(module: str, name: str) -> Any:
    """The kernel of that name in a module that is imported, without what is wrapped around it; None if there is none.

    Nothing is imported or run: a kernel whose module this model does not use is not needed.
    """
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None)
    while value is not None and not hasattr(type(value), "preload"):
        value = inspect.getattr_static(value, "fn", None)  # an autotuner, a heuristic
    return value


def watch(folder: str, known: set[str]) -> None:
    """Describe in `folder` each kernel that is compiled or loaded from now on."""

    def take(kernel: Any, told: dict[str, Any], compiled: Any) -> None:
        if len(known) < MOST and (name := describe(folder, told)):
            known.add(name)

    importlib.import_module("warmstart_spec").on_use(sys.modules["triton.runtime.jit"], take)


def describe(folder: str, event: dict[str, Any]) -> str:
    """Write the file for what Triton's hook is told; its name, or "" for what is not asked for by a launch."""
    kernel, specialization = event["fn"], event["compile"].get("specialization_data")
    if event.get("is_manual_warmup") or not specialization or len(specialization) > LONGEST // 2:
        return ""
    content = {"module": kernel.module, "name": kernel.name, "specialization": specialization}
    text = json.dumps(content, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        files.make(folder)
        files.put(path, text.encode())
    return name
