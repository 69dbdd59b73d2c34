"""A record made on this GPU, replayed without it, serves the GPU: nothing is compiled, nothing measured."""

from __future__ import annotations

import json
from typing import Any

from tests.device.conftest import INSIDE, Script
from warmstart import run

KERNELS = 5  # one, and four configurations of an autotuner


def without_gpu(image: str, cache: str, *words: str) -> str:
    """stdout of a program of the image where there is no GPU."""
    argv = ["podman", "run", "--rm", "--network=none", "--user", "4321:4321", "--env", "PYTHONPATH=/mnt/inside"]
    argv += [
        "--volume",
        f"{INSIDE}:/mnt/inside:ro",
        "--volume",
        f"{cache}:/cache",
        "--entrypoint",
        "/opt/venv/bin/python",
    ]
    return run.run([*argv, image, *words]).stdout


def env(**values: str) -> list[str]:
    """podman's options for variables."""
    return [word for name, value in values.items() for word in ("--env", f"{name}={value}")]


def test_a_seed_without_a_gpu_serves_this_one(python: Script, image: str, cache: str) -> None:
    place = {"TRITON_CACHE_DIR": "/cache/first/triton", "WARMSTART_VERDICTS": "/cache/first/verdicts"}
    first: Any = python("seeds.py", options=env(WARMSTART_RECORD="/cache/recorded", WARMSTART_SEED="/nowhere", **place))
    assert first["right"]
    assert (first["compiled"], first["measured"]) == (KERNELS, KERNELS - 1)
    assert int(first["cu"]) > 0
    without_gpu(image, cache, "/opt/warmstart/caches/record.py", "/cache/recorded", "-o", "/cache/record.json")
    said = without_gpu(image, cache, "/opt/warmstart/caches/replay.py", "--out", "/cache/seed", "/cache/record.json")
    done = json.loads(said.splitlines()[-1])
    assert (done["kernels"], done["verdicts"], done["left out"]) == (KERNELS, 1, 0)
    assert done["recorded under the same key"] == f"{KERNELS} of {KERNELS}"
    place = {"TRITON_CACHE_DIR": "/cache/second/triton", "WARMSTART_VERDICTS": "/cache/second/verdicts"}
    second: Any = python("seeds.py", options=env(WARMSTART_SEED="/cache/seed", **place))
    assert second["right"]
    assert (second["compiled"], second["measured"]) == (0, 0)
    assert second["found"] == 2
