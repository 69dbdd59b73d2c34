"""The base as a rootfs of distribution packages, made by mmdebstrap without a registry.

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
from warmstart.cuts import Cuts
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
from warmstart.plan import Plan
from warmstart.profile import Profile

ROOM = 2_000_000_000  # bytes: an unpacked base with compilers is 0.4 to 0.8 GB, its packages 0.2 GB
CAP_SYS_ADMIN = 21  # bit in CapEff, linux/capability.h
AWAY = re.compile(
    r"(?:Could not resolve|(?:Could not|Unable to) connect to|Cannot initiate the connection to) '?([^\s':]+)"
    r"|Failed to fetch \w+://([^/\s]+)"
)
FOUND = "warmstart-packages"  # the file inside the rootfs in which the packages are told

# /bin, /sbin and /lib* as links into /usr from the start: `usrmerge`, which would make them later, brings
# 47 MB of Perl.
MERGED_USR = """
for d in {dirs}; do mkdir -p "$1/usr/$d"; ln -s "usr/$d" "$1/$d"; done
printf 'Package: usrmerge\\nPin: release *\\nPin-Priority: -1\\n' > "$1/etc/apt/preferences.d/usrmerge"
"""

# What is installed, as apt's own indexes describe it: with the hash of the package file.
TELL = f"""
dpkg-query --admindir="$1/var/lib/dpkg" -W -f '${{Package}}=${{Version}}\\n' > "$1/tmp/names"
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-cache show --no-all-versions $(cat "$1/tmp/names") > "$1/tmp/{FOUND}"
"""

# What is left of the host or of the making. Log files and the other caches of apt are removed by mmdebstrap.
CLEAN = """
cd "$1"
rm -rf etc/apt/sources.list etc/apt/sources.list.d/* etc/apt/preferences.d/* etc/apt/apt.conf.d/99mmdebstrap
rm -f etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid- etc/subgid-
rm -f var/lib/dpkg/*-old var/cache/debconf/*-old var/cache/ldconfig/aux-cache etc/.pwd.lock
rm -rf var/lib/apt/* var/cache/apt/*
find var/log -type f -delete
for f in etc/hostname etc/resolv.conf; do rm -f "$f"; : > "$f"; done
"""


def make(root: Path, planned: Plan, out: Path, log_file: Path) -> tuple[Package, ...]:
    """Make the base of a plan, slim, as tar file `out`. Returns the packages in it, sorted.

    Where the locked packages are still offered it is they that are taken. `out` is there whole or not at all.
    Raises Unreachable, DiskFull, SetupFailed (keys missing), HostUnsupported (no way to make one here),
    ProfileError (no such suite or package), CommandFailed.
    """
    with _scratch() as scratch:
        rules, file = planned.cuts.rules("os"), scratch / "rules.json"
        file.write_bytes(msgspec.json.encode(rules, order="sorted"))
        slim = inside(root / "image" / "slim.py", [file], ["/tmp/rules.json", "os", "/"])
        slim = slim if any(isinstance(table, list) and table for table in rules.values()) else []
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            found = _mmdebstrap(
                root,
                planned.profile,
                planned.epoch,
                beside,
                log_file,
                scratch,
                slim,
                planned.base.locked.packages,
            )
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)
    return found


def resolve(root: Path, state: Path, profile: Profile, cuts: Cuts) -> tuple[Package, ...]:
    """The packages that the base of a profile has when it is made now, sorted. Raises as `make` does."""
    with _scratch() as scratch:
        return _mmdebstrap(root, profile, 0, Path(os.devnull), state / profile.arch / "rootfs.log", scratch)


def check(locked: Sequence[Package], found: Sequence[Package]) -> list[str]:
    """The differences between locked and found packages, one line each; empty when they are the same."""
    before, after = (
        {(p.name, p.architecture): p for p in locked},
        {(p.name, p.architecture): p for p in found},
    )
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old and new and old.version == new.version and old.sha256 != new.sha256:
            lines.append(f"{key[0]} {old.version}: sha256 {old.sha256[:12]} → {new.sha256[:12]}")
        elif old != new:
            lines.append(f"{key[0]} {old.version if old else 'absent'} → {new.version if new else 'absent'}")
    return lines


def inside(script: Path, files: Sequence[Path], arguments: Sequence[str]) -> list[str]:
    """Hooks that run a script inside the finished rootfs with its own Python; `files` lie in /tmp then."""
    given = shlex.join(str(path) for path in (script, *files))
    command = shlex.join(["python3", "-I", f"/tmp/{script.name}", *arguments])
    return [f"copy-in {given} /tmp", f'chroot "$1" {command}']


def resolve_image_digest(ref: str) -> str:
    """The digest (sha256:…) that the registry gives for an image now. Raises Unreachable."""
    try:
        argv = ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{ref}"]
        return run.run(argv, always=True).stdout.strip()
    except CommandFailed as failed:
        registry = ref.partition("/")[0]
        raise Unreachable(
            f"{registry} gives no digest for {ref}: {_last(failed)}",
            hint="behind a proxy set https_proxy; mirrors: registries.conf, passwords: `skopeo login`",
        ) from None


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


def _mmdebstrap(
    root: Path,
    profile: Profile,
    epoch: int,
    out: Path,
    log_file: Path,
    scratch: Path,
    hooks: Sequence[str] = (),
    locked: Sequence[Package] = (),
) -> tuple[Package, ...]:
    base = profile.base
    _require()
    host.need_disk(out.parent, ROOM, "the base")
    listed = scratch / "found"
    dirs = "bin sbin lib" + (" lib64" if platform.machine() == "x86_64" else "")
    argv = ["mmdebstrap", "--verbose", "--mode=unshare", "--variant=essential", "--skip=output/dev"]
    argv += [
        "--format=" + ("null" if str(out) == os.devnull else "tar"),
        f"--include={','.join(base.packages)}",
    ]
    argv += ["--dpkgopt=force-unsafe-io", *(f"--aptopt={line}" for line in aptconf.acquire())]
    argv += [f"--keyring={_copied(root / 'arch' / base.keyring, scratch)}"] if base.keyring else []
    argv += [f"--setup-hook={MERGED_USR.format(dirs=dirs).strip()}"]
    if pins := aptconf.pins(locked):
        (scratch / "pins").write_text(pins, encoding="utf-8")
        argv += [f"--setup-hook=upload {shlex.quote(str(scratch / 'pins'))} /etc/apt/preferences.d/locked"]
    argv += [
        f"--customize-hook={TELL.strip()}",
        f"--customize-hook=download /tmp/{FOUND} {shlex.quote(str(listed))}",
    ]
    argv += [f"--customize-hook={hook}" for hook in hooks] + [f"--customize-hook={CLEAN.strip()}"]
    argv += [base.suite, str(out), *aptconf.sources(base.suite)]
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.unlink(missing_ok=True)
    env = {"SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": str(scratch)}
    try:
        run.run(argv, env=env, log_file=log_file)
    except CommandFailed as failed:
        raise explain(failed, base.suite) from None
    return packages(listed.read_text(encoding="utf-8")) if listed.is_file() else ()


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
    if re.search(r"newuidmap|subuid|unshare|Operation not permitted|cannot mount", told):
        return _no_namespaces(_last(failed))
    return failed


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
def _scratch() -> Iterator[Path]:
    """A folder to work in, in memory where there is plenty; removed at the end with all that is in it."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and host.free_bytes(memory) > 2 * ROOM
    roomy = roomy and not os.statvfs(memory).f_flag & os.ST_NOEXEC and _available_memory() > 2 * ROOM
    folder = Path(tempfile.mkdtemp(prefix="warmstart-", dir=memory if roomy else None))
    folder.chmod(0o755)  # mmdebstrap works in it under another user id
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():  # of a killed mmdebstrap: files of user ids that only a user namespace maps
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


def _last(failed: CommandFailed) -> str:
    result = getattr(failed, "result", None)
    lines = [
        line.strip() for line in (result.stderr if result else failed.message).splitlines() if line.strip()
    ]
    return re.sub(r"^(E: |time=\S+ level=\w+ msg=)", "", lines[-1]) if lines else "no reason given"
