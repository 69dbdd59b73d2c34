"""Rehearsals on the real engine: of a Radeon and an Instinct arch, and of trees in which one thing is broken.

`make rehearse ARGS=--all` rehearses all archs.

They use the machine's own image store and the checkout's `.warmstart/rehearsal`, where a base, wheels and layers may
lie that would take minutes to make anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from warmstart import cuts, profile
from warmstart import lock as locks
from warmstart.errors import Unreachable

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".warmstart" / "rehearsal"
# As it was before other tests chose a store of their own.
ENV = {name: value for name, value in os.environ.items() if name != "WARMSTART_IMAGE"}
SHARED = ("cache", "wheels", "bases", "trees", "moved.json")
IGNORED = (".warmstart", ".venv", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__")
REPOSITORY = "localhost/warmstart/rehearsal"

pytestmark = [pytest.mark.engine, pytest.mark.net]
Edit = Callable[[Path], None]


def build(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(root / "build.py"), *words]
    done = subprocess.run(argv, cwd=root, env=ENV, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == Unreachable.code and "which has the packages of noble" in done.stderr:
        pytest.skip("Ubuntu's archive does not answer here, so there is no base with the Python of AMD's wheels")
    return done


def images(pattern: str) -> set[str]:
    conf = ROOT / ".warmstart" / "containers.conf"
    env = ENV | ({"CONTAINERS_CONF": str(conf)} if conf.is_file() else {})
    argv = ["podman", "images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.Id}}", pattern]
    return set(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split("\n")) - {""}


@pytest.mark.parametrize("arch", ["gfx1151", "gfx942"])
def test_an_arch_of_each_line(arch: str) -> None:
    real = images("localhost/warmstart/vllm")
    done = build(ROOT, "rehearse", arch, "--json", "-q")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    record = json.loads((OWN / arch / "rehearsal.json").read_text(encoding="utf-8"))
    assert told == record
    assert record["failed"] == 0
    assert record["passed"] >= 40
    assert record["tag"] == f"{REPOSITORY}:{arch}"
    assert {f"rocm-sdk-device-{arch}", "torch", "vllm", "triton", "rocm"} <= set(record["standins"])
    assert all(record["standins"].values())
    assert {re.sub(r"^https://([^/]+)/.*", r"\1", a) for a in record["indexes"]} <= set(record["indexes"]) | {
        "stable.repo.amd.com",
        "wheels.vllm.ai",
    }
    assert all(local.startswith("http://127.0.0.1:") for local in record["indexes"].values())
    skipped = {test["message"] for test in record["tests"] if test["outcome"] == "skipped"}
    assert "" not in skipped
    assert images("localhost/warmstart/vllm") == real  # no tag of a real image was touched
    assert [line for line in images(REPOSITORY) if line.startswith(f"{REPOSITORY}:{arch} ")]


# --- one thing is broken ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed() -> None:
    """The layers of gfx1151 are there, so that a broken tree fails at what is broken."""
    if not (OWN / "gfx1151" / "image.json").is_file():
        assert build(ROOT, "rehearse", "gfx1151", "-q").returncode == 0


@pytest.fixture
def tree(tmp_path: Path, rehearsed: None) -> Iterator[Path]:
    """A copy of this tree with a state of its own that shares what takes long to make."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*IGNORED), symlinks=True)
    own = copy / ".warmstart" / "rehearsal"
    own.mkdir(parents=True)
    for name in SHARED:
        (own / name).symlink_to(OWN / name)
    for name in ("engine.json", "containers.conf"):
        if (ROOT / ".warmstart" / name).is_file():
            shutil.copy(ROOT / ".warmstart" / name, copy / ".warmstart" / name)
    edit(copy / "warmstart" / "rehearse.py", f'REPOSITORY = "{REPOSITORY}"', f'REPOSITORY = "{REPOSITORY}-broken"')
    yield copy
    subprocess.run(["podman", "rmi", f"{REPOSITORY}-broken:gfx1151"], env=ENV, capture_output=True, check=False)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file.name} has no {old!r}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def relock(tree: Path, arch: str, names: dict[str, str]) -> None:
    """Let the lock of an arch name other distributions, as `lock --pins` would."""
    known = profile.load(tree, arch).profile
    path = locks.committed(tree, known.slug)
    old = locks.parse(path)
    wheels = tuple(msgspec.structs.replace(w, name=names.get(w.name, w.name)) for w in old.wheels)
    wanted = locks.wanted(known, cuts.load(tree, known).dropped)
    locks.write(path, msgspec.structs.replace(old, wheels=wheels, profile=wanted))


