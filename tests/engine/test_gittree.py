"""Fetching a folder of a repository at a commit, with real git and a repository on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import gittree, run
from warmstart.errors import Unreachable
from warmstart.gittree import Tree


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A repository with two commits: its address, and their hashes."""
    folder = tmp_path_factory.mktemp("repository")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    run.run(["git", "init", "--quiet", folder])
    run.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"])
    run.run([*git, "config", "uploadpack.allowFilter", "true"])
    found = []
    for number in ("one", "two"):
        (folder / "python/kernels").mkdir(parents=True, exist_ok=True)
        (folder / "python/kernels/__init__.py").write_text(number, encoding="utf-8")
        (folder / "large").write_text("not asked for", encoding="utf-8")
        run.run([*git, "add", "."])
        run.run([*git, "commit", "--quiet", "-m", number])
        found.append(run.run([*git, "rev-parse", "HEAD"]).stdout.strip())
    return f"file://{folder}", found


def test_the_folder_at_that_commit_and_nothing_else(tmp_path: Path, commits: tuple[str, list[str]]) -> None:
    address, (first, _) = commits
    tree = Tree(address, first, "python/kernels")
    gittree.fetch(tmp_path, [tree])
    place = gittree.store(tmp_path) / gittree.folder(tree)
    assert (place / "__init__.py").read_text(encoding="utf-8") == "one"
    assert [p.name for p in gittree.store(tmp_path).rglob("*") if p.is_file()] == ["__init__.py"]
    gittree.fetch(tmp_path, [Tree("file:///nowhere", first, "python/kernels")])  # there already: not asked again


@pytest.mark.parametrize("case", ["no repository", "no commit", "no folder"])
def test_what_is_not_there(tmp_path: Path, commits: tuple[str, list[str]], case: str) -> None:
    address, (first, _) = commits
    tree = {
        "no repository": Tree("file:///nowhere", first, "python/kernels"),
        "no commit": Tree(address, "0" * 40, "python/kernels"),
        "no folder": Tree(address, first, "python/other"),
    }[case]
    with pytest.raises(Unreachable, match="does not give"):
        gittree.fetch(tmp_path, [tree])
    assert list(gittree.store(tmp_path).iterdir()) == []
