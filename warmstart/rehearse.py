"""Building an arch's real Containerfile to the end with stand-ins for what this network can't reach.

The plan, the resolver, the fetch, the template, the engine and the image tests are the real ones, and so is what the
general index and the distribution offer. Replaced is only what the record lists: scheme, host and port of the
vendors' indexes, and the distributions in them. All of it lies below `.warmstart/rehearsal`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from warmstart import (
    assemble,
    engine,
    inputs,
    log,
    loopback,
    offers,
    plan,
    rehearsed,
    render,
    reuse,
    run,
    solve,
    standins,
    targets,
    verify,
)
from warmstart import lock as locks
from warmstart import profile as profiles
from warmstart.cuts import Cuts
from warmstart.engine import Capabilities
from warmstart.errors import (
    ImageMissing,
    Interrupted,
    LockMismatch,
    ProfileError,
    Terminated,
    Unreachable,
    UsageError,
    VerifyFailed,
    WarmstartError,
)
from warmstart.lock import PIP, Lock, LockedBase
from warmstart.loopback import Served
from warmstart.offers import Rehearsal
from warmstart.plan import Plan
from warmstart.profile import Loaded, Profile
from warmstart.rehearsed import Rehearsed as Rehearsed
from warmstart.rehearsed import text as text
from warmstart.standins import Made

REPOSITORY = "localhost/warmstart/rehearsal"


def require_vendors(profile: Profile) -> None:
    """Raises UsageError for an arch whose image needs nothing of a vendor's index."""
    if profile.device is None:
        raise UsageError(
            f"{profile.arch} needs no rehearsal: all that goes in can be had here",
            hint=f"make image ARCH={profile.arch}",
        )


def home(state: Path) -> Path:
    """Where rehearsals keep all that is theirs: nothing of it is ever taken for a real wheel, image or record."""
    return state / "rehearsal"


def archs(root: Path) -> list[str]:
    """The archs whose images have wheels of a vendor's index that a rehearsal can stand in for."""
    known = {urlsplit(index.address).netloc for index in offers.load(root).index}
    found = []
    for arch in profiles.archs(root):
        indexes = profiles.load(root, arch).profile.wheels.indexes
        if profiles.load(root, arch).profile.device and any(urlsplit(i.url).netloc in known for i in indexes):
            found.append(arch)
    return found


def each(names: Sequence[str], one: Callable[[str], None]) -> None:
    """Rehearse archs one after another. Of several, a failed one keeps no other back; the first failure is raised."""
    failures: dict[str, WarmstartError] = {}
    for arch in names:
        try:
            one(arch)
        except (Interrupted, Terminated):
            raise
        except WarmstartError as failed:
            failures[arch] = failed
            if len(names) > 1:
                log.warn(f"{arch}: {failed.message}")
    if failures:
        first = next(iter(failures.values()))
        if len(names) > 1:
            first.message = f"{len(failures)} of {len(names)} archs failed ({', '.join(failures)}): {first.message}"
        raise first


def rehearse(
    root: Path, state: Path, loaded: Loaded, cuts: Cuts, caps: Capabilities, *, first: bool = False
) -> Rehearsed:
    """Rehearse the image of one arch; writes its record. With `first` no image test runs after one that failed.

    Raises what the steps of `image` and `verify` do; Unreachable or ProfileError for an index's address, or a name
    in it, that is not known to be right; LockMismatch when the vendors' part resolves to another than is committed.
    """
    own, profile = home(state), loaded.profile
    table = offers.load(root)
    committed = locks.read(root, own / "no-relock", profile, cuts.dropped)
    real = plan.make(root, loaded, committed, cuts)
    if run.recorder.on:
        log.info(f"would rehearse plan {real.plan_id[:12]} of {profile.arch}")
        return Rehearsed(arch=profile.arch, plan_id="", real_plan_id=real.plan_id, indexes={}, standins={})
    watch = _Watch()
    with engine.hold(own, profile.arch):
        with engine.hold(own, "standins"):
            made = standins.make(root, state, own / "cache", table, profile, committed.wheels)
        watch.lap("stand-ins")
        with _direct(), loopback.serve(table.index, made) as served:
            here = Loaded(_redirected(profile, served), loaded.origins)
            locked = _resolved(own, here.profile, cuts, committed, served, made)
            told = differences(committed, locked)
            if told:
                log.warn(f"{len(told)} packages are others than the lock says: {'; '.join(told[:3])}")
            watch.lap("resolve")
            planned = _own(plan.make(root, loaded, locked, cuts), table)
            trees = reuse.share(state, own, planned, made)
            planned = _fetched(root, own, loaded, here, planned, cuts, caps, table)
            watch.lap("fetch")
        addresses = [targets.fill(index.url, profile) for index in profile.wheels.indexes]
        known = {(m.name, m.version): m.why for m in made}
        record = Rehearsed(
            arch=profile.arch,
            plan_id=planned.plan_id,
            real_plan_id=real.plan_id,
            tag=planned.tags[0],
            indexes={address: served.address(address) for address in addresses},
            standins=trees | {w.name: known[w.name, w.version] for w in planned.wheels if (w.name, w.version) in known},
            differences=told,
        )
        built = _built(root, own, planned, caps)
        watch.lap("build")
        record = msgspec.structs.replace(record, image_id=built)
        return _verified(root, own, planned, caps, record, watch, first)


