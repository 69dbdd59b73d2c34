"""A failed build as one of our errors: in which step it broke, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from warmstart.errors import BuildFailed, DiskFull, Unreachable, WarmstartError, WheelMismatch

# Lines of buildah's own, which say nothing about the reason. They begin in the middle of a line where a
# program ended its output without a line break.
_STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP \d+/\d+: (.*)")
_NOISE = re.compile(
    r'^(?:Error: building at STEP|time="|-->|\s*$|exit status|container exited on|subprocess exited)'
)

_FULL = re.compile(r"no space left on device|disk quota exceeded|ENOSPC", re.IGNORECASE)

# What tools print when a name can't be resolved or a host doesn't answer. Where they name no host in a way of
# their own, only that of an address counts: `six==1.16.0` is no host.
_HOST = r"(?P<host>[\w-]+(?:\.[\w-]+)*(?::\d+)?)"
_UNREACHABLE = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"dial tcp: lookup {_HOST}",  # buildah, podman
        rf"dial tcp {_HOST}: (?:connect|i/o)",
        rf"pinging container registry {_HOST}",
        rf"could not resolve host: {_HOST}",  # curl, git
        rf"failed to connect to {_HOST}",
        rf"temporary failure resolving '{_HOST}'",  # apt
        rf"failed to fetch:? https?://{_HOST}",  # apt, uv
        rf"error sending request for url \(https?://{_HOST}",  # uv
        rf"ConnectionPool\(host='{_HOST}'",  # pip
        rf"(?:connection refused|network is unreachable|timed out).*?https?://{_HOST}",
    )
]

_MISMATCH = re.compile(r"hash(?:es)? mismatch|do not match the hash", re.IGNORECASE)
_WHEEL = re.compile(r"[\w.+-]+\.whl|(?<=mismatch for `)[^`]+")


def explain(lines: Sequence[str], log_file: Path, replay: Path, code: int) -> WarmstartError:
    """The error for a build that ended with `code` after printing `lines`.

    DiskFull, WheelMismatch (naming the wheel), Unreachable (naming the host), else BuildFailed with the step
    and the last line before buildah's own.
    """
    step = next((found[1] for line in reversed(lines) if (found := _STEP.search(line))), "")
    where = f"log {log_file}, again with {replay}"
    since = lines[-60:]  # the reason stands near the end; a retry that worked stands further up
    text = "\n".join(since)
    if _FULL.search(text):
        return DiskFull(
            f"no space left on the disk in step {shown(step)}", hint=f"make prune, or free some; {where}"
        )
    if mismatch := _MISMATCH.search(text):
        wheel = _WHEEL.search(text, mismatch.start()) or _WHEEL.search(text)
        told = f"{wheel[0] if wheel else 'a wheel'}: its sha256 is not the one in the lock"
        return WheelMismatch(told, hint=f"make lock resolves anew; {where}")
    if host := unreachable(text):
        hint = "set https_proxy if this machine needs a proxy, or name a mirror; " + where
        return Unreachable(f"{host} does not answer in step {shown(step)}", hint=hint)
    return BuildFailed(f"step {shown(step)} failed: {reason(since, code)}", hint=where)


def unreachable(text: str) -> str:
    """The host that could not be reached, by what a tool printed; empty when that is not what went wrong."""
    for pattern in _UNREACHABLE:
        if found := pattern.search(text):
            return found["host"]
    return ""


def reason(lines: Sequence[str], code: int) -> str:
    """The last line that isn't buildah's own; its own error when there is none."""
    told = [line for line in lines if not _NOISE.match(line) and not _STEP.search(line)]
    last = (told or [line for line in lines if line.strip()] or [f"exit code {code}"])[-1]
    return last.strip().removeprefix("Error: ")


def shown(step: str, width: int = 100) -> str:
    """A step's line, short enough to be read."""
    step = " ".join(word for word in step.split() if not word.startswith("--mount="))
    return f"'{step[: width - 1]}…'" if len(step) > width else f"'{step}'"
