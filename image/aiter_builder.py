#!/usr/bin/env python3
"""The process in which aiter's own builder runs: `aiter_builder.py ORDER.json`, started by aiter_prebuild.py.

The order says where aiter is and what to build; where the results go, and for which arch, is in the
environment that aiter itself reads (AITER_JIT_DIR, AITER_ROOT_DIR, GPU_ARCHS).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def build(order: Mapping[str, Any]) -> int:
    """Build the order's modules and libraries with aiter's own code; returns the exit code."""
    sys.path.insert(0, order["package"])  # as setup.py does: jit.core without the rest of aiter
    sys.path.append(str(Path(order["package"]).parent))
    core: Any = importlib.import_module("jit.core")
    wanted = {name: core.get_args_of_build(name) for name in order["modules"]}
    for name, args in wanted.items():
        if not args["srcs"]:
            print(f"error: this aiter has no module {name}")
            return 1
        for tree in args.get("third_party", []):  # the builder would clone it: no network in a build
            if not Path(order["meta"], "3rdparty", tree).is_dir():
                print(f"error: {name} needs the source tree {tree}, which is not installed")
                return 1
    parameters = inspect.signature(core.build_module).parameters
    for name, args in wanted.items():
        started = clocks()
        core.build_module(**{key: args[key] for key in parameters if key in args} | {"md_name": name})
        print(f"built {name} in {taken(started)}", flush=True)
    for spec in order["itfs"]:
        build_itfs(spec, order)
    return 0


def build_itfs(spec: str, order: Mapping[str, Any]) -> None:
    """Build one library of aiter's csrc/cpp_itfs family: "pa.pa_v1:head_size=128,dtype=_Float16,...\""""
    # The family imports aiter.jit.utils only; the real aiter/__init__.py would import all operators.
    parent = types.ModuleType("aiter")
    parent.__path__ = [order["package"]]
    sys.modules.setdefault("aiter", parent)
    sys.path.insert(0, order["meta"])
    name, _, given = spec.partition(":")
    values = dict(pair.split("=", 1) for pair in given.split(",") if pair)
    started = clocks()
    importlib.import_module(f"csrc.cpp_itfs.{name}").compile(**{k: literal(v) for k, v in values.items()})
    print(f"built cpp_itfs {spec} in {taken(started)}", flush=True)


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and seconds of processor time of this process and of those it waited for."""
    used = os.times()
    return time.monotonic(), used.user + used.system + used.children_user + used.children_system


def taken(started: tuple[float, float]) -> str:
    """What passed on both clocks since `started`."""
    wall, work = (now - then for now, then in zip(clocks(), started, strict=True))
    return f"{wall:.1f} s ({work:.1f} s of processor time)"


def literal(text: str) -> int | bool | str:
    """A value of an --itfs argument: an integer, True or False, else the text."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else text


if __name__ == "__main__":
    sys.exit(build(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
