#!/usr/bin/env python3
"""Checks aiter's prebuilt modules without a GPU; runs inside the image, so the standard library only.

For every module: which archs its device code is for, read from the file itself. For the core module: does it
know exactly the enums of the header that the installed aiter ships (aiter itself notices a stale module only
by an AttributeError). For every directory: no lock that would make the first start wait, nothing half built.

    aiter_check.py /opt/aiter-prebuilt --arch gfx1151 --core module_aiter_core --header .../aiter_enum.h

Exit code 0: all right, 1: problems (one line each on stderr), 2: wrong use.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from image.code_objects import CodeObject, code_objects_of  # in the project's tree
except ImportError:  # in an image: beside this file, also for `python -I`
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from code_objects import CodeObject, code_objects_of  # type: ignore[import-not-found, no-redef]

Enums = Mapping[str, Mapping[str, int]]
LOCKS = re.compile(r"lock|lock_.*|.*\.steal|\.ninja_lock")


def enums(header: str) -> dict[str, dict[str, int]]:
    """The `enum class` types of a C++ header: type name -> enumerator -> value.

    Raises ValueError for a value that is neither an integer nor an earlier enumerator.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    found: dict[str, dict[str, int]] = {}
    for name, body in re.findall(r"\benum\s+(?:class|struct)\s+(\w+)[^{;]*\{([^}]*)\}", text):
        values: dict[str, int] = {}
        following = 0
        for item in filter(None, (part.strip() for part in body.split(","))):
            key, _, value = (word.strip() for word in item.partition("="))
            values[key] = following = _integer(value, values) if value else following
            following += 1
        found[name] = values
    return found


def _integer(text: str, names: Mapping[str, int]) -> int:
    if text in names:
        return names[text]
    try:
        return int(text.rstrip("uUlL"), 0)
    except ValueError:
        raise ValueError(f"the enum value {text!r} is not understood") from None


def enum_problems(header: Enums, module: Enums) -> list[str]:
    """How the header's enums differ from the module's; more types in the module are no difference."""
    problems = [] if header else ["the header has no enum class: is it aiter_enum.h?"]
    for name, wanted in header.items():
        have = module.get(name)
        if have is None:
            problems.append(f"enum {name} is in the header but not in the module: built from another aiter")
        elif dict(have) != dict(wanted):
            parts = sorted(set(wanted.items()) ^ set(have.items()))
            words = ", ".join(f"{k}={v}" for k, v in parts)
            problems.append(f"enum {name} differs between header and module: {words}")
    return problems


def arch_problems(objects: Sequence[CodeObject], arch: str, *, host_only: bool, at_least: bool) -> list[str]:
    """What is wrong with a module's device code for an image of `arch`, one line each."""
    found = sorted({o.arch for o in objects})
    if host_only:
        return [f"holds device code for {' '.join(found)}, expected none"] if found else []
    if not found or found == [arch] or (at_least and arch in found):
        return []
    extent = "at least" if at_least else "alone"
    return [f"holds device code for {' '.join(found)}, expected {arch} {extent}"]


def directory_problems(folder: Path) -> list[str]:
    """Locks and half-built things in a module directory, and a missing `build`, one line each.

    aiter makes `build` at import, which fails on a read-only image unless it is there.
    """
    problems = [f"lock left behind: {p}" for p in sorted(folder.rglob("*")) if LOCKS.fullmatch(p.name)]
    build = folder / "build"
    if not build.is_dir():
        problems.append(f"no directory {build}")
    elif any(p for p in build.iterdir() if not LOCKS.fullmatch(p.name)):
        problems.append(f"{build} is not empty")
    return problems + [f"half-made file: {p}" for p in sorted(folder.glob(".*.so*"))]


