"""Fixtures of the image tests. `verify` sets WARMSTART_IMAGE (a reference or id) and WARMSTART_PLAN (a JSON file).

A rehearsal also sets WARMSTART_REHEARSAL: its record, a JSON file that names the stand-ins in the image.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import testinfra
from testinfra.host import Host

from tests.image.server import Server, ready, tiny_model
from warmstart import run
from warmstart.names import VENV
from warmstart.plan import Plan

ROOT = Path(__file__).parents[2]
PYTHON = f"{VENV}/bin/python -I"
# Programs of the tests, and of the build, that run inside.
MOUNTS = ["--volume", f"{ROOT}/tests/image/inside:/mnt/inside:ro", "--volume", f"{ROOT}/image:/mnt/image:ro"]
LEAST = ["--cap-drop=all", "--security-opt=no-new-privileges", "--network=none"]
Script = Callable[..., object]


def planned_arch() -> str:
    """The arch of the image under test, for modules that are left out whole; empty when none is given."""
    file = os.environ.get("WARMSTART_PLAN")
    return str(json.loads(Path(file).read_bytes())["arch"]) if file else ""


def random_uid() -> str:
    """A user and a group that the image does not know."""
    return f"{20000 + secrets.randbelow(20000)}:{20000 + secrets.randbelow(20000)}"


@pytest.fixture(scope="session")
def image() -> str:
    """The image under test."""
    if not (ref := os.environ.get("WARMSTART_IMAGE")):
        pytest.fail("no image to test: run `make smoke ARCH=…`, which sets WARMSTART_IMAGE")
    return ref


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The plan that the image was built from."""
    return msgspec.json.decode(Path(os.environ["WARMSTART_PLAN"]).read_bytes(), type=Plan)


@pytest.fixture(scope="session")
def config(image: str) -> dict[str, Any]:
    """The image's configuration, as `podman image inspect` shows it."""
    found: list[dict[str, Any]] = json.loads(run.run(["podman", "image", "inspect", image]).stdout)
    return found[0]


@pytest.fixture(scope="session")
def host(image: str) -> Iterator[Host]:
    """A container of the image that only waits, as testinfra's host."""
    container = run.run(
        ["podman", "run", "--detach", "--rm", "--cap-drop=all", "--security-opt=no-new-privileges", *MOUNTS]
        + ["--entrypoint", "/bin/sh", image, "-c", "sleep 3600"]
    ).stdout.strip()
    try:
        yield testinfra.get_host(f"podman://{container}")
    finally:
        run.run(["podman", "rm", "--force", "--time", "0", container])


@pytest.fixture(scope="session")
def model(image: str) -> Iterator[str]:
    """A volume that holds the tiny model."""
    with tiny_model(image) as volume:
        yield volume


@pytest.fixture(scope="session")
def server(image: str, model: str) -> Iterator[Server]:
    """The first start, with an empty cache volume."""
    cache = f"warmstart-cache-{os.getpid()}"
    try:
        with ready(image, model, cache) as running:
            yield running
    finally:
        run.run(["podman", "volume", "rm", "--force", cache])


@pytest.fixture(scope="session")
def python(host: Host) -> Script:
    """Run a file of tests/image/inside/ with the image's Python and return what it prints, as JSON.

    The arguments are words of a shell, which may be globs.
    """

    def call(name: str, *args: str) -> object:
        return json.loads(host.check_output(f"{PYTHON} /mnt/inside/{name} {' '.join(args)}"))

    return call


@pytest.fixture(scope="session")
def site(plan: Plan) -> str:
    """The image's site-packages."""
    return f"{VENV}/lib/python{plan.versions['python']}/site-packages"


@pytest.fixture(scope="session")
def standins() -> dict[str, str]:
    """Distributions of the image that are stand-ins, with the reason; empty but in a rehearsal."""
    if not (file := os.environ.get("WARMSTART_REHEARSAL")):
        return {}
    found: dict[str, str] = json.loads(Path(file).read_text(encoding="utf-8"))["standins"]
    return found


@pytest.fixture
def real(standins: dict[str, str]) -> Callable[..., None]:
    """Skip a test that would prove nothing when one of these distributions is a stand-in."""

    def need(*names: str) -> None:
        for name in names:
            if name in standins:
                pytest.skip(f"stand-in: {name}")

    return need
