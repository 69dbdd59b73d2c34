"""Source trees by commit: what names one, and where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import gittree, profile
from warmstart.errors import ProfileError

ROOT = Path(__file__).parents[2]
COMMIT = "669b31acc1dd1b3fd93286afd5db67f65d9f7557"


def test_the_parts_of_a_tree() -> None:
    tree = gittree.parse(f"https://host/org/name@{COMMIT}/a/b")
    assert tree == ("https://host/org/name", COMMIT, "a/b")
    assert gittree.folder(tree) == f"{COMMIT}/a/b"


@pytest.mark.parametrize(
    "spec",
    [
        "https://host/name@main/a",  # a branch moves
        f"https://host/name@{COMMIT[:12]}/a",
        f"https://host/name@{COMMIT}",
        f"https://host/name@{COMMIT}/../a",
        f"host/name@{COMMIT}/a",
        f"https://host/na me@{COMMIT}/a",
    ],
)
def test_what_names_no_tree(spec: str) -> None:
    with pytest.raises(ProfileError, match="names no source tree"):
        gittree.parse(spec)


def test_only_the_source_lane_has_trees() -> None:
    assert [tree.path for tree in gittree.of(profile.load(ROOT, "gfx1102").profile)] == [
        "python/triton_kernels/triton_kernels"
    ]
    assert gittree.of(profile.load(ROOT, "gfx1151").profile) == ()
    assert gittree.of(profile.load(ROOT, "gfx1151", "source").profile)
    assert gittree.of(profile.load(ROOT, "cpu").profile) == ()
