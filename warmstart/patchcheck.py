"""Applying all patches to the sources of the versions that the profiles pin, before any image is built.

They are applied by image/patch.py, the program that the build runs, so that what passes here applies there.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from packaging.specifiers import SpecifierSet

from warmstart import log, patches, pipconf, run
from warmstart.errors import CommandFailed, PatchError, WheelMismatch
from warmstart.patches import Patch
from warmstart.schema import Profile


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pinned source archive."""

    component: str
    version: str
    project: str  # the name that package indexes know it by
    file: str
    sha256: str


class Outcome(msgspec.Struct, frozen=True):
    """What became of one patch on one version."""

    component: str
    version: str
    patch: str
    state: Literal["applied", "no longer needed"]
    moved: tuple[str, ...] = ()  # hunks that were found at another line than the patch says


def check_all(root: Path, state: Path, profiles: Sequence[Profile]) -> list[Outcome]:
    """Check the patches of all profiles on the sources of every version that they pin, kept below `state`.

    Warns of patches that are no longer needed. Raises PatchError, or what a failed fetch means.
    """
    wanted: dict[tuple[str, str], set[str]] = {}
    for profile in profiles:
        for component in profile.patches:
            names = wanted.setdefault((component, getattr(profile.versions, component, "")), set())
            names.update(patches.selected(root, component, profile))
    outcomes = []
    for (component, version), only in sorted(wanted.items()):
        if not only:
            continue
        source = pinned(root, component, version)
        if run.recorder.on:
            log.info(f"would apply {', '.join(sorted(only))} to {source.file}")
            continue
        with log.step(f"patches of {component} on {version}"), tempfile.TemporaryDirectory() as folder:
            archive = fetch(state, source)
            unpack(archive, {f for p in patches.series(root, component) for f in touched(p)}, Path(folder))
            outcomes += check(root, component, Path(folder), version, only)
    return outcomes


def check(
    root: Path, component: str, source_tree: Path, version: str, only: Collection[str] | None = None
) -> list[Outcome]:
    """Apply a component's series, or what is named of it, to a copy of a folder laid out like site-packages.

    Raises PatchError where one does not apply (with file, hunk and version), is out of its range, or has its
    marker in the sources already. A patch whose Drop-when is met is left out, with a warning.
    """
    found = [p for p in patches.series(root, component) if only is None or p.name in only]
    obsolete = [p for p in found if _is_obsolete(p, source_tree, version)]
    wanted = [p for p in found if p not in obsolete]
    for patch in obsolete:
        log.warn(f"{component} {version} no longer needs {patch.name} (Drop-when: {patch.drop_when})")
    for patch in wanted:
        if any(patch.marker in _text(source_tree / name) for name in patch.files):
            raise PatchError(
                f"{patch.name}: its marker {patch.marker!r} is in {component} {version} without it",
                hint="choose a text that only the patch brings",
            )
    told = _apply(root, wanted, source_tree, version).splitlines()
    outcomes = [Outcome(component, version, p.name, "no longer needed") for p in obsolete]
    for patch in wanted:
        mine = [line.removeprefix(f"{patch.name}: ") for line in told if line.startswith(f"{patch.name}: ")]
        moved = tuple(line for line in mine if line.startswith("hunk "))
        outcomes.append(Outcome(component, version, patch.name, "applied", moved))
    return outcomes


def touched(patch: Patch) -> set[str]:
    """The files that a patch changes, and the one that its Drop-when looks at."""
    looked_at = set() if patches.is_range(patch.drop_when) else {patch.drop_when.partition(": ")[0]}
    return looked_at | set(patch.files)


def text(outcomes: Iterable[Outcome]) -> str:
    """The outcomes for people, a line each, with the hunks that moved below."""
    lines = []
    for o in outcomes:
        lines += [f"{o.component} {o.version}  {o.patch}  {o.state}", *(f"    {line}" for line in o.moved)]
    return "\n".join(lines) or "no patches"


def sources(root: Path) -> list[Source]:
    """All pinned source archives, from patches/sources.toml."""
    return msgspec.convert(tomllib.loads(_text(root / "patches" / "sources.toml"))["source"], list[Source])


