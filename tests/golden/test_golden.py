"""Rendered files are what is committed. WARMSTART_REWRITE=1 writes them anew; look at the diff before committing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warmstart import cuts, lock, plan, profile, render

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent


# Every committed lock: each arch in its own lane, some in another one as well.
LOCKS = sorted(file.name.removesuffix(".lock.json") for file in (ROOT / "arch").glob("*.lock.json"))


def make(root: Path, slug: str) -> plan.Plan:
    arch, _, lane = slug.partition(".")
    loaded = profile.load(root, arch, lane)
    cut = cuts.load(root, loaded.profile)
    return plan.make(root, loaded, lock.parse(lock.committed(root, slug)), cut)


def test_every_arch_has_a_lock() -> None:
    assert {slug.partition(".")[0] for slug in LOCKS} == set(profile.archs(ROOT))


@pytest.mark.parametrize("slug", LOCKS)
def test_containerfile(slug: str) -> None:
    planned = make(ROOT, slug)
    text = render.render(ROOT, planned)
    assert text == render.render(ROOT, make(ROOT, slug)), "two renderings of one plan differ"
    file = GOLDEN / f"{slug}.Containerfile"
    if os.environ.get("WARMSTART_REWRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("slug", LOCKS)
def test_nothing_of_the_host(slug: str) -> None:
    text = render.render(ROOT, make(ROOT, slug))
    for trace in (str(ROOT), str(Path.home()), os.environ.get("USER", "no-user") + "@"):
        assert trace not in text
