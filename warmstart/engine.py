"""Images and containers, by plain buildah and podman calls.

Every build keeps its layers, gets the lock's epoch as each file's time, and receives its tags only when it is
whole. An image's id is the digest of its config, written `sha256:<hex>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from warmstart import failure, log, run, store
from warmstart.errors import BaseMismatch, CommandFailed, DiskFull, ImageMissing, Unreachable
from warmstart.leftovers import MARK, hold, note, swept
from warmstart.probe import Capabilities, environment, probe
from warmstart.pruning import prune
from warmstart.run import Result
from warmstart.store import ANNOTATION, made

__all__ = ["Capabilities", "environment", "hold", "probe", "prune"]

# What `run_container` takes away from every container: no rights, no new ones, nothing to write but /tmp.
LEAST = ("--cap-drop=all", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp")

_CACHED = re.compile(r"--> Using cache ([0-9a-f]{11,64})$")  # the image of a step that was not run again


class LayerInfo(msgspec.Struct, frozen=True):
    """One entry of an image's history."""

    created_by: str
    size_bytes: int  # unpacked; 0 for an entry without files


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows about an image."""

    image_id: str
    size_bytes: int  # unpacked
    layers: tuple[LayerInfo, ...]  # oldest first
    labels: dict[str, str]
    env: dict[str, str]
    created: str  # RFC 3339
    tags: tuple[str, ...]


def build(
    caps: Capabilities,
    containerfile: str,
    *,
    context: Path,
    tags: Sequence[str],
    epoch: int,
    log_file: Path,
    contexts: Mapping[str, Path] | None = None,
    secrets: Mapping[str, Path] | None = None,
    volumes: Iterable[tuple[Path, str]] = (),
    devices: Iterable[str] = (),
    network: str = "",
    no_cache: bool = False,
    target: str = "",
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Build an image, tag it, and return its id.

    The folder of `log_file` is the build's own: Containerfile, temporary files and RUN caches lie there, and
    the caller holds it (`hold`). `contexts` are named build contexts. `secrets` and `volumes` (host path,
    path inside; read-only) are seen by RUN; of a volume an empty mount point stays in the image, of a context
    or a secret that is mounted nothing does. A secret without a file is left out.
    `epoch` is in seconds. `network` is "none" or, if empty, the engine's default.
    Raises BuildFailed, DiskFull, Unreachable, WheelMismatch, Interrupted, Terminated.
    """
    work = log_file.parent.resolve()
    file, iid = work / MARK, work / "build.iid"
    words: list[str | Path] = [*"buildah build --layers --force-rm --pull=never --format oci".split()]
    words += ["--timestamp", str(epoch), "--iidfile", iid, "--file", file, "--secret", f"id=mark,src={file}"]
    words += ["--annotation", f"{ANNOTATION}={work.name}"]
    words += [f"--build-context={name}={path.resolve()}" for name, path in sorted((contexts or {}).items())]
    words += [f"--secret=id={k},src={v.resolve()}" for k, v in sorted((secrets or {}).items()) if v.exists()]
    words += [f"--volume={path.resolve()}:{inside}:ro" for path, inside in volumes]
    passed = [f"--device={device}" for device in devices]
    words += passed
    words += [f"--network={network}"] if network else []
    words += [f"--target={target}"] if target else []
    words += ["--no-cache"] if no_cache else []
    words += ["--security-opt=label=disable"] if os.path.exists("/sys/fs/selinux/enforce") else []
    if caps.isolation == "chroot" and passed:
        log.warn("devices are ignored in this build: containers can't start here, so it runs in a chroot")
    if not run.recorder.on:
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(containerfile, encoding="utf-8")
        for old in (log_file, log_file.with_suffix(".sh")):
            old.unlink(missing_ok=True)
    image = _built(caps, [*words, context.resolve()], log_file, file, iid, on_line)
    if image:
        tag(caps, image, tags)
    return image


def import_rootfs(caps: Capabilities, tar: Path, ref: str, epoch: int, log_file: Path) -> str:
    """Make the base image `ref` from a rootfs tar and return its id: the same for the same tar and epoch.

    Raises as `build` does; the caller holds the folder of `log_file`.
    """
    text = f"FROM scratch\nADD {tar.name} /\n"
    # The layer cache doesn't know of the epoch: another one would be answered with the old image.
    return build(caps, text, context=tar.parent, tags=[ref], epoch=epoch, log_file=log_file, no_cache=True)


def tag(caps: Capabilities, image: str, tags: Sequence[str]) -> None:
    """Give an image its tags; each then points to this image alone."""
    if tags:
        _call(caps, "podman", "tag", image, *tags)


def exists(caps: Capabilities, ref: str) -> bool:
    """Whether an image of that name or id lies in the store."""
    return store.ask(caps, "image", "exists", ref, ok=(0, 1)).code == 0


def find(caps: Capabilities, label: str, value: str) -> str | None:
    """The id of the image with that label, or None. Tagged ones come first: their times are all the epoch."""
    found = images(caps, f"label={label}={value}")
    found.sort(key=lambda image: not image.get("Names"))
    return f"sha256:{found[0]['Id']}" if found else None


