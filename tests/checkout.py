"""A copy of the project's tree, in which the real command line runs with a state and presets of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warmstart import processes

ROOT = Path(__file__).parents[1]
NEEDED = ("build.py", "warmstart", "presets", "arch", "caches", "tools")


def copy(root: Path, presets: str) -> Path:
    """Copy what the command line needs to `root`, with a file of presets; returns `root`."""
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    (root / "presets" / "test.ini").write_text(presets)
    return root


class Checkout:
    """A copy of the project with presets of its own, and models that say what the engine does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: list[subprocess.Popen[str]] = []

    def model(self, name: str, *lines: str) -> Path:
        """A model's folder: the least that the guard needs, and the lines of its start."""
        folder = self.root / "models" / name / "m"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        config = {
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "hidden_size": 8,
            "max_position_embeddings": 64,
            "vocab_size": 8,
            "intermediate_size": 8,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "lines").write_text("\n".join(lines) + "\n")
        return folder

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a verb; its output is read by `end`."""
        process = subprocess.Popen(
            [sys.executable, str(self.root / "build.py"), *words],
            env=self.env() | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root,
        )
        self.running.append(process)
        return process

    def close(self) -> None:
        """End what was started and not waited for."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def env(self) -> dict[str, str]:
        """Leases are this copy's own, whatever else runs on the machine; hints are those of the command line."""
        runtime = self.root / "runtime"
        runtime.mkdir(mode=0o700, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name != "MAKELEVEL"}
        ours = {"HF_HOME": str(self.root / "hf"), "XDG_RUNTIME_DIR": str(runtime), "PYTHONDONTWRITEBYTECODE": "1"}
        return kept | ours

    def call(self, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Run a verb: its exit code, stdout and stderr."""
        return end(self.start(*words, env=env))

    def up(self, preset: str, model: Path, *words: str) -> subprocess.Popen[str]:
        return self.start("up", preset, "--set", f"model={model}", *words)

    def leases(self) -> list[dict[str, Any]]:
        file = self.root / "runtime/warmstart/leases.json"
        return list(json.loads(file.read_bytes())) if file.exists() else []

    def seen(self, preset: str) -> str:
        """The state of a preset's container; empty when there is none."""
        told = podman("container", "inspect", "--format", "{{.State.Status}}", f"warmstart-{preset}", check=False)
        return told.stdout.strip()

    def log(self, preset: str) -> str:
        """What the preset's latest engine wrote."""
        files = sorted((self.root / f".warmstart/logs/warmstart-{preset}").glob("*.log"))
        return files[-1].read_text() if files else ""

    def text(self, preset: str) -> list[str]:
        """The lines of that, without the stamps of podman."""
        return [line.split(" ", 3)[-1] for line in self.log(preset).splitlines()]

    def wait_for(self, preset: str, text: str, seconds: float = 120) -> None:
        """Until the engine has written that, and the lease names its container: before, `up` knows of none."""
        assert until(lambda: text in self.log(preset), seconds), f"{text!r} is not in the log:\n{self.log(preset)}"
        assert until(lambda: any(one["preset"] == preset and one["container_id"] for one in self.leases()))


def podman(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *words], check=check, capture_output=True, text=True)


def end(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def until(true: Callable[[], bool], seconds: float = 120) -> bool:
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        time.sleep(0.05)
    return true()


def watchers(tree: Path) -> list[int]:
    """The pids of watchers of the copy."""
    return [pid for pid in processes.pids() if f"{tree}/build.py watch" in processes.command(pid)]


def free_port() -> int:
    """A port on which nobody listens, below those that the kernel gives to whoever asks for any: it stays free."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port := random.randrange(20_000, 32_000)))
            return port
