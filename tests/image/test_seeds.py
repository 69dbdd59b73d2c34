"""Triton's cache in an image: the manager with a seed below the volume, and the seed that the build made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

from tests.image.conftest import planned_arch
from warmstart.names import HOME
from warmstart.plan import Plan

if planned_arch() == "cpu":
    pytest.skip("an image without Triton", allow_module_level=True)


def test_triton_keeps_kernels_through_the_manager(python: Callable[..., Any], plan: Plan) -> None:
    assert plan.profile.device
    words = (plan.arch, str(plan.profile.device.wave), "/tmp/kept")
    first, second = python("cached.py", *words), python("cached.py", *words)
    assert first == {"manager": "SeededCacheManager", "found": [False], "key": first["key"]}
    assert second == {**first, "found": [True]}


def test_there_is_a_seed_where_there_are_records(host: Host, plan: Plan) -> None:
    assert host.file(f"{HOME}/seed").exists == bool(plan.records)
    for name in ("record.py", "replay.py", "compilers.py", "standin.py", "verdicts.py", "bans.toml"):
        assert host.file(f"{HOME}/caches/{name}").exists, name
