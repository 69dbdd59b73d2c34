"""vLLM's look at a model's class in a process that the helper forks, instead of a Python that imports all anew.

vLLM asks a model's class what it can do in a process of its own, because importing it could open the GPU, and keeps
the answer on the cache volume. A first start waits for that process, which imports torch and vLLM once more.
Standard library only.
"""

import contextlib
import importlib
import multiprocessing.connection
import os
import pickle
import sys
from typing import Any

PATIENCE = 120.0  # seconds for the answer; vLLM itself waits without end


def install(module: Any) -> None:
    """Wrap _run_in_subprocess of vllm.model_executor.models.registry: a function's result from another process."""
    original = getattr(module, "_run_in_subprocess", None)
    if original is None or hasattr(original, "warmstart"):
        return

    def run_in_subprocess(fn: Any) -> Any:
        try:
            done, result = asked(fn)
        except Exception:
            done, result = False, None
        return result if done else original(fn)  # which also tells what went wrong

    run_in_subprocess.warmstart = True  # type: ignore[attr-defined]
    module._run_in_subprocess = run_in_subprocess


def asked(fn: Any) -> tuple[bool, Any]:
    """Whether a forked process could call `fn`, and its result."""
    fork = sys.modules.get("warmstart_fork")
    if fork is None or fork.helper.socket is None:
        return False, None
    packed = importlib.import_module("cloudpickle").dumps(fn)
    answer, reply = multiprocessing.connection.Pipe(duplex=False)
    process = fork.Context().Process(target=call, args=(packed, reply), name="warmstart-inspect", daemon=True)
    process.start()
    reply.close()
    try:
        if answer.poll(PATIENCE):
            return True, pickle.loads(answer.recv_bytes())
    except EOFError:
        pass  # it failed, or ended
    finally:
        answer.close()
        process.kill()
        process.join()
    return False, None


def call(packed: bytes, reply: Any) -> None:
    """In the forked process: what vLLM's own process does, its output unseen as there."""
    with open(os.devnull, "w", encoding="ascii") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    with contextlib.suppress(Exception):
        importlib.import_module("vllm.plugins").load_general_plugins()
        reply.send_bytes(pickle.dumps(pickle.loads(packed)()))
    reply.close()
