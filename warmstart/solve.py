"""The resolver: a profile's requirements as exact wheels, found by uv where the host's pip would look."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from warmstart import log, pipconf, run, targets
from warmstart.errors import CommandFailed, Unreachable, WarmstartError
from warmstart.lock import PIP, Wheel
from warmstart.profile import Index, Profile

PROJECT = "warmstart-image"


def resolve(
    profile: Profile, dropped: Sequence[str], *, without_indexes: Collection[str] = ()
) -> tuple[Wheel, ...]:
    """One wheel for each distribution that the profile's requirements need, sorted by name.

    Each has its file name, sha256, layer, source, and its size in bytes (0 where an index tells none).
    `dropped` are left out whoever requires them. What an index of the profile lists comes from there alone,
    unless `without_indexes` names that index. An override of such a distribution, or of one that is made from
    sources, stands for it alone: neither what others ask of it nor what it requires itself is looked at. The same
    indexes give the same answer.
    Raises Unreachable when an index does not answer or offers nothing that fits, or ProfileError.
    """
    conf = pipconf.read()
    indexes = [i for i in profile.wheels.indexes if i.name not in without_indexes]
    requires = [targets.fill(r, profile) for r in profile.wheels.requires]
    wanted = {canonicalize_name(Requirement(r).name) for r in requires}
    dropped = [name for name in dropped if name not in wanted]
    # uv looks for an overridden distribution everywhere but in its own index. So these are resolved by themselves.
    tied = {canonicalize_name(p) for i in indexes for p in i.packages}
    tied |= {canonicalize_name(name) for name in profile.wheels.from_source}  # whose metadata a build decides
    overrides = {canonicalize_name(Requirement(text).name): text for text in _overrides(profile)}
    alone = {name: text for name, text in overrides.items() if name in tied & wanted}
    requires = [r for r in requires if canonicalize_name(Requirement(r).name) not in alone]
    dropped = sorted({*dropped, *alone})
    listed = sorted({canonicalize_name(p) for i in indexes for p in i.packages} - wanted - set(dropped))
    shown = ", ".join(requires[:3]) + (f" and {len(requires) - 3} more" if len(requires) > 3 else "")
    with log.step(f"resolving {profile.arch}: {shown}"):
        if listed:
            # uv takes a package from a particular index only when the project itself requires it. So all
            # listed ones are required first, and then only those that something needs.
            text = _uv(profile, conf, indexes, [*requires, *listed], dropped, "requirements.txt")
            listed = sorted(set(listed) & reached(text, wanted))
        text = _uv(profile, conf, indexes, [*requires, *listed], dropped, "pylock.toml")
        found = chosen(profile, text, indexes)
        if alone:
            text = _uv(profile, conf, indexes, sorted(alone.values()), (), "pylock.toml", "--no-deps")
            found += chosen(profile, text, indexes)
    return tuple(sorted(found, key=lambda wheel: wheel.name))


def reached(text: str, roots: Iterable[str]) -> set[str]:
    """All that `roots` need, themselves included, by the `# via` comments of uv's requirements."""
    needed = set(roots)
    via: dict[str, set[str]] = {}
    for line in text.splitlines():
        pin, _, comment = line.partition("# via")
        if "==" in pin:
            via[canonicalize_name(pin.partition("==")[0])] = {p.strip() for p in comment.split(",")}
    while more := {name for name, parents in via.items() if parents & needed} - needed:
        needed |= more
    return needed


def chosen(profile: Profile, text: str, indexes: Sequence[Index] = ()) -> tuple[Wheel, ...]:
    """The best wheel of each package in a pylock.toml, or the sources of what is offered as such only.

    Raises Unreachable where none fits the target.
    """
    layers = {canonicalize_name(p): layer for layer, names in profile.wheels.layers.items() for p in names}
    sources = {canonicalize_name(p): index.name for index in indexes for p in index.packages}
    from_source = {canonicalize_name(p) for p in profile.wheels.from_source}
    found = []
    for package in tomllib.loads(text).get("packages", []):
        name = canonicalize_name(package["name"])
        offered = {_file(w): w for w in reversed(package.get("wheels", []))}
        file = targets.best(offered, profile)
        if name in from_source and "sdist" in package:
            file = _file(package["sdist"])
            offered = {file: package["sdist"]}
        if not file:
            raise Unreachable(
                f"no wheel of {name} {package['version']} runs on {profile.wheels.platform}",
                hint=f"with Python {profile.versions.python}; see versions.python and wheels.platform",
            )
        found.append(
            Wheel(
                name=name,
                version=package["version"],
                layer=layers.get(name, "python"),
                file=file,
                sha256=offered[file]["hashes"]["sha256"],
                size=_size(offered[file]),
                source=sources.get(name, PIP),
            )
        )
    return tuple(sorted(found, key=lambda w: w.name))


