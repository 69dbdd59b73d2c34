"""What a plan changes against the last built image, and which layers that rebuilds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from warmstart import lock, render
from warmstart.errors import InputError
from warmstart.plan import Plan
from warmstart.profile import leaves


class Change(msgspec.Struct, frozen=True):
    """One difference between two plans."""

    what: str
    before: str
    after: str


class Explained(msgspec.Struct, frozen=True):
    """The differences between two plans, and what they rebuild."""

    before: str  # plan id, empty when nothing was built yet
    after: str
    same_cache_key: bool
    changes: tuple[Change, ...]
    rebuilds: dict[str, tuple[str, ...]]  # stage → its instructions that run again


def explain(state: Path, plan: Plan, text: str, against: str = "") -> Explained:
    """Compare `plan` with the plan in file `against`, or with the one of the last build.

    Raises InputError when `against` can't be read as a plan.
    """
    file = Path(against) if against else state / plan.arch / "built-plan.json"
    old_text = file.with_name("Containerfile")
    if not against and not file.is_file():
        return _everything(plan, text, "never built here")
    try:
        old = msgspec.json.decode(file.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as bad:
        if not against:
            return _everything(plan, text, "built by another version of warmstart")
        why = (bad.strerror or "unreadable") if isinstance(bad, OSError) else str(bad)
        raise InputError(f"{file} is not a plan: {why}", hint="make one with `plan --json`") from None
    was = old_text.read_text(encoding="utf-8") if old_text.is_file() else ""
    return Explained(old.plan_id, plan.plan_id, old.cache_key == plan.cache_key, changes(old, plan), rebuilt(was, text))


def _everything(plan: Plan, text: str, why: str) -> Explained:
    return Explained("", plan.plan_id, False, (Change("image", why, "everything"),), rebuilt("", text))


def changes(old: Plan, new: Plan) -> tuple[Change, ...]:
    """Profile values, packages, wheels and parts of the tree that differ."""
    found = []
    before, after = leaves(old.profile), leaves(new.profile)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            found.append(Change(f"profile {key}", str(before.get(key, "absent")), str(after.get(key, "absent"))))
    for key in sorted(old.inputs.keys() | new.inputs.keys()):
        was, now = old.inputs.get(key, "absent"), new.inputs.get(key, "absent")
        if was != now and not key.startswith("lock/"):
            found.append(Change(key, was[:12], now[:12]))
    found += [
        Change(name, was, now)
        for name, was, now in lock.changed(old.base.locked, old.wheels, new.base.locked, new.wheels)
    ]
    if old.epoch != new.epoch:
        found.append(Change("epoch", str(old.epoch), str(new.epoch)))
    return tuple(found)


def rebuilt(old: str, new: str) -> dict[str, tuple[str, ...]]:
    """Per stage, the instructions that run again: the first changed one and all after it."""
    again = {}
    stages = render.stages(new)
    for stage, (first, _) in render.first_change(old, new).items():
        again[stage] = tuple(line[:100] for line in stages[stage][first:])
    return again


def text(told: Explained) -> str:
    """For people."""
    if told.before == told.after:
        return f"nothing changed: plan {told.after[:12]} is built"
    lines = [f"plan {told.before[:12] or '(none)'} → {told.after[:12]}"]
    lines += [f"  {c.what}: {c.before} → {c.after}" for c in told.changes]
    lines.append("  caches: kept" if told.same_cache_key else "  caches: a new key, the first start is cold")
    for stage, again in told.rebuilds.items():
        lines.append(
            f"  rebuilds in {stage}: {len(again)} instruction{'s' * (len(again) != 1)} from `{again[0][:90]}`"
            if again
            else f"  drops from {stage}"
        )
    return "\n".join(lines)
