"""Weights out of the page cache once they are loaded: a GPU that shares the machine's memory would have them twice.

On with WARMSTART_DROP_PAGES=1, which images for such GPUs set. The files can be read again, so nothing is lost but the
quicker read of another start soon after. Standard library only.
"""

import importlib
import os
from contextlib import suppress
from typing import Any


def install(module: Any) -> None:
    """Have vLLM's loader (vllm.model_executor.model_loader.default_loader) drop the pages of files it has loaded."""
    loader = module.DefaultModelLoader
    prepare, load = loader._prepare_weights, loader.load_weights
    if os.environ.get("WARMSTART_DROP_PAGES") != "1" or hasattr(load, "warmstart"):
        return

    def _prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = prepare(self, *args, **kwargs)
        with suppress(Exception):
            names = [name for name in found[1] if isinstance(name, str)]
            self.warmstart_files = [*getattr(self, "warmstart_files", ()), *names]
        return found

    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, *args, **kwargs)
        finally:
            drop(getattr(self, "warmstart_files", ()))
            self.warmstart_files = []

    load_weights.warmstart = True  # type: ignore[attr-defined]
    loader._prepare_weights, loader.load_weights = _prepare_weights, load_weights


def drop(files: Any) -> int:
    """Drop the pages of these files; how many files. What is still mapped somewhere stays where it is."""
    done = 0
    for name in files:
        with suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                done += 1
            finally:
                os.close(fd)
    if done:
        with suppress(Exception):
            importlib.import_module("warmstart_count").emit("pages", files=done)
    return done
