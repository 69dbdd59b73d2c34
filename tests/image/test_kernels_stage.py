"""The stage `kernels` as an arch with a record has it, built by the engine; the seed it makes serves the image.

The image without a GPU has no Triton, so a real one is lent to it, and a stand-in driver says which GPU is meant.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_seed_replay import CONFIGS, HERE, KERNELS, LATEST, triton
from tests.golden.test_golden import make
from tests.image.conftest import planned_arch
from warmstart import engine, probe, render, run
from warmstart.names import HOME, PYTHON, START
from warmstart.plan import Plan

if planned_arch() not in {"", "cpu"}:
    pytest.skip("the image's own Triton would hide the one that is lent", allow_module_level=True)

pytestmark = pytest.mark.net
ROOT = Path(__file__).parents[2]
ARCH, WAVE, CU = "gfx1151", "32", "40"
USE = f"{HOME}/use.py"  # the program that uses kernels
Lent = list[tuple[Path, str]]


@pytest.fixture(scope="module")
def lent(plan: Plan, site: str) -> Lent:
    """What is mounted beside the image's own packages: where it is here, and there."""
    parts = [*triton(LATEST, plan.versions["python"]).iterdir(), HERE / "gpu_kernels.py"]
    return [*((part, f"{site}/{part.name}") for part in parts), (HERE / "pretended_gpu.py", USE)]


def run_in(image: str, lent: Lent, volume: Path, *words: str, **env: str) -> str:
    """What a program prints that runs in the image under the arch's settings, which Triton's keys depend on."""
    env |= {name: value for name, value in make(ROOT, ARCH).env.items() if name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": "/cache/triton", "WARMSTART_VERDICTS": "/cache/verdicts", "WARMSTART_CU": CU}
    command = ["podman", "run", "--rm", "--network=none", "--volume", f"{volume}:/cache", "--env", f"HOOKS={HOME}"]
    command += [word for path, inside in lent for word in ("--volume", f"{path}:{inside}:ro")]
    command += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return run.run([*command, "--entrypoint", START, image, PYTHON, *words]).stdout


def use(image: str, lent: Lent, volume: Path, **env: str) -> Any:
    """What such a run did with kernels."""
    return json.loads(run_in(image, lent, volume, USE, ARCH, WAVE, **env))


@pytest.fixture
def seeded(image: str, lent: Lent, tmp_path: Path) -> Iterator[str]:
    """The image with a seed: the template's own stage, over this image in place of the arch's."""
    volume = tmp_path / "recorded"
    volume.mkdir()
    assert len(use(image, lent, volume, WARMSTART_RECORD="/cache/rows")["compiled"]) == KERNELS
    run_in(image, lent, volume, f"{HOME}/caches/record.py", "/cache/rows", "-o", "/cache/record.json")
    tree = tmp_path / "tree"
    for name in ("arch", "image", "sitecustomize", "caches", "patches"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "Containerfile.j2", tree)
    shutil.copy(volume / "record.json", tree / f"caches/records/{ARCH}-of-this-test.json")
    planned = make(tree, ARCH)
    text = render.render(tree, planned)
    stage = text[text.index("FROM whole AS kernels") : text.index("# Start-up:")]
    caps, name = probe.probe(ROOT / ".warmstart"), f"localhost/warmstart/kernels-test:{os.getpid()}"
    engine.build(
        caps,
        f"FROM {image} AS whole\n\n{stage}",
        context=tree,
        tags=[name],
        epoch=planned.epoch,
        log_file=tmp_path / "build" / "build.log",
        volumes=lent,
        network="none",
        no_cache=True,  # what is lent is not in the text
    )
    yield name
    run.run(["podman", "rmi", "--force", name], env=engine.environment(caps))


def test_the_image_begins_with_what_the_build_compiled(seeded: str, lent: Lent, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    told = use(seeded, lent, volume, WARMSTART_SEED=f"{HOME}/seed")
    assert (told["compiled"], told["benched"]) == ([], [])
    assert len(told["found"]) == KERNELS - CONFIGS + 1  # of the tuned one the winner alone
