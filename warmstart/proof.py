"""Proof that the engine can start a container: a program of 130 bytes, run in a container and in a build.

It needs no image and leaves none, and the build uses the mounts that ours use.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from warmstart import run
from warmstart.errors import CommandFailed
from warmstart.run import Result

# "exit(0)" in machine code: ELF machine number and instructions (from Linux' system call tables).
EXIT = {
    "x86_64": (62, bytes.fromhex("31ff b83c000000 0f05")),  # xor edi,edi; mov eax,60; syscall
    "aarch64": (183, bytes.fromhex("000080d2 a80b80d2 010000d4")),  # mov x0,0; mov x8,93; svc 0
}
PROOF = """\
FROM scratch
COPY exit /exit
RUN --mount=type=bind,from=more,target=/more --mount=type=secret,id=more,target=/secret \\
    --mount=type=cache,target=/cache ["/exit"]
"""


def secret(folder: Path) -> Path:
    """The file that the proof's build passes as a secret; a working container that it left is known by it."""
    return folder / "more" / "file"


def prepare(folder: Path) -> bool:
    """Lay out what the proof needs. False where there is no tiny program for this machine."""
    program = tiny_program(os.uname().machine)
    for name in ("rootfs", "more", "tmp"):
        (folder / name).mkdir()
    for path in (folder / "rootfs/exit", folder / "exit", secret(folder)):
        path.write_bytes(program)
        path.chmod(0o755)
    (folder / "Containerfile").write_text(PROOF, encoding="utf-8")
    return bool(program)


def fault(folder: Path, env: Mapping[str, str], *, podman: bool = True) -> str:
    """The engine's last error when a container or a build can't run with `env`; empty when both can."""
    env = {**env, "TMPDIR": str(folder / "tmp")}
    more, iid = folder / "more", folder / "iid"
    build: list[str | Path] = [*"buildah build --quiet --layers=false --force-rm --timestamp 0".split()]
    build += ["--build-context", f"more={more}", "--secret", f"id=more,src={secret(folder)}"]
    build += ["--iidfile", iid, "--file", folder / "Containerfile", folder]
    try:
        if podman:
            run.run(["podman", "run", "--rm", "--rootfs", folder / "rootfs", "/exit"], env=env, timeout=60)
        run.run(build, env=env, timeout=60)
        run.run(["buildah", "rmi", iid.read_text()], env=env)
    except CommandFailed as failure:
        return last_line(failure)
    return ""


def hint(error: str) -> str:
    """What to try, from the engine's last error."""
    if yours := os.environ.get("CONTAINERS_CONF"):
        relative = "" if yours.startswith("/") else ", which must be an absolute path for builds"
        return f"CONTAINERS_CONF={yours}{relative}: correct it, or unset it to have settings looked for"
    words = error.lower()
    if about_network(error):
        return "install the tools for container networks (iptables and slirp4netns, or nftables and passt)"
    if re.search(r"uidmap|subuid|user namespace|unshare|clone", words):
        return "rootless: install uidmap, name the user in /etc/subuid and /etc/subgid, allow user namespaces"
    if re.search(r"overlay|storage|graph|mount_program", words):
        return 'the image store fails here: set CONTAINERS_STORAGE_CONF to a storage.conf with driver = "vfs"'
    return "an OCI runtime (runc or crun) and the right to start containers are needed; try `podman run` by hand"


def about_network(error: str) -> bool:
    """Whether an error of the engine is about giving a container a network of its own."""
    return bool(re.search(r"netavark|\bcni\b|aardvark|iptables|nft|slirp|pasta|network", error.lower()))


def last_line(failure: CommandFailed) -> str:
    """The last line that says something, of a failed command."""
    result: Result | None = getattr(failure, "result", None)
    lines = (result.stderr or result.stdout).splitlines() if result else []
    lines = [line.strip() for line in lines if line.strip() and "level=warning" not in line]
    noise = re.compile(r'Error: building at STEP|time="|:? ?exit status')  # where it failed, not why
    told = [line for line in lines if not noise.match(line)]
    return (told or lines or [failure.message])[-1].removeprefix("Error: ")


def mounts(folder: Path) -> list[str]:
    """Mount points below a folder, the innermost first."""
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [point.replace("\\040", " ") for point in points]
    return sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True)


def tiny_program(machine: str) -> bytes:
    """A static ELF program (man 5 elf) that exits with 0; empty for a machine that is not in EXIT."""
    if machine not in EXIT:
        return b""
    number, code = EXIT[machine]
    start, header, segment = 0x400000, 64, 56
    size = header + segment + len(code)
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf = struct.pack(
        "<HHIQQQIHHHHHH", 2, number, 1, start + header + segment, header, 0, 0, header, segment, 1, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, start, start, size, size, 0x1000)
    return identity + elf + load + code
