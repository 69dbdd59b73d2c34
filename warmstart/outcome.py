"""How a start came out: the record that is kept of a good one, the diagnosis of a bad one."""

from __future__ import annotations

from pathlib import Path

from warmstart import diagnosis, hints, lease, log, logline, masking, run, starts
from warmstart.errors import EngineStopped, MemoryPressure, StartFailed
from warmstart.lease import Lease
from warmstart.startup import Startup


def finish(state: Path, place: Path, mine: Lease, follows: Startup, *, keep: bool) -> None:
    """What is noted when an engine became ready: its lease says so, and with `keep` its start is kept."""
    lease.update(place, mine, state="ready")
    if keep:
        began, wall = follows.seen.started, follows.wall
        one = starts.Start(preset=mine.preset, image=mine.image, began=began, wall=wall, record=follows.record())
        starts.add(state, one)


def ended(place: Path, preset: str, startup: Startup) -> StartFailed | EngineStopped | MemoryPressure:
    """Why a start came to no good end, after showing the end of its log."""
    lines = list(startup.lines)
    record = startup.record()
    title = logline.titles()[record.reached]
    one = lease.find(place, lease.container_name(preset))
    if one and one.reason:
        return MemoryPressure(f"{preset} was stopped: {one.reason}", hint="docs/memory.md says what counts")
    if startup.state == "gone" or one is None or one.state == "stopping":
        told = f"{preset} was stopped or removed by somebody else while it started ({title})"
        return EngineStopped(told, hint=f"`{hints.command('up', preset)}` starts it again")
    if lines:
        log.info(f"the end of {startup.seen.log}:\n{diagnosis.tail(lines)}")
    code = startup.seen.code
    known = diagnosis.diagnose(lines, 137 if startup.seen.oom else code)
    means = known.means if known else record.error or run.SIGNALS.get(code, f"exit code {code}")
    if known and known.line:
        log.info(f"  > {known.line}")
    remedy = hints.reworded(known.remedy) if known else record.hint
    whole = f"`{hints.command('logs', preset)}` shows its whole log"
    hint = f"{remedy}; {whole}" if remedy else whole
    return StartFailed(f"{preset} ended in the phase {title} (exit code {code}): {masking.text(means)}", hint=hint)
