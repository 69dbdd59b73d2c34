"""One build of a name at a time, and nothing left of one that was broken off.

What belongs to our build is known for certain: each of its processes has our folder as TMPDIR, each of its
working containers records the path of a secret that we pass, the images that its steps made have our annotation
and are noted in `<log>.steps`. Nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from warmstart import log, run, store
from warmstart.errors import Busy, CommandFailed
from warmstart.probe import Capabilities, environment
from warmstart.proof import mounts, secret
from warmstart.store import marked

GRACE = 10.0  # seconds that processes of a dead build get to clean up after SIGTERM
LOOKS = 10  # at a right that another has, 50 ms apart: who only asks whether a build runs has it for a moment, too
CACHES = "buildah-cache"  # begins the name of the folder of RUN cache mounts, which outlive a build
MARK = "build.containerfile"  # a build's file in its folder, which it passes as a secret


class Left(msgspec.Struct, frozen=True):
    """What a build, or a probe of the engine, left that was cut off."""

    folder: Path  # its own, resolved
    mark: Path  # what it passed as a secret
    containers: dict[str, str]  # working containers: name of each by id
    images: dict[str, list[str]]  # buildah's temporary names by id
    files: bool


@contextlib.contextmanager
def hold(state: Path, name: str, wait: bool = True) -> Iterator[None]:
    """Hold the only right to build `name` in the folder `state`.

    Another build is waited for, saying for whom; with `wait` false it raises Busy instead. The right ends
    with the process, so a dead owner never blocks.
    """
    if run.recorder.on:
        yield
        return
    folder = state / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("a+", encoding="utf-8") as file:
        if not _taken(file.fileno()):
            file.seek(0)
            owner = _owner(file.read())
            if not wait:
                told = f"{name} is being built by {owner}"
                raise Busy(told, hint="wait for it, or leave out --no-wait")
            log.info(f"{name}: waiting for {owner}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "command": shlex.join(sys.argv), "since": time.time()}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


@contextlib.contextmanager
def swept(caps: Capabilities, work: Path, mark: Path) -> Iterator[dict[str, str]]:
    """The environment for a build in the folder `work`, which leaves nothing behind but what it made.

    Removes first what a dead build left here, and last what this one did. `mark` is the file that the build
    passes as a secret. The caller holds the right to build here.
    """
    temporary = work / "tmp"
    running = temporary / "running"
    if running.exists():
        sweep(caps, temporary, mark)
    temporary.mkdir(parents=True, exist_ok=True)
    running.touch()
    try:
        yield environment(caps) | {"TMPDIR": str(temporary)}
    finally:
        sweep(caps, temporary, mark)


def note(file: Path, steps: Iterable[str], image: str) -> None:
    """Add a line to `file`: the images that a build's steps made or used; `=` begins a whole build's."""
    ids = {*steps, image.removeprefix("sha256:")} - {""}
    with file.open("a", encoding="utf-8") as noted:
        noted.write(" ".join(["=" if image else "!", *sorted(ids)]) + "\n")


def cut_off(storage: Path, state: Path) -> list[Left]:
    """What is left of builds and probes below `state` that are over. Changes nothing."""
    running, over = set(), []
    for folder in folders(state):
        if _held(folder / "build.lock"):
            running.add(folder.name)
        else:
            over.append((folder, folder / MARK))
    over += [(folder, secret(folder)) for folder in probes(state)]
    names = {folder.name for folder, _ in over} - running
    images = store.lasting(lambda: store.temporary(storage, names))
    half = store.lasting(lambda: store.half_made(storage, names))
    called = {one["id"]: (one.get("names") or [one["id"][:12]])[0] for one in store.stored(storage, "containers")}
    found = []
    for folder, mark in over:
        own = {image: left for image, left in images.items() if store.maker(storage, image) == folder.name}
        ids = [*marked(storage, mark), *(one for one, name in half.items() if name == folder.name)]
        containers = {one: called[one] for one in ids if one in called}
        files = (folder / "tmp" / "running").exists() or mark.name != MARK
        # Once more: it may have begun just then, and a probe has its right a moment after its folder.
        if (containers or own or files) and not _held(folder / "build.lock" if mark.name == MARK else folder):
            found.append(Left(folder, mark, containers, own, files))
    return found


def probes(state: Path) -> list[Path]:
    """The folders of probes of the engine that were cut off."""
    return sorted(folder.resolve() for folder in state.glob("probe-*") if folder.is_dir() and not _held(folder))


def folders(state: Path) -> list[Path]:
    """The folders of all builds, those of rehearsals too."""
    locks = (lock for pattern in ("*/build.lock", "*/*/build.lock") for lock in state.glob(pattern))
    return sorted(lock.parent.resolve() for lock in locks)


def _taken(right: int) -> bool:
    """Take a right that nobody has; whether that could be done."""
    for look in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(right, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if look + 1 < LOOKS:
            time.sleep(0.05)
    return False


def _held(path: Path) -> bool:
    """Whether a process has the right to a file or folder. Asking takes it for a moment, shared."""
    try:
        right = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(right, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(right)
    return False


def told(left: Left) -> str:
    """What was left, in words."""
    parts = [f"working containers {_some(left.containers.values())}"] if left.containers else []
    parts += [f"images that were being written {_some(image[:12] for image in left.images)}"] if left.images else []
    parts += [f"files in {left.folder}"] if left.files else []
    return "; ".join(parts)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        since = time.strftime("%H:%M:%S", time.localtime(owner["since"]))
        return f"pid {owner['pid']} ({owner['command']}) since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def sweep(caps: Capabilities, temporary: Path, mark: Path) -> None:
    """Remove what the build left whose TMPDIR is `temporary`. The caller knows that it is over."""
    env = environment(caps) | {"TMPDIR": str(temporary)}
    _stop(temporary)
    inside = ["buildah", "unshare"] if caps.rootless else []
    for container in _running(caps, inside, temporary):
        run.run([*inside, caps.runtime, "delete", "--force", container], env=env, ok=range(256))
    storage = Path(caps.storage)
    half = store.lasting(lambda: store.half_made(storage, {temporary.parent.name}))
    if containers := [*marked(storage, mark), *half]:
        with contextlib.suppress(CommandFailed):  # told below
            run.run(["buildah", "rm", *containers], env=env)
        if left := marked(storage, mark):
            log.warn(f"working containers could not be removed: buildah rm {' '.join(left)}")
    _settle(caps, temporary.parent)
    for mount in mounts(temporary):
        run.run([*inside, "umount", "--lazy", mount], ok=range(256))
    if mounts(temporary):
        log.warn(f"{temporary} stays: something is mounted there")
        return
    for path in temporary.glob("*"):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
        elif not path.name.startswith(CACHES):
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():  # of another user of our user namespace
                run.run([*inside, "rm", "-rf", path], env=env, ok=range(256))


def _settle(caps: Capabilities, folder: Path) -> None:
    """Mend what a build in this folder was writing: an image without a manifest goes, one with a temporary name
    loses that, and is noted, so that prune frees it unless a build needs it."""
    storage = Path(caps.storage)
    with contextlib.suppress(CommandFailed):  # the next one that lists images tells it
        if store.unreadable(storage):
            store.images(caps)
    named = store.lasting(lambda: store.temporary(storage, {folder.name}))
    for image, names in named.items():
        run.run(["podman", "untag", image, *names], env=environment(caps), ok=range(256))
    if named:
        note(folder / "cut.steps", named, "")


def _running(caps: Capabilities, inside: list[str], temporary: Path) -> list[str]:
    """Ids of the OCI runtime's containers that a RUN of ours started: their bundles lie in `temporary`."""
    told = run.run([*inside, caps.runtime, "list", "--format", "json"], env=environment(caps), ok=range(256))
    with contextlib.suppress(ValueError):
        listed = json.loads(told.stdout) or []
        return [found["id"] for found in listed if found["bundle"].startswith(f"{temporary}/")]
    return []


def _stop(temporary: Path) -> None:
    """End the processes of a build that outlived us."""
    end = time.monotonic() + GRACE
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in (left := _processes(temporary)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = _processes(temporary)
        if not left:
            return


def _processes(temporary: Path) -> list[int]:
    """Processes whose TMPDIR is `temporary`: buildah and its helpers, not what runs inside the containers."""
    wanted = f"TMPDIR={temporary}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
