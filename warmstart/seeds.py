"""Seeds: the caches of one cache key as an image, made here, pushed, pulled into a volume, and listed.

A seed is code: its kernels and artefacts run with the rights of the container that uses them. What is checked here is
that it is whole, for this image and GPU, and has nothing in it but cache files; not whether its maker is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from warmstart import (
    cachedir,
    engine,
    hints,
    host,
    log,
    registry,
    run,
    seedlabels,
    seedlayout,
    seedplace,
    seedstore,
    unpack,
)
from warmstart.errors import NothingToSeed, SeedDamaged, UsageError, WarmstartError
from warmstart.names import LABEL
from warmstart.plan import Plan
from warmstart.probe import Capabilities
from warmstart.seedlabels import Facts, Here
from warmstart.seedlayout import Image
from warmstart.seedstore import Seed


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that was pushed, pulled or verified: where it comes from or went to, and what was done."""

    seed: str
    digest: str
    where: str
    tiers: tuple[str, ...]
    model: str = ""
    flags: str = ""
    into: str = ""
    files: int = 0
    placed: int = 0  # the other files were there
    bytes: int = 0
    misfit: str = ""  # why it is not for the image and the GPUs here


def push(state: Path, caps: Capabilities, to: str, tag: str = "") -> Moved:
    """Push the seed `tag`, or the one that the tag of `to` names, or the only one here; its digest stays as it is.

    Raises NothingToSeed, UsageError, RegistryRefused, Unreachable, SeedDamaged.
    """
    ref = registry.parse(to)
    if ref.digest:
        raise UsageError("a push goes to a tag", hint=f"{ref.name}:{tag or '<cache key>'}")
    layout = seedstore.chosen(state, tag or ref.tag)
    image = seedlayout.read(layout)
    ref = msgspec.structs.replace(ref, tag=ref.tag or layout.name)
    registry.require(caps)
    with seedstore.work(state) as work, log.step(f"seed: pushing {layout.name} to {ref.registry}"):
        digest = registry.push(caps, layout, layout.name, ref, work / "digest")
    if digest not in {image.digest, ""}:
        told = f"{ref.registry} has it as {digest[:19]}…, it is {image.digest[:19]}…"
        raise SeedDamaged(told, hint="the registry changes what it is given: another one is needed")
    exact = ref.at(image.digest).exact
    return Moved(seed=layout.name, digest=image.digest, where=exact, tiers=image.facts.tiers)


def pull(state: Path, caps: Capabilities, source: str, here: Callable[[], Here], into: str) -> Moved:
    """Put the files of a seed into a volume or a folder of caches, after all checks that can be made before that.

    Raises SeedMismatch before anything is unpacked, SeedDamaged, SeedUnsafe, and what the registry causes.
    """
    layout, ref, image = _look(state, caps, source)
    facts = image.facts
    seedlabels.require(facts, here())
    top = cachedir.locate(caps, into, make=True)
    done = seedplace.there(top, image) if top.is_dir() else None
    if run.recorder.on:
        log.info(f"would put {seedlabels.tag(facts)} ({image.expected.bytes / 1e6:.1f} MB) into {into}")
        done = done or seedplace.Placed(0, 0, 0)
    if not done:
        with seedstore.work(state) as work:
            layout = layout or _fetch(caps, ref, image, work / "layout")
            with log.step(f"seed: checking {seedlabels.tag(facts)} and putting it into {into}"):
                done = seedplace.place(top, layout, image)
    return msgspec.structs.replace(
        _moved(image, str(layout) if not ref else ref.exact),
        into=into,
        files=done.files,
        placed=done.placed,
        bytes=done.bytes,
    )


