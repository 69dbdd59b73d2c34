#!/usr/bin/env python3
"""warmstart, top to bottom: load → lock → plan → render → build → verify → publish.

Each verb of the command line is one function here, and each line of it is a call into the module of that name.
Modules are imported where they are used: `--help` and `plan` must not wait for what only a build needs.
"""

from __future__ import annotations

if __name__ == "__main__":
    from warmstart import early

    early.catch()  # first of all: a Ctrl-C during the imports below is one line, too

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart import cli, options

if TYPE_CHECKING:
    from warmstart.cuts import Cuts
    from warmstart.plan import Plan
    from warmstart.profile import Loaded

ROOT = Path(__file__).resolve().parent
STATE = ROOT / ".warmstart"  # everything that is made here and can be thrown away


def image(args: Namespace) -> int:
    """The main job."""
    from warmstart import assemble, engine, host, inputs, madewheels, probe, render, report

    host.require_linux()
    began = time.monotonic()
    loaded, planned = plan_of(args, settle=True, device=host.build_device(args.device))
    caps = probe.probe(STATE)
    with engine.hold(STATE, planned.arch, wait=not args.no_wait):
        planned = inputs.fetch(ROOT, STATE, loaded, planned, caps, frozen=args.frozen)
        containerfile = render.render(ROOT, planned)
        record = assemble.image(ROOT, STATE, planned, containerfile, caps, began, no_cache=args.no_cache)
        if record.rebuilt:
            madewheels.export(STATE, planned, containerfile, caps)
    return cli.show(args, record, report.built(record))


def plan_of(args: Namespace, *, settle: bool = False, device: bool = False) -> tuple[Loaded, Plan]:
    """profile: what is known of the arch. lock: what goes in. plan: both and the tree, frozen."""
    from warmstart import lock, plan, profile
    from warmstart.profile import Loaded

    loaded, cut = profile_of(args)
    locked = lock.read(ROOT, STATE, loaded.profile, cut.dropped, frozen=getattr(args, "frozen", False))
    if settle and locked.state == "pins":
        from warmstart import resolve

        locked = resolve.settle(ROOT, STATE, loaded.profile, cut, locked)
    loaded = Loaded(profile.choose(loaded.profile, locked.choice), loaded.origins)
    return loaded, plan.make(ROOT, loaded, locked, cut, device=device)


def profile_of(args: Namespace) -> tuple[Loaded, Cuts]:
    """The profile of the arch asked for, judged by the rules, and what is left out of its image."""
    from warmstart import cuts, profile, rules

    loaded = profile.load(ROOT, cli.arch(args.arch, profile.archs(ROOT)), args.lane)
    rules.check(loaded.profile)
    return loaded, cuts.load(ROOT, loaded.profile)


def archs(args: Namespace) -> int:
    from warmstart import hardware, profile, tables

    profiles = [profile.load(ROOT, name).profile for name in profile.archs(ROOT)]
    records = [hardware.validated(ROOT, one) for one in profiles]
    rows = [tables.arch(one, found.date if found else None) for one, found in zip(profiles, records, strict=True)]
    return cli.show(args, {"archs": rows}, tables.archs(rows))


def plan(args: Namespace) -> int:
    from warmstart import tables

    loaded, planned = plan_of(args)
    return cli.show(args, planned, tables.plan(planned, loaded.origins))


def explain(args: Namespace) -> int:
    from warmstart import explain, render

    _, planned = plan_of(args)
    told = explain.explain(STATE, planned, render.render(ROOT, planned), args.against)
    return cli.show(args, told, explain.text(told))


def render(args: Namespace) -> int:
    from warmstart import render

    text = render.render(ROOT, plan_of(args)[1])
    return cli.write(args.output, text) if args.output else cli.show(args, {"containerfile": text}, text.rstrip("\n"))


def lock(args: Namespace) -> int:
    from warmstart import resolve

    loaded, cut = profile_of(args)
    if args.check:
        told = resolve.check(ROOT, loaded.profile, cut)
    else:
        without, made = args.without_index, [Path(file) for file in args.made]
        told = resolve.lock(
            ROOT, STATE, loaded.profile, cut, without_indexes=without, pin=args.pins, choice=args.choose, made=made
        )
    return cli.show(args, told, resolve.text(told))


def verify(args: Namespace) -> int:
    from warmstart import probe, report, verify

    _, current = plan_of(args)
    caps = probe.probe(STATE)
    ref = args.image or report.read(STATE, current.arch).image_id
    planned = verify.plan_of(STATE, caps, current, ref)
    verdict = verify.verify(ROOT, STATE, caps, planned, ref, args.only)
    return 0 if args.dry_run else cli.show(args, verdict, verify.text(verdict))


def rehearse(args: Namespace) -> int:
    """The image of an arch from stand-ins for what only the vendors' indexes have, then its tests."""
    from warmstart import cuts, host, probe, profile, rehearse, rules
    from warmstart.errors import UsageError

    host.require_linux()
    if args.all and args.arch:
        raise UsageError("rehearse takes an arch or --all", hint="leave one out")
    archs = rehearse.archs(ROOT) if args.all else [cli.arch(args.arch, profile.archs(ROOT))]
    for arch in archs:
        rehearse.require_vendors(profile.load(ROOT, arch).profile)
    caps = probe.probe(STATE)

    def one(arch: str) -> None:
        loaded = profile.load(ROOT, arch)
        rules.check(loaded.profile)
        record = rehearse.rehearse(ROOT, STATE, loaded, cuts.load(ROOT, loaded.profile), caps, first=args.first)
        if not args.dry_run:
            cli.show(args, record, rehearse.text(record))

    rehearse.each(archs, one)
    return 0


