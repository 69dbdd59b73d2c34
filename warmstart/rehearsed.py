"""The record of a rehearsal: what was built from what, and how the image tests ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from warmstart.verify import Test


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """`.warmstart/rehearsal/<arch>/rehearsal.json`: what was built from what, and how the image tests ended."""

    arch: str
    plan_id: str
    real_plan_id: str  # of the plan that was rehearsed, from the committed lock
    image_id: str = ""
    tag: str = ""
    indexes: dict[str, str]  # real address → where it was served
    standins: dict[str, str]  # distribution → what stands in for it
    differences: tuple[str, ...] = ()  # from the committed lock, in what the general index offers
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    tests: tuple[Test, ...] = ()
    seconds: dict[str, float] = {}  # phase → seconds


def text(record: Rehearsed) -> str:
    """For people: what stood in, what was skipped and why, and the counts on the last line."""
    lines = [f"rehearsed {record.arch} as {record.tag}: {len(record.standins)} stand-ins"]
    reasons: dict[str, int] = {}
    for test in record.tests:
        if test.outcome == "skipped":
            reasons[test.message] = reasons.get(test.message, 0) + 1
    lines += [f"  {count} skipped: {reason}" for reason, count in sorted(reasons.items())]
    lines.append("  " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in record.seconds.items()))
    lines.append(f"{record.passed} passed, {record.failed} failed, {record.skipped} skipped")
    return "\n".join(lines)


def write(path: Path, record: Rehearsed) -> None:
    """Write the record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    beside.replace(path)