def verify(state: Path, caps: Capabilities, source: str, here: Callable[[str], Here]) -> Moved:
    """Check a seed as `pull` does, without putting it anywhere, and say whether it fits here."""
    layout, ref, image = _look(state, caps, source)
    if ref and run.recorder.on:
        log.info(f"would fetch {image.layer_size / 1e6:.1f} MB from {ref.registry} and check them")
        return _moved(image, ref.exact)
    with seedstore.work(state) as work:
        layout = layout or _fetch(caps, ref, image, work / "layout")
        with log.step(f"seed: checking {seedlabels.tag(image.facts)}"), seedlayout.layer(layout, image) as layer:
            content = unpack.unpack(layer, image.expected)
    misfit = _misfit(image.facts, here)
    moved = _moved(image, ref.exact if ref else str(layout))
    size = sum(file.size for file in content.files)
    return msgspec.structs.replace(moved, files=len(content.files), bytes=size, misfit=misfit)


def ls(state: Path, here: Callable[[str], Here]) -> list[Seed]:
    """The seeds that lie here."""
    rows = []
    for folder in seedstore.layouts(state):
        try:
            image = seedlayout.read(folder)
        except WarmstartError as bad:
            log.warn(f"{folder}: {bad.message}")
            continue
        rows.append(seedstore.row(folder, image, _misfit(image.facts, here)))
    return rows


def here(caps: Capabilities, plan: Plan, cu: int = 0) -> Here:
    """What a seed has to be for: the image that the tree plans, or one that was built or pulled, and this machine.

    `cu` is the number of compute units of another machine's GPU, whose processor is not known then.
    """
    images = engine.images(caps, f"label={LABEL}arch={plan.arch}", f"label={LABEL}plan-id")
    built = {(image.get("Labels") or {}).get(f"{LABEL}cache-key", "") for image in images}
    device = plan.profile.device
    mine = {gpu.compute_units for gpu in host.gpus() if gpu.arch == plan.arch}
    return Here(
        cache_keys=(plan.cache_key, *sorted(built - {"", plan.cache_key})),
        arch=plan.arch,
        wave=device.wave if device else 0,
        versions=plan.versions,
        cus=(cu,) if cu else tuple(sorted(mine)),
        cpu=None if cu else seedlabels.processor(plan.volume.cpu_flags),
    )


def _look(state: Path, caps: Capabilities, source: str) -> tuple[Path | None, registry.Ref | None, Image]:
    """A seed's image from its manifest and config alone: of a layout here, or of a registry, by digest."""
    if layout := seedstore.named(state, source):
        return layout, None, seedlayout.read(layout)
    if "/" not in source:
        form = hints.word("REF", "host[:port]/path[:tag][@sha256:…]")
        hint = f"`{hints.call('seed', DO='ls')}` lists those that are; one in a registry is {form}"
        raise NothingToSeed(f"there is no seed {source} here", hint=hint)
    registry.require(caps)
    given = registry.parse(source)
    ref, manifest = registry.manifest(caps, given)
    if not given.digest:
        log.info(f"{given.exact} is {ref.digest}: only by that digest it stays the same")
    seedlayout.config_digest(manifest)  # before more of it is fetched
    return None, ref, seedlayout.parse(ref.digest, manifest, registry.config(caps, ref))


def _fetch(caps: Capabilities, ref: registry.Ref | None, image: Image, layout: Path) -> Path:
    assert ref
    host.need_disk(layout, image.layer_size, "fetching the seed")
    with log.step(f"seed: fetching {image.layer_size / 1e6:.1f} MB from {ref.registry}"):
        registry.fetch(caps, ref, layout)
    if seedlayout.read(layout).digest != image.digest:
        raise SeedDamaged(f"{ref.name} gave another image than {image.digest[:19]}…", hint=seedlabels.AGAIN)
    return layout


def _misfit(facts: Facts, here: Callable[[str], Here]) -> str:
    try:
        return seedlabels.misfit(facts, here(facts.arch))
    except WarmstartError as unknown:
        return unknown.message


def _moved(image: Image, where: str) -> Moved:
    facts = image.facts
    tag = seedlabels.tag(facts)
    return Moved(seed=tag, digest=image.digest, where=where, tiers=facts.tiers, model=facts.model, flags=facts.flags)
