"""docs/startup-kit.md names every switch, event, cache and figure as the code and the data have them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warmstart import names, toml
from warmstart.volume import CacheTable

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "sitecustomize"
TEXT = (ROOT / "docs" / "startup-kit.md").read_text(encoding="utf-8")
SOURCE = "".join(file.read_text(encoding="utf-8") for file in sorted(HOOKS.glob("*.py")))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a hook's file as new, with the hooks off."""
    monkeypatch.setenv("WARMSTART_HOOKS", "0")
    monkeypatch.syspath_prepend(str(HOOKS))
    names = [file.stem for file in HOOKS.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_every_hook_has_a_switch_that_is_told(hooks: Any) -> None:
    """The hooks that wait, and those that ask for a variable of their own; no others are told."""
    waiting = {row[0].upper() for row in hooks("warmstart_calls").WAITING}
    own = set(re.findall(r"WARMSTART_HOOK_([A-Z]+)", SOURCE))
    (told,) = re.findall(r"`WARMSTART_HOOK_<NAME>=0` one: ([A-Z, ]+) \|", TEXT)
    assert sorted(told.split(", ")) == sorted(waiting | own)
    assert set(re.findall(r"WARMSTART_HOOK_([A-Z]+)", TEXT)) <= waiting | own


def test_every_event_of_a_start_is_told() -> None:
    events = set(re.findall(r"\b(?:emit|note)\(\"([a-z]+)\"", SOURCE))
    section = TEXT.partition("## What a start did")[2].partition("\n## ")[0]
    assert {"import", "helper"} <= events
    assert [event for event in sorted(events | {"start"}) if f"`{event}`" not in section] == []


def test_the_volume_is_told_as_it_is() -> None:
    table = toml.read(ROOT / "caches" / "caches.toml", CacheTable)
    (told,) = re.findall(rf"{table.volume}/<cache key>/(.+?)  +caches \(", TEXT)
    assert sorted(told.split()) == sorted(cache.path for cache in table.cache)
    assert f"start records, the last {table.keep_starts}\n" in TEXT
    assert f"they take more than {table.keep_gb:g} GB" in TEXT
    assert f"`WARMSTART_KEEP_GB={table.keep_gb:g}`" in TEXT


def test_the_entry_point_looks_where_the_hooks_write(hooks: Any) -> None:
    text = (ROOT / "image" / "start_caches.py").read_text(encoding="utf-8")
    assert re.findall(r'^USED = "(.+?)"', text, re.MULTILINE) == [hooks("warmstart_ahead").FOLDER]
    assert f"`triton/{hooks('warmstart_ahead').FOLDER}/`" in TEXT


def test_the_hooks_look_where_the_image_has_its_files(hooks: Any) -> None:
    looked = {"lost.json": hooks("warmstart_hooks").LOST, "caches/bans.toml": hooks("warmstart_bans").BANS}
    assert looked == {name: f"{names.HOME}/{name}" for name in looked}