def pinned(root: Path, component: str, version: str) -> Source:
    """The source archive of a version, without its local part. Raises PatchError when none is pinned."""
    for source in sources(root):
        if (source.component, source.version) == (component, version.partition("+")[0]):
            return source
    raise PatchError(
        f"no source of {component} {version} is pinned, so its patches can't be checked",
        hint="add its archive's name and sha256 to patches/sources.toml",
    )


def fetch(state: Path, source: Source) -> Path:
    """The archive of a source, kept below `state`; pip brings it when it isn't there.

    Raises WheelMismatch, DiskFull or Unreachable.
    """
    folder = state / "cache" / "sources"
    archive = folder / source.file
    if archive.is_file() and _sha256(archive) == source.sha256:
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        part = Path(work)
        unbuilt, env = pipconf.unbuilt(part)
        requirement = f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n"
        (part / "requirements.txt").write_text(requirement, encoding="utf-8")
        argv = [sys.executable, "-Pm", "pip", "download", "--no-deps", "--no-binary", ":all:", *unbuilt]
        argv += ["--no-cache-dir", "--require-hashes"]
        argv += ["--dest", work, "--requirement", str(part / "requirements.txt")]
        try:
            run.run(argv, env=pipconf.environment() | env, always=True)
        except CommandFailed as failed:
            raise pipconf.explain(failed, source.file, pipconf.read().places) from None
        if not (part / source.file).is_file():
            raise WheelMismatch(f"pip did not bring {source.file}", hint="see `file` in patches/sources.toml")
        (part / source.file).replace(archive)
    return archive


def unpack(archive: Path, names: Collection[str], target: Path) -> None:
    """Lay some files of a source archive below `target`, without the folder that an archive begins with."""
    with tarfile.open(archive) as packed:
        for member in packed:
            name = member.name.partition("/")[2]
            if name in names and (content := packed.extractfile(member)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(content.read())


def _apply(root: Path, wanted: Sequence[Patch], source_tree: Path, version: str) -> str:
    """Run image/patch.py on a virtual environment made of the touched files. Returns what it printed."""
    if not wanted:
        return ""
    component = wanted[0].component
    with tempfile.TemporaryDirectory() as work:
        folder, venv = Path(work, "patches"), Path(work, "venv")
        site = venv / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
        record = site / f"{component}-{version}.dist-info" / "RECORD"
        record.parent.mkdir(parents=True)
        folder.mkdir()
        for patch in wanted:
            shutil.copy(root / "patches" / component / patch.name, folder)
            for name in patch.files:
                if (source_tree / name).is_file():
                    (site / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source_tree / name, site / name)
        record.write_text("".join(f"{name},,\n" for p in wanted for name in p.files), encoding="utf-8")
        (folder / "series").write_text("".join(f"{p.name}\n" for p in wanted), encoding="utf-8")
        argv: list[str | Path] = [sys.executable, "-I", root / "image" / "patch.py", folder, venv]
        try:
            return run.run([*argv, Path(work, "out")], always=True).stdout
        except CommandFailed as failed:
            why = re.search(r"^error: (.+)", failed.result.stderr, re.MULTILINE)  # type: ignore[attr-defined]
            told = why[1] if why else failed.message
            raise PatchError(told, hint=_way_out(told, wanted)) from None


def _way_out(why: str, wanted: Sequence[Patch]) -> str:
    """What to do about a patch that was refused."""
    patch = next((p for p in wanted if p.name in why), wanted[0])
    merged = "" if patch.upstream == "none yet" else f", or drop it if {patch.upstream} is in that version"
    return f"make patches/{patch.component}/{patch.name} anew from the sources of that version{merged}"


def _is_obsolete(patch: Patch, source_tree: Path, version: str) -> bool:
    if patches.is_range(patch.drop_when):
        return SpecifierSet(patch.drop_when).contains(version, prereleases=True)
    name, _, pattern = patch.drop_when.partition(": ")
    return re.search(pattern, _text(source_tree / name), re.MULTILINE) is not None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
