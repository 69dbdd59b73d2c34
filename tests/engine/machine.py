"""A pretended host for tools/setup: a folder for /, a PATH with nothing but what the host is said to have."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = "cat dirname env flock id mkdir mv readlink rm sed setsid sh sha256sum tail uname".split()
ENGINE = "buildah podman skopeo crun newuidmap fuse-overlayfs patch slirp4netns pasta iptables nft mmdebstrap".split()
ENGINE += ["docker-registry"]  # for tests
FILES = [
    "usr/bin/catatonit",
    "usr/lib/podman/netavark",
    "usr/lib/podman/aardvark-dns",
    "usr/share/keyrings/debian-archive-keyring.gpg",
    "etc/ssl/certs",
]
RELEASES = {
    "bookworm": 'ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME=bookworm',
    "trixie": 'ID=debian\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_CODENAME=trixie',
    "noble": 'ID=ubuntu\nID_LIKE=debian\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\nUBUNTU_CODENAME=noble',
    "jammy": 'ID=ubuntu\nID_LIKE=debian\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\nUBUNTU_CODENAME=jammy',
    "fedora": 'ID=fedora\nPRETTY_NAME="Fedora Linux 43"',
    "rocky": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nPRETTY_NAME="Rocky Linux 10"',
    "arch": 'ID=arch\nPRETTY_NAME="Arch Linux"',
    "nixos": 'ID=nixos\nPRETTY_NAME="NixOS 25.11"',
}
MANAGERS = {
    "bookworm": "apt-get",
    "trixie": "apt-get",
    "noble": "apt-get",
    "jammy": "apt-get",
    "fedora": "dnf",
    "rocky": "dnf",
    "arch": "pacman",
}


class Machine:
    """A pretended host and a checkout on it."""

    def __init__(self, folder: Path) -> None:
        self.host = folder / "host"
        self.bin = self.host / "usr" / "bin"
        self.project = folder / "project"
        self.calls = folder / "calls"
        self.bin.mkdir(parents=True)
        (self.project / "tools").mkdir(parents=True)
        for name in ("tools/setup", "requirements.txt", "requirements-test.txt"):
            shutil.copy(ROOT / name, self.project / name)
        for name in TOOLS:
            self.link(name, shutil.which(name))
        self.link("python3", sys.executable)
        self.program("id", "echo 0")

    def link(self, name: str, target: str | None) -> None:
        """A program that is really there."""
        assert target, name
        (self.bin / name).symlink_to(target)

    def program(self, name: str, text: str = "") -> None:
        """A program that writes down how it was called, then does `text`."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{text}\n', encoding="utf-8")
        path.chmod(0o755)

    def release(self, name: str) -> None:
        """What /etc/os-release says, and the package manager that goes with it."""
        (self.host / "etc").mkdir(exist_ok=True)
        (self.host / "etc/os-release").write_text(RELEASES[name] + "\n", encoding="utf-8")
        if name in MANAGERS:
            self.program(MANAGERS[name])

    def engine(self) -> None:
        """All that the engine needs."""
        for name in ENGINE:
            self.program(name)
        for name in FILES:
            (self.host / name).parent.mkdir(parents=True, exist_ok=True)
            (self.host / name).touch()

    def venv(self, kind: str = "run") -> None:
        """A finished .venv."""
        (self.project / ".venv/bin").mkdir(parents=True)
        (self.project / ".venv/bin/python").symlink_to(sys.executable)
        lock = {"run": "requirements.txt", "test": "requirements-test.txt"}[kind]
        digest = hashlib.sha256((self.project / lock).read_bytes()).hexdigest()
        stamp = f"{os.path.realpath(sys.executable)}\n{self.project}\n{kind}\n{digest}  -\n"
        (self.project / ".venv/.stamp").write_text(stamp, encoding="utf-8")

    def start(self, *args: str) -> subprocess.Popen[str]:
        """tools/setup, running."""
        return subprocess.Popen(
            [self.project / "tools/setup", *args],
            env={"PATH": str(self.bin), "WARMSTART_HOST": str(self.host), "CI": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def setup(self, *args: str) -> tuple[int, str]:
        """tools/setup's exit code and what it said; it says nothing on stdout."""
        running = self.start(*args)
        out, err = running.communicate(timeout=120)
        assert out == ""
        return running.returncode, err

    def called(self) -> list[str]:
        """The calls of pretended programs but `id`, in order."""
        lines = self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []
        return [line for line in lines if not line.startswith("id ")]
