"""Old images, layers and caches freed when asked, and with them what builds left that were cut off."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmstart import log, run, store
from warmstart.errors import Busy
from warmstart.leftovers import CACHES, MARK, Left, cut_off, folders, hold, sweep, told
from warmstart.names import LABEL
from warmstart.probe import Capabilities, environment
from warmstart.proof import mounts

ID = re.compile(r"[0-9a-f]{12,64}")  # of an image, short or whole
ONE_BUILD = re.compile(r"-[0-9a-f]{12}$")  # ends the name of one build; the other name of an arch's moves to the newest


def prune(caps: Capabilities, state: Path) -> dict[str, int]:
    """Free what our earlier builds left: images, layers and RUN caches beyond the newest build of each arch.

    So it does with all that builds left which were cut off. Returns the bytes and images freed: the sizes of what is
    gone, so nobody else's writing shows in them. Images with a name outside of localhost/ stay, seeds too, what another
    checkout built last, and so does all that a build which runs right now, a container or the newest builds need.
    """
    freed, removed = 0, 0
    left = cut_off(Path(caps.storage), state)
    with contextlib.ExitStack() as held:
        for folder in folders(state):
            try:
                held.enter_context(hold(folder.parent, folder.name, wait=False))
            except Busy as busy:
                log.info(f"nothing is freed while {busy.message}")
                return {"bytes": 0, "images": 0}
        for one in left:
            freed += _clear(caps, one)
        images = {image["Id"]: image for image in store.images(caps, "--all")}
        old = _old(images, state)
        layers = store.layers(Path(caps.storage), old)
        for image in old:
            words = ["podman", "rmi", "--no-prune", *(images[image].get("Names") or [image])]
            removed += run.run(words, env=environment(caps), ok=range(256)).code == 0
        for cache in state.glob(f"*/tmp/{CACHES}*") if not run.recorder.on else ():
            freed += _size(cache)
            shutil.rmtree(cache, ignore_errors=True)
            freed -= _size(cache)
        still = {layer["id"] for layer in store.stored(Path(caps.storage), "layers")}
        freed += sum(size for layer, size in layers.items() if layer not in still)
    return {"bytes": freed, "images": removed}


def _clear(caps: Capabilities, left: Left) -> int:
    """Remove what a build that is over left; its images become such without a name. Returns the bytes freed."""
    if run.recorder.on:
        if left.containers:
            run.run(["buildah", "rm", *left.containers])
        for image, names in left.images.items():
            run.run(["podman", "untag", image, *names])
        return 0
    storage = Path(caps.storage)
    layers = [one["layer"] for one in store.stored(storage, "containers") if one["id"] in left.containers]
    written = [place for layer in layers for place in storage.glob(f"*/{layer}/diff")]
    before = sum(map(_size, written))
    temporary = left.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    sweep(caps, temporary, left.mark)
    if left.mark.name != MARK and not mounts(left.folder):
        shutil.rmtree(left.folder, ignore_errors=True)
    log.info(f"removed what was left of {left.folder.name}, which was cut off: {told(left)}")
    return before - sum(map(_size, written))


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
        if f"{LABEL}seed" in labels:  # kept on purpose
            return False
        local = all(name.startswith("localhost/") for name in images[image].get("Names") or ())
        return local and (labels.get(f"{LABEL}arch") in records or image.startswith(tuple(noted)))

    def current(image: str) -> bool:
        """Whether it has the name by which an arch's image is used, whoever built it."""
        arch = (images[image].get("Labels") or {}).get(f"{LABEL}arch")
        return bool(arch) and not all(map(ONE_BUILD.search, images[image].get("Names") or ()))

    keep: set[str] = set()
    for image in (i for i in images if i.startswith(tuple(newest)) or current(i)):
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


def _size(folder: Path) -> int:
    """Bytes of the files in a folder; 0 when it is gone."""
    sizes = (Path(place, name).lstat().st_size for place, _, names in os.walk(folder) for name in names)
    return sum(sizes)
