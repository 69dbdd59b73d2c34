"""Starts of an image on a made-up machine: `image/start` run up to the exec, for the tests of its parts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "image" / "start"
PARTS = ("start_say", "start_gpus", "start_command", "start_key", "start_volume", "start_copy", "start_caches")
KEY = "cpu-0123456789ab"
TOLD = "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES WARMSTART_GPUS HF_HUB_OFFLINE".split()
FLAGS = "fpu sse4_2 avx2 smep"


class Gpu(NamedTuple):
    """What the kernel tells of one GPU."""

    version: int
    location: int
    domain: int = 0
    unique: int = 0
    simds: int = 64
    per_cu: int = 2


class Ended(Exception):
    """The command that the script became."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self.command = command


class Start:
    """Starts of an image for one arch, one after the other or, until `end`, beside each other."""

    def __init__(self, folder: Path, parts: dict[str, Any]) -> None:
        self.folder, self.module, self.parts = folder, parts["start"], parts
        self.gpus = parts["start_gpus"]
        self.nodes = folder / "nodes"
        self.root = folder / "cache"
        self.key = self.root / KEY
        self.caches = {name: str(self.key / name) for name in ("triton", "vllm", "inductor")}
        self.volume: dict[str, Any] = {
            "root": str(self.root),
            "keep_gb": 20,
            "keep_starts": 3,
            "need_mb": 0,
            "cpu_flags": "sse|avx",
            "network": ["nfs4", "fuse.*"],
            "local": ["fuse.fuse-overlayfs"],
            "cpu_code": [self.caches["vllm"], self.caches["inductor"]],
            "locks": [f"{self.caches['inductor']}/locks/*.lock"],
            "batons": [f"{self.caches['triton']}/build/lock_*"],
            "private": [f"{self.caches['vllm']}/*/model"],
        }
        self.held: list[int] = []

    def machine(self, *gpus: Gpu, processors: int = 1, unreadable: int = 0) -> None:
        """KFD's topology: processors first, then GPUs, then GPUs that this container may not use."""
        for number, gpu in enumerate([Gpu(0, 0)] * processors + list(gpus)):
            facts = {"simd_count": gpu.simds, "gfx_target_version": gpu.version, "location_id": gpu.location}
            facts |= {"domain": gpu.domain, "unique_id": gpu.unique, "simd_per_cu": gpu.per_cu}
            (self.nodes / str(number)).mkdir(parents=True)
            (self.nodes / str(number) / "properties").write_text("".join(f"{k} {v}\n" for k, v in facts.items()))
        for number in range(unreadable):
            (self.nodes / str(90 + number) / "properties").mkdir(parents=True)  # also root can't read a folder

    def processor(self, flags: str) -> None:
        """What /proc/cpuinfo says from now on."""
        (self.folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: x\nflags\t\t: {flags}\n")

    def manifest(self, arch: str, **more: Any) -> None:
        """Write the image's manifest."""
        told = {"arch": arch, "cache_key": KEY, "caches": self.caches, "volume": self.volume, **more}
        (self.folder / "manifest.json").write_text(json.dumps(told))

    def __call__(self, arch: str, *command: str, serve: dict[str, str] | None = None) -> list[str]:
        """Run the script; the command that it becomes."""
        self.manifest(arch, **({} if serve is None else {"serve": serve}))
        with pytest.raises(Ended) as ended:
            self.module.main(list(command))
        return ended.value.command

    def end(self) -> None:
        """All that was started ends."""
        for fd in self.held:
            os.close(fd)
        self.held.clear()

    def again(self, arch: str = "cpu", *command: str) -> list[str]:
        """A start after all others have ended, by a new process that knows nothing of them."""
        self.end()
        os.environ.pop("WARMSTART_START", None)
        return self(arch, *(command or ("vllm", "serve")))


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """The script and its parts as new modules, on a machine without GPUs."""
    for name in (*PARTS, "start"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for variable in (*TOLD, "WARMSTART_START", "WARMSTART_CU"):
        monkeypatch.setenv(variable, "")  # so that what the script sets is taken back
        monkeypatch.delenv(variable)
    loader = SourceFileLoader("start", str(SCRIPT))
    spec = importlib.util.spec_from_loader("start", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    parts = {name: __import__(name) for name in PARTS} | {"start": module}
    start = Start(folder, parts)

    def execvp(file: str, args: list[str]) -> None:
        assert file == args[0]
        raise Ended(args)

    def share(fd: int) -> None:
        start.held += [fd] if fd >= 0 else []
        kept(fd)

    kept = parts["start_key"].share
    monkeypatch.setattr(os, "execvp", execvp)
    monkeypatch.setattr(parts["start_key"], "share", share)
    monkeypatch.setattr(parts["start_key"], "CPUINFO", folder / "cpuinfo")
    monkeypatch.setattr(parts["start_volume"], "MOUNTS", folder / "mountinfo")
    monkeypatch.setattr(parts["start_gpus"], "KFD_NODES", folder / "nodes")
    monkeypatch.setattr(module, "__file__", str(folder / "start"))
    start.processor(FLAGS)
    return start
