"""What lies in the image store: asked of podman, or read from its files (containers/storage, whichever driver).

An image that a broken-off build was writing has no manifest, and with it podman refuses to list any image at all.
Such an image is removed where it is met, and nothing that can be read ever is.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warmstart import log, run
from warmstart.errors import CommandFailed
from warmstart.names import LABEL
from warmstart.probe import Capabilities, environment
from warmstart.run import Result

ANNOTATION = f"{LABEL}build"  # in the manifest of every step's image; its value is the name that is built
PAUSE = 2.0  # seconds; a build that is just writing an image is through with that in milliseconds
BROKEN = re.compile(r'item named \\?"manifest\\?" for image with ID \\?"([0-9a-f]{64})')  # podman 4 and 5
TEMPORARY = re.compile(r"(?:[^/]+/)*[0-9a-f]{64}-tmp(?::latest)?")  # buildah's name for an image that it commits

# buildah's name for the container of a step: it begins with the image of the step before, which has no name of its own.
STEP = re.compile(r"[0-9a-f]{12}-working-container(-\d+)?")


def ask(caps: Capabilities, *words: str, ok: Sequence[int] = (0,)) -> Result:
    """What podman answers, also when an image in the store is broken: after a warning it is removed then.

    Raises CommandFailed. With --dry-run nothing is removed.
    """
    waited: set[str] = set()
    removed: set[str] = set()
    while True:
        failed = None
        try:
            told = run.run(["podman", *words], env=environment(caps), ok=ok, always=True)
        except CommandFailed as caught:
            failed, told = caught, getattr(caught, "result", Result("", "", 1, 0.0))
        broken = broken_image(told)
        if broken and broken not in waited:
            waited |= {broken, *unreadable(Path(caps.storage))}
            time.sleep(PAUSE)
        elif broken and broken not in removed and _removed(caps, broken):
            removed.add(broken)
        elif broken:
            message = f"podman can't read image {broken[:12]}, and so none: it has no manifest"
            raise CommandFailed(message, hint=f"podman rmi --force {broken}")
        elif failed:
            raise failed
        else:
            return told


def images(caps: Capabilities, *words: str) -> list[dict[str, Any]]:
    """What `podman images` lists with these options. With --dry-run nothing, if a broken image stands in its way."""
    try:
        listed: list[dict[str, Any]] = json.loads(ask(caps, "images", "--format", "json", *words).stdout or "[]")
    except CommandFailed as failed:
        if not run.recorder.on or not failed.hint.startswith("podman rmi "):
            raise
        log.warn(f"{failed.message} ({failed.hint}); this dry run goes on as if there were no images")
        return []
    return listed or []


def broken_image(told: Result) -> str:
    """The id of the image for which podman failed because it has no manifest; empty for any other answer."""
    found = BROKEN.search(told.stderr) if told.code else None
    return found[1] if found else ""


def unreadable(storage: Path) -> set[str]:
    """Ids of the images that have no manifest, right now: of one that is just being written this is true, too."""
    return {image["id"] for image in stored(storage, "images") if not _manifest(storage, image["id"])}


def temporary(storage: Path, names: Collection[str]) -> dict[str, list[str]]:
    """Images of builds of these names that still have the name that buildah gives while it commits, and that name."""
    found = {}
    for image in stored(storage, "images"):
        left = [name for name in image.get("names") or () if TEMPORARY.fullmatch(name)]
        if left and maker(storage, image["id"]) in names:
            found[image["id"]] = left
    return found


def maker(storage: Path, image: str) -> str:
    """The name of the build that made an image; empty for others."""
    return _annotation(_manifest(storage, image))


def lasting(look: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What a look at the store finds, and finds again after a pause: so it is no running build's."""
    first = look()
    if not first:
        return {}
    time.sleep(PAUSE)
    return {key: value for key, value in look().items() if first.get(key) == value}


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


def half_made(storage: Path, names: Collection[str]) -> dict[str, str]:
    """Working containers that were broken off before buildah had noted their build: by id the name of the build.

    They are those of a step after the first, so they are told by the image of the step before. Podman's own containers
    have metadata.
    """
    found = {}
    for one in stored(storage, "containers"):
        step = not one.get("metadata") and any(STEP.fullmatch(name) for name in one.get("names") or ())
        noted = next(storage.glob(f"*-containers/{one['id']}/userdata/buildah.json"), None)
        if step and not noted and (name := maker(storage, one.get("image", ""))) in names:
            found[one["id"]] = name
    return found


def made(caps: Capabilities, name: str) -> set[str]:
    """Ids of the images in the store that builds of `name` made, those of their steps too."""
    files = Path(caps.storage).glob("*-images/*/manifest")
    return {file.parent.name for file in files if _annotation(file) == name}


def layers(storage: Path, images: Iterable[str]) -> dict[str, int]:
    """All layers of some images, each with its size in bytes, unpacked."""
    known = {layer["id"]: layer for layer in stored(storage, "layers")}
    wanted, found = set(images), dict[str, int]()
    for image in (image for image in stored(storage, "images") if image["id"] in wanted):
        for layer in (image.get("layer", ""), *image.get("mapped-layers", ())):
            while layer in known and layer not in found:
                found[layer] = max(0, known[layer].get("diff-size", 0))
                layer = known[layer].get("parent", "")
    return found


def stored(storage: Path, kind: str) -> list[dict[str, Any]]:
    """What the store has noted of its images, layers or containers."""
    found: list[dict[str, Any]] = []
    for file in storage.glob(f"*-{kind}/*{kind}.json"):
        with contextlib.suppress(OSError, ValueError):  # being written
            found += json.loads(file.read_bytes()) or []
    return found


def _removed(caps: Capabilities, image: str) -> bool:
    if run.recorder.on or _manifest(Path(caps.storage), image):
        return False
    words = ["podman", "rmi", "--force", "--no-prune", image]
    if run.run(words, env=environment(caps), ok=range(256)).code:
        return False
    log.warn(f"an image without a manifest kept podman from listing any: removed it (podman rmi --force {image[:12]})")
    return True


def _manifest(storage: Path, image: str) -> Path | None:
    return next(storage.glob(f"*-images/{image}/manifest"), None) if image else None


def _annotation(manifest: Path | None) -> str:
    """The name of the build that made the image; empty for others."""
    try:
        read = json.loads(manifest.read_bytes()) if manifest else {}
        return str((read.get("annotations") or {}).get(ANNOTATION, ""))
    except (OSError, ValueError, AttributeError):
        return ""
