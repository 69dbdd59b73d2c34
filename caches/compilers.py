"""Kernels compiled by Triton in several processes, for replay.py: forked, so that all modules are imported once."""

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

Task = tuple[Any, str, str, str]  # a kernel, its name, Triton's specialisation, the recorded key
IN_C = {  # backend → its folder, and the classes that build what a launch needs
    "hip": ("amd", "HIPUtils", "HIPLauncher"),
    "cuda": ("nvidia", "CudaUtils", "CudaLauncher"),
}


def compile_all(tasks: "list[Task]", target: Any, jobs: int) -> "Iterator[tuple[Task, dict[str, Any]]]":
    """Compile all of them; what became of each. A compiler that crashes loses only the kernel it was at."""
    with contextlib.suppress(Exception):
        importlib.import_module("triton.runtime.cache").triton_key()  # reads all of Triton, once for all children
    while tasks:
        shares = [tasks[number::jobs] for number in range(min(jobs, len(tasks)))]
        children = [start(share, target) for share in shares]
        tasks = []
        for (pid, take), share in zip(children, shares, strict=True):
            with open(take, encoding="utf-8") as lines:
                told = [json.loads(line) for line in lines if line.endswith("\n")]
            os.waitpid(pid, 0)
            yield from zip(share, told, strict=False)
            if len(told) < len(share):
                yield share[len(told)], {"error": "its compiler crashed"}
                tasks += share[len(told) + 1 :]


def start(tasks: "list[Task]", target: Any) -> "tuple[int, int]":
    """A child that compiles `tasks` and tells a line for each; its process id and where it tells."""
    take, give = os.pipe()
    pid = os.fork()
    if pid:
        os.close(give)
        return pid, take
    try:
        os.close(take)
        for kernel, _, spec, _ in tasks:
            os.write(give, (json.dumps(compiled(kernel, spec, target)) + "\n").encode())
    finally:
        os._exit(0)


def compiled(kernel: Any, spec: str, target: Any) -> "dict[str, Any]":
    """What became of one kernel: its key, or an error."""
    try:
        made = kernel.preload(spec)
        return {"hash": made.hash, "launchers": in_c(made, target)}
    except Exception as problem:
        return {"error": f"{type(problem).__name__}: {problem}"[:500]}


def most() -> int:
    """How many processes may compile at the same time: half a GiB of free memory is reckoned for each."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) >> 19
    except (OSError, ValueError, StopIteration):
        free = 1
    return max(1, min(len(os.sched_getaffinity(0)), free))


def in_c(kernel: Any, target: Any) -> int:
    """Have Triton build what it needs in C for a launch; 1 for a launcher, which it has for each signature up to 3.6.

    Where there is no compiler, or no library of the driver, the first launch does it.
    """
    try:
        maker, utilities, launcher = IN_C[target.backend]
        module = importlib.import_module(f"triton.backends.{maker}.driver")
        if not hasattr(module, "make_launcher"):
            getattr(module, utilities)()
            return 0
        getattr(module, launcher)(kernel.src, kernel.metadata)
        getattr(module, utilities)()
    except (Exception, SystemExit):
        return 0
    return 1
