"""Device code for stand-ins: a small kernel, compiled by the real Triton for each arch. Needs no GPU."""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from warmstart import log, pipconf, run, targets
from warmstart.errors import CommandFailed, Unreachable
from warmstart.profile import Profile

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"  # clang's ClangOffloadBundler.rst: magic, u64 count, then the entries
ALIGN = 4096
LARGE = 100_000  # bytes: of Triton's part for NVIDIA GPUs only files below are kept

# Triton reads a kernel's source from its file, so this becomes one. Arguments: folder, then arch:wave …
COMPILE = '''\
import pathlib, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


source = ASTSource(add_one, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constexprs={(2,): 256})
for arch, wave in (word.split(":") for word in sys.argv[2:]):
    compiled = triton.compile(source, target=GPUTarget("hip", arch, int(wave)))
    pathlib.Path(sys.argv[1], f"{arch}.hsaco").write_bytes(compiled.asm["hsaco"])
'''


def compiled(cache: Path, version: str, waves: Mapping[str, int]) -> dict[str, bytes]:
    """One code object for each arch of `waves` (arch → lanes of a wave), kept below `cache`.

    `version` is Triton's; pip fetches it for this machine's Python. Raises Unreachable, CommandFailed.
    """
    folder = cache / f"code-triton-{version}"
    missing = {arch: wave for arch, wave in waves.items() if not (folder / f"{arch}.hsaco").is_file()}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with log.step(f"device code for {len(missing)} archs by Triton {version}"):
            _compile(_unpacked(cache, version), folder, missing)
    return {arch: (folder / f"{arch}.hsaco").read_bytes() for arch in waves}


def bundle(code: Mapping[str, bytes]) -> bytes:
    """An offload bundle of code objects by arch, as HIP's compiler embeds it in a library."""
    labels = ["host-x86_64-unknown-linux-gnu-", *(f"hipv4-amdgcn-amd-amdhsa--{arch}" for arch in sorted(code))]
    objects = [b"", *(code[arch] for arch in sorted(code))]
    head = len(BUNDLE) + 8 + sum(24 + len(label) for label in labels)
    table, body = BUNDLE + struct.pack("<Q", len(labels)), b""
    begin = _up(head)
    for label, content in zip(labels, objects, strict=True):
        table += struct.pack("<QQQ", begin + len(body), len(content), len(label)) + label.encode()
        body += content.ljust(_up(len(content)), b"\0")
    return table.ljust(begin, b"\0") + body


def pack(arch: str, code: bytes) -> bytes:
    """A kpack: header, code object, and the table that names its arch (rocm-kpack)."""
    kernel = {arch: {"offset": 16, "size": len(code)}}
    table = msgspec.msgpack.encode({"gfx_arches": [arch], "toc": {"add_one": kernel}})
    return struct.pack("<4sIQ", b"KPAK", 1, 16 + len(code)) + code + table


def fetch(cache: Path, version: str, profile: Profile | None = None) -> Path:
    """Triton's wheel of a version from the general index: for a profile's Python, or for this machine's own."""
    folder = cache / ("triton-image" if profile else "triton-host")
    pattern = f"triton-{version}-*.whl"
    if there := sorted(folder.glob(pattern)):
        return there[0]
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, "tmp*")
    argv = [sys.executable, "-Im", "pip", "download", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
    if profile:
        python = profile.versions.python
        argv += ["--python-version", python, "--implementation", "cp", "--abi", "cp" + python.replace(".", "")]
        argv += [word for name in targets.platforms(profile.wheels.platform) for word in ("--platform", name)]
    with tempfile.TemporaryDirectory(dir=folder) as work:
        try:
            run.run([*argv, "--dest", work, f"triton=={version}"], env=pipconf.environment() | {"TMPDIR": work})
        except CommandFailed as failed:
            raise pipconf.explain(failed, f"triton {version}", pipconf.read().places) from None
        found = sorted(Path(work).glob(pattern))
        if not found:
            raise Unreachable(f"pip did not bring triton {version}", hint=pipconf.NETWORK_HINT)
        return found[0].replace(folder / found[0].name)


def _unpacked(cache: Path, version: str) -> Path:
    """Triton for this machine's Python, unpacked: not installed, so that the tools' own environment stays as it is."""
    target = cache / f"triton-{version}-py{sys.version_info[0]}{sys.version_info[1]}"
    if not target.is_dir():
        _sweep(cache, f"{target.name}.*")
        wheel = fetch(cache, version)
        beside = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache))
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if "/backends/nvidia/" not in member.filename or member.file_size < LARGE:
                        archive.extract(member, beside)
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        wheel.unlink()
    return target


def _sweep(folder: Path, pattern: str) -> None:
    """Remove what killed processes left. The caller holds the only right to work here."""
    for left in folder.glob(pattern):
        shutil.rmtree(left, ignore_errors=True)


def _compile(triton: Path, folder: Path, waves: Mapping[str, int]) -> None:
    with tempfile.TemporaryDirectory() as work:
        script = Path(work, "compile.py")
        script.write_text(COMPILE, encoding="utf-8")
        words = [f"{arch}:{wave}" for arch, wave in sorted(waves.items())]
        env = {"PYTHONPATH": str(triton), "TRITON_CACHE_DIR": work, "TRITON_HOME": work}
        run.run([sys.executable, script, work, *words], env=env)
        for arch in waves:
            shutil.move(Path(work, f"{arch}.hsaco"), folder / f"{arch}.hsaco")


def _up(number: int) -> int:
    return -(-number // ALIGN) * ALIGN
