"""From plan and Containerfile to an image in the engine's storage, and the record of it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from warmstart import context, engine, log, report, run
from warmstart.engine import Capabilities
from warmstart.inputs import contexts
from warmstart.names import LABEL
from warmstart.plan import Plan
from warmstart.report import Record

# Free disk for one build, as a multiple of the unpacked budget: stages, layers and the image itself.
ROOM = 3.0

DEVICES = ("/dev/kfd", "/dev/dri")  # what a program needs to use AMD GPUs


def image(
    root: Path, state: Path, plan: Plan, containerfile: str, caps: Capabilities, began: float, *, no_cache: bool = False
) -> Record:
    """Build the image of `plan`, tag it and write `image.json`; nothing is built when it is there already.

    `began` is when the command did, by the monotonic clock, for the record's seconds.
    Raises BuildFailed, DiskFull, or what the engine raises. Whatever happens, no tag points to half an image.
    """
    folder = state / plan.arch
    there = None if no_cache else engine.find(caps, f"{LABEL}plan-id", plan.plan_id)
    if there:
        engine.tag(caps, there, plan.tags)
        log.info(f"{plan.arch}: plan {plan.plan_id[:12]} is built already")
        return _record(folder, plan, caps, there, time.monotonic() - began, containerfile, rebuilt=False)
    engine.need_disk(caps, int(plan.profile.budget.unpacked_mb * 1e6 * ROOM), folder)
    if not run.recorder.on:
        context.write(root, folder / "context", plan)
    with log.step(f"image {plan.tags[0]}") as step:
        built = engine.build(
            caps,
            containerfile,
            context=folder / "context",
            tags=list(plan.tags),
            epoch=plan.epoch,
            contexts=contexts(state, plan),
            network="none",
            devices=DEVICES if plan.aiter == "device" else (),
            no_cache=no_cache,
            log_file=folder / "build.log",
            on_line=step.note,
        )
    if run.recorder.on:
        return Record("", None, plan.plan_id, plan.arch, plan.cache_key, plan.tags, 0, (), 0.0, False)
    return _record(folder, plan, caps, built, time.monotonic() - began, containerfile, rebuilt=True)


def _record(
    folder: Path, plan: Plan, caps: Capabilities, image_id: str, seconds: float, containerfile: str, *, rebuilt: bool
) -> Record:
    info = engine.inspect(caps, image_id)
    record = Record(
        image_id=info.image_id,
        manifest_digest=None,
        plan_id=plan.plan_id,
        arch=plan.arch,
        cache_key=plan.cache_key,
        tags=plan.tags,
        size_bytes=info.size_bytes,
        layers=report.layers(info),
        seconds=round(seconds, 3),
        rebuilt=rebuilt,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Containerfile").write_text(containerfile, encoding="utf-8")
    (folder / "built-plan.json").write_bytes(msgspec.json.encode(plan, order="sorted"))
    report.write(folder.parent, record)
    return record