def probe(paths: Sequence[Path], core: str) -> tuple[dict[Path, str], Enums]:
    """Load all files, all symbols bound at once (RTLD_NOW): what went wrong, by file, and `core`'s enums.

    In a process of its own, since a damaged file kills that and not us; one process for as many files as
    possible, since most of its time goes into importing torch.
    """
    problems: dict[Path, str] = {}
    found: Enums = {}
    waiting = list(paths)
    while waiting:
        command = [sys.executable, __file__, "--probe", "--core", core, *map(str, waiting)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        for path, answer in zip(waiting, answers, strict=False):
            found = answer["enums"] or found
            if answer["error"]:
                problems[path] = f"it does not load: {answer['error']}"
        waiting = waiting[len(answers) :]
        if waiting:  # the process died on the first of these
            problems[waiting.pop(0)] = _death(done)
    return problems, found


def _death(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"loading it ended with {signal.Signals(-done.returncode).name}: the file is damaged"
    return "it does not load: " + (done.stderr.strip().splitlines() or ["no message"])[-1]


def answer_probe(paths: Sequence[Path], core: str) -> int:
    """Inside the process of `probe`: one line of JSON a file."""
    if importlib.util.find_spec("torch"):
        # brings the HIP runtime of ROCm's wheels into the process, as in a real start
        importlib.import_module("torch")
    for path in paths:
        answer: dict[str, Any] = {"error": "", "enums": {}}
        try:
            if path.stem == core:
                answer["enums"] = _enums_of(path)
            else:
                ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        except (ImportError, OSError) as error:
            answer["error"] = str(error)
        print(json.dumps(answer), flush=True)
    return 0


def _enums_of(path: Path) -> dict[str, dict[str, int]]:
    loader = importlib.machinery.ExtensionFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(
        importlib.machinery.ModuleSpec(path.stem, loader, origin=str(path))
    )
    loader.exec_module(module)
    types = {k: v for k, v in vars(module).items() if hasattr(v, "__members__")}
    return {k: {m: int(x) for m, x in v.__members__.items()} for k, v in types.items()}


def check_module(path: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """A record of one module (name, path, size in bytes, archs) and what its bytes say against it."""
    record: dict[str, Any] = {"name": path.stem, "path": str(path), "size": path.stat().st_size, "archs": []}
    try:
        objects = code_objects_of(path)
    except (ValueError, OSError) as error:
        return record, [f"{path}: {error}"]
    record["archs"] = sorted({one.arch for one in objects})
    if not options.arch:
        return record, []
    core = path.stem == options.core
    lines = arch_problems(objects, options.arch, host_only=core, at_least=options.at_least)
    return record, [f"{path}: {line}" for line in lines]


def check_loading(paths: Sequence[Path], options: argparse.Namespace) -> tuple[list[str], Enums]:
    """What goes wrong when modules are loaded, how the core's enums differ from the header's, and the enums."""
    files = list({path.resolve(): path for path in paths}.values())  # a link and its file are one module
    cores = [path for path in files if path.stem == options.core and options.header]
    others = [path for path in files if path not in cores and options.load]
    # Two core modules in one process would define the same types twice, so each further one has its own.
    groups = [[*cores[:1], *others], *([core] for core in cores[1:])]
    lines: list[str] = []
    found: Enums = {}
    for group in groups:
        bad, found = probe(group, options.core)
        lines += [f"{path}: {line}" for path, line in bad.items()]
        if group and group[0] in cores and group[0] not in bad:
            wanted = enums(options.header.read_text(encoding="utf-8"))
            lines += [f"{group[0]}: {line}" for line in enum_problems(wanted, found)]
    return lines, found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="check aiter's prebuilt modules without a GPU")
    parser.add_argument("paths", nargs="+", type=Path, help="module directories, or modules")
    parser.add_argument("--arch", help="the arch that all device code must be for")
    parser.add_argument("--at-least", action="store_true", help="other archs may be there too")
    parser.add_argument("--core", default="", help="the module of enums, which holds no device code")
    parser.add_argument("--header", type=Path, help="aiter_enum.h of the installed aiter")
    parser.add_argument("--load", action="store_true", help="load every module, all symbols bound at once")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.probe:
        return answer_probe(options.paths, options.core)
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in options.paths:
        problems += directory_problems(path) if path.is_dir() else []
        modules = sorted(path.glob("*.so")) if path.is_dir() else [path]
        problems += [] if modules else [f"{path}: no module here"]
        if path.is_dir() and options.core and not (path / f"{options.core}.so").is_file():
            problems.append(f"{path}: no {options.core}.so")
        for module in modules:
            record, lines = check_module(module, options)
            records.append(record)
            problems += lines
    found: Enums = {}
    if not problems:  # nothing is loaded that is known to be wrong
        problems, found = check_loading([Path(record["path"]) for record in records], options)
    if options.json:
        print(json.dumps({"modules": records, "enums": found, "problems": problems}))
    else:
        for r in records:
            print(f"{r['size']:>12,} B  {' '.join(r['archs']) or 'no device code':<16} {r['path']}")
    for line in problems:
        print(f"aiter-check: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
