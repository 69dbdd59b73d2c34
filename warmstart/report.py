"""The record of a build, and an image's size by layer and by component against its budget."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from warmstart import engine, run
from warmstart.engine import Capabilities, ImageInfo
from warmstart.errors import ImageMissing, OverBudget
from warmstart.names import HOME, PYTHON
from warmstart.plan import Plan
from warmstart.tables import grid

SMALL = 5_000_000  # bytes below which a component is summed up as "the rest"


class Layer(msgspec.Struct, frozen=True):
    """One layer of an image: what made it, and its unpacked bytes."""

    name: str
    size_bytes: int


class Record(msgspec.Struct, frozen=True):
    """`.warmstart/<arch>/image.json`: what the last build of an arch made."""

    image_id: str  # digest of the image's config: its identity for verify, repro and publish
    manifest_digest: str | None  # None until pushed: it depends on the compression
    plan_id: str
    arch: str
    cache_key: str
    tags: tuple[str, ...]
    size_bytes: int  # unpacked
    layers: tuple[Layer, ...]
    seconds: float
    rebuilt: bool  # False when the image was there already


class Sizes(msgspec.Struct, frozen=True):
    """Where the bytes of an image are."""

    image_id: str
    size_bytes: int
    budget_mb: int
    layers: tuple[Layer, ...]
    components: dict[str, int]  # largest first


def path(state: Path, arch: str) -> Path:
    """Where the record of an arch lies."""
    return state / arch / "image.json"


def read(state: Path, arch: str) -> Record:
    """The record of the last build. Raises ImageMissing when there is none."""
    file = path(state, arch)
    if not file.is_file():
        raise ImageMissing(f"no image of {arch} was built here", hint=f"make image ARCH={arch}")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except msgspec.MsgspecError:
        raise ImageMissing(f"{file} is damaged", hint=f"make image ARCH={arch} writes it anew") from None


def write(state: Path, record: Record) -> None:
    """Keep the record of a build."""
    file = path(state, record.arch)
    beside = file.with_suffix(".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    beside.replace(file)


def layers(info: ImageInfo) -> tuple[Layer, ...]:
    """The layers that hold files, by the name of the stage or step that made them."""
    return tuple(Layer(_name(entry.created_by), entry.size_bytes) for entry in info.layers if entry.size_bytes)


def size(caps: Capabilities, record: Record, plan: Plan) -> Sizes:
    """Look into the image: bytes by layer from its history, by component from its files."""
    info = engine.inspect(caps, record.image_id)
    words = ["podman", "run", "--rm", "--network=none", "--entrypoint", PYTHON, record.image_id]
    told = run.run([*words, "-I", f"{HOME}/size.py", "/"], env=engine.environment(caps), always=True)
    found = sorted(json.loads(told.stdout or "{}").items(), key=lambda item: -item[1])
    return Sizes(
        image_id=info.image_id,
        size_bytes=info.size_bytes,
        budget_mb=plan.profile.budget.unpacked_mb,
        layers=layers(info),
        components=dict(found),
    )


def check_budget(size_bytes: int, budget_mb: int, arch: str) -> None:
    """Raises OverBudget when an image is larger than its profile allows."""
    if size_bytes > budget_mb * 1e6:
        raise OverBudget(
            f"the {arch} image takes {size_bytes / 1e6:.0f} MB, its budget is {budget_mb} MB",
            hint=f"make size ARCH={arch} shows where they are; the budget is in arch/{arch}.toml",
        )


def text(sizes: Sizes) -> str:
    """For people."""
    large = {name: size for name, size in sizes.components.items() if size >= SMALL}
    rest = sum(sizes.components.values()) - sum(large.values())
    rows = [["layer", ""], *([layer.name, _mb(layer.size_bytes)] for layer in sizes.layers), ["", ""]]
    rows += [
        ["component", ""],
        *([name, _mb(size)] for name, size in large.items()),
        ["(the rest)", _mb(rest)],
        ["", ""],
    ]
    share = 100 * sizes.size_bytes / (sizes.budget_mb * 1e6)
    rows.append(["total", f"{_mb(sizes.size_bytes)}, {share:.0f} % of the budget of {sizes.budget_mb} MB"])
    return grid(rows)


def built(record: Record) -> str:
    """One line for people, at the end of `image`."""
    what = "built" if record.rebuilt else "nothing to do"
    return f"{record.tags[0]}  {_mb(record.size_bytes)}  {record.image_id[:19]}  {what} in {record.seconds:.1f} s"


def _name(created_by: str) -> str:
    """The stage or step that made a layer: our RUN lines carry `: name@digest`."""
    if found := re.search(r": ([a-z0-9_/.-]+)@[0-9a-f]{12,}", created_by):
        return {"start": "start-up files", "plan": "manifest", "loader": "table of the loader"}.get(found[1], found[1])
    return "base" if " ADD " in created_by else "mount points removed" if "rm -r /ws" in created_by else created_by[:40]


def _mb(size: int) -> str:
    return f"{size / 1e6:8.1f} MB"
