"""What each carried patch is for: the real functions of vLLM fail without it and work with it.

The functions run from the real sources. amdsmi, torch and sysfs are stand-ins, so that no AMD GPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.vllm_gpus import CARD, IGPU, INTERFACE, KFD, STRIX, Rocm, amdsmi, facts, kfd, kfd_module
from tests.engine.vllm_sources import ROOT, SITE, parts, patch, pristine, unpack, venv
from warmstart import patchcheck

pytestmark = pytest.mark.net
VERSIONS = [source.version for source in patchcheck.sources(ROOT) if source.component == "vllm"]
PLATFORMS = "vllm/platforms/__init__.py"
DECORATORS, CACHING = "vllm/compilation/decorators.py", "vllm/compilation/caching.py"

Sources = Callable[[str, bool], Path]  # (version, patched or not) → vLLM's files


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """The files that the patches touch, as upstream has them and as image/patch.py leaves them."""

    @lru_cache
    def made(version: str, patched: bool) -> Path:
        folder = tmp_path_factory.mktemp(version)
        if not patched:
            return unpack(version, [INTERFACE], pristine(version, folder))
        where = venv(made(version, False), folder / "venv", f"vllm-{version}")
        result = patch(ROOT / "patches" / "vllm", where, folder / "out")
        assert result.returncode == 0, result.stderr
        return folder / "out" / where.relative_to("/") / SITE

    return made


# --- 0001: ask amdsmi about the GPUs that HIP counts ------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_the_visible_gpu_counts_when_an_igpu_is_first(sources: Sources, version: str, tmp_path: Path) -> None:
    smi, pristine = amdsmi([IGPU, CARD]), sources(version, False)
    stock = Rocm(pristine, pristine, smi, tmp_path, HIP_VISIBLE_DEVICES="1")
    assert stock() == (IGPU.arch, CARD.name, CARD.memory)  # half of it is the iGPU's
    patched = Rocm(pristine, sources(version, True), smi, tmp_path, HIP_VISIBLE_DEVICES="1")
    assert patched() == facts(CARD)


@pytest.mark.parametrize("version", VERSIONS)
def test_gpus_are_numbered_as_hip_does(
    sources: Sources, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi, pristine = amdsmi([IGPU, CARD]), sources(version, False)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    env = {"WARMSTART_GPUS": f"{CARD.pci},{IGPU.pci}"}  # HIP counts the card first
    assert Rocm(pristine, pristine, smi, tmp_path, **env)() == facts(IGPU)
    assert Rocm(pristine, sources(version, True), smi, tmp_path, **env)() == facts(CARD)
    second = Rocm(pristine, sources(version, True), smi, tmp_path, **env, HIP_VISIBLE_DEVICES="1")
    assert second() == facts(IGPU)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("env", [{}, {"HIP_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_where_the_first_gpu_is_meant_nothing_changes(
    sources: Sources, version: str, env: dict[str, str], tmp_path: Path
) -> None:
    smi, pristine = amdsmi([CARD, IGPU]), sources(version, False)
    for tree in (pristine, sources(version, True)):
        assert Rocm(pristine, tree, smi, tmp_path, **env)() == facts(CARD)


# --- 0002: know AMD GPUs by the kernel's list when amdsmi sees none ---------------------------

BLIND = {
    "not there": types.ModuleType("amdsmi"),
    "fails": amdsmi([STRIX], RuntimeError("no permission")),
    "sees none": amdsmi([]),
}


def plugin(tree: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None, smi: str) -> str | None:
    """What vLLM takes the platform for."""
    monkeypatch.setitem(sys.modules, "amdsmi", BLIND[smi])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=hip)))
    package = types.ModuleType("platforms")
    if (tree / KFD).is_file():
        package.__dict__["kfd"] = kfd_module(tree, nodes)
    monkeypatch.setitem(sys.modules, "platforms", package)
    logger = SimpleNamespace(debug=print)
    space = parts(
        tree / PLATFORMS, "rocm_platform_plugin", __package__="platforms", logger=logger, in_wsl=lambda: False
    )
    found: str | None = space["rocm_platform_plugin"]()
    return found


@pytest.mark.parametrize("smi", BLIND)
@pytest.mark.parametrize("version", VERSIONS)
def test_rocm_is_found_without_amdsmi(
    sources: Sources, version: str, smi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = kfd(tmp_path, [STRIX])
    assert plugin(sources(version, False), nodes, monkeypatch, "7.14", smi) is None
    patched = sources(version, True)
    assert plugin(patched, nodes, monkeypatch, "7.14", smi) == "vllm.platforms.rocm.RocmPlatform"
    assert plugin(patched, nodes, monkeypatch, None, smi) is None  # a torch for CPU or CUDA
    assert plugin(patched, tmp_path / "none", monkeypatch, "7.14", smi) is None  # no AMD GPU


@pytest.mark.parametrize("smi", BLIND)
@pytest.mark.parametrize("version", VERSIONS)
def test_arch_and_name_are_known_without_amdsmi(
    sources: Sources, version: str, smi: str, tmp_path: Path
) -> None:
    pristine, nodes = sources(version, False), kfd(tmp_path, [IGPU, STRIX])
    stock = Rocm(pristine, pristine, BLIND[smi], nodes)
    with pytest.raises(pytest.fail.Exception, match="HIP was initialised"):
        stock.query()
    with pytest.raises((IndexError, NameError, RuntimeError)):
        stock.platform.get_device_name()
    patched = Rocm(pristine, sources(version, True), BLIND[smi], nodes, CUDA_VISIBLE_DEVICES="1")
    assert patched.query() == "gfx1151"
    assert patched.platform.get_device_name() == "AMD_Radeon_8060S"
    first = Rocm(pristine, sources(version, True), BLIND[smi], nodes)
    assert (first.query(), first.platform.get_device_name()) == ("gfx1036", "gfx1036")  # not in vLLM's list


# --- 0003: load the ahead-of-time compiled model on CPU ---------------------------------------


def load(tree: Path, compiled: object, cache: Path) -> tuple[object, list[str]]:
    """What vLLM makes of a compiled model from its cache, and what it logs."""
    told: list[str] = []
    loaded = SimpleNamespace(
        source_info=lambda: None,
        disable_guard_check=lambda: None,
        _artifacts=SimpleNamespace(compiled_fn=compiled),
    )
    nothing = contextlib.nullcontext

    def tell(form: str, *args: object) -> None:
        told.append(form % args)

    space = parts(
        tree / DECORATORS,
        "_try_load_aot_compiled_fn",
        Any=Any,
        os=os,
        monitor_torch_compile=lambda *a, **k: nothing(),
        set_current_vllm_config=lambda config: nothing(),
        maybe_use_cudagraph_partition_wrapper=lambda config: nothing(),
        _verify_source_unchanged=lambda *a: None,
        torch=SimpleNamespace(
            compiler=SimpleNamespace(load_compiled_function=lambda file, f_globals: loaded)
        ),
        compilation_counter=SimpleNamespace(num_aot_artifacts_loaded=0),
        logger=SimpleNamespace(info=tell, warning=tell),
        envs=SimpleNamespace(VLLM_FORCE_AOT_LOAD=False),
    )
    config = SimpleNamespace(dynamic_shapes_config=SimpleNamespace(evaluate_guards=False))
    model = SimpleNamespace(
        vllm_config="config", _is_encoder=False, forward=lambda: None, compilation_config=config
    )
    cache.write_bytes(b"compiled")
    found = space["_try_load_aot_compiled_fn"](model, str(cache))
    assert found in (loaded, None)
    return found, told


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plain_function_from_the_cache_is_used(sources: Sources, version: str, tmp_path: Path) -> None:
    found, told = load(sources(version, False), lambda x: x, tmp_path / "model")
    assert found is None
    assert "'function' object has no attribute 'finalize_loading'" in told[0]
    found, told = load(sources(version, True), lambda x: x, tmp_path / "model")
    assert found
    assert told == [f"Directly load AOT compilation from path {tmp_path / 'model'}"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_own_back_end_is_still_finished(sources: Sources, version: str, tmp_path: Path) -> None:
    for patched in (False, True):
        finished: list[object] = []
        compiled = SimpleNamespace(finalize_loading=finished.append)
        found, _ = load(sources(version, patched), compiled, tmp_path / "model")
        assert found
        assert finished == ["config"]


def key(tree: Path, flags: str, cpu: bool = True) -> list[str]:
    """What vLLM's key for a compiled model is made of, on a CPU with these flags."""
    space = parts(
        tree / CACHING,
        "aot_compile_hash_factors",
        VllmConfig=Any,
        envs=SimpleNamespace(compile_factors=dict, VLLM_USE_MEGA_AOT_ARTIFACT=False),
        hash_factors=str,
        current_platform=SimpleNamespace(is_cpu=lambda: cpu),
        open=lambda file: io.StringIO(f"processor: 0\nflags : {flags}\nprocessor: 1\nflags : {flags}\n"),
    )
    found: list[str] = space["aot_compile_hash_factors"](SimpleNamespace(compute_hash=lambda: "config"))
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_machine_code_is_kept_for_the_cpu_it_was_made_for(sources: Sources, version: str) -> None:
    stock, patched = sources(version, False), sources(version, True)
    assert key(stock, "avx2") == key(stock, "avx2 avx512f")
    assert key(patched, "avx2") != key(patched, "avx2 avx512f")
    assert key(patched, "avx2") == key(patched, "avx2")
    assert key(patched, "avx2", cpu=False) == key(stock, "avx2")
