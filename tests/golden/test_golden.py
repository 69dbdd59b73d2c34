"""Rendered files are what is committed. WARMSTART_REWRITE=1 writes them anew; look at the diff before committing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warmstart import cuts, lock, plan, profile, render

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent


def make(root: Path, arch: str) -> plan.Plan:
    loaded = profile.load(root, arch)
    cut = cuts.load(root, loaded.profile)
    return plan.make(root, loaded, lock.parse(lock.committed(root, arch)), cut)


@pytest.mark.parametrize("arch", profile.archs(ROOT))
def test_containerfile(arch: str) -> None:
    planned = make(ROOT, arch)
    text = render.render(ROOT, planned)
    assert text == render.render(ROOT, make(ROOT, arch)), "two renderings of one plan differ"
    file = GOLDEN / f"{arch}.Containerfile"
    if os.environ.get("WARMSTART_REWRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("arch", profile.archs(ROOT))
def test_nothing_of_the_host(arch: str) -> None:
    text = render.render(ROOT, make(ROOT, arch))
    for trace in (str(ROOT), str(Path.home()), os.environ.get("USER", "no-user") + "@"):
        assert trace not in text
