"""One run of mmdebstrap, which makes a rootfs of distribution packages.

The same packages and epoch give the same bytes, on any host, for root and for other users: what a host could
leave in it (its name, its mirror, its resolver, logs, caches) is removed before it is packed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from warmstart import aptconf, host, run
from warmstart.errors import (
    CommandFailed,
    DiskFull,
    HostUnsupported,
    ProfileError,
    SetupFailed,
    Unreachable,
    WarmstartError,
)
from warmstart.lock import Package
from warmstart.profile import Profile

ROOM = 2_000_000_000  # bytes: an unpacked base with compilers is 0.4 to 0.8 GB, its packages 0.2 GB
CAP_SYS_ADMIN = 21  # bit in CapEff, linux/capability.h
AWAY = re.compile(
    r"(?:Could not resolve|(?:Could not|Unable to) connect to|Cannot initiate the connection to) '?([^\s':]+)"
    r"|Failed to fetch \w+://([^/\s]+)"
)
ARCHIVES = "/var/cache/apt/archives"
SCRATCH = "warmstart-base-"
FOUND = "warmstart-packages"  # the file inside the rootfs in which the packages are told

# /bin, /sbin and /lib* as links into /usr from the start: `usrmerge`, which would make them later, brings
# 47 MB of Perl.
MERGED_USR = """
mkdir -p "$1/var/cache/apt/archives"
for d in {dirs}; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done
printf 'Package: usrmerge\\nPin: release *\\nPin-Priority: -1\\n' > "$1/etc/apt/preferences.d/usrmerge"
"""

# What is installed, as apt's own indexes describe it: with the hash of the package file.
TELL = f"""
dpkg-query --admindir="$1/var/lib/dpkg" -W -f '${{Package}}=${{Version}}\\n' > "$1/tmp/names"
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-cache show --no-all-versions $(cat "$1/tmp/names") > "$1/tmp/{FOUND}"
"""

# What is left of the host or of the making.
CLEAN = """
cd "$1"
rm -rf etc/apt/sources.list etc/apt/sources.list.d/* etc/apt/preferences.d/* etc/apt/apt.conf.d/99mmdebstrap
rm -f etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid- etc/subgid-
rm -f var/lib/dpkg/*-old var/cache/debconf/*-old var/cache/ldconfig/aux-cache etc/.pwd.lock
rm -rf var/lib/apt/* var/cache/apt/*
find var/log -type f -delete
for f in etc/hostname etc/resolv.conf; do rm -f "$f"; : > "$f"; done
"""


class Job(msgspec.Struct, frozen=True):
    """One run of mmdebstrap: what, where to, and the folders it uses."""

    root: Path
    profile: Profile
    epoch: int
    out: Path
    log_file: Path
    scratch: Path
    cache: Path


def make(job: Job, hooks: Sequence[str] = (), locked: Sequence[Package] = ()) -> tuple[Package, ...]:
    """Make a rootfs and return its packages, sorted. `hooks` run at the end, in order.

    Where `locked` packages are still offered it is they that are taken. Raises Unreachable, DiskFull,
    SetupFailed, HostUnsupported, ProfileError, CommandFailed.
    """
    _require()
    host.need_disk(job.out.parent, ROOM, "the base")
    base = job.profile.base
    argv = ["mmdebstrap", "--verbose", "--mode=unshare", "--variant=essential", "--skip=output/dev"]
    argv += ["--format=" + ("null" if str(job.out) == os.devnull else "tar")]
    argv += [f"--include={','.join(base.packages)}"] if base.packages else []
    argv += ["--dpkgopt=force-unsafe-io", *(f"--aptopt={line}" for line in aptconf.acquire())]
    argv += [f"--components={','.join(base.components)}"] if base.components else []
    argv += [f"--keyring={_copied(job.root / 'arch' / base.keyring, job.scratch)}"] if base.keyring else []
    argv += [
        *_hooks(job, hooks, aptconf.pins(locked)),
        base.suite,
        str(job.out),
        *aptconf.sources(base.suite),
    ]
    job.log_file.parent.mkdir(parents=True, exist_ok=True)
    job.log_file.unlink(missing_ok=True)
    env = {"SOURCE_DATE_EPOCH": str(job.epoch), "TMPDIR": str(job.scratch)}
    try:
        run.run(argv, env=env, log_file=job.log_file)
    except CommandFailed as failed:
        raise explain(failed, base.suite) from None
    if run.recorder.on:
        return ()
    _keep(job.scratch / "debs", job.cache)
    return packages((job.scratch / "found").read_text(encoding="utf-8"))


def inside(script: Path, files: Sequence[Path], arguments: Sequence[str], python: str) -> list[str]:
    """Hooks that run a script inside the finished rootfs with its own `python`; `files` lie in /tmp then."""
    given = shlex.join(str(path) for path in (script, *files))
    command = shlex.join([python, "-I", f"/tmp/{script.name}", *arguments])
    return [f"copy-in {given} /tmp", f'chroot "$1" {command}']


def packages(told: str) -> tuple[Package, ...]:
    """Packages from the stanzas that apt tells, sorted by name."""
    found = []
    for stanza in told.split("\n\n"):
        fields = dict(re.findall(r"^(\S+): (.*)$", stanza, re.MULTILINE))
        if fields:
            found.append(
                Package(
                    fields["Package"], fields["Version"], fields["Architecture"], fields.get("SHA256", "")
                )
            )
    return tuple(sorted(found, key=lambda p: (p.name, p.architecture)))


def cache(state: Path, suite: str) -> Path:
    """Folder of the suite's package files that were downloaded before. Backup tools know to leave it out."""
    top = state / "cache"
    folder = top / "apt" / suite
    folder.mkdir(parents=True, exist_ok=True)
    tag = top / "CACHEDIR.TAG"  # https://bford.info/cachedir/
    if not tag.exists():
        tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n", encoding="utf-8")
    return folder


def _hooks(job: Job, customize: Sequence[str], pins: str) -> list[str]:
    """What is done before packages are fetched, and after they are installed."""
    debs, found, locked = job.scratch / "debs", job.scratch / "found", job.scratch / "locked"
    dirs = "bin sbin lib" + (" lib64" if platform.machine() == "x86_64" else "")
    before = [MERGED_USR.format(dirs=dirs).strip(), _words("sync-in", job.cache, ARCHIVES)]
    if pins:
        locked.write_text(pins, encoding="utf-8")
        before.append(_words("upload", locked, "/etc/apt/preferences.d/locked"))
    # apt finds in its folder what it fetched for an earlier base, and leaves there all that makes up this.
    debs.mkdir()
    after = [TELL.strip(), _words("download", f"/tmp/{FOUND}", found), _words("sync-out", ARCHIVES, debs)]
    words = [f"--setup-hook={hook}" for hook in before]
    words += [f"--customize-hook={hook}" for hook in (*after, *customize, CLEAN.strip())]
    # Once /tmp is cut, the apt of mmdebstrap's own cleaning works on the host: CLEAN does it instead.
    return [*words, "--skip=essential/unlink,cleanup/apt"]


def _words(*words: str | Path) -> str:
    return shlex.join(str(word) for word in words)


def _keep(debs: Path, kept: Path) -> None:
    """Keep the package files of this base for the next one, in place of other versions."""
    fresh = {file.name: file for file in debs.glob("*.deb")}
    names = {name.partition("_")[0] for name in fresh}
    for old in kept.glob("*.deb"):
        if old.name.partition("_")[0] in names and old.name not in fresh:
            old.unlink(missing_ok=True)
    for name, file in fresh.items():
        if not (kept / name).exists():
            beside = kept / f"{name}.{os.getpid()}"
            shutil.copyfile(file, beside)
            beside.replace(kept / name)


def explain(failed: CommandFailed, suite: str) -> WarmstartError:
    """What a failed mmdebstrap means, from its output."""
    result = getattr(failed, "result", None)
    told = f"{result.stdout}\n{result.stderr}" if result else failed.message
    if re.search(r"No space left on device|Disk quota exceeded", told):
        return DiskFull(
            "the disk filled up while the base was made", hint="free 2 GB, or set TMPDIR elsewhere"
        )
    if lost := re.search(
        r"Unable to locate package (\S+)|Package '(\S+)' has no installation candidate", told
    ):
        return ProfileError(
            f"{suite} has no package {lost[1] or lost[2]}", hint="see base.packages in the profile"
        )
    if re.search(r"NO_PUBKEY|is not signed|signatures? (?:couldn't|could not) be verified|EXPKEYSIG", told):
        return SetupFailed(
            f"the keys that {suite} is signed with are not on this host, or too old",
            hint="install debian-archive-keyring or ubuntu-keyring, or set base.keyring in the profile",
        )
    if gone := re.search(r"Failed to fetch \w+://([^/\s]+)\S*/(\S+)\s+404", told):
        return Unreachable(
            f"{gone[1]} lacks {gone[2]}, which its index of {suite} lists",
            hint="a mirror that is being updated right now: try again in a while",
        )
    if re.search(r"does not have a Release file", told):
        return ProfileError(
            f"the mirror has no suite {suite}", hint="see base.suite, and WARMSTART_DEB_MIRROR if set"
        )
    if away := AWAY.search(told):
        return Unreachable(
            f"{away[1] or away[2]}, which has the packages of {suite}, does not answer",
            hint=f"behind a proxy set http_proxy; for a mirror set {aptconf.MIRROR}",
        )
    errors = re.findall(r"^E: (.+)$", told, re.MULTILINE)
    if errors and re.search(r"newuidmap|subuid|unshare|Operation not permitted|cannot mount", errors[0]):
        return _no_namespaces(errors[0])
    return CommandFailed(f"mmdebstrap: {errors[0]}", hint=failed.hint) if errors else failed


