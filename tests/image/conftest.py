"""Fixtures of the image tests. `verify` sets WARMSTART_IMAGE (a reference or id) and WARMSTART_PLAN (a JSON file)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import testinfra
from testinfra.host import Host

from warmstart import run
from warmstart.plan import Plan

PYTHON = "/opt/venv/bin/python -I"
Script = Callable[..., object]


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
        ["podman", "run", "--detach", "--rm", "--cap-drop=all", "--security-opt=no-new-privileges"]
        + ["--entrypoint", "/bin/sh", image, "-c", "sleep 3600"]
    ).stdout.strip()
    try:
        yield testinfra.get_host(f"podman://{container}")
    finally:
        run.run(["podman", "rm", "--force", "--time", "0", container])


@pytest.fixture(scope="session")
def python(host: Host) -> Script:
    """Run a file of tests/image/inside/ with the image's Python and return what it prints, as JSON."""

    def call(name: str, *args: str) -> object:
        code = (Path(__file__).parent / "inside" / name).read_text(encoding="utf-8")
        return json.loads(host.check_output(f"{PYTHON} -c %s {' '.join(args)}", code))

    return call
