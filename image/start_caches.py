"""The caches of a start: the key's folder made ready on the volume, or a private one where that can't be."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import start_key  # type: ignore[import-not-found] # beside this file
import start_volume  # type: ignore[import-not-found]
from start_say import say  # type: ignore[import-not-found]

EXIT_NO_CACHE = 65
MOST_BEFORE = 5  # images before this one that are asked what they used
USED = "warmstart-used"  # where the hooks describe kernels (sitecustomize/warmstart_ahead.py)


class Caches(NamedTuple):
    """Where a start's caches lie."""

    key: Path | None  # None for an image without caches
    kept: bool  # on the volume: the next start finds them
    starts: int  # how many start records stay


def prepare(manifest: dict[str, Any], gpus: list[dict[str, Any]]) -> Caches:
    """Make the caches ready, as the manifest's `caches` and `volume` say.

    On a volume that can't be written, and on one that is full, the start works on a copy. It ends with EXIT_NO_CACHE
    only where there is no place at all that can be written.
    """
    if not manifest["caches"]:
        return Caches(None, False, 0)
    volume = manifest["volume"]
    key = Path(volume["root"], manifest["cache_key"])
    parts = relative(key, manifest["caches"].values())
    try:
        start_key.make_all(key, parts)
    except OSError as problem:
        return Caches(elsewhere(key, parts, volume, gpus, problem), False, volume["keep_starts"])
    if kind := start_volume.network(key, volume["network"], volume["local"]):
        say(f"cache {volume['root']} lies on {kind}: starts are slower, and two at a time can fail; use a local disk")
    if own := made_room(key, parts, volume):
        use(own, parts, volume, gpus)
        return Caches(own, False, volume["keep_starts"])
    fd, alone = start_key.hold(key)
    if not (key / start_key.HOLD).exists():  # another image's start removed the key just then
        start_key.make_all(key, parts)
        fd, alone = start_key.hold(key)
    start_key.clear_locks(key, relative(key, volume["locks"]), relative(key, volume["batons"]), alone, bool(kind))
    start_key.open_up(key, relative(key, volume["private"]))
    use(key, parts, volume, gpus, alone or fd < 0)
    start_key.share(fd)
    start_volume.prune(key.parent, key, bound(volume))
    return Caches(key, True, volume["keep_starts"])


def relative(key: Path, paths: Any) -> list[str]:
    """Paths below the key, relative to it, sorted."""
    return sorted(path.removeprefix(f"{key}/") for path in paths)


def bound(volume: dict[str, Any]) -> float:
    """Bytes that caches of other images may take: WARMSTART_KEEP_GB, else what the image says."""
    told, usual = os.environ.get("WARMSTART_KEEP_GB", ""), float(volume["keep_gb"])
    with suppress(ValueError):
        if (given := float(told)) >= 0:  # NaN is not
            return given * 1e9
    if told:
        say(f"WARMSTART_KEEP_GB={told} is no number of gigabytes: {usual:g} are kept")
    return usual * 1e9


def elsewhere(key: Path, parts: list[str], volume: dict[str, Any], gpus: list[dict[str, Any]], why: OSError) -> Path:
    """A private copy of what the volume has, because it can't be written. Exits where no copy can be made."""
    import start_copy  # type: ignore[import-not-found]

    reason = str(why.strerror or why).lower()
    own: Path | None = start_copy.copy(key, parts) or start_copy.copy(key, parts, full=False)
    if own is None:
        say(f"cache {why.filename or key} can't be used ({reason}): mount a writable volume at {volume['root']}")
        sys.exit(EXIT_NO_CACHE)
    warm = any(any((own / part).iterdir()) for part in parts)
    what = "works on a copy of it" if warm else "begins with empty caches"
    say(f"cache {volume['root']} can't be written ({reason}): this start {what}, and what it makes is lost")
    start_copy.point(key, own)
    use(own, parts, volume, gpus)
    return own


