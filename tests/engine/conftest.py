"""An engine with an image store of its own, and a base image of some 5 MB made from this machine's shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmstart import engine
from warmstart.engine import Capabilities

# A shell starts what is in the background with SIGINT ignored, and what ignores it passes that on to its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EPOCH = 1_700_000_000
PROGRAMS = "sh cat cp mkdir rm sleep head ls touch true false stat id mount".split()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The engine works in this store, so tests see all there is in it and touch nothing else."""
    folder = tmp_path_factory.mktemp("store")
    conf = folder / "storage.conf"
    conf.write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\n'
        f'graphroot = "{folder}/graph"\nrootless_storage_path = "{folder}/graph"\n'
    )
    before = os.environ.get("CONTAINERS_STORAGE_CONF")
    os.environ["CONTAINERS_STORAGE_CONF"] = str(conf)
    try:
        yield folder / "graph"
    finally:
        for words in ("podman rm --all --force --time 0", "buildah rm --all", "buildah rmi --all --force"):
            subprocess.run(words.split(), check=False, capture_output=True)
        subprocess.run(["umount", str(folder / "graph" / "overlay")], check=False, capture_output=True)
        inside = [] if os.geteuid() == 0 else ["buildah", "unshare"]
        subprocess.run([*inside, "rm", "-rf", str(folder)], check=False, capture_output=True)
        os.environ.pop("CONTAINERS_STORAGE_CONF")
        if before is not None:
            os.environ["CONTAINERS_STORAGE_CONF"] = before


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.warmstart` folder."""
    folder = tmp_path_factory.mktemp("checkout") / ".warmstart"  # podman has trouble with such a name
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def caps(store: Path, state: Path) -> Iterator[Capabilities]:
    """The probed engine; what plain podman calls need is in the environment."""
    found = engine.probe(state)
    needed = engine.environment(found)
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    yield found
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rootfs tar: a shell, some programs and their libraries."""
    folder = tmp_path_factory.mktemp("rootfs")
    files = {}
    for name in PROGRAMS:
        program = shutil.which(name, path="/bin:/usr/bin")
        assert program
        files[f"bin/{name}"] = program
        told = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        for word in told.split():
            if word.startswith("/"):
                files[word[1:]] = word
    tar = folder / "rootfs.tar"
    with tarfile.open(tar, "w") as archive:
        for inside, path in sorted(files.items()):
            member = archive.gettarinfo(os.path.realpath(path), inside)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            with open(os.path.realpath(path), "rb") as content:
                archive.addfile(member, content)
    return tar


@pytest.fixture(scope="session")
def base(caps: Capabilities, rootfs: Path, state: Path) -> str:
    """The name of the base image."""
    ref = "localhost/warmstart-test:base"
    with engine.hold(state, "base"):
        engine.import_rootfs(caps, rootfs, ref, EPOCH, state / "base" / "base.log")
    return ref
