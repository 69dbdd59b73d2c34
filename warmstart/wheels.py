"""Fetching the locked wheels into a folder, the wheelhouse, from which the build installs without a network.

pip fetches, in its user's own configuration: mirrors, folders, proxies, passwords and certificates work as
the user set them up, and none of them can reach the image. Every file is checked against the lock before it
gets its name, so whatever lies in the wheelhouse under a wheel's name is whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from warmstart import host, log, pipconf, run, targets
from warmstart.errors import CommandFailed, LockNotResolved, Unreachable, WarmstartError, WheelMismatch
from warmstart.lock import MADE, Wheel
from warmstart.profile import Index, Profile

WORKERS = 3  # pips at once: each waits for the network half of the time
ALONE = 48_000_000  # bytes from which a wheel gets a pip of its own, so that an interrupted fetch keeps it
EACH = 2_000_000  # what looking up a wheel costs, as bytes downloaded in the same time
POLL = 0.3  # seconds between two looks at what is there
STAMP = ".checked.json"
PART = ".part-"

Job = tuple[Wheel, ...]


def fetch(profile: Profile, wheels: Sequence[Wheel], wheelhouse: Path) -> None:
    """Make sure that every wheel of a lock lies in `wheelhouse` with the locked sha256.

    Looks where the host's pip is configured to look; then, for what one of the profile's indexes lists, in
    that index. Interrupted, it keeps what is done.
    Raises WheelMismatch, Unreachable, DiskFull, or LockNotResolved for wheels without a hash.
    """
    if any(not w.sha256 for w in wheels) and not run.recorder.on:
        raise LockNotResolved("the lock holds wheels without hashes", hint=f"make lock ARCH={profile.arch}")
    if run.recorder.on:
        log.info(f"would fetch into {wheelhouse} what is missing of {len(wheels)} wheels")
        return
    wheelhouse.mkdir(parents=True, exist_ok=True)
    wanted = missing(wheels, wheelhouse)
    if not wanted:
        return
    if here := [w for w in wanted if w.source == MADE]:
        raise Unreachable(
            f"{_names(here)} was made from sources on another machine and is offered by no index",
            hint=f"put {here[0].file} into {wheelhouse}, or {profile.lock_command} to make it here",
        )
    _sweep(wheelhouse)
    # pip downloads to a temporary place and copies from there, so both exist for a while.
    host.need_disk(wheelhouse, 2 * sum(w.size for w in wanted), "fetching the wheels")
    with log.step(f"wheels: {len(wanted)} of {len(wheels)} to fetch") as step, _part(wheelhouse) as part:
        places = _Places(profile, pipconf.read(), wheelhouse, part, threading.Event())
        _together(jobs(wanted, _listed(profile)), places, step)
    missing(wheels, wheelhouse)  # notes what was fetched as checked


def missing(wheels: Iterable[Wheel], wheelhouse: Path) -> list[Wheel]:
    """The wheels that are not in the wheelhouse, or not as locked.

    Files are hashed once: a stamp beside them keeps size and time of those found right, which change when a
    file does.
    """
    stamps = _stamps(wheelhouse)
    absent = []
    fresh = {}
    for wheel in wheels:
        try:
            status = (wheelhouse / wheel.file).stat()
        except FileNotFoundError:
            absent.append(wheel)
            continue
        stamp = (wheel.sha256, status.st_size, status.st_mtime_ns)
        if stamps.get(wheel.file) != stamp:
            if sha256(wheelhouse / wheel.file) != wheel.sha256:
                log.warn(f"{wheelhouse / wheel.file} is not the wheel that the lock names: fetching it again")
                absent.append(wheel)
                continue
            fresh[wheel.file] = stamp
    if fresh:
        beside = wheelhouse / f"{STAMP}.{os.getpid()}-{threading.get_native_id()}"
        beside.write_bytes(msgspec.json.encode(stamps | fresh))
        beside.replace(wheelhouse / STAMP)
    return absent


def jobs(wheels: Iterable[Wheel], listed: Iterable[str] = ()) -> list[Job]:
    """Shares of the work for one pip each, the longest first.

    Large wheels, and those that may have to be looked for in a second place, stand alone.
    """
    single = set(listed)
    alone = [w for w in wheels if w.size >= ALONE or w.name in single]
    shares: list[list[Wheel]] = [[] for _ in range(WORKERS)]
    for wheel in sorted((w for w in wheels if w not in alone), key=_work, reverse=True):
        min(shares, key=lambda share: sum(map(_work, share))).append(wheel)
    every = [(w,) for w in alone] + [tuple(share) for share in shares if share]
    return sorted(every, key=lambda job: sum(map(_work, job)), reverse=True)


def sha256(file: Path) -> str:
    """sha256 of a file's content in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class _Places(msgspec.Struct, frozen=True):
    """Where to look, and where to put."""

    profile: Profile
    conf: pipconf.PipConfig
    wheelhouse: Path
    part: Path  # a folder in the wheelhouse for what is not checked yet
    stop: threading.Event  # set when no further pip may start


