"""What is left out of an image, why, and what a user loses by it: data in `arch/cuts.toml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from warmstart import toml
from warmstart.names import VENV
from warmstart.profile import BUILDER, Profile


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """Any entry holds for all images, or for those of some lanes, families or archs."""

    why: str = ""
    lanes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()

    def holds(self, profile: Profile) -> bool:
        """Whether the entry is for this profile."""
        pairs = ((self.lanes, profile.lane), (self.families, profile.family), (self.archs, profile.arch))
        return all(not chosen or own in chosen for chosen, own in pairs)


class Paths(Entry, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """Globs relative to the image's root; {site} and {venv} stand for site-packages and the virtual environment."""

    layer: str | tuple[str, ...]  # one layer, or those that it holds for
    paths: tuple[str, ...]
    optional: bool = False  # may match nothing; any other glob that matches nothing is a mistake
    saves_mb: float = 0.0
    lost: str = ""  # the feature that goes with it


class Bytecode(Paths, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """Folders whose modules are compiled at build time, but those in `skip`."""

    skip: tuple[str, ...] = ()


class Alias(Entry, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A second name for a distribution that looks itself up under another one."""

    layer: str | tuple[str, ...]
    name: str
    version: str
    of: str
    of_version: str
    optional: bool = False  # the distribution may be absent


class Drop(Entry, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A distribution that others require and that is never installed."""

    name: str
    saves_mb: float = 0.0
    lost: str = ""
    extra: bool = False  # only an extra of another distribution asks for it


class Lost(Entry, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """A feature that went with cuts or drops, and what importing one of its modules says."""

    name: str
    message: str
    modules: tuple[str, ...] = ()


class Cuts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of cuts.toml that concerns one profile."""

    cut: tuple[Paths, ...] = ()
    keep: tuple[Paths, ...] = ()  # exceptions from cuts
    strip: tuple[Paths, ...] = ()  # libraries that lose their symbols and debug information
    alias: tuple[Alias, ...] = ()
    bytecode: tuple[Bytecode, ...] = ()
    drop: tuple[Drop, ...] = ()
    lost: tuple[Lost, ...] = ()
    versions: dict[str, str] = {}  # the profile's: {vllm} … in an alias, and Python's in the path of site-packages

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the distributions that are never installed, sorted."""
        return tuple(sorted(d.name for d in self.drop))

    def messages(self) -> dict[str, str]:
        """Module name → what importing it says, for the hook in the image."""
        return {module: lost.message for lost in self.lost for module in lost.modules}

    def rules(self, layer: str) -> dict[str, Any]:
        """What `image/slim.py` does to one layer. Holds no reasons, so that a reworded one rebuilds nothing."""
        said = {"why", "lanes", "families", "archs", "saves-mb", "lost"}
        tables: dict[str, tuple[Paths | Alias, ...]] = {
            "cut": self.cut,
            "keep": self.keep,
            "strip": self.strip,
            "alias": self.alias,
            "bytecode": self.bytecode,
        }
        of_layer = {
            name: [msgspec.structs.replace(e, layer=layer) for e in entries if _is_of(e, layer)]
            for name, entries in tables.items()
        }
        told = {
            name: [{k: self._filled(v) for k, v in msgspec.to_builtins(e).items() if k not in said} for e in entries]
            for name, entries in of_layer.items()
        }
        site = f"{VENV}/lib/python{self.versions['python']}/site-packages"
        return {"site": site.lstrip("/"), "venv": VENV.lstrip("/"), **told}

    def _filled(self, value: Any) -> Any:
        """A value with versions put in; {site} and {venv} are left to slim.py, which knows the prefix."""
        if not isinstance(value, str):
            return value
        return re.sub(r"\{(\w+)\}", lambda m: self.versions.get(m[1], m[0]), value)


def load(root: Path, profile: Profile) -> Cuts:
    """The entries of `arch/cuts.toml` that hold for a profile. Raises ProfileError."""
    every = toml.read(root / "arch" / "cuts.toml", Cuts)
    tables = ("cut", "keep", "strip", "alias", "bytecode", "drop", "lost")
    chosen = {name: tuple(e for e in getattr(every, name) if e.holds(profile)) for name in tables}
    required = {re.split(r"[\[=<>~! ;]", r, maxsplit=1)[0] for r in profile.wheels.requires}
    required -= set(profile.wheels.layers.get(BUILDER, ()))  # what builds an image's wheels is not in the image
    chosen["drop"] = tuple(d for d in chosen["drop"] if d.name not in required)
    if profile.removals:
        paths = tuple(f"{{site}}/{name}" for name in profile.removals)
        chosen["cut"] += (Paths(layer="device", paths=paths, why="the profile's removals: files that break this arch"),)
    return Cuts(**chosen, versions=msgspec.to_builtins(profile.versions))


def _is_of(entry: Paths | Alias, layer: str) -> bool:
    return layer == entry.layer or (isinstance(entry.layer, tuple) and layer in entry.layer)
