"""Stand-ins for the distributions that only vendors' indexes have, as `arch/rehearsal.toml` describes them.

Each has the real one's name, version, requirements and layout, and as much content as a build and the image tests
look at. The same description gives the same bytes, whatever arch is rehearsed, so that archs share layers.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from warmstart import archives, devicecode, elf, patchcheck
from warmstart.archives import Entry, Metadata
from warmstart.lock import Wheel
from warmstart.offers import Content, Rehearsal, Standin, named, wanted
from warmstart.plan import tree_digest
from warmstart.profile import Profile

# 69 is EX_UNAVAILABLE of sysexits.h.
REFUSAL = '#!/bin/sh\necho "$(basename "$0"): a stand-in of a rehearsal, not a program" >&2\nexit 69\n'


class Made(msgspec.Struct, frozen=True):
    """A stand-in as a file."""

    name: str
    version: str
    index: str
    why: str
    path: str
    sha256: str
    metadata: str


def make(
    root: Path, state: Path, cache: Path, table: Rehearsal, profile: Profile, wheels: Sequence[Wheel]
) -> list[Made]:
    """Make what is missing of the stand-ins for a lock, below `cache`, and return all of them.

    `state` is where source archives are kept. Raises what a failed fetch means.
    """
    public = profile.versions.triton.partition("+")[0]
    code = devicecode.compiled(cache, public, table.archs)
    maker = _Maker(root, state, cache, table, profile, code, _digest(root, code))
    return [maker.made(*one) for one in wanted(table, wheels)]


class _Maker(msgspec.Struct, frozen=True):
    """What all stand-ins are made from."""

    root: Path
    state: Path
    cache: Path
    table: Rehearsal
    profile: Profile
    code: dict[str, bytes]
    of: str  # digest of this code, the sources and the device code

    def made(self, one: Standin, arch: str, version: str) -> Made:
        """The stand-in as a file: kept from before, or written now."""
        told = self.metadata(one, arch, version)
        parts = [msgspec.to_builtins(one), arch, version, msgspec.to_builtins(self.profile.versions), self.of]
        key = hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]
        file = told.file if one.tag and one.form in ("wheel", "vllm", "triton") else f"{told.name}-{version}.tar.gz"
        folder = self.cache / "standins" / f"{told.name}-{version}"
        note = folder / f"{key}.json"
        if note.is_file() and (folder / file).is_file():
            kept = msgspec.json.decode(note.read_bytes(), type=Made)
            return msgspec.structs.replace(kept, path=str(folder / file))  # the folder may have moved
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = folder / file
        with tempfile.TemporaryDirectory(dir=folder) as work:
            beside = Path(work, file)
            told = self.write(one, arch, told, beside)
            with beside.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            beside.replace(path)
        made = Made(told.name, version, one.index, one.why, str(path), digest, told.text)
        note.write_bytes(msgspec.json.encode(made))
        return made

    def metadata(self, one: Standin, arch: str, version: str) -> Metadata:
        """Name, version, requirements and entry points, with all placeholders filled."""

        def each(texts: Iterable[str]) -> tuple[str, ...]:
            texts = () if one.form == "vllm-sources" else texts  # its build says them
            spread = (t.replace("{arch}", a) for t in texts for a in (one.built_for if "{arch}" in t else ("",)))
            return tuple(self.fill(t, arch, version) for t in spread)

        extras: dict[str, tuple[str, ...]] = {}
        for extra, requires in one.extras.items():
            for a in self.table.archs if "{arch}" in extra else ("",):
                filled = (r.replace("{arch}", a) for r in requires)
                extras[extra.replace("{arch}", a)] = tuple(self.fill(r, arch, version) for r in filled)
        name = named(one, arch)
        return Metadata(
            name=name, version=version, tag=one.tag, requires=each(one.requires), extras=extras, scripts=one.scripts
        )

    def fill(self, text: str, arch: str, version: str) -> str:
        """Text with the profile's versions for {torch}, {rocm} …; braces around anything else stay."""
        values = {k: str(v) for k, v in msgspec.to_builtins(self.profile.versions).items()}
        values |= {"arch": arch, "family": arch, "version": version}
        return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), text)

    def write(self, one: Standin, arch: str, told: Metadata, path: Path) -> Metadata:
        """Write the archive; returns its metadata, which that of a release can have been part of."""
        if one.form == "triton":
            return _triton(self.cache, self.profile, told, path)
        files = self.files(one, arch, told.version)
        if one.form == "vllm-sources":
            release, requires = _vllm(self.root, self.state, told.version)
            lines = (*requires, *one.requires)
            files |= {**release, "REQUIRES": Entry("".join(f"{line}\n" for line in lines).encode())}
            for a, code in self.code.items():
                built = self._kinds(Content(libraries=one.libraries, hip=one.hip), one, a, {a: code})
                files |= {f"built/{a}/{path}": entry for path, entry in built.items()}
            archives.write_sdist(path, told, files)
            return told
        if one.form == "sdist":
            files["VERSION"] = Entry(f"{told.version}\n".encode())
            files["ARCHS"] = Entry("".join(f"{a}\n" for a in self.table.archs).encode())
            archives.write_sdist(path, told, files)
            return told
        if one.form == "vllm":
            release, requires = _vllm(self.root, self.state, told.version)
            files = {**release, **files}
            files["vllm/_version.py"] = Entry(f'__version__ = version = "{told.version}"\n'.encode())
            told = msgspec.structs.replace(told, requires=(*requires, *told.requires))
        archives.write_wheel(path, told, files)
        return told

    def files(self, one: Standin, arch: str, version: str) -> dict[str, Entry]:
        """The files that a description names."""
        found: dict[str, Entry] = {}
        folder, values = self.root / "tests" / "standins" / one.sources, msgspec.to_builtins(self.profile.versions)
        for file in sorted(folder.rglob("*")) if one.sources else ():
            if file.is_file() and "__pycache__" not in file.parts:
                text = re.sub(r"@(\w+)@", lambda m: values.get(m[1], m[0]), file.read_text(encoding="utf-8"))
                found[file.relative_to(folder).as_posix()] = Entry(text.encode())
        built = {a: self.code[a] for a in one.built_for}
        for content in (one, *([one.also[arch]] if arch in one.also else [])) if one.form != "vllm-sources" else ():
            found |= {self.fill(p, arch, version): e for p, e in self._kinds(content, one, arch, built).items()}
        return found

    def _kinds(self, content: Content, one: Standin, arch: str, built: Mapping[str, bytes]) -> dict[str, Entry]:
        own = self.code.get(self.table.families.get(arch, arch), b"")
        found = {path: Entry(f"{path}\n".encode()) for path in content.files}
        found |= {path: Entry(REFUSAL.encode(), program=True) for path in content.programs}
        found |= {path: Entry(own) for path in content.code}
        found |= {path: Entry(devicecode.pack(arch, own)) for path in content.packs}
        for path, needed in (content.libraries | content.hip).items():
            name = path.rpartition("/")[2]
            device = devicecode.bundle(built) if path in content.hip else b""
            module = name.partition(".")[0] if ".abi3." in name or ".cpython-" in name else ""
            library = elf.library(name, needed=needed, runpath=one.runpath, device_code=device, module=module)
            found[path] = Entry(library)
        for path, source in content.modules.items():
            name = path.rpartition("/")[2]
            found[path] = Entry(elf.library(name, module=name.partition(".")[0], source=source))
        return found


