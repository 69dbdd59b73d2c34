"""GPUs that are not there: stand-ins for amdsmi and KFD's sysfs, and vLLM's ROCm platform that asks them."""

from __future__ import annotations

import types
from functools import lru_cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.engine.vllm_sources import parts

ROCM, INTERFACE, KFD = "vllm/platforms/rocm.py", "vllm/platforms/interface.py", "vllm/platforms/kfd.py"


class Gpu(NamedTuple):
    """A GPU of the stand-ins: its PCI address, LLVM target, PCI device id, name and bytes of memory."""

    pci: str
    arch: str
    device: int
    name: str
    memory: int


IGPU = Gpu("0000:03:00.0", "gfx1036", 0x164E, "AMD Radeon Graphics", 2 << 28)
CARD = Gpu("0000:0c:00.0", "gfx1102", 0x7480, "AMD Radeon RX 7600 XT", 2 << 33)
STRIX = Gpu("0000:c4:00.0", "gfx1151", 0x1586, "AMD Radeon 8060S", 2 << 28)


def amdsmi(gpus: list[Gpu], trouble: Exception | None = None) -> types.ModuleType:
    """A stand-in for amdsmi that lists `gpus` in that order, or fails at its start."""

    def init() -> None:
        if trouble:
            raise trouble

    def asic(gpu: Gpu) -> dict[str, str]:
        return {"target_graphics_version": gpu.arch, "device_id": hex(gpu.device), "market_name": gpu.name}

    module = types.ModuleType("amdsmi")
    module.__dict__.update(
        amdsmi_init=init,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: list(gpus),
        amdsmi_get_processor_handle_from_bdf=lambda pci: next(gpu for gpu in gpus if gpu.pci == pci),
        amdsmi_get_gpu_asic_info=asic,
        amdsmi_get_gpu_memory_total=lambda gpu, kind: gpu.memory,
        AmdSmiMemoryType=SimpleNamespace(VRAM=0),
    )
    return module


def kfd(tmp_path: Path, gpus: list[Gpu]) -> Path:
    """KFD's topology in sysfs: processors, then GPUs, in so many nodes that by name they are out of order."""
    targets = {"gfx1036": 100306, "gfx1102": 110002, "gfx1151": 110501}
    processors = [(0, 0)] * 9
    for node, (version, device) in enumerate([*processors, *((targets[g.arch], g.device) for g in gpus)]):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"gfx_target_version {version}\ndevice_id {device}\n")
    (tmp_path / "nodes" / "99").mkdir(parents=True)  # a GPU whose properties the container may not read
    return tmp_path / "nodes"


class Rocm:
    """vLLM's ROCm platform, as far as it asks which GPU it runs on, in environment `env`."""

    def __init__(self, pristine: Path, tree: Path, smi: types.ModuleType, nodes: Path, **env: str) -> None:
        seen = SimpleNamespace(environ=env)
        mapping = ("device_id_to_physical_device_id", "device_control_id_to_physical_device_id")
        interface = parts(pristine / INTERFACE, *mapping, os=seen, _assigned_physical_gpu_ids=None)
        given = {name: value for name, value in vars(smi).items() if not name.startswith("__")}
        if (tree / KFD).is_file():
            given["kfd"] = kfd_module(tree, nodes)
        methods = ("get_device_name", "_amdsmi_device_name", "get_device_total_memory")
        functions = "with_amdsmi_context _query_gcn_arch_from_amdsmi _query_total_memory_from_amdsmi"
        functions += " _get_gcn_arch _sync_hip_cuda_env_vars _hip_gpus _ROCM_DEVICE_ID_NAME_MAP"
        hip = SimpleNamespace(get_device_properties=lambda device: pytest.fail("HIP was initialised"))
        space = parts(
            tree / ROCM,
            *functions.split(),
            *methods,
            **given,
            os=seen,
            wraps=wraps,
            lru_cache=lru_cache,
            torch=SimpleNamespace(cuda=hip),
            logger=SimpleNamespace(debug=print, warning_once=print),
        )
        space["_sync_hip_cuda_env_vars"]()
        members = {name: space[name] for name in methods if name in space}
        members |= {name: interface[name] for name in mapping}
        members["device_control_env_var"] = "CUDA_VISIBLE_DEVICES"
        self.platform: Any = type("RocmPlatform", (), members)
        self.query = space["_get_gcn_arch"]

    def __call__(self) -> tuple[str, str, int]:
        """Arch, name and bytes of memory of vLLM's first device."""
        return self.query(), self.platform.get_device_name(), self.platform.get_device_total_memory()


def kfd_module(tree: Path, nodes: Path) -> SimpleNamespace:
    """The module that a patch adds, looking at `nodes` instead of sysfs."""
    return SimpleNamespace(**parts(tree / KFD, "gpus", "arch", NODES=nodes, Path=Path))


def facts(gpu: Gpu) -> tuple[str, str, int]:
    """What Rocm() answers when it asks `gpu`."""
    return gpu.arch, gpu.name, gpu.memory
