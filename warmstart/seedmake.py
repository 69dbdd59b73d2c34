"""Making a seed: the caches of one cache key, packed as an image."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from warmstart import (
    cachedir,
    engine,
    hints,
    log,
    run,
    seedfiles,
    seedlabels,
    seedlayout,
    seedplace,
    seedstore,
    seedtiers,
)
from warmstart.errors import InputError, NothingToSeed, UsageError
from warmstart.plan import Plan
from warmstart.probe import Capabilities, environment
from warmstart.seedlabels import Facts
from warmstart.seedstore import FOLDER, NAME, Seed


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What `seed make` was asked for."""

    source: str  # a volume or a folder of caches
    tiers: tuple[str, ...] = ()  # none: what is there of kernels and verdicts, and of artefacts if a model is named
    cu: int = 0
    model: str = ""
    flags: str = ""


def make(state: Path, caps: Capabilities, plan: Plan, wanted: Wanted) -> Seed:
    """Pack the caches of a plan's cache key into a seed, below `state` and in podman's storage.

    Raises NothingToSeed, SeedUnsafe for a cache with secrets in it, InputError, UsageError.
    """
    tiers = wanted.tiers or seedtiers.TIERS[: 3 if wanted.model else 2]
    if plan.arch == "cpu" and (not wanted.model or set(wanted.tiers) - {"artefacts"}):
        told = "a seed of the cpu image holds artefacts alone, of one model and its flags: the image has no Triton"
        raise UsageError(told, hint=_for_model())
    top = cachedir.locate(caps, wanted.source)
    top = top.parent if top.name == plan.cache_key else top
    if plan.cache_key not in (found := cachedir.keys(top)):
        others = f"it holds those of {', '.join(found)}; " if found else ""
        hint = f"{others}serve something with the image first: `{hints.command('up', '…')}`"
        raise NothingToSeed(f"{wanted.source} holds no caches of {plan.cache_key}", hint=hint)
    with seedstore.work(state) as work, seedplace.cache(top, plan.cache_key) as key:
        (work / "files").mkdir()
        known = _host(key)
        cu = _compute_units(key, plan.arch, known, wanted.cu) if set(tiers) & set(seedlabels.MACHINE) else 0
        with log.step(f"seed: reading {', '.join(tiers)} of {plan.cache_key}"):
            place = f"{plan.volume.root}/{plan.cache_key}"
            taken = seedfiles.take(key, place, tiers, cu, work / "files")
        facts = _facts(plan, taken, wanted, cu, known)
        if run.recorder.on:
            log.info(f"would pack {len(taken.copies)} files into {NAME}:{seedlabels.tag(facts)}")
        with log.step(f"seed: packing {len(taken.copies)} files"):
            image = seedlayout.write(work / "layout", facts, taken.copies, plan.epoch)
        folder = state / FOLDER / plan.cache_key / seedlabels.tag(facts)
        if not run.recorder.on:
            folder.parent.mkdir(exist_ok=True)
            if folder.exists():
                folder.rename(work / "old")
            (work / "layout").rename(folder)
    load(caps, folder, seedlabels.tag(facts))
    return msgspec.structs.replace(seedstore.row(folder, image), files=len(taken.copies), left_out=taken.left_out)


def load(caps: Capabilities, folder: Path, tag: str) -> None:
    """Bring the seed of a layout into podman's storage, under our name for seeds; what had that name is removed.

    By skopeo: podman itself (4.3) takes a layout's path for a name, and none with a point at its begin (.warmstart).
    """
    name = f"{NAME}:{tag}"
    before = engine.images(caps, f"reference={name}")
    run.run(["skopeo", "copy", "--quiet", f"oci:{folder}:{tag}", f"containers-storage:{name}"], env=environment(caps))
    now = {image["Id"] for image in engine.images(caps, f"reference={name}")}
    for old in {image["Id"] for image in before} - now:
        run.run(["podman", "rmi", old], env=environment(caps), ok=range(256))


def _for_model() -> str:
    """How artefacts are asked for."""
    named, other = "--preset NAME", "--model NAME --flags FLAGS"
    without = hints.options(f"{named} --set model=…")
    return f"{hints.options(named)} ({without} where it has none), or {hints.options(other)}"


def _facts(plan: Plan, taken: seedfiles.Taken, wanted: Wanted, cu: int, known: dict[str, list[str]]) -> Facts:
    """Whom the files are for. Raises NothingToSeed when a tier that was asked for has none."""
    kinds = [kind.tier for kind in map(seedtiers.kind, taken.copies) if kind]
    tiers = seedtiers.ordered(kinds)
    missing = [tier for tier in wanted.tiers if tier not in tiers]
    if missing or not tiers:
        told = f"the caches of {plan.cache_key} have no complete {missing[0] if missing else 'kernels or verdicts'}"
        raise NothingToSeed(told, hint="serve something with the image first, and let it answer a request")
    for_machine = set(tiers) & set(seedlabels.MACHINE)
    more: dict[str, str | int] = {"cu": cu if for_machine else 0}
    if "artefacts" in tiers:
        if not wanted.model:
            raise UsageError("artefacts are for one model and its flags", hint=_for_model())
        gpu = f"{plan.arch}, {cu} compute units" if cu else ""
        more |= {"model": wanted.model, "flags": wanted.flags, "gpu": gpu, "cpu": ",".join(known["cpu"])}
        if not known["cpu"]:
            told = "the cache has no host.json, which says for which processor its machine code is"
            raise InputError(told, hint="the image's entry point writes it: take a cache that it made")
    if for_machine and not cu and plan.arch != "cpu":
        told = f"nothing says how many compute units the GPU has that {' and '.join(sorted(for_machine))} are of"
        raise UsageError(told, hint=f"{hints.options('--cu N')}; rocminfo shows it")
    return seedlabels.of_plan(plan, tiers, **more)


def _compute_units(key: int, arch: str, known: dict[str, list[str]], given: int) -> int:
    """The number of compute units that verdicts and artefacts of this cache are of; 0 when nothing says it."""
    if given or arch == "cpu":
        return given
    found = {int(gpu.partition(":")[2]) for gpu in known["gpus"] if gpu.partition(":")[0] == arch}
    try:
        with cachedir.opened(key, "verdicts") as folder:
            found |= {seedtiers.cu(f"verdicts/{name}/") for name in cachedir.names(folder)}
    except FileNotFoundError:
        pass
    found -= {0}
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        hint = f"{hints.options(f'--cu {max(found)}')} says which a seed is for"
        raise UsageError(f"the cache is of GPUs with {numbers} compute units", hint=hint)
    return found.pop() if found else 0


def _host(key: int) -> dict[str, list[str]]:
    """What host.json says the cache was used on: instruction sets, and GPUs as `arch:compute units`."""
    try:
        told = json.loads(cachedir.content(key, seedplace.HOST) or b"{}")
        gpus = [f"{gpu['arch']}:{int(gpu['cu'])}" for gpu in told.get("gpus", ())]
        return {"cpu": [str(flag) for flag in told.get("cpu", ())], "gpus": gpus}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        raise InputError("the cache's host.json is damaged", hint="the next start of the image makes it anew") from None
