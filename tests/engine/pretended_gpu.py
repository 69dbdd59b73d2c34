"""Run in a Python of its own with a real Triton wheel: kernels of gpu_kernels.py on a pretended AMD GPU.

The driver is a stand-in: kernels are really compiled, for a real arch, and really looked up in the cache; launches and
times are pretended. `python pretended_gpu.py ARCH WAVE [WHAT…]` prints what happened as JSON: kernels that were
compiled, kernels found in a cache, benchmarks, hashes.
"""

import importlib
import json
import os
import sys
import threading
import time
import types
from typing import Any

arch, wave, *asked = sys.argv[1:]
sys.path.insert(0, os.environ["HOOKS"])
if os.environ.get("WARMSTART_HOOKS") != "0":
    importlib.import_module("warmstart_hooks")
if os.environ.get("APART"):  # as on a machine where compilers in processes of their own are worth it
    compilers: Any = importlib.import_module("warmstart_compile")
    compilers.processors, compilers.PATIENCE = lambda: 4, 30.0
if os.environ.get("BANS"):
    bans: Any = importlib.import_module("warmstart_bans")
    bans.BANS = os.environ["BANS"]
triton = importlib.import_module("triton")
pause = float(os.environ.get("PAUSE", "0"))  # seconds that each kernel takes a worker longer
benched: list[str] = []
launched: list[str] = []


class Tensor:
    """What Triton specialises for: a type, an address, a size."""

    dtype = "torch.float32"

    def data_ptr(self) -> int:
        return 1 << 20

    def ptr_range(self) -> int:
        return 1 << 16

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(size=lambda: 1 << 16)


torch = types.ModuleType("torch")
torch.Tensor = Tensor  # type: ignore[attr-defined]
sys.modules["torch"] = torch  # Triton asks it for the size of a tensor


class Driver:
    """triton.runtime.driver.active, as far as a launch needs it."""

    def __init__(self) -> None:
        self.target = importlib.import_module("triton.backends.compiler").GPUTarget("hip", arch, int(wave))
        properties = {"max_shared_mem": 65536, "multiprocessor_count": 20, "warpSize": int(wave)}
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: properties, load_binary=lambda *args: (1, 1, 32, 0, 1024)
        )
        self.launcher_cls = lambda src, metadata: lambda *args: launched.append(src.fn.__name__)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 4

    def get_active_torch_device(self) -> str:
        return "cuda"

    def get_benchmarker(self) -> Any:
        def bench(call: Any, quantiles: Any) -> list[float]:
            call()
            benched.append(launched[-1])
            return [1.0 + (7 * len(benched)) % 5 * 0.25] * 3

        return bench


importlib.import_module("triton.runtime.driver").driver.set_active(Driver())
if os.environ.get("APART"):
    workers: Any = importlib.import_module("warmstart_workers")
    workers.start(Driver().target)  # else the first autotuner doesn't wait for it
    sent = workers.sent

    def slowly(*job: Any) -> Any:
        time.sleep(pause)
        return sent(*job)

    workers.sent = slowly
counts: dict[str, list[str]] = {"compiled": [], "found": []}


def listener(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
    counts["found" if cache_hit else "compiled"].append(f"{src.fn.__name__} {metadata['hash']}")


triton.knobs.compilation.listener = listener
kernels = importlib.import_module("gpu_kernels")
own: Any = importlib.import_module("own_kernels") if "own" in asked else None
if os.environ.get("MODEL"):  # its weights are loaded now
    ahead: Any = importlib.import_module("warmstart_ahead")
    ahead.begin(os.environ["MODEL"])
    if os.environ.get("SLOWLY"):
        for thread in threading.enumerate():
            if thread.name == "warmstart-ahead":
                thread.join()
    elif pause:  # until the workers compile the first ones
        while not importlib.import_module("warmstart_turns").working:
            time.sleep(0.01)
x, y = Tensor(), Tensor()
for what in asked or ["add", "scale", "tuned"]:
    if what == "add":
        kernels.add[(1,)](x, y, 1000, BLOCK=128)
        kernels.add[(1,)](x, y, 1024, BLOCK=128, num_warps=8)
    elif what == "scale":
        kernels.made[(1,)](x, 5.0, 64, BLOCK=64)
    elif what == "own":
        own.use(x)
    elif what == "tuned":
        kernels.tuned[(1,)](x, y, 4096)
winners = {str(key): str(config) for key, config in kernels.tuned.fn.cache.items()}
apart = getattr(sys.modules.get("warmstart_workers"), "compiled", 0)
print(json.dumps({**counts, "apart": apart, "benched": benched, "launched": len(launched), "winners": winners}))
