"""The build context: the files that the Containerfile mounts, laid out from the plan and the tree.

Written anew for every build into an empty folder. Nothing in it depends on the host, so that its content is what
the digests in the plan say.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from warmstart import debs
from warmstart.manifest import manifest, sbom
from warmstart.plan import Plan, layers, made
from warmstart.profile import BUILDER


def write(root: Path, folder: Path, plan: Plan) -> None:
    """Lay out the context of `plan` in `folder`, replacing what was there."""
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    for name in ("image", "sitecustomize", "caches"):
        _copy(root / name, beside / name)
    for component, files in plan.patches.items():
        for file in files:
            _copy(root / "patches" / component / file, beside / "patches" / component / file)
        _text(beside / "patches" / component / "series", "".join(f"{file}\n" for file in files))
    _copy(root / "arch" / "aiter.toml", beside / "image" / "aiter.toml")
    for layer in (*layers(plan.profile), BUILDER):
        _text(beside / "requirements" / f"{layer}.txt", requirements(plan, layer))
    for layer, packages in plan.packages.items():
        sums, names = debs.listing(packages, "/ws/debs")
        _text(beside / "requirements" / f"{layer}.sha256", sums)
        _text(beside / "requirements" / f"{layer}.debs", names)
    for layer in ("os", *layers(plan.profile)):
        _json(beside / "rules" / f"{layer}.json", plan.cuts.rules(layer))
    _json(beside / "manifest" / "manifest.json", manifest(plan))
    _json(beside / "manifest" / "sbom.json", sbom(plan))
    _json(beside / "manifest" / "lost.json", plan.cuts.messages())
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def uv() -> Path:
    """The uv that installs in the build: the host's own program, mounted, never part of the image."""
    return Path(sys.executable).with_name("uv")


def requirements(plan: Plan, layer: str) -> str:
    """The pinned requirements of one layer, with hashes where the lock has them."""
    lines = []
    here = {m.name for m in made(plan)}
    for wheel in plan.wheels:
        if wheel.layer == layer and wheel.name not in here:
            pin = f"{wheel.name}=={wheel.version}"
            lines.append(f"{pin} --hash=sha256:{wheel.sha256}" if wheel.sha256 else pin)
    return "\n".join(sorted(lines)) + "\n"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _json(path: Path, value: Any) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1)
    _text(path, encoded.decode() + "\n")
