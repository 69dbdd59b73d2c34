"""Source trees of repositories that a build from sources needs besides its own, fetched before the build.

A tree is named by its commit, which git itself checks: the same commit is the same content.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from warmstart import log, run
from warmstart.errors import CommandFailed, ProfileError, Unreachable
from warmstart.profile import Profile

SPEC = re.compile(r"(?P<repository>[a-z]+://[^@\s]+)@(?P<commit>[0-9a-f]{40})/(?P<path>[\w./-]+)")


class Tree(NamedTuple):
    """A folder of a repository at a commit."""

    repository: str
    commit: str
    path: str


def parse(spec: str) -> Tree:
    """`https://host/repository@commit/folder` as a tree. Raises ProfileError."""
    found = SPEC.fullmatch(spec)
    if not found or ".." in PurePosixPath(found["path"]).parts:
        raise ProfileError(f"{spec!r} names no source tree", hint="repository@40 digits of a commit/folder")
    return Tree(found["repository"], found["commit"], found["path"].strip("/"))


def of(profile: Profile) -> tuple[Tree, ...]:
    """The trees that the lane of a profile needs."""
    if profile.lane != "source" or profile.source_lane is None:
        return ()
    return tuple(parse(spec) for spec in profile.source_lane.trees.values())


def store(state: Path) -> Path:
    """Where trees lie on this machine."""
    return state / "trees"


def folder(tree: Tree) -> str:
    """Place of a tree below the store."""
    return f"{tree.commit}/{tree.path}"


def fetch(state: Path, trees: Iterable[Tree]) -> None:
    """Make sure that the trees lie in the store, each whole or not at all. Raises Unreachable."""
    for tree in trees:
        place = store(state) / folder(tree)
        if place.is_dir():
            continue
        if run.recorder.on:
            log.info(f"would fetch {tree.path} of {tree.repository}")
            continue
        with log.step(f"{tree.path} of {tree.repository}"):
            _fetch(tree, place, store(state) / f".{tree.commit}")


def _fetch(tree: Tree, place: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        run.run(["git", "init", "--quiet", "--bare", work])
        git: list[str | Path] = ["git", "-C", work]
        try:
            run.run([*git, "fetch", "--quiet", "--depth=1", "--filter=blob:none", tree.repository, tree.commit])
            run.run([*git, "-c", f"remote.origin.url={tree.repository}", "-c", "remote.origin.promisor=true"]
                    + ["archive", "--output", work / "tree.tar", tree.commit, "--", tree.path])  # fmt: skip
        except CommandFailed as failed:
            raise Unreachable(
                f"{tree.repository} does not give commit {tree.commit[:12]}", hint=failed.hint
            ) from None
        (work / "out").mkdir()
        run.run(["tar", "-xf", work / "tree.tar", "-C", work / "out"])
        place.parent.mkdir(parents=True, exist_ok=True)
        (work / "out" / tree.path).rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