def project(profile: Profile, requires: Iterable[str], indexes: Iterable[Index]) -> str:
    """A pyproject.toml that requires `requires` and ties what an index lists to that index."""
    quoted = json.dumps  # JSON's strings are TOML's too
    lines = ["[project]", f"name = {quoted(PROJECT)}", 'version = "0"']
    lines.append(f"requires-python = {quoted(f'=={profile.versions.python}.*')}")
    lines.append(f"dependencies = {quoted(list(requires))}")
    for index in indexes:
        url = quoted(targets.fill(index.url, profile))
        lines += ["[[tool.uv.index]]", f"name = {quoted(index.name)}", f"url = {url}", "explicit = true"]
    lines.append("[tool.uv.sources]")
    lines += [f"{quoted(p)} = {{ index = {quoted(i.name)} }}" for i in indexes for p in i.packages]
    return "\n".join(lines) + "\n"


def _uv(
    profile: Profile,
    conf: pipconf.PipConfig,
    indexes: Sequence[Index],
    requires: Sequence[str],
    dropped: Sequence[str],
    form: str,
    *more: str,
) -> str:
    args, env = pipconf.for_uv(conf)
    uv = Path(sys.executable).with_name("uv")
    argv = [str(uv) if uv.is_file() else "uv", "pip", "compile", *args, "--quiet", "--no-header"]
    argv += ["--python-version", profile.versions.python, "--python-platform", profile.wheels.platform]
    argv += ["--only-binary", ":all:", "--format", form, "--annotation-style", "line"]
    argv += [word for name in profile.wheels.from_source for word in ("--no-binary", name)]
    with tempfile.TemporaryDirectory(prefix="warmstart-") as folder:
        pyproject, overrides = Path(folder, "pyproject.toml"), Path(folder, "overrides.txt")
        pyproject.write_text(project(profile, requires, indexes), encoding="utf-8")
        lines = [o for o in _overrides(profile) if canonicalize_name(Requirement(o).name) not in dropped]
        lines = [] if more else lines + [f"{d} ; sys_platform == 'never'" for d in dropped]
        overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            argv += ["--overrides", str(overrides), *more, str(pyproject)]
            return run.run(argv, env=env, always=True).stdout
        except CommandFailed as failed:
            raise explain(failed, profile, indexes, conf) from None


def explain(
    failed: CommandFailed, profile: Profile, indexes: Iterable[Index], conf: pipconf.PipConfig
) -> WarmstartError:
    """What uv's failure means: which index is silent or refuses, or which requirement nothing meets."""
    told = pipconf.output(failed)
    causes = re.findall(r"^\s*(?:error|cause|hint): (.+)$", told, re.MULTILINE)
    asked = re.search(r"Failed to fetch: `?(\S+?)`?$", told, re.MULTILINE)
    refused = re.search(r"An index \((\S+?)\) returned a (4\d\d)", told)
    address = asked[1] if asked else refused[1] if refused else ""
    why = f"does not answer ({causes[-1] if causes else 'for no reason given'})"
    why = f"refuses ({refused[2]})" if refused and not asked else why
    for index in indexes:
        if address.startswith(targets.fill(index.url, profile).rstrip("/")):
            return Unreachable(
                f"index {index.name} ({urlparse(address).netloc}) {why}",
                hint=f"make lock ARCH={profile.arch} on a machine that it answers, and take "
                f"arch/{profile.slug}.lock.json from there; if pip's own places offer the same: "
                f"ARGS='--without-index {index.name}'",
            )
    if address:
        return Unreachable(f"{urlparse(address).netloc} {why}", hint=pipconf.NETWORK_HINT)
    if sources := re.search(r"[Bb]ecause (\S+) has no (?:usable )?wheels", told):
        return Unreachable(
            f"{sources[1]} is offered without a wheel that fits {profile.wheels.platform}",
            hint="wheels.from-source in the profile allows sources where there is nothing else",
        )
    lost = re.search(r"[Bb]ecause (\S+) was not found in the package registry", told)
    lost = lost or re.search(r"[Bb]ecause there (?:is|are) no versions? of (\S+)", told)
    if lost:
        name = canonicalize_name(re.split(r"[=<>!~]", lost[1])[0])
        for index in indexes:
            if name in map(canonicalize_name, index.packages):
                return Unreachable(
                    f"index {index.name} ({targets.fill(index.url, profile)}) does not offer {lost[1]}",
                    hint="is its address, and the name, still what its owner says? see the profile's wheels.indexes",
                )
        return Unreachable(f"{lost[1]} is not offered by {conf.places}", hint=pipconf.NETWORK_HINT)
    return CommandFailed("uv: " + " ".join(causes or [failed.message]), hint=failed.hint)


def _overrides(profile: Profile) -> list[str]:
    return [targets.fill(text, profile) for text in profile.wheels.overrides]


def _file(wheel: dict[str, Any]) -> str:
    address = urlparse(wheel.get("url", wheel.get("path", ""))).path
    return str(wheel.get("name") or unquote(address.rsplit("/", 1)[-1]))


def _size(wheel: dict[str, Any]) -> int:
    """Bytes, by the index's word or the file itself; 0 when neither tells."""
    if size := wheel.get("size"):
        return int(size)
    url = urlparse(wheel.get("url", ""))
    local = Path(unquote(url.path)) if url.scheme == "file" else Path(wheel.get("path", ""))
    return local.stat().st_size if local.is_file() else 0
