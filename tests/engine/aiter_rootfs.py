"""A root file system with Debian's hipcc and the real aiter of PyPI, and containers of it without any GPU.

Debian 13 is the oldest suite whose compiler knows gfx942 (clang 17; Debian 12 has clang 15). Its packages are
only unpacked, not configured (mmdebstrap's variant `extract`): all that the compiler and Python need of a
configuration is two links. Kept under .warmstart/cache by a digest of all that goes in.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from warmstart import engine, probe, run

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".warmstart" / "cache"
SUITE = "trixie"
PACKAGES = (
    "base-files bash dash coreutils findutils sed grep make perl-base libc-bin procps "
    "hipcc libamdhip64-dev g++ ninja-build python3-dev python3-setuptools python3-torch python3-pandas"
).split()
# Exactly these files, whatever index or folder they come from. 0.1.7.post2.dev18 is the only aiter on PyPI.
WHEELS = (
    "amd-aiter==0.1.7.post2.dev18 "
    "--hash=sha256:fe139d74438217c35e87e3b961166bac8db2d381eadccb371da2e63615f05a31\n"
    "pybind11==3.1.0 --hash=sha256:b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0\n"
)
SITE = "usr/local/lib/python3.13/dist-packages"  # .pth files are read there
LINKS = {f"usr/lib/x86_64-linux-gnu/lib{x}.so.3": f"{x}/lib{x}.so.3" for x in ("blas", "lapack")}
CORE = "module_aiter_enum"
KERNELS = "module_fused_kernels"
# Every module of this aiter that holds device code wants headers of a ROCm build of torch. Its source file
# fused_kernels.cu wants none, but is in no module: this entry puts it into aiter's own table of modules.
ENTRY = {
    "srcs": ["f'{AITER_CSRC_DIR}/kernels/fused_kernels.cu'"],
    "flags_extra_cc": [],
    "flags_extra_hip": [],
    "extra_ldflags": "None",
    "extra_include": [],
    "verbose": "False",
    "torch_exclude": "True",
    "blob_gen_cmd": "''",
}
IMPORTS = "import torch._dynamo, pandas, setuptools"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by warmstart's tests; may be deleted.\n"


def rootfs() -> Path:
    """The directory of the root file system, made when it is not there (half a minute). Needs root."""
    parts = json.dumps([SUITE, PACKAGES, WHEELS, SITE, LINKS, ENTRY, IMPORTS])
    folder = CACHE / f"aiter-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "CACHEDIR.TAG").write_text(TAG, encoding="utf-8")
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            (folder / "complete").touch()
    return folder / "rootfs"


def _make(folder: Path) -> None:
    root = folder / "rootfs"
    folder.mkdir()
    include = f"--include={','.join(PACKAGES)}"
    command = ["mmdebstrap", "--variant=extract", include, SUITE, f"{root}"]
    run.run(command, log_file=folder / "mmdebstrap.log")
    for place, target in LINKS.items():
        (root / place).symlink_to(target)
    (folder / "wheels.txt").write_text(WHEELS, encoding="utf-8")
    pip = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    fetch = [sys.executable, *"-m pip download --quiet --no-deps --require-hashes".split()]
    fetch += ["--dest", f"{folder}/wheels", "--requirement", f"{folder}/wheels.txt"]
    run.run(fetch, env=pip)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(root / SITE)
    table = root / SITE / "aiter" / "jit" / "optCompilerConfig.json"
    table.write_text(json.dumps(json.loads(table.read_text()) | {KERNELS: ENTRY}), encoding="utf-8")
    # Byte code of what every container imports: compiled once here, not in each of them.
    podman("run", "--rm", "--network", "none", "--rootfs", f"{root}", "python3", "-c", IMPORTS)


def podman(*words: str, ok: Sequence[int] = (0,), stdin: str | None = None) -> run.Result:
    """A podman call in the environment in which containers can start here."""
    env = engine.environment(probe.probe(ROOT / ".warmstart"))
    return run.run(["podman", *words], env=env, ok=ok, stdin=stdin)


class Box(NamedTuple):
    """A running container of the root file system; what it changes is gone with it."""

    name: str

    def call(self, *argv: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> run.Result:
        """Run a command inside; any exit code is accepted."""
        settings = [f"--env={k}={v}" for k, v in ({"HOME": "/tmp"} | dict(env or {})).items()]
        return podman("exec", "--interactive", *settings, self.name, *argv, ok=range(256), stdin=stdin or "")

    def write(self, path: str, text: str) -> None:
        """Make a file inside, with the folders above it."""
        done = self.call("sh", "-c", f"mkdir -p {Path(path).parent} && cat > {path}", stdin=text)
        assert done.code == 0, done.stderr

    def prebuild(self, *arguments: str, env: Mapping[str, str] | None = None) -> run.Result:
        """image/aiter_prebuild.py, as the build stage calls it."""
        script = ["/src/aiter_prebuild.py", *arguments, "--data", "/data/aiter.toml"]
        return self.call("python3", "-I", *script, env=env)

    def check(self, *arguments: str) -> run.Result:
        """image/aiter_check.py, as the image tests call it."""
        return self.call("python3", "-I", "/src/aiter_check.py", *arguments)

    def files(self, *folders: str) -> list[str]:
        """All paths under `folders` that are there; `find`'s own options may follow."""
        return self.call("find", *folders).stdout.split()

    def leavings(self) -> list[str]:
        """What a build left under /opt."""
        return [path for path in self.files("/opt") if path != "/opt"]


@contextmanager
def box(root: Path) -> Iterator[Box]:
    """A container without network and without devices, with the project's scripts at /src."""
    volumes = [f"--volume={ROOT / 'image'}:/src:ro", f"--volume={ROOT / 'arch'}:/data:ro"]
    rights = ["--network", "none", "--security-opt", "label=disable"]
    started = podman("run", "--detach", "--rm", *rights, *volumes, "--rootfs", f"{root}:O", "sleep", "7200")
    name = started.stdout.strip()
    try:
        yield Box(name)
    finally:
        podman("rm", "--force", "--time", "0", name, ok=range(256))
