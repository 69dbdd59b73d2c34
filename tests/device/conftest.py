"""Fixtures of the device tests, and the record of a run: `.warmstart/<arch>/device.json`.

Without WARMSTART_IMAGE and WARMSTART_PLAN the last build for this machine's GPU is tested.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import engine as engines
from warmstart import hardware, host, probe, run
from warmstart.plan import Plan

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".warmstart"
INSIDE = Path(__file__).parent / "inside"
Script = Callable[..., Any]

outcomes: dict[str, str] = {}  # test → passed, failed or skipped, of this run
gathered: dict[str, Any] = {}  # what the record says besides


def nodes() -> list[Path]:
    """The device files that ROCm opens."""
    return [Path("/dev/kfd"), *sorted(Path("/dev/dri").glob("renderD*")), *sorted(Path("/dev/dri").glob("card*"))]


def gpu_options() -> list[str]:
    """podman's options for the GPU and nothing else: its device files, and the groups that may open them.

    Groups by number, because the image's own group file knows other ones. A rootless podman can't map those: it
    keeps the groups that the user is in, for which the runtime has to be crun.
    """
    options = ["--device", "/dev/kfd", "--device", "/dev/dri"]
    if Path("/sys/fs/selinux/enforce").is_file() and Path("/sys/fs/selinux/enforce").read_text().strip() == "1":
        options += ["--security-opt", "label=disable"]
    if os.getuid():
        return [*options, "--group-add", "keep-groups"]
    groups = sorted({node.stat().st_gid for node in nodes() if stat.S_ISCHR(node.stat().st_mode)})
    return options + [word for group in groups for word in ("--group-add", str(group))]


@pytest.fixture(scope="session")
def gpus() -> list[host.Gpu]:
    """The GPUs of this machine."""
    found = host.gpus()
    if not found:
        pytest.skip("no AMD GPU in this machine")
    if not Path("/dev/kfd").exists():
        pytest.skip("the GPU's driver is there but /dev/kfd is not")
    return found


@pytest.fixture(scope="session")
def arch(gpus: list[host.Gpu]) -> str:
    """The arch under test: WARMSTART_ARCH, else that of the GPU which `make image` would build for."""
    return os.environ.get("WARMSTART_ARCH") or host.default_arch()[0]


@pytest.fixture(scope="session", autouse=True)
def engine(gpus: list[host.Gpu]) -> None:
    """The engine's settings, as builds use them."""
    settings = engines.environment(probe.probe(STATE))
    os.environ.update({name: value for name, value in settings.items() if name.startswith("CONTAINERS_")})


@pytest.fixture(scope="session")
def plan(arch: str) -> Plan:
    """The plan that the image was built from."""
    file = Path(os.environ.get("WARMSTART_PLAN") or STATE / arch / "built-plan.json")
    if not file.is_file():
        pytest.fail(f"no image of {arch} to test: make image ARCH={arch}")
    return msgspec.json.decode(file.read_bytes(), type=Plan)


@pytest.fixture(scope="session")
def image(plan: Plan, engine: None) -> str:
    """The id of the image under test."""
    ref = os.environ.get("WARMSTART_IMAGE") or json.loads((STATE / plan.arch / "image.json").read_text())["image_id"]
    found = json.loads(run.run(["podman", "image", "inspect", ref]).stdout)[0]
    assert found["Config"]["Labels"]["io.warmstart.plan-id"] == plan.plan_id
    gathered.update(plan=plan, image_id=f"sha256:{found['Id'].removeprefix('sha256:')}")
    return str(found["Id"])


@pytest.fixture(scope="session")
def cache() -> Iterator[str]:
    """A cache volume for the whole run."""
    volume = f"warmstart-device-{os.getpid()}"
    yield volume
    run.run(["podman", "volume", "rm", "--force", volume])


@pytest.fixture(scope="session")
def python(image: str, cache: str) -> Script:
    """Run a file of tests/device/inside/ on the GPU, through the image's entry point; its last line, as JSON."""

    def call(name: str, *args: str, options: Sequence[str] = ()) -> Any:
        least = ["--rm", "--read-only", "--network=none", "--cap-drop=all", "--security-opt=no-new-privileges"]
        argv = ["podman", "run", *least, "--user", "4321:4321", *gpu_options(), *options]
        argv += ["--volume", f"{INSIDE}:/mnt/inside:ro", "--volume", f"{cache}:/cache"]
        argv += ["--entrypoint", "/opt/warmstart/start", image]
        done = run.run([*argv, "/opt/venv/bin/python", f"/mnt/inside/{name}", *args])
        return json.loads(done.stdout.strip().splitlines()[-1])

    return call


@pytest.fixture(scope="session")
def torch(python: Script) -> Any:
    """What torch and amdsmi see of the GPUs."""
    found = python("gpus.py")
    gathered.update(gpu=found["torch"][0]["name"] if found["torch"] else "", gpus=len(found["torch"]))
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/device/" not in report.nodeid:
        return
    name = report.nodeid.partition("::")[2]
    if report.failed or report.skipped or (report.when == "call" and name not in outcomes):
        outcomes[name] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, also of a run that failed; there is none of a part of the tests, or without a GPU."""
    files = Path(__file__).parent.glob("test_*.py")
    every = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    if {"plan", "image_id", "gpu"} <= set(gathered) and every <= {name.partition("[")[0] for name in outcomes}:
        record = hardware.make(
            gathered["plan"], gathered["image_id"], gathered["gpu"], gathered["gpus"], dict(sorted(outcomes.items()))
        )
        hardware.write(STATE, record)
