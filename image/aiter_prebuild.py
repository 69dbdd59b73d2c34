#!/usr/bin/env python3
"""Builds aiter's modules while the image is built, so that no start compiles them. Needs no GPU.

    aiter_prebuild.py core   --arch gfx1151     the module of enums, which `import aiter` would compile
    aiter_prebuild.py set    --arch gfx942 --modules module_a,module_b --itfs sampling.x:d=4
    aiter_prebuild.py device --arch gfx1151     like core, then the real `import aiter` on this build's GPU
    aiter_prebuild.py off                       nothing: says what the image's environment must hold instead

It drives aiter's own builder (jit/core.py, loaded the way aiter's setup.py does) in a process and a working
folder of their own, and moves what passed `aiter_check.py` into place by renaming: a build that stops half
way leaves no module and no lock. The modules lie in --dest, which a .pth file puts on sys.path (that is where
they are found when AITER_JIT_DIR is set), and as links in the package's jit folder (when it is not).

Exit code 0: done, 2: wrong use, 3: refused, 4: the build failed, 5: the result is wrong, 6: no usable GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    from image import aiter_device, aiter_facts, aiter_work  # in the project's tree
except ImportError:  # in an image: beside this file, also for `python -I`
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import aiter_device  # type: ignore[import-not-found, no-redef]
    import aiter_facts  # type: ignore[import-not-found, no-redef]
    import aiter_work  # type: ignore[import-not-found, no-redef]

HERE = Path(__file__).resolve().parent
CHECK = HERE / "aiter_check.py"
LOG_TAIL = 40  # lines: enough to hold one compiler error with its notes


def environment(work: Path, arch: str, jobs: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of the builder: ours, less aiter's own settings, plus where to build and for what."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AITER_")}
    if not shutil.which(env.get("CXX", "c++")) and shutil.which("g++"):
        env["CXX"] = "g++"  # the builder links with $CXX, by default c++, which slim systems don't have
    # Without an id per build the module is the same file for every arch and in every build.
    flags = f"{env.get('HIPCC_COMPILE_FLAGS_APPEND', '')} -fuse-cuid=none".strip()
    return env | {
        "GPU_ARCHS": arch,
        "MAX_JOBS": str(jobs),
        "HIPCC_COMPILE_FLAGS_APPEND": flags,
        "AITER_JIT_DIR": str(work / "jit"),
        "AITER_ROOT_DIR": str(work / "root"),
        "HOME": str(work),
        "TMPDIR": str(work),
        **extra,
    }


def run_builder(
    order: Mapping[str, Any], env: Mapping[str, str], work: Path, log: Path, timeout: float
) -> None:
    """Run aiter_builder.py on `order` and wait; its output goes to `log`. Raises Stop with what went wrong.

    When this process is told to stop (or `timeout` seconds are over), the builder and its compilers go first.
    """
    (work / "order.json").write_text(json.dumps(order), encoding="utf-8")
    command = [sys.executable, "-u", str(HERE / "aiter_builder.py"), str(work / "order.json")]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            command, env=dict(env), cwd=work, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )  # fmt: skip
        try:
            code = child.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            aiter_work.end_processes(work)
    if code:
        failed(log, f"aiter's builder failed with exit code {code}")
    if code is None:
        failed(log, f"aiter's builder took longer than {timeout:.0f} s and was stopped")


def failed(log: Path, what: str) -> NoReturn:
    """Show the end of `log` on stderr, since a build step's files are gone with it, and raise Stop."""
    text = re.sub(r"\x1b\[\d*m", "", log.read_text(encoding="utf-8", errors="replace"))
    lines = text.splitlines()
    print("\n".join(lines[-LOG_TAIL:]), file=sys.stderr)
    # Not the errors of the builder's own trials of compiler flags: those have no file and line.
    errors = [line.strip() for line in lines if re.search(r"(:\d+:\d+: (fatal )?error: |^error: )", line)]
    reason = (errors or [line for line in lines if line.strip()][-1:] or ["no output"])[0]
    raise aiter_facts.Stop(4, f"{what}: {reason} (log: {log})")


def put(source: Path, target: Path) -> None:
    """Copy `source` to `target` so that `target` is either the whole file or not there."""
    half = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, half)
    half.chmod(0o755)
    with half.open("rb") as file:
        os.fsync(file.fileno())
    half.replace(target)


def link(target: Path, place: Path) -> None:
    """Make `place` a symbolic link to `target`, replacing what is there in one step.

    A link and not a copy: a set of modules is hundreds of MB, and hard links don't survive copying by layers.
    """
    if place.resolve() == target.resolve():
        return
    half = place.with_name(f".{place.name}.{os.getpid()}")
    half.unlink(missing_ok=True)
    half.symlink_to(target)
    half.replace(place)


def make_ready(dest: Path, package: aiter_facts.Package) -> None:
    """Make both module folders, each with an empty `build` (old locks go), and the .pth file for `dest`."""
    for folder in (dest, package.folder / "jit"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "build", ignore_errors=True)  # nobody else builds in an image build
        (folder / "build").mkdir(mode=0o755)
    path_file = package.folder.parent / "aiter-prebuilt.pth"
    half = path_file.with_suffix(".half")
    half.write_text(f"{dest}\n", encoding="utf-8")
    half.replace(path_file)


