"""Where seeds lie here: one OCI image layout each, `.warmstart/seeds/<cache key>/<tag>`."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from warmstart import cachedir, hints, run, seedlabels
from warmstart.errors import NothingToSeed, UsageError
from warmstart.leftovers import hold
from warmstart.seedlayout import Image

NAME = "localhost/warmstart/seed"  # of seeds in podman's storage; their tag is `seedlabels.tag`
FOLDER = "seeds"  # below .warmstart
TAG = re.compile(cachedir.KEY + "(-[a-z0-9]+)*")


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that lies here."""

    seed: str  # its tag
    digest: str
    tiers: tuple[str, ...]
    cu: int
    bytes: int
    packed: int
    folder: str
    fits: str  # "yes", or why it doesn't
    files: int = 0
    left_out: int = 0  # files of the cache that belong to something incomplete
    model: str = ""  # of artefacts, with the flags, as the seed's maker said: nothing checks it
    flags: str = ""


def layouts(state: Path) -> list[Path]:
    """The layouts of all seeds here, in order."""
    return sorted(file.parent for file in (state / FOLDER).glob("*/*/index.json"))


def named(state: Path, source: str) -> Path | None:
    """The layout that a tag or a folder names; None for what is a name in a registry. Raises NothingToSeed."""
    tag = source.removeprefix(f"{NAME}:")
    if TAG.fullmatch(tag):
        return chosen(state, tag)
    folder = Path(source.removeprefix("oci:")).expanduser()
    return folder if (folder / "oci-layout").is_file() else None


def chosen(state: Path, tag: str) -> Path:
    """The layout of that tag, or the only one if none is named. Raises NothingToSeed, UsageError."""
    found = {folder.name: folder for folder in layouts(state)}
    if tag in found:
        return found[tag]
    known = ", ".join(found) or "none"
    if len(found) == 1 and not TAG.fullmatch(tag):
        return next(iter(found.values()))
    if found and not TAG.fullmatch(tag):
        raise UsageError("which seed?", hint=hints.options(f"--seed {next(iter(found))}") + f"; seeds: {known}")
    told = f"there is no seed {tag} here" if tag else "there is no seed here"
    raise NothingToSeed(told, hint=f"seeds: {known}; `{hints.call('seed', DO='make', ARCH='…')}` makes one")


def row(folder: Path, image: Image, misfit: str = "") -> Seed:
    """A layout in a list of them."""
    return Seed(
        seed=seedlabels.tag(image.facts),
        digest=image.digest,
        tiers=image.facts.tiers,
        cu=image.facts.cu,
        bytes=image.expected.bytes,
        packed=image.layer_size,
        folder=str(folder),
        fits=misfit or "yes",
        model=image.facts.model,
        flags=image.facts.flags,
    )


@contextmanager
def work(state: Path) -> Iterator[Path]:
    """A folder for what a run needs while it lasts; one run of ours at a time has it."""
    if run.recorder.on:
        with tempfile.TemporaryDirectory(prefix="warmstart-") as temporary:
            yield Path(temporary)
        return
    folder = state / FOLDER / "work"
    with hold(state, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