def form_of_amds_index(tree: Path) -> None:
    edit(tree / "arch" / "rocm.toml", "stable.repo.amd.com/rocm/whl-next/", "stable.repo.amd.com/rocm/whl/")


def form_of_vllms_index(tree: Path) -> None:
    edit(tree / "arch" / "rocm.toml", "wheels.vllm.ai/rocm/{vllm}/{variant}", "wheels.vllm.ai/rocm/{variant}/{vllm}")


def name_of_a_device_distribution(tree: Path) -> None:
    edit(tree / "arch" / "rocm.toml", "rocm-sdk-device-{arch}", "rocm-sdk-{arch}")
    relock(tree, "gfx1151", {"rocm-sdk-device-gfx1151": "rocm-sdk-gfx1151"})


def extras_of_all_archs(tree: Path) -> None:
    edit(tree / "arch" / "rocm.toml", 'overrides = ["torch=={torch}", ', "overrides = [")
    relock(tree, "gfx1151", {})


def copy_of_a_layer(tree: Path) -> None:
    edit(
        tree / "Containerfile.j2",
        "{% for layer in layers %}\n{{ copy(layer, base",
        '{% for layer in layers if layer != "device" %}\n{{ copy(layer, base',
    )


def path_in_the_environment(tree: Path) -> None:
    edit(tree / "arch" / "rocm.toml", "lib/llvm/bin/amdclang++\"\nROCM", "lib/llvm/bin/amdclangxx\"\nROCM")


def label(tree: Path) -> None:
    edit(tree / "Containerfile.j2", "LABEL{% for name, value in plan.labels.items() %}", (
        'LABEL{% for name, value in plan.labels.items() if name != "io.warmstart.wave" %}'
    ))


BROKEN: list[tuple[Edit, int, str]] = [
    (form_of_amds_index, 40, r"there is no https://stable\.repo\.amd\.com/rocm/whl/"),
    (form_of_vllms_index, 40, r"there is no https://wheels\.vllm\.ai/rocm/rocm100/0\.33\.0"),
    (name_of_a_device_distribution, 40, r"there is no https://stable\.repo\.amd\.com/rocm/whl-next/rocm-sdk-gfx1151/"),
    (extras_of_all_archs, 40, r"amd-torch-device-gfx\w+"),
    (copy_of_a_layer, 51, r"image tests failed: test_\w+::test_\w+"),
    (path_in_the_environment, 51, r"test_paths_in_the_environment_exist"),
    (label, 51, r"image tests failed: test_contents::test_\w*label"),
]


@pytest.mark.parametrize(("breaks", "code", "told"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_a_slip_is_found(tree: Path, breaks: Edit, code: int, told: str) -> None:
    breaks(tree)
    done = build(tree, "rehearse", "gfx1151", "--first")
    assert done.returncode == code, done.stderr
    assert re.search(told, done.stderr), done.stderr
    if code == 51:
        record = json.loads((tree / ".warmstart/rehearsal/gfx1151/rehearsal.json").read_text(encoding="utf-8"))
        assert record["failed"] == 1
    assert not (tree / ".warmstart" / "gfx1151").exists()  # nothing that could be taken for a real build's


def test_ctrl_c_leaves_nothing(tree: Path) -> None:
    argv = [sys.executable, str(tree / "build.py"), "rehearse", "gfx1151"]
    before = {path.name for path in (OWN / "wheels").iterdir()}
    with subprocess.Popen(argv, cwd=tree, env=ENV, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr
        for line in child.stderr:
            if "resolving" in line:
                break
        time.sleep(1)
        child.send_signal(signal.SIGINT)
        child.stderr.read()
        assert child.wait(60) == 130
    assert {path.name for path in (OWN / "wheels").iterdir()} == before
    assert not list((OWN / "cache").rglob("tmp*"))
    assert not (tree / ".warmstart/rehearsal/gfx1151/rehearsal.json").exists()