def _together(todo: list[Job], places: _Places, step: log.Step) -> None:
    """Run all jobs, a few at a time. The first failure, or a signal, ends the others."""
    wanted = {w.file: w.size for job in todo for w in job}
    pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
    running = {pool.submit(_get, job, places) for job in todo}
    try:
        while running:
            done, running = concurrent.futures.wait(running, POLL, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                future.result()
            there, size = _progress(wanted, places)
            step.note(f"{there}/{len(wanted)} files, {size / 1e6:.0f} of {sum(wanted.values()) / 1e6:.0f} MB")
    except BaseException:
        places.stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        while running := {f for f in running if not f.done()}:  # wait never counts what was cancelled as done
            _end(places.part)
            concurrent.futures.wait(running, POLL)
        raise
    finally:
        pool.shutdown()


def _get(job: Job, places: _Places) -> None:
    """Fetch one job: where pip looks by itself, then for what is still missing in the index that lists it."""
    try:
        _pip(job, places, None)
        return
    except CommandFailed as failed:
        rest = missing(job, places.wheelhouse)
        problem = pipconf.explain(_told_more(failed, job, places), _names(rest), places.conf.places)
    for index in places.profile.wheels.indexes:
        listed = tuple(w for w in rest if w.name in index.packages)
        if not listed:
            continue
        try:
            _pip(listed, places, index)
        except CommandFailed as failed:
            if isinstance(problem, WheelMismatch):
                break  # the more telling one: the index that lists it was only the second place
            raise _also(failed, index, listed) from None
        rest = [w for w in rest if w not in listed]
    if rest:
        raise problem


def _pip(job: Job, places: _Places, index: Index | None, *more: str) -> None:
    """Run one pip and take what it brought, also when it failed half way. Raises CommandFailed."""
    if places.stop.is_set():
        raise CommandFailed("another part of the fetch failed")
    folder = Path(tempfile.mkdtemp(dir=places.part))
    (folder / "tmp").mkdir()
    lines = [f"{w.name}=={w.version} --hash=sha256:{w.sha256}" for w in job]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources = [w for w in job if not w.file.endswith(".whl")]
    unbuilt, env = pipconf.unbuilt(folder) if sources else ([], {})
    # Both keep the folder that we were started in out of pip's modules; the second lets PYTHONPATH in.
    argv = [sys.executable, "-Pm" if sources else "-Im", "pip", "download", *unbuilt]
    argv += ["--no-cache-dir", "--no-deps", "--require-hashes"]
    argv += ["--only-binary", ":all:", *targets.for_pip(places.profile, [w.file for w in job]), *more]
    argv += [word for w in sources for word in ("--no-binary", w.name)]
    argv += ["--index-url", targets.fill(index.url, places.profile), "--retries", "2"] if index else []
    argv += ["--requirement", str(folder / "requirements.txt"), "--dest", str(folder / "new")]
    try:
        # A wheel can be larger than a /tmp in memory: pip's temporary files go where there was room for it.
        run.run(argv, env=pipconf.environment() | env | {"TMPDIR": str(folder / "tmp")})
    finally:
        _take(job, folder, places.wheelhouse)
        shutil.rmtree(folder, ignore_errors=True)
    if lost := missing(job, places.wheelhouse):
        raise CommandFailed(f"pip reported success but did not bring {_names(lost)}")


def _take(job: Job, folder: Path, wheelhouse: Path) -> None:
    """Move the locked wheels found below `folder` into the wheelhouse, recognised by what is in them."""
    wanted = {w.sha256: w.file for w in job}
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            usable = file.suffix == ".whl" or file.name in wanted.values()
            if usable and (name := wanted.get(sha256(file))):
                file.replace(wheelhouse / name)


def _told_more(failed: CommandFailed, job: Job, places: _Places) -> CommandFailed:
    """pip tells only when asked why it did not find something: ask, for that one wheel."""
    name = pipconf.not_found(failed).partition("==")[0]
    again = tuple(w for w in job if w.name == name)
    if again and name not in _listed(places.profile):
        try:
            _pip(again, places, None, "-vv")
        except CommandFailed as told:
            return told
    return failed


def _also(failed: CommandFailed, index: Index, wheels: Job) -> WarmstartError:
    """What a failure with a vendor's index means, and that pip's own places were tried too."""
    problem = pipconf.explain(failed, _names(wheels), f"index {index.name}")
    where = "" if index.name in problem.message else f"index {index.name}: "
    tried = f"{_names(wheels)} is not offered where pip is configured to look"
    return type(problem)(f"{where}{problem.message}; and {tried}", hint=problem.hint)


def _listed(profile: Profile) -> set[str]:
    return {name for index in profile.wheels.indexes for name in index.packages}


def _work(wheel: Wheel) -> int:
    return wheel.size + EACH


def _names(wheels: Sequence[Wheel]) -> str:
    """The first wheels by name and version, for people."""
    shown = ", ".join(f"{w.name} {w.version}" for w in wheels[:3])
    return shown + (f" and {len(wheels) - 3} more" if len(wheels) > 3 else "")


def _stamps(wheelhouse: Path) -> dict[str, tuple[str, int, int]]:
    try:
        return msgspec.json.decode((wheelhouse / STAMP).read_bytes(), type=dict[str, tuple[str, int, int]])
    except (OSError, msgspec.MsgspecError):
        return {}  # a lost stamp only costs hashing again


@contextlib.contextmanager
def _part(wheelhouse: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{PART}{os.getpid()}-", dir=wheelhouse))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(wheelhouse: Path) -> None:
    """Remove what killed fetches left: parts and new stamps of processes that are gone."""
    for begin in (PART, f"{STAMP}."):
        for left in wheelhouse.glob(f"{begin}*"):
            owner = left.name.removeprefix(begin).partition("-")[0]
            if not Path(f"/proc/{owner}").exists():
                shutil.rmtree(left, ignore_errors=True)
                with contextlib.suppress(OSError):  # a stamp; a part is gone
                    left.unlink()


def _progress(wanted: dict[str, int], places: _Places) -> tuple[int, int]:
    """Files done, and bytes there, counting those on their way."""
    done = {name for name in wanted if (places.wheelhouse / name).exists()}
    size = sum(wanted[name] for name in done)
    for folder, _, files in os.walk(places.part):
        for name in files:
            if name in wanted and name not in done:
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(os.path.join(folder, name)).st_size
    return len(done), min(size, sum(wanted.values()))


def _end(part: Path) -> None:
    """Interrupt the pips that work below `part`: the threads that wait for them can't be interrupted."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                if str(part).encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGINT)
