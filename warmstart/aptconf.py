"""The machine's own apt configuration: where its packages come from and how it reaches them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from warmstart import run
from warmstart.lock import Package

# Files in which a distribution keeps its own sources; others are third parties'.
OWN = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/debian.sources",
    "etc/apt/sources.list.d/ubuntu.sources",
)
COMPONENTS = ("main", "universe")
MIRROR = "WARMSTART_DEB_MIRROR"
# What decides how servers are reached: proxies, certificates, and how old an index may be.
REACH = re.compile(
    r'^Acquire::(?:https?::[^"]*|Retries|Check-Valid-Until|Check-Date) "[^"]+";$', re.MULTILINE
)


def sources(suite: str, root: Path = Path("/")) -> list[str]:
    """mmdebstrap's mirror arguments for a suite; empty for the tool's own choice.

    $WARMSTART_DEB_MIRROR wins: addresses, `deb …` lines (one a line) or files. Else a host of the same suite
    gives its own sources, because those are known to work here.
    """
    if given := os.environ.get(MIRROR, ""):
        return [part.strip() for part in given.splitlines() if part.strip()]
    release = _text(root / "etc/os-release")
    if not re.search(rf'^(VERSION|UBUNTU)_CODENAME="?{re.escape(suite)}"?$', release, re.MULTILINE):
        return []
    return [line for file in OWN for line in entries(_text(root / file), suite)]


def entries(text: str, suite: str) -> list[str]:
    """The lines of a sources.list or stanzas of a .sources file that concern a suite, as one-line entries.

    Its updates and security fixes belong to it, backports and proposals don't.
    """
    found = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        fields = {k.lower(): v for k, v in re.findall(r"^([\w-]+):[ \t]*(.*)$", stanza, re.MULTILINE)}
        if "uris" in fields:
            keys = fields.get("signed-by", "")
            inline = "signed-by" in fields and not keys.startswith("/")
            if (
                "deb" in fields.get("types", "").split()
                and fields.get("enabled", "yes") != "no"
                and not inline
            ):
                for uri in fields["uris"].split():
                    for name in fields.get("suites", "").split():
                        found += _entry(uri, name, fields.get("components", ""), keys, suite)
            continue
        for match in re.finditer(r"^deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s+(.+)$", stanza, re.MULTILINE):
            keys = re.search(r"signed-by=(\S+)", match[1] or "")
            found += _entry(match[2], match[3], match[4], keys[1] if keys else "", suite)
    return found


def acquire() -> list[str]:
    """Options of the host's apt that mmdebstrap's apt, which reads none of its files, has to be given."""
    if not run.program("apt-config"):
        return []
    return REACH.findall(run.run(["apt-config", "dump"], always=True).stdout)


def pins(locked: Iterable[Package]) -> str:
    """apt preferences that hold packages at their locked versions, as long as those are offered."""
    return "\n".join(
        f"Package: {p.name}\nPin: version {p.version}\nPin-Priority: 1001\n" for p in locked if p.version
    )


def _entry(uri: str, name: str, components: str, keys: str, suite: str) -> list[str]:
    names = (suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates")
    usable = [c for c in components.split() if c in COMPONENTS]
    if name not in names or not usable:
        return []
    signed = f"[signed-by={keys.strip()}] " if keys.strip() else ""
    return [f"deb {signed}{uri} {name} {' '.join(usable)}"]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
