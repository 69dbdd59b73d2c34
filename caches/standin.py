"""A driver for Triton on a machine without the GPU that kernels are compiled for. It launches nothing.

Triton asks its driver which target to compile for; modules of kernels ask it, torch and vLLM's platform which GPU there
is, to choose what they define. All of them are answered from a record. The names in Triton are those of 3.4 to 3.9.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from typing import Any

DEVICE = 0


class Standin:
    """What triton.runtime.driver.active is asked before a launch."""

    def __init__(self, target: Any, properties: "dict[str, Any]") -> None:
        self.target, self.properties = target, properties
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: dict(properties))
        self.binary_ext = "hsaco" if target.backend == "hip" else "cubin"

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return DEVICE

    def set_current_device(self, device: int) -> None:
        return

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = DEVICE) -> "tuple[int, int]":
        return capability(self.target)

    def get_active_torch_device(self) -> Any:
        return importlib.import_module("torch").device("cuda", DEVICE)

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be measured without a GPU")


def install(target: "dict[str, Any]", properties: "dict[str, Any]") -> Any:
    """Make Triton, torch and vLLM take this machine for one with the GPU; the driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ[name] = ""
    compiler = importlib.import_module("triton.backends.compiler")
    backends = importlib.import_module("triton.backends").backends
    made = compiler.GPUTarget(target["backend"], target["arch"], target["warp_size"])
    for name, backend in backends.items():
        wanted = {"amd": "hip", "nvidia": "cuda"}.get(name) == target["backend"]
        backend.driver.is_active = classmethod(lambda cls, wanted=wanted: wanted)
    driver = Standin(made, properties)
    importlib.import_module("triton.runtime.driver").driver.set_active(driver)
    with contextlib.suppress(ImportError):
        pretend_torch(importlib.import_module("torch"), made, properties)
    with contextlib.suppress(ImportError):
        pretend_vllm(made)
    return driver


def pretend_torch(torch: Any, target: Any, properties: "dict[str, Any]") -> None:
    """Answer what modules ask about the GPU while they are imported."""
    facts = types.SimpleNamespace(
        name=properties.get("name", ""),
        major=capability(target)[0],
        minor=capability(target)[1],
        gcnArchName=str(target.arch),
        warp_size=target.warp_size,
        multi_processor_count=properties.get("multiprocessor_count", properties.get("multiProcessorCount", 1)),
        shared_memory_per_block_optin=properties.get("max_shared_mem", 0),
        shared_memory_per_block=properties.get("max_shared_mem", 0),
        total_memory=16 << 30,
    )
    for name, answer in {
        "get_device_properties": facts,
        "get_device_capability": capability(target),
        "get_device_name": facts.name,
        "device_count": 1,
        "current_device": DEVICE,
    }.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def pretend_vllm(target: Any) -> None:
    """Have vLLM choose the platform of the target; its kernels are placeholders on any other."""
    if target.backend != "hip" or importlib.util.find_spec("vllm") is None:
        return
    sys.modules["amdsmi"] = None  # type: ignore[assignment] # lists the GPUs of this machine
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.builtin_platform_plugins = {"rocm": lambda: "vllm.platforms.rocm.RocmPlatform"}
    with contextlib.suppress(ImportError):  # ours, by a patch
        kfd: Any = importlib.import_module("vllm.platforms.kfd")
        kfd.gpus = lambda: [{"gfx_target_version": kfd_version(target.arch)}]


def kfd_version(arch: str) -> str:
    """KFD's decimal gfx_target_version of an arch: gfx1151 → 110501, gfx90a → 90010."""
    digits = arch.removeprefix("gfx")
    return str(int(digits[:-2]) * 10000 + int(digits[-2], 16) * 100 + int(digits[-1], 16))


def capability(target: Any) -> "tuple[int, int]":
    """torch's capability: 90 → (9, 0), gfx1151 → (11, 5)."""
    if isinstance(target.arch, int):
        return divmod(target.arch, 10)
    digits = target.arch.removeprefix("gfx")
    return int(digits[:-2]), int(digits[-2], 16)
