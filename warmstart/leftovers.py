"""One build of a name at a time, and nothing left of one that was broken off; old layers freed when asked.

What belongs to our build is known for certain: each of its processes has our folder as TMPDIR, each of its
working containers records the path of a secret that we pass, and the images that its steps made are noted in
`<log>.steps`. Nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from warmstart import log, run
from warmstart.errors import Busy, CommandFailed
from warmstart.names import LABEL
from warmstart.probe import Capabilities, environment
from warmstart.proof import mounts

GRACE = 10.0  # seconds that processes of a dead build get to clean up after SIGTERM
ANNOTATION = f"{LABEL}build"  # in the manifest of every step's image; its value is the name that is built
ID = re.compile(r"[0-9a-f]{12,64}")  # of an image, short or whole
CACHES = "buildah-cache"  # begins the name of the folder of RUN cache mounts, which outlive a build


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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = _owner(file.read())
            if not wait:
                told = f"{name} is being built by {owner}"
                raise Busy(told, hint="wait for it, or leave out --no-wait") from None
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
        _sweep(caps, temporary, mark)
    temporary.mkdir(parents=True, exist_ok=True)
    running.touch()
    try:
        yield environment(caps) | {"TMPDIR": str(temporary)}
    finally:
        _sweep(caps, temporary, mark)


def marked(storage: Path, mark: Path) -> list[str]:
    """Ids of the working containers whose build was given the secret `mark`.

    buildah keeps the options of a build beside each working container (`userdata/buildah.json`).
    """
    text = json.dumps(f"src={mark}")[1:-1].encode()
    found = []
    for file in storage.glob("*-containers/*/userdata/buildah.json"):
        with contextlib.suppress(OSError):  # another build's, gone while we looked
            if text in file.read_bytes():
                found.append(file.parent.parent.name)
    return sorted(found)


def made(caps: Capabilities, name: str) -> set[str]:
    """Ids of the images in the store that builds of `name` made, those of their steps too."""
    found = set()
    for file in Path(caps.storage).glob("*-images/*/manifest"):
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(file.read_bytes())
            if (manifest.get("annotations") or {}).get(ANNOTATION) == name:
                found.add(file.parent.name)
    return found


def note(file: Path, steps: Iterable[str], image: str) -> None:
    """Add a line to `file`: the images that a build's steps made or used; `=` begins a whole build's."""
    ids = {*steps, image.removeprefix("sha256:")} - {""}
    with file.open("a", encoding="utf-8") as noted:
        noted.write(" ".join(["=" if image else "!", *sorted(ids)]) + "\n")


def prune(caps: Capabilities, state: Path) -> dict[str, int]:
    """Free what our earlier builds left: images, layers and RUN caches beyond the newest build of each arch.

    Returns the bytes and images freed: the sizes of what is gone, so nobody else's writing shows in them. Images
    with a name outside of localhost/ stay, and so does all that a build which runs right now, a container or the
    newest builds need.
    """
    freed, removed = 0, 0
    with contextlib.ExitStack() as held:
        for folder in sorted(path.parent for path in state.glob("*/build.lock")):
            try:
                held.enter_context(hold(state, folder.name, wait=False))
            except Busy as busy:
                log.info(f"nothing is freed while {busy.message}")
                return {"bytes": 0, "images": 0}
        images = {image["Id"]: image for image in _listed(caps)}
        old = _old(images, state)
        layers = _layers(caps, old)
        for image in old:
            words = ["podman", "rmi", "--no-prune", *(images[image].get("Names") or [image])]
            removed += run.run(words, env=environment(caps), ok=range(256)).code == 0
        for cache in state.glob(f"*/tmp/{CACHES}*") if not run.recorder.on else ():
            freed += _size(cache)
            shutil.rmtree(cache, ignore_errors=True)
            freed -= _size(cache)
        left = {layer["id"] for layer in _stored(caps, "layers")}
        freed += sum(size for layer, size in layers.items() if layer not in left)
    return {"bytes": freed, "images": removed}


def _old(images: Mapping[str, Mapping[str, Any]], state: Path) -> list[str]:
    """Ids of the images that can go, children before their parents."""
    newest: set[str] = set()
    noted: set[str] = set()
    for file in state.glob("*/*.steps"):
        # A line that was broken off, or anything that is no id, must never name an image.
        text = file.read_text(encoding="utf-8", errors="replace")
        whole = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip()]
        lines = [[line[0], *(word for word in line[1:] if ID.fullmatch(word))] for line in whole]
        newest.update(next((line[1:] for line in reversed(lines) if line[0] == "="), ()))
        noted.update(word for line in lines for word in line[1:])
    records = {path.parent.name: _image_id(path) for path in state.glob("*/image.json")}
    newest.update(image_id for image_id in records.values() if image_id)

    def ours(image: str) -> bool:
        labels = images[image].get("Labels") or {}
        local = all(name.startswith("localhost/") for name in images[image].get("Names") or ())
        return local and (labels.get(f"{LABEL}arch") in records or image.startswith(tuple(noted)))

    keep: set[str] = set()
    for image in (i for i in images if i.startswith(tuple(newest))):
        keep.update(_line(images, image))
    gone = [image for image in images if image not in keep and ours(image)]
    return sorted(gone, key=lambda image: len(_line(images, image)), reverse=True)


def _image_id(record: Path) -> str:
    """The image that a build's record names; empty when it can't be read."""
    try:
        return str(json.loads(record.read_bytes())["image_id"]).removeprefix("sha256:")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _line(images: Mapping[str, Mapping[str, Any]], image: str) -> list[str]:
    """An image and those that it was made from."""
    line = []
    while image in images and image not in line:
        line.append(image)
        image = images[image].get("ParentId") or ""
    return line


def _listed(caps: Capabilities) -> list[dict[str, Any]]:
    words = ["podman", "images", "--all", "--format", "json"]
    listed: list[dict[str, Any]] = json.loads(
        run.run(words, env=environment(caps), always=True).stdout or "[]"
    )
    return listed or []


def _layers(caps: Capabilities, images: Iterable[str]) -> dict[str, int]:
    """All layers of some images, each with its size in bytes, unpacked."""
    known = {layer["id"]: layer for layer in _stored(caps, "layers")}
    found: dict[str, int] = {}
    for image in (image for image in _stored(caps, "images") if image["id"] in set(images)):
        for layer in (image.get("layer", ""), *image.get("mapped-layers", ())):
            while layer in known and layer not in found:
                found[layer] = max(0, known[layer].get("diff-size", 0))
                layer = known[layer].get("parent", "")
    return found


def _stored(caps: Capabilities, kind: str) -> list[dict[str, Any]]:
    """What the store has noted of its images or layers (containers/storage, whichever driver)."""
    found: list[dict[str, Any]] = []
    for file in Path(caps.storage).glob(f"*-{kind}/{kind}.json"):
        with contextlib.suppress(OSError, ValueError):  # being written
            found += json.loads(file.read_bytes())
    return found


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0 when it is gone."""
    sizes = (Path(place, name).lstat().st_size for place, _, names in os.walk(folder) for name in names)
    return sum(sizes)


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        since = time.strftime("%H:%M:%S", time.localtime(owner["since"]))
        return f"pid {owner['pid']} ({owner['command']}) since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _sweep(caps: Capabilities, temporary: Path, mark: Path) -> None:
    env = environment(caps) | {"TMPDIR": str(temporary)}
    _stop(temporary)
    inside = ["buildah", "unshare"] if caps.rootless else []
    for container in _running(caps, inside, temporary):
        run.run([*inside, caps.runtime, "delete", "--force", container], env=env, ok=range(256))
    if containers := marked(Path(caps.storage), mark):
        with contextlib.suppress(CommandFailed):  # told below
            run.run(["buildah", "rm", *containers], env=env)
        if left := marked(Path(caps.storage), mark):
            log.warn(f"working containers could not be removed: buildah rm {' '.join(left)}")
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