def made_room(key: Path, parts: list[str], volume: dict[str, Any]) -> Path | None:
    """Make room on a volume that is full. A private copy where that was in vain and another disk has room, else None.

    What has to be stored and can't be ends a start; a start that finds all it needs is not disturbed by a full disk.
    """
    need = volume["need_mb"] * 1e6
    if start_volume.free(key) >= need:
        return None
    start_volume.prune(key.parent, key, 0, lambda: start_volume.free(key) >= need)
    if (room := start_volume.free(key)) >= need:
        return None
    import start_copy

    told = f"cache {volume['root']} is full ({room / 1e6:.0f} MB free)"
    own: Path | None = start_copy.copy(key, parts) if start_copy.room() >= need else None
    if own is None:
        say(f"{told}: what this start has to compile can't be stored, and that may end it")
        return None
    say(f"{told}: this start works on a copy of it, and what it makes is lost")
    start_copy.point(key, own)
    return own


def use(key: Path, parts: list[str], volume: dict[str, Any], gpus: list[dict[str, Any]], alone: bool = True) -> None:
    """Compare host.json with this machine, see to it that no foreign CPU code is run, and note this use."""
    flags = start_key.cpu_flags(volume["cpu_flags"])
    host = start_key.read_host(key)
    code = relative(Path(volume["root"], key.name), volume["cpu_code"])
    if reason := start_key.foreign(host, flags):
        if not alone:
            return apart(key, code, "are left to another machine that uses them", reason)
        try:
            start_key.set_aside(key, code)
        except OSError as problem:  # another user's
            return apart(key, code, f"can't be set aside ({str(problem.strerror or problem).lower()})", reason)
        say(f"{' and '.join(code)} of the cache are set aside and compiled anew: {reason}")
        host = {}
    start_key.write_host(key, host or {}, flags, gpus)
    return None


def apart(key: Path, code: list[str], why: str, reason: str) -> None:
    """Private directories for CPU code, because the key's can be neither used nor set aside; host.json stays."""
    import start_copy

    own: Path | None = start_copy.copy(key, code, full=False)
    if own:
        for part in code:
            start_copy.point(key / part, own / part)
    then = "this start has its own" if own else "there is no room for others, so they are used"
    say(f"{' and '.join(code)} of the cache {why}, {then}: {reason}")


def look_back(manifest: dict[str, Any]) -> None:
    """Name in WARMSTART_AHEAD where other images described the kernels that they used, for the hooks; the last first.

    A value that the user gave stands, also an empty one.
    """
    if "WARMSTART_AHEAD" not in os.environ and "triton" in manifest["caches"]:
        key = Path(manifest["volume"]["root"], manifest["cache_key"])
        (triton,) = relative(key, [manifest["caches"]["triton"]])
        with suppress(OSError):
            if found := start_volume.before(key.parent, key, f"{triton}/{USED}"):
                os.environ["WARMSTART_AHEAD"] = os.pathsep.join(map(str, found[:MOST_BEFORE]))


def record(caches: Caches, command: list[str], gpus: list[dict[str, Any]], seconds: float) -> None:
    """Begin the start record, a file of JSON lines to which the hooks add; WARMSTART_START names it.

    A value that the user gave stands: another file, or nothing for no record.
    """
    given = os.environ.get("WARMSTART_START")
    if caches.key is None or given == "":
        return
    now = time.time()
    folder = caches.key / start_key.STARTS
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}-{os.getpid()}.jsonl"
    what = [os.path.basename(command[0]), *(word for word in command[1:2] if word.isalpha())]  # flags may be secrets
    event = {"event": "start", "pid": os.getpid(), "t": now, "command": what, "kept": caches.kept, "seconds": seconds}
    event |= {"key": caches.key.name, "gpus": [{"arch": gpu["arch"], "cu": gpu["cu"]} for gpu in gpus]}
    with suppress(OSError):
        if not given and not start_key.inside(caches.key, folder / name):
            return
        flags = os.O_NONBLOCK if given else os.O_EXCL  # a pipe of the user's that nobody reads is not waited for
        fd = os.open(given or folder / name, flags | os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(fd, json.dumps(event).encode() + b"\n")
        os.close(fd)
        os.environ["WARMSTART_START"] = given or str(folder / name)
        for old in sorted(start_key.own_files(caches.key, f"{start_key.STARTS}/*.jsonl"))[: -caches.starts]:
            with suppress(OSError):
                old.unlink()