def patches_check(args: Namespace) -> int:
    """All patches on the pinned sources of every version that some profile names."""
    from warmstart import patchcheck, profile

    outcomes = patchcheck.check_all(ROOT, STATE, [profile.load(ROOT, name).profile for name in profile.archs(ROOT)])
    return 0 if args.dry_run else cli.show(args, {"patches": outcomes}, patchcheck.text(outcomes))


def size(args: Namespace) -> int:
    from warmstart import probe, report

    _, planned = plan_of(args)
    sizes = report.size(probe.probe(STATE), report.read(STATE, planned.arch), planned)
    cli.show(args, sizes, report.text(sizes))
    report.check_budget(sizes.size_bytes, sizes.budget_mb, planned.arch)
    return 0


def doctor(args: Namespace) -> int:
    """What is wrong with this machine, and how to mend it. The exit code is that of the worst finding."""
    from warmstart import doctor

    report = doctor.examine(ROOT, STATE, Path(args.root), args.image)
    cli.show(args, report, doctor.text(report))
    return doctor.code(report)


def phases(args: Namespace) -> int:
    from warmstart import phases

    record = phases.read_file(Path(args.file))
    return cli.show(args, record, phases.table(record))


def bench_doctor(args: Namespace) -> int:
    """Is the device's clock to be trusted? Verdicts are made by it."""
    from warmstart import benchdoctor, probe, profile, report

    caps = probe.probe(STATE)
    ref = args.image or report.read(STATE, cli.arch(args.arch, profile.archs(ROOT))).image_id
    told = benchdoctor.examine(caps, ref)
    return 0 if args.dry_run else cli.show(args, told, told["summary"])


def presets(args: Namespace) -> int:
    from warmstart import presetlist, presets

    if args.preset:
        one = presets.load(ROOT, args.preset, presets.sets(args.set))
        return cli.show(args, presets.masked(one), presetlist.one(one))
    rows, broken = presetlist.listed(ROOT)
    cli.show(args, {"presets": rows}, presetlist.text(rows))
    for problem in broken:
        raise problem
    return 0


def emit(args: Namespace) -> int:
    """The run line of a preset as a file of another program."""
    from warmstart import emit, presets

    text = emit.emit(ROOT, STATE, args.kind, args.preset, presets.sets(args.set), args.arch)
    return cli.write(args.output, text) if args.output else cli.show(args, {args.kind: text}, text.rstrip("\n"))


def up(args: Namespace) -> int:
    """Serve a model: from here on images are used."""
    from warmstart import control, presets, probe

    ask = control.Ask(
        stop=tuple(args.stop), force=args.force, detach=args.detach, profile=args.profile, silence=args.silence
    )
    engine = control.up(ROOT, STATE, probe.probe(STATE), args.preset, presets.sets(args.set), ask)
    return 0 if args.dry_run else cli.show(args, engine, control.text(engine))


def down(args: Namespace) -> int:
    from warmstart import probe, stopping

    stopped = stopping.down(ROOT, STATE, probe.probe(STATE), args.preset)
    return 0 if args.dry_run else cli.show(args, {"stopped": stopped}, f"stopped {', '.join(stopped)}")


def status(args: Namespace) -> int:
    from warmstart import engines

    told = engines.status(STATE)
    return cli.show(args, told, engines.text(told))


def logs(args: Namespace) -> int:
    from warmstart import engines

    return cli.until_stopped(lambda: engines.show_log(STATE, args.preset, follow=args.follow), follows=args.follow)


def exec_(args: Namespace) -> int:
    from warmstart import engine, engines, probe

    preset, command = engines.split(args.words)
    engines.execute(STATE, preset, command, engine.environment(probe.probe(STATE)))
    return 0


def gpu_check(args: Namespace) -> int:
    from warmstart import gpucheck, probe

    found = gpucheck.check(ROOT, probe.probe(STATE), args.arch)
    return 0 if args.dry_run else cli.show(args, found, gpucheck.text(found))


def watch(args: Namespace) -> int:
    from warmstart import probe, watcher

    told = watcher.watch(ROOT, STATE, probe.probe(STATE), args.preset, keep_record=args.record)
    return cli.show(args, {"ended": told}, told)


def seed(args: Namespace) -> int:
    """Caches as images, so that another machine's first start is a warm one."""
    from warmstart import profile, seedverb

    def planned(arch: str) -> Plan:
        return plan_of(Namespace(**{**vars(args), "arch": arch}))[1]

    told = seedverb.do(args, ROOT, STATE, lambda arch: cli.arch(arch, profile.archs(ROOT)), planned)
    return 0 if args.dry_run and args.do != "ls" else cli.show(args, told, seedverb.text(args, told))


def prune(args: Namespace) -> int:
    from warmstart import engine, probe

    freed = engine.prune(probe.probe(STATE), STATE)
    told = f"freed {freed['bytes'] / 1e9:.2f} GB, {freed['images']} images"
    return 0 if args.dry_run else cli.show(args, freed, told)


ALL: tuple[cli.Verb, ...] = (
    *(archs, plan, explain, render, lock, image, verify, rehearse, size, patches_check, doctor, phases, bench_doctor),
    *(presets, emit, up, down, status, logs, exec_, gpu_check, watch, seed, prune),
)
VERBS: cli.Verbs = {name: (verb, *options.TABLE[name]) for verb in ALL for name in [cli.name(verb)]}


if __name__ == "__main__":
    sys.exit(cli.main(VERBS, sys.argv[1:], last=early.catch))  # then nothing is left that a signal would have to stop
