"""The verb `seed`: what each of its parts calls, and how the outcome is told."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warmstart import hints, log, presets, probe, runline, seedlabels, seedmake, seeds, seedtiers, starts, tables
from warmstart.errors import UsageError
from warmstart.plan import Plan
from warmstart.seedlabels import Here
from warmstart.seeds import Moved
from warmstart.seedstore import NAME, Seed


def do(
    args: Namespace,
    root: Path,
    state: Path,
    arch: Callable[[str], str],
    plan: Callable[[str], Plan],
) -> Any:
    """Do what `args` asks for. `arch` settles an arch, `plan` makes its plan."""
    if args.do in {"push", "pull", "verify"} and not args.what:
        listed = f"`{hints.call('seed', DO='ls')}` lists"
        hint = f"`{hints.call('seed', DO=args.do, REF='…')}`: the tag of a seed that {listed}, or host/path:tag"
        raise UsageError(f"seed {args.do} what?", hint=hint)
    if args.set and not args.preset:
        hint = f"{hints.options('--preset NAME --set KEY=VALUE')}; --flags goes with --model"
        raise UsageError("--set lies over a preset", hint=hint)
    caps = probe.probe(state)

    def here(name: str) -> Here:
        return seeds.here(caps, plan(name), args.cu)

    if args.do == "make":
        planned = plan(arch(args.what or args.arch))
        model, *words = [args.model, *shlex.split(args.flags)] if args.model else _served(root, args, planned)
        wanted = seedmake.Wanted(
            source=args.source or runline.CACHE,
            tiers=seedtiers.tiers(args.tier),
            cu=args.cu,
            model=model,
            flags=seedlabels.flags(words),
        )
        made = seedmake.make(state, caps, planned, wanted)
        if "artefacts" in made.tiers and _never_started(state, args):
            log.warn(f"no start of {args.preset} is on record here: the artefacts may be of another model")
        return made
    if args.do == "push":
        return seeds.push(state, caps, args.what, args.seed)
    if args.do == "pull":
        return seeds.pull(state, caps, args.what, lambda: here(arch(args.arch)), args.into or runline.CACHE)
    if args.do == "verify":
        return seeds.verify(state, caps, args.what, here)
    return {"seeds": seeds.ls(state, here)}


def _served(root: Path, args: Namespace, planned: Plan) -> list[str]:
    """Model and flags of the preset that `args` names; no model without one."""
    if not args.preset:
        return [""]
    preset = presets.load(root, args.preset, presets.sets(args.set), planned.versions["vllm"])
    presets.usable(preset, planned.arch, force=True)
    return presets.command(preset)


def _never_started(state: Path, args: Namespace) -> bool:
    """Whether a seed is named after a preset that never started here. Of caches from elsewhere nobody can know."""
    return bool(args.preset and not args.model and not args.source) and not starts.of(state, args.preset)


def text(args: Namespace, told: Any) -> str:
    """For people."""
    if args.do == "ls":
        return _table(told["seeds"])
    return _made(told) if args.do == "make" else _moved(args.do, told)


def _table(rows: list[Seed]) -> str:
    if not rows:
        makes, gets = hints.call("seed", DO="make", ARCH="…"), hints.call("seed", DO="pull", REF="…")
        log.info(f"there are no seeds here: `{makes}` makes one of what {runline.CACHE} holds, `{gets}` gets one")
        return ""
    head = ["seed", "tiers", "CUs", "MB", "packed", "digest", "fits the image here"]
    lines = [
        [
            row.seed,
            ", ".join(row.tiers),
            str(row.cu or ""),
            f"{row.bytes / 1e6:.2f}",
            f"{row.packed / 1e6:.2f}",
            row.digest[:19],
            row.fits,
        ]
        for row in rows
    ]
    made = [f"{row.seed}: {_artefacts(row.model, row.flags)}" for row in rows if row.model]
    return "\n".join([tables.grid([head, *lines]), *made])


def _artefacts(model: str, flags: str) -> str:
    """What artefacts are of; only a start shows whether that is so."""
    return f"its artefacts are of {model} with {flags or 'no flags'}, as its maker said: nothing checks that"


def _made(seed: Seed) -> str:
    left = f", {seed.left_out} incomplete ones left out" if seed.left_out else ""
    size = f"{seed.files} files{left}, {seed.bytes / 1e6:.2f} MB, packed {seed.packed / 1e6:.2f} MB"
    return f"{NAME}:{seed.seed}  {', '.join(seed.tiers)}  {size}\n{seed.digest}"


def _moved(verb: str, moved: Moved) -> str:
    size = f"{moved.bytes / 1e6:.2f} MB"
    if verb == "push":
        return f"{moved.seed} is {moved.where}"
    if verb == "verify":
        fits = f"not for the image here: {moved.misfit}" if moved.misfit else "for the image here"
        done = f"whole: {moved.files} files, {size}; {fits}"
    else:
        done = f"{moved.placed} files ({size}) put into {moved.into}, {moved.files - moved.placed} were there"
    lines = [f"{moved.seed}  {', '.join(moved.tiers)}  {done}"]
    lines.append(f"from {moved.where.partition('@')[0]}, {moved.digest}: nobody has signed for it, and it is code")
    if moved.model:
        lines.append(_artefacts(moved.model, moved.flags))
    return "\n".join(lines)