def _digest(root: Path, code: Mapping[str, bytes]) -> str:
    """Digest of what decides the bytes of stand-ins besides their description."""
    modules = [root / "warmstart" / f"{name}.py" for name in ("archives", "devicecode", "elf", "offers", "standins")]
    content = hashlib.sha256(tree_digest(root / "tests" / "standins", *modules).encode())
    for arch in sorted(code):
        content.update(code[arch])
    return content.hexdigest()


def _triton(cache: Path, profile: Profile, told: Metadata, path: Path) -> Metadata:
    """The general index's Triton of that release under the vendor's version."""
    public = told.version.partition("+")[0]
    wheel = devicecode.fetch(cache, public, profile)
    files = archives.members(wheel)
    info = f"triton-{public}.dist-info"
    points = _points(archives.read(files[f"{info}/entry_points.txt"]).decode())
    head = archives.read(files[f"{info}/METADATA"]).decode()
    requires = tuple(re.findall(r"(?m)^Requires-Dist: (?!.*extra ==)(.+)$", head))
    large = {n for n, e in files.items() if "/backends/nvidia/" in n and archives.size(e) > devicecode.LARGE}
    kept = {name: entry for name, entry in files.items() if not name.startswith(f"{info}/") and name not in large}
    scripts = points.pop("console_scripts", {})
    told = msgspec.structs.replace(told, requires=requires, scripts=scripts, points=points)
    archives.write_wheel(path, told, kept)
    return told


def _points(text: str) -> dict[str, dict[str, str]]:
    groups: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            current = groups.setdefault(line.strip("[]"), {})
        elif "=" in line:
            name, _, target = line.partition("=")
            current[name.strip()] = target.strip()
    return groups


def _vllm(root: Path, state: Path, version: str) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """The Python sources of a vLLM release, and what its build for ROCm requires."""
    archive = patchcheck.fetch(state, patchcheck.pinned(root, "vllm", version))
    files: dict[str, Entry] = {}
    texts: dict[str, str] = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            name = member.name.partition("/")[2]
            if not member.isfile() or not name.startswith(("vllm/", "requirements/")):
                continue
            content = packed.extractfile(member)
            assert content
            if name.startswith("vllm/"):
                files[name] = Entry(content.read())
            else:
                texts[name] = content.read().decode()
    return files, tuple(_requirements(texts, "requirements/rocm.txt"))


def _requirements(texts: Mapping[str, str], name: str) -> list[str]:
    """The lines of a requirements file and of those that it includes, without comments and options."""
    found: list[str] = []
    for line in texts[name].splitlines():
        line = line.partition(" #")[0].strip()
        if line.startswith("-r "):
            found += _requirements(texts, f"requirements/{line[3:].strip()}")
        elif line and not line.startswith(("#", "-")):
            found.append(line)
    return found

