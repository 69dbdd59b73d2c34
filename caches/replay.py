"""Compiles what a record holds, without a GPU: `python replay.py --out DIRECTORY RECORD…`, with the image's Triton.

A stand-in driver says which GPU is meant; Triton does the rest, so that all keys are its own. The result is
DIRECTORY/triton/<hash>/… (binaries only) and DIRECTORY/verdicts/cu<N>/<hash>/….autotune.json, which
warmstart_cache.py reads as a seed. A kernel that is not there any more, or can't be compiled, is told in a line and
left out. The last line of stdout is what was done, as JSON.

Standard library, Triton and warmstart_spec.py only. Which configurations are banned for an arch is in bans.toml.
"""

import argparse
import fnmatch
import gc
import importlib
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # which -I leaves out
sys.path.append(str(HERE.parent / "sitecustomize"))  # while an image is built; later they are where Python looks

import compilers  # type: ignore[import-not-found]  # noqa: E402
import standin  # type: ignore[import-not-found]  # noqa: E402
import verdicts  # type: ignore[import-not-found]  # noqa: E402
import warmstart_spec  # type: ignore[import-not-found]  # noqa: E402

SCHEMA = 2
UNSET = ("TRITON_CACHE_MANAGER", "WARMSTART_RECORD", "WARMSTART_START", "TRITON_ALWAYS_COMPILE")


class ReplayError(Exception):
    """Why nothing can be replayed, in one line."""


class Replay:
    """What became of the kernels and verdicts so far."""

    def __init__(self, bans: "list[dict[str, Any]]", arch: str) -> None:
        self.bans = [ban for ban in bans if fnmatch.fnmatchcase(arch, ban["arch"])]
        self.kernels = self.verdicts = self.same = self.compared = self.banned = self.launchers = 0
        self.skipped: list[str] = []
        self.jitted: dict[tuple[str, str], Any] = {}
        self.imported: dict[str, str] = {}  # module → why it can't be imported

    def skip(self, what: str, why: object) -> None:
        """Leave something out, and say so."""
        line = f"{what}: {' '.join(str(why).split())[:200] or type(why).__name__}"
        self.skipped.append(line)
        print(f"left out: {line}", file=sys.stderr, flush=True)

    def module(self, name: str) -> Any:
        """A module of kernels; raises ReplayError."""
        if name not in self.imported:
            try:
                importlib.import_module(name)
                self.imported[name] = ""
            except (Exception, SystemExit) as problem:
                self.imported[name] = f"{type(problem).__name__}: {problem}"
        if self.imported[name]:
            raise ReplayError(f"{name} can't be imported: {self.imported[name]}")
        return sys.modules[name]

    def found(self, module: str, name: str) -> Any:
        """A kernel with all that its module wrapped around it; raises ReplayError."""
        value = self.module(module)
        try:
            for part in name.split("."):
                value = getattr(value, part)
        except AttributeError:
            # Made inside of a function, or replaced in its module by something that hides it.
            value = self.jitted.get((module, name)) or self.among_all(module, name)
        if not any(hasattr(each, "device_caches") for each in unwrapped(value)):
            raise ReplayError("it is no kernel here")
        return value

    def among_all(self, module: str, name: str) -> Any:
        """A kernel by looking at every object there is; raises ReplayError."""
        jit = importlib.import_module("triton.runtime.jit").JITFunction
        for each in gc.get_objects():
            if type(each) is jit:
                self.jitted[each.fn.__module__, each.fn.__qualname__] = each
        if (module, name) not in self.jitted:
            raise ReplayError("its module does not have it any more")
        return self.jitted[module, name]

    def is_banned(self, kernel: str, values: "dict[str, Any]") -> bool:
        """Whether a configuration is known to fault on this arch."""
        return any(
            fnmatch.fnmatchcase(kernel, ban["kernel"])
            and all(values.get(name) == value for name, value in ban["config"].items())
            for ban in self.bans
        )

    def tasks(self, group: "dict[str, Any]", target: Any) -> "list[compilers.Task]":
        """What is to be compiled of one kernel."""
        what = f"{group['module']}.{group['kernel']}"
        try:
            kernel = next(each for each in unwrapped(self.found(group["module"], group["kernel"])) if is_jit(each))
        except (ReplayError, StopIteration) as problem:
            self.skip(f"{what}, {len(group['variants'])} variants", problem)
            return []
        names = list(group["spec"]["signature"])
        found: list[compilers.Task] = []
        for number, (constants, options, key) in enumerate(group["variants"]):
            keys = group["spec"]["constant_keys"]
            values = {names[k[0]]: v for k, v in zip(keys, constants, strict=True) if len(k) == 1}
            if self.is_banned(kernel.fn.__name__, {**values, **options}):
                self.banned += 1
                continue
            try:
                spec = warmstart_spec.fitted({**group["spec"], "constant_vals": constants}, kernel)
            except ValueError as problem:
                self.skip(f"{what}, {len(group['variants'])} variants", problem)
                return []
            spec |= {"options": options, "key": f"replayed {number}", "target": target.__dict__}
            found.append((kernel, what, json.dumps(spec), key))
        return found

    def count(self, what: str, key: str, row: "dict[str, Any]", compare: bool) -> None:
        """Take in what became of one kernel."""
        if "error" in row:
            self.skip(what, row["error"])
            return
        self.kernels += 1
        self.compared += compare
        self.same += compare and row["hash"].startswith(key)
        self.launchers += row["launchers"]

    def replay_verdicts(self, group: "dict[str, Any]") -> None:
        """Have the autotuner itself store what it decided, under its own key."""
        what = f"{group['module']}.{group['tuner']}"
        try:
            tuner = next(
                each
                for each in unwrapped(self.found(group["module"], group["tuner"]))
                if hasattr(each, "cache_results")
            )
        except (ReplayError, StopIteration) as problem:
            self.skip(f"verdicts of {what}", problem or "it is no autotuner here")
            return
        make = importlib.import_module("triton.runtime.autotuner").Config
        for key, times, winner in group["verdicts"]:
            try:
                rows = [
                    (make(**settings), time, number == winner)
                    for number, (settings, time) in enumerate(zip(group["configs"], times, strict=True))
                    if not self.is_banned(tuner.base_fn.__name__, verdicts.flat(settings))
                ]
                if not rows or all(time is None for _, time, _ in rows):
                    continue
                tuner.check_disk_cache(
                    verdicts.tupled(key), [row[0] for row in rows], verdicts.storing(tuner, verdicts.tupled(key), rows)
                )
                self.verdicts += 1
            except Exception as problem:
                self.skip(f"a verdict of {what}", f"{type(problem).__name__}: {problem}")