def _require() -> None:
    """Raises HostUnsupported where no rootfs can be made: that takes the right to mount."""
    if run.recorder.on:
        return
    if os.geteuid() == 0:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
        if found and not int(found[1], 16) >> CAP_SYS_ADMIN & 1:
            raise _no_namespaces("root may not mount here (no CAP_SYS_ADMIN)")
    elif not run.program("newuidmap"):
        raise _no_namespaces("newuidmap is missing (package uidmap)")


def _no_namespaces(why: str) -> HostUnsupported:
    return HostUnsupported(
        f"the base can't be made here: {why}",
        hint="allow user namespaces and give the user a range in /etc/subuid and /etc/subgid, or run as root",
    )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder to work in, in memory where there is plenty; removed at the end with all that is in it."""
    disk, memory = Path(tempfile.gettempdir()), Path("/dev/shm")
    for top in (disk, memory):
        for old in top.glob(f"{SCRATCH}*"):
            if not Path("/proc", old.name.removeprefix(SCRATCH).partition("-")[0]).exists():
                _remove(old)  # its owner was killed
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and host.free_bytes(memory) > 2 * ROOM
    roomy = roomy and not os.statvfs(memory).f_flag & os.ST_NOEXEC and _available_memory() > 2 * ROOM
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=memory if roomy else disk))
    folder.chmod(0o755)  # mmdebstrap works in it under another user id
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and os.access(folder, os.W_OK):  # files of user ids that only a user namespace maps
        with contextlib.suppress(CommandFailed):
            run.run(["mmdebstrap", "--unshare-helper", "rm", "-rf", "--", folder])
        shutil.rmtree(folder, ignore_errors=True)


def _available_memory() -> int:
    """Bytes."""
    found = re.search(
        r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found[1]) * 1024 if found else 0


def _copied(file: Path, folder: Path) -> Path:
    """A copy that the user id of mmdebstrap may read."""
    copy = folder / file.name
    shutil.copyfile(file, copy)
    return copy


def last(failed: CommandFailed) -> str:
    """The last line that a failed command wrote, without its prefix."""
    result = getattr(failed, "result", None)
    lines = [
        line.strip() for line in (result.stderr if result else failed.message).splitlines() if line.strip()
    ]
    return re.sub(r"^(E: |time=\S+ level=\w+ msg=)", "", lines[-1]) if lines else "no reason given"