def install(built: Sequence[Path], dest: Path, package: aiter_facts.Package) -> list[Path]:
    """Move what was built into place, for both settings of AITER_JIT_DIR; returns the paths in `dest`."""
    placed = []
    for file in built:
        of_family = file.name == "lib.so"  # cpp_itfs, which looks in $AITER_ROOT_DIR/build/<name>
        target = (dest / "itfs" / "build" / file.parent.name if of_family else dest) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        put(file, target)
        if not of_family:
            link(target, package.folder / "jit" / file.name)
        placed.append(target)
    return placed


def check(paths: Sequence[Path], arch: str, core: str, package: aiter_facts.Package, *more: str) -> bool:
    """Whether aiter_check.py finds no problems in these modules; its lines go to our output."""
    header = package.meta / "csrc" / "include" / "aiter_enum.h"
    options = ["--arch", arch, "--core", core, "--header", str(header), "--load", *more]
    command = [sys.executable, str(CHECK), *map(str, paths), *options]
    return subprocess.run(command, check=False).returncode == 0


def adopt(package: aiter_facts.Package, arch: str, core: str, dest: Path, names: Sequence[str]) -> set[str]:
    """Link the modules that are there already (from a vendor's wheel) into `dest`; returns their names.

    With `names`, only those, and none when they are not right for this image: then they are built. Without,
    all of them, and Stop when they are not right.
    """
    found = sorted(p for p in (package.folder / "jit").glob("*.so") if p.is_file())
    found = [p for p in found if not names or p.stem in names]
    if found and not check(found, arch, core, package, "--at-least"):
        if not names:
            raise aiter_facts.Stop(5, f"what aiter {package.version} brought is not right (lines above)")
        return set()
    for module in found:
        dest.mkdir(parents=True, exist_ok=True)
        link(module, dest / module.name)
    return {module.stem for module in found}


def build(options: argparse.Namespace, data: Mapping[str, Any], package: aiter_facts.Package) -> None:
    """Modes core, set and the first half of device."""
    aiter_facts.require_arch(data, package.version, options.arch)
    known = aiter_facts.facts(data, package.version)
    core = known["core"]
    wanted = [core, *filter(None, options.modules.split(","))]
    have = adopt(package, options.arch, core, options.dest, [] if options.mode == "set" else wanted)
    todo = [name for name in wanted if name not in have]
    what = f"aiter {package.version} for {options.arch}"
    print(f"aiter-prebuild: {what}, modules that are there already: {len(have)}")
    if todo or options.itfs:
        compile_missing(options, package, core, todo, known["core-env"])
    make_ready(options.dest, package)


def compile_missing(
    options: argparse.Namespace,
    package: aiter_facts.Package,
    core: str,
    todo: Sequence[str],
    settings: Mapping[str, str],
) -> None:
    """Build the modules `todo` and the libraries of --itfs, check them, and move them into place."""
    work, handle = aiter_work.folder(options.dest)
    try:
        env = environment(work, options.arch, options.jobs, settings)
        where = {"package": str(package.folder), "meta": str(package.meta)}
        order = where | {"modules": list(todo), "itfs": options.itfs}
        run_builder(order, env, work, options.log, options.timeout)
        built = sorted((work / "jit").glob("*.so")) + sorted((work / "root" / "build").glob("*/lib.so"))
        if missing := set(todo) - {path.stem for path in built}:
            raise aiter_facts.Stop(5, f"the builder reported success but left no {' '.join(sorted(missing))}")
        if not check(built, options.arch, core, package):
            raise aiter_facts.Stop(5, "what was built is not right (lines above); nothing was installed")
        install(built, options.dest, package)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(handle)
    for line in options.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("built "):
            print(f"aiter-prebuild: {line}")
    options.log.unlink(missing_ok=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description="build aiter's modules while the image is built")
    parser.add_argument("mode", choices=["core", "set", "device", "off"])
    parser.add_argument("--arch", help="LLVM target name, for example gfx1151")
    parser.add_argument("--dest", type=Path, default=Path("/opt/aiter-prebuilt"))
    parser.add_argument("--data", type=Path, default=HERE / "aiter.toml")
    parser.add_argument("--modules", default="", help="names from aiter's optCompilerConfig.json, by commas")
    parser.add_argument("--itfs", action="append", default=[], help="one library: NAME:key=value,key=value")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all compiling")
    parser.add_argument("--log", type=Path, default=Path("/tmp/aiter-prebuild.log"))
    options = parser.parse_args(argv)
    if options.mode != "off" and not options.arch:
        parser.error(f"mode {options.mode} needs --arch")
    options.dest, options.log = options.dest.absolute(), options.log.absolute()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    try:
        data = tomllib.loads(options.data.read_text(encoding="utf-8"))
        package = aiter_facts.installed()
        if options.mode == "off":
            aiter_facts.off(data, package)
        else:
            if options.mode == "device":
                aiter_device.require_device()
            build(options, data, package)
            if options.mode == "device":
                aiter_device.import_test(aiter_facts.facts(data, package.version)["core"])
    except aiter_facts.Stop as stop:
        print(f"aiter-prebuild: {stop}", file=sys.stderr)
        return stop.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