def unwrapped(value: Any) -> "Iterator[Any]":
    """A kernel and all that it is wrapped in, from the outside."""
    while value is not None:
        yield value
        value = None if is_jit(value) else getattr(value, "fn", None)


def is_jit(value: Any) -> bool:
    """Whether it is what Triton compiles."""
    return isinstance(value, importlib.import_module("triton.runtime.jit").JITFunction)


def read(files: "list[Path]", arch: str) -> "list[dict[str, Any]]":
    """The records; raises ReplayError."""
    records = []
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            known = record["schema"] == SCHEMA and record["target"]["backend"] and record["kernels"] is not None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ReplayError(f"{file.name} is no record: {problem!r}") from problem
        if not known:
            raise ReplayError(f"{file.name} was made by another version of record.py")
        records.append(record)
    if not records:
        raise ReplayError("no record given")
    if arch and any(record["target"]["backend"] != "hip" for record in records):
        raise ReplayError(f"records of another maker's GPU say nothing about {arch}")
    if not arch and len({json.dumps(record["target"], sort_keys=True) for record in records}) > 1:
        raise ReplayError("records of different GPUs: choose one with --arch")
    return records


def target_of(records: "list[dict[str, Any]]", arch: str) -> "dict[str, Any]":
    """What to compile for. A wave has 64 lanes before gfx10, and 32 from there on."""
    if not arch:
        return dict(records[0]["target"])
    return {"backend": "hip", "arch": arch, "warp_size": 32 if int(arch.removeprefix("gfx")[:-2]) >= 10 else 64}


def prepare(out: Path) -> None:
    """The environment of a replay: Triton's own cache below `out`, binaries only, nothing recorded."""
    for name in UNSET:
        os.environ.pop(name, None)
    os.environ |= {
        "TRITON_CACHE_DIR": str(out / "triton"),
        "TRITON_STORE_BINARY_ONLY": "1",
        "TRITON_CACHE_AUTOTUNING": "1",
    }


def replay(
    files: "list[Path]", out: Path, arch: str = "", bans: "list[dict[str, Any]] | None" = None, jobs: int = 0
) -> "dict[str, Any]":
    """Compile all records into `out`; what was done. Raises ReplayError."""
    began = time.monotonic()
    records = read(files, arch)
    target = target_of(records, arch)
    prepare(out)
    driver = standin.install(target, {**records[0]["properties"], "warpSize": target["warp_size"]})
    triton = importlib.import_module("triton")
    done = Replay(bans or [], str(target["arch"]))
    for record in records:
        home = record["target"] == target
        compare = bool(home and record["versions"].get("triton") == triton.__version__)
        tasks = [task for group in record["kernels"] for task in done.tasks(group, driver.target)]
        for (_, what, _, key), row in compilers.compile_all(tasks, driver.target, jobs or compilers.most()):
            done.count(what, key, row, compare)
        for group in record["verdicts"] if home else ():
            done.replay_verdicts(group)
        verdicts.sort(out, record["cu"] or 0)
    return {
        "target": target,
        "kernels": done.kernels,
        "recorded under the same key": f"{done.same} of {done.compared}",
        "launchers": done.launchers,
        "verdicts": done.verdicts,
        "banned": done.banned,
        "left out": len(done.skipped),
        "bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        "seconds": round(time.monotonic() - began, 1),
    }


def read_bans(file: Path) -> "list[dict[str, Any]]":
    """The bans of a file; raises ReplayError."""
    try:
        return list(tomllib.loads(file.read_text(encoding="utf-8")).get("ban", []))
    except (OSError, ValueError) as problem:
        raise ReplayError(f"no bans from {file}: {problem}") from problem


def main(arguments: "list[str] | None" = None) -> int:
    """Replay; 0, or 1 with one line on stderr when nothing or too little was compiled."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("records", nargs="+", type=Path)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--arch", default="", help="compile for this one, whatever GPU was recorded")
    options.add_argument("--bans", type=Path, default=HERE / "bans.toml")
    options.add_argument("--jobs", type=int, default=0, metavar="N", help="compilers at the same time")
    options.add_argument("--require", type=int, default=0, metavar="N", help="fail with fewer kernels")
    asked = options.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        done = replay(asked.records, asked.out.resolve(), asked.arch, read_bans(asked.bans), asked.jobs)
    except ReplayError as problem:
        print(f"replay: {problem}", file=sys.stderr)
        return 1
    print(json.dumps(done))
    if done["kernels"] < asked.require:
        print(f"replay: {done['kernels']} kernels, {asked.require} are required", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
