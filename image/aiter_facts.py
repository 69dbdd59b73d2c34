"""The installed aiter, and what aiter.toml says of its version. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

VERSION = re.compile(
    r"v?(?P<release>\d+(\.\d+)*)([-_.]?(?P<kind>a|b|rc)(?P<pre>\d+))?([-_.]?post(?P<post>\d+))?"
    r"([-_.]?dev(?P<dev>\d+))?(\+.*)?"
)


class Stop(Exception):
    """A failure told in one line; `code` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Package(NamedTuple):
    """The installed aiter: its version, the folder of the package, and the folder with csrc/."""

    version: str
    folder: Path
    meta: Path


def installed() -> Package:
    """The aiter that this Python would import; nothing of it is run. Raises Stop when there is none."""
    spec = importlib.util.find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        raise Stop(3, "aiter is not installed in this Python")
    folder = Path(next(iter(spec.submodule_search_locations)))
    meta = folder.parent / "aiter_meta"
    for name in ("amd-aiter", "aiter"):
        try:
            return Package(importlib.metadata.version(name), folder, meta if meta.is_dir() else folder.parent)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise Stop(3, f"the aiter in {folder} has no metadata, so its version is unknown")


def order(version: str) -> tuple[object, ...]:
    """A key that sorts version numbers as PEP 440 does, without the local part. Raises Stop for others.

    0.1.7.post2.dev18 comes before 0.1.7.post2, which comes before 0.1.7.post3 and 0.1.8.
    """
    found = VERSION.fullmatch(version)
    if not found:
        raise Stop(3, f"{version!r} is no version number of aiter")
    release = tuple(int(n) for n in found["release"].split("."))
    while release[-1:] == (0,):
        release = release[:-1]
    development = (0, int(found["dev"])) if found["dev"] else (1, 0)
    first = not found["post"] and not found["kind"] and found["dev"]  # 1.0.dev1 is older than 1.0a1
    before = (0,) if first else (1, found["kind"], int(found["pre"])) if found["kind"] else (2,)
    return release, before, int(found["post"] or -1), development


def facts(data: Mapping[str, Any], version: str) -> dict[str, Any]:
    """What aiter.toml says about one aiter version: its rows up to that version, later ones winning."""
    rows = [row for row in data["version"] if order(row["since"]) <= order(version)]
    if not rows:
        raise Stop(3, f"aiter {version} is older than any known here ({data['version'][0]['since']})")
    return {key: value for row in rows for key, value in row.items() if key != "since"}


def require_arch(data: Mapping[str, Any], version: str, arch: str) -> None:
    """Raises Stop when this aiter's builder does not let `arch` through, saying which version does."""
    known = facts(data, version)["archs"]
    if arch in known:
        return
    later = next((r["since"] for r in data["version"] if arch in r.get("archs", [])), None)
    advice = f"{arch} came with {later}" if later else "no version does"
    raise Stop(3, f"aiter {version} does not know {arch} ({advice}); it knows {' '.join(known)}")


def off(data: Mapping[str, Any], package: Package) -> None:
    """Mode off: print what the image's environment must hold. Raises Stop for an aiter without that mode."""
    if not facts(data, package.version)["triton-only"]:
        since = next(r["since"] for r in data["version"] if r.get("triton-only"))
        raise Stop(3, f"aiter {package.version} has no Triton-only mode ({since} brought it): use mode core")
    init = package.folder / "__init__.py"
    for key, value in data["off"]["env"].items():
        if key not in init.read_text(encoding="utf-8"):
            raise Stop(3, f"{init} does not read {key}, so it would have no effect")
        print(f"ENV {key}={value}")
