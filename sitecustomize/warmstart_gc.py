"""Garbage is looked for less often while vLLM is imported: next to nothing of what an import makes is garbage.

On the CPU lane 1,540 collections took 1.0 of the 5.7 CPU seconds that `vllm serve` spends on imports; without them it
took 15 MB more. Standard library only.
"""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from typing import Any

RARELY = (100_000, 50, 100)

before: list[tuple[int, int, int]] = []  # Python's own thresholds while they are raised


def rarely(module: Any) -> None:
    """From here on: with vllm.version, which vLLM imports first. A helper has done so for all of its imports."""
    if gc.get_threshold() != RARELY and gc.get_threshold()[0]:
        before.append(gc.get_threshold())
        gc.set_threshold(*RARELY)


def rarely_in_server(module: Any) -> None:
    """From here on in `vllm serve`: it goes on importing after vllm.entrypoints.cli.main, spawned processes do not."""
    if importlib.import_module("warmstart_fork").serves():
        rarely(module)


def as_before(module: Any) -> None:
    """As often as ever, unless somebody else has set it meanwhile: after vllm, and vllm.entrypoints.cli.serve."""
    if before:
        thresholds = before.pop()
        if gc.get_threshold() == RARELY:
            gc.set_threshold(*thresholds)


@contextlib.contextmanager
def rare() -> Iterator[None]:
    """For what is imported within."""
    thresholds = gc.get_threshold()
    if os.environ.get("WARMSTART_HOOK_GC") != "0" and thresholds[0]:
        gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