def differences(committed: Lock, locked: Lock) -> tuple[str, ...]:
    """How a lock resolved from stand-ins differs from the committed one, in what the general index offers.

    Raises LockMismatch for any difference in the vendors' part: a name or a version that nobody committed.
    """
    rows = locks.changed(LockedBase("rootfs"), committed.wheels, LockedBase("rootfs"), locked.wheels)
    vendors = {f"wheel {w.name}" for w in (*committed.wheels, *locked.wheels) if w.source != PIP}
    rows = [row for row in rows if row[1]]  # a version that the lock leaves open
    theirs = [f"{name[6:]} {after} instead of {before}" for name, before, after in rows if name in vendors]
    if theirs:
        raise LockMismatch(
            f"{committed.arch} resolves to {theirs[0]}" + (f" and {len(theirs) - 1} more" if theirs[1:] else ""),
            hint=f"make lock ARCH={committed.arch} ARGS=--pins, if the profile means it",
        )
    return tuple(f"{name}: {before} → {after}" for name, before, after in rows)


class _Watch:
    """Seconds of the phases, one after another."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase], self._since = round(now - self._since, 1), now


def _redirected(profile: Profile, served: Served) -> Profile:
    """The profile with scheme, host and port of its indexes replaced, and nothing else of their addresses."""
    indexes = []
    for index in profile.wheels.indexes:
        address = served.address(targets.fill(index.url, profile))
        if not address:
            raise ProfileError(
                f"index {index.name} is at {index.url}, a host that arch/rehearsal.toml doesn't know",
                hint=f"known are {', '.join(served.hosts)}; add its address there once it is known to be right",
            )
        indexes.append(msgspec.structs.replace(index, url=address))
    wheels = msgspec.structs.replace(profile.wheels, indexes=tuple(indexes))
    return msgspec.structs.replace(profile, wheels=wheels)


def _resolved(
    own: Path, profile: Profile, cuts: Cuts, committed: Lock, served: Served, made: Sequence[Made]
) -> Lock:
    """The committed lock with all hashes, resolved as `lock` does it, and kept for the steps that follow."""
    try:
        wheels = solve.resolve(profile, cuts.dropped)
    except Unreachable as failed:
        if not served.refused:
            raise
        named = [r for r in served.refused if r.rstrip("/").rpartition("/")[2] in failed.message]
        raise Unreachable(
            f"{failed.message}: there is no {(named or served.refused)[0]}",
            hint="compare with arch/rehearsal.toml, which holds the addresses and names that are known to be right",
        ) from None
    # Sources from the general index that can't be built without the vendors' compiler.
    instead = {(m.name, m.version): m for m in made if not m.index}
    for i, wheel in enumerate(wheels):
        if one := instead.get((wheel.name, wheel.version)):
            path = Path(one.path)
            other = msgspec.structs.replace(wheel, file=path.name, sha256=one.sha256, size=path.stat().st_size)
            wheels = (*wheels[:i], other, *wheels[i + 1 :])
    of = locks.digest(msgspec.to_builtins(committed))
    locked = msgspec.structs.replace(committed, state="resolved", wheels=wheels, of=of)
    locked = reuse.as_moved(own, committed, locked)
    locks.write(locks.relocked(own, profile.slug), locked)
    return locked


def _fetched(
    root: Path, own: Path, loaded: Loaded, here: Loaded, planned: Plan, cuts: Cuts, caps: Capabilities, table: Rehearsal
) -> Plan:
    """Base and wheels, fetched as for a build. When distribution packages moved, the plan is another one."""
    fetched = inputs.fetch(root, own, here, planned, caps)
    if fetched is planned:
        return planned
    again = locks.read(root, own, loaded.profile, cuts.dropped)
    reuse.note_moved(own, locks.parse(locks.committed(root, loaded.profile.slug)), again)
    return _own(plan.make(root, loaded, again, cuts), table)


def _built(root: Path, own: Path, planned: Plan, caps: Capabilities) -> str:
    """Build the image, and forget the one that the tag pointed to before."""
    before = ""
    with contextlib.suppress(ImageMissing):
        before = engine.inspect(caps, planned.tags[0]).image_id
    record = assemble.image(root, own, planned, render.render(root, planned), caps, time.monotonic())
    if before not in ("", record.image_id):
        engine.remove(caps, before)
    return record.image_id


def _verified(
    root: Path, own: Path, planned: Plan, caps: Capabilities, record: Rehearsed, watch: _Watch, first: bool
) -> Rehearsed:
    """Run the image tests, which read the record to know what stands in, and write it with their verdict."""
    path = own / planned.arch / "rehearsal.json"
    rehearsed.write(path, record)
    failure: VerifyFailed | None = None
    try:
        verdict = verify.verify(root, own, caps, planned, record.image_id, rehearsal=path, first=first)
    except VerifyFailed as failed:
        failure = failed
        junit = own / planned.arch / "verify.xml"
        verdict = verify.read(junit, record.image_id, planned.plan_id, junit.with_suffix(".log"))
    watch.lap("image tests")
    counts = {"passed": verdict.passed, "failed": verdict.failed, "skipped": verdict.skipped}
    record = msgspec.structs.replace(record, tests=verdict.tests, seconds=watch.laps, **counts)
    rehearsed.write(path, record)
    if failure:
        raise failure
    return record


def _own(planned: Plan, table: Rehearsal) -> Plan:
    """The plan under a rehearsal's own tag, with the disk space that stand-ins need."""
    tag = f"{REPOSITORY}:{planned.profile.slug.replace('.', '-')}"
    budget = msgspec.structs.replace(planned.profile.budget, unpacked_mb=table.unpacked_mb)
    profile = msgspec.structs.replace(planned.profile, budget=budget)
    return msgspec.structs.replace(planned, tags=(tag,), profile=profile)


@contextlib.contextmanager
def _direct() -> Iterator[None]:
    """While in use, no proxy stands between this machine and itself."""
    before = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY")}
    os.environ |= {name: ",".join(filter(None, (value, loopback.HOST))) for name, value in before.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