def inspect(caps: Capabilities, ref: str) -> ImageInfo:
    """What the store knows about an image. Raises ImageMissing."""
    told = store.ask(caps, "image", "inspect", ref, ok=(0, 125))
    if told.code:
        raise ImageMissing(f"no image {ref} here", hint="make image builds it")
    image = json.loads(told.stdout)[0]
    history = json.loads(store.ask(caps, "history", "--no-trunc", "--format", "json", ref).stdout)
    return ImageInfo(
        image_id=f"sha256:{image['Id']}",
        size_bytes=image["Size"],
        layers=tuple(LayerInfo(h.get("CreatedBy") or "", h.get("size") or 0) for h in reversed(history)),
        labels=image.get("Labels") or {},
        env=dict(entry.split("=", 1) for entry in image["Config"].get("Env") or ()),
        created=image["Created"],
        tags=tuple(image.get("RepoTags") or ()),
    )


def pull(caps: Capabilities, ref: str, digest: str) -> None:
    """Bring the image `ref` of exactly that manifest digest into the store.

    Raises BaseMismatch when the registry doesn't have that digest or what came has another, Unreachable.
    """
    name = re.sub(r":[^/:]+$", "", ref.partition("@")[0])
    exact = f"{name}@{digest}"
    if exists(caps, exact):
        return
    try:
        _call(caps, "podman", "pull", "--quiet", exact)
    except CommandFailed as failed:
        told = getattr(failed, "result", Result("", failed.message, 1, 0.0)).stderr
        if re.search(r"manifest unknown|not found|does not match|digest mismatch", told, re.IGNORECASE):
            hint = "the lock is out of date, or the registry was tampered with: make lock resolves anew"
            raise BaseMismatch(f"{name} has no image {digest[:19]}…", hint=hint) from None
        registry = name.partition("/")[0]
        hint = "set https_proxy, or name a mirror in registries.conf (CONTAINERS_REGISTRIES_CONF)"
        reason = failure.reason(told.splitlines(), failed.code)
        raise Unreachable(f"registry {registry} does not give {name}: {reason}", hint=hint) from None
    if not run.recorder.on and not exists(caps, exact):
        raise BaseMismatch(f"{name} came with another digest than {digest}", hint="make lock resolves anew")


def remove(caps: Capabilities, ref: str) -> bool:
    """Remove an image or a tag that nothing uses. Returns whether it was there and is gone."""
    return _call(caps, "podman", "rmi", ref, ok=(0, 1, 2, 125)).code == 0


def run_container(
    caps: Capabilities,
    image: str,
    command: Sequence[str] = (),
    *,
    name: str = "",
    env: Mapping[str, str] | None = None,
    volumes: Iterable[tuple[Path, str]] = (),
    devices: Iterable[str] = (),
    publish: Iterable[str] = (),
    options: Sequence[str] = (),
) -> str:
    """Start a container with the least rights and return its id.

    `volumes` are read-only; `options` are podman's own.
    """
    words = ["run", "--detach", "--pull=never", *LEAST]
    words += [f"--name={name}"] if name else []
    words += [f"--env={key}={value}" for key, value in (env or {}).items()]
    words += [f"--volume={path.resolve()}:{inside}:ro" for path, inside in volumes]
    words += [f"--device={device}" for device in devices] + [f"--publish={port}" for port in publish]
    return _call(caps, "podman", *words, *options, image, *command).stdout.strip()


@contextlib.contextmanager
def extracted(caps: Capabilities, image: str, path: str) -> Iterator[Path]:
    """A copy of a folder of an image, in a temporary place."""
    container = _call(caps, "podman", "create", "--pull=never", image, "true").stdout.strip()
    try:
        with tempfile.TemporaryDirectory(prefix="warmstart-") as folder:
            _call(caps, "podman", "cp", f"{container}:{path}", folder)
            yield Path(folder)
    finally:
        _call(caps, "podman", "rm", "--force", container)


def free_bytes(caps: Capabilities) -> int:
    """Bytes that are free for the image store."""
    return _free(Path(caps.storage))


def need_disk(caps: Capabilities, needed: int, *folders: Path) -> None:
    """Raises DiskFull unless `needed` bytes are free for the image store, and on the disks of `folders`."""
    for place in (Path(caps.storage), *folders):
        if (free := _free(place)) < needed:
            told = f"{place}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
            raise DiskFull(told, hint="make prune frees old images and caches, or move the store (storage.conf)")


def _free(place: Path) -> int:
    while not place.exists():
        place = place.parent
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def _built(
    caps: Capabilities,
    words: Sequence[str | Path],
    log_file: Path,
    file: Path,
    iid: Path,
    on_line: Callable[[str], None] | None,
) -> str:
    """Run the build and note the images of its steps. Returns the image's id; empty with --dry-run."""
    if run.recorder.on:
        run.run(words, env=environment(caps))
        return ""
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        if on_line:
            on_line(text)

    iid.unlink(missing_ok=True)
    image, before = "", made(caps, log_file.parent.name)
    try:
        with swept(caps, file.parent, file) as env:
            run.run(words, env=env, log_file=log_file, on_line=line)
        image = iid.read_text(encoding="utf-8").strip()
    except CommandFailed as failed:
        code = getattr(failed, "result", Result("", "", 1, 0.0)).code
        raise failure.explain(lines, log_file, log_file.with_suffix(".sh"), code) from None
    finally:
        steps = made(caps, log_file.parent.name) - before
        steps.update(cached[1] for text in lines if (cached := _CACHED.search(text)))
        note(log_file.with_suffix(".steps"), steps, image)
    return image


def images(caps: Capabilities, *filters: str) -> list[dict[str, Any]]:
    """What podman lists of the images that meet all of its `filters`."""
    return store.images(caps, *(word for condition in filters for word in ("--filter", condition)))


def _call(caps: Capabilities, *words: str, ok: Sequence[int] = (0,)) -> Result:
    return run.run(words, env=environment(caps), ok=ok)
