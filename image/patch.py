"""Apply a component's patches to installed packages: `patch.py FOLDER VENV OUT`, run by the Python of VENV.

FOLDER holds the patches and a `series` file that names them in order. The files they change are copied,
patched, compiled and laid below OUT under the path they have in the image; VENV is only read. Nothing is
guessed: a line of context that differs, a version out of range or a missing marker ends it, saying where.
Needs GNU patch. Standard library only.
"""

import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# --fuzz=0: every line of context must be there. A hunk may be found at another line, which is told.
PATCH = ("patch", "-p1", "--fuzz=0", "--forward", "--batch", "--no-backup-if-mismatch", "--reject-file=-")
HUNK = re.compile(r"Hunk #(\d+) (\w+) at (\d+)(?: with fuzz \d+)?(?: \(offset (-?\d+) lines?\))?")


class Refused(Exception):
    """Why a patch can't be applied, in one line."""


def main(folder: Path, venv: Path, out: Path) -> None:
    """Apply the series of `folder`. Raises Refused."""
    site = venv.resolve() / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    if not shutil.which("patch"):
        raise Refused("GNU patch is not here: the base needs the package `patch`")
    with tempfile.TemporaryDirectory() as work:
        changed: set[str] = set()
        for name in series(folder):
            changed |= apply(folder / name, site, Path(work))
        for name in sorted(changed):
            publish(Path(work, name), site / name, out)


def series(folder: Path) -> list[str]:
    """Names of the patches, in order. What follows a # is a comment."""
    lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def apply(patch: Path, site: Path, tree: Path) -> set[str]:
    """Apply one patch in `tree`, to which the files it changes are copied. Returns their names."""
    if not patch.is_file():
        raise Refused(f"{patch.name} is in the series, but not beside it")
    text = patch.read_text(encoding="utf-8")
    names = set(targets(patch.name, text))
    package, version = owner(site, names)
    wanted = field(patch.name, text, "Applies-to")
    if not within(version, wanted):
        raise Refused(f"{patch.name} is for {package} {wanted}, not {version}")
    for name in sorted(names):
        if (site / name).is_file() and not (tree / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(site / name, tree / name)
    originals = [(tree / name).read_text(encoding="utf-8") for name in names if (tree / name).is_file()]
    done = subprocess.run(
        [*PATCH, "-d", str(tree), "-i", str(patch.resolve())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
    if done.returncode:
        why = "; ".join(failures(done.stdout))
        raise Refused(f"{patch.name} does not apply to {package} {version}: {why}")
    changed = set(re.findall(r"^patching file (\S+)", done.stdout, re.MULTILINE))
    if changed != names:
        raise Refused(f"{patch.name} also changes {', '.join(sorted(changed - names))}, which no +++ line names")
    marker = field(patch.name, text, "Marker")
    if any(marker in before for before in originals):
        raise Refused(f"{patch.name}: its marker {marker!r} is there without it")
    if not any(marker in (tree / name).read_text(encoding="utf-8") for name in names):
        raise Refused(f"{patch.name}: its marker {marker!r} is in none of the files it changed")
    print(f"{patch.name}: applied to {package} {version}")
    for file, number, _, _, offset in hunks(done.stdout):
        if offset:
            print(f"{patch.name}: hunk {number} of {file} moved by {offset} lines")
    return names


def field(name: str, text: str, wanted: str) -> str:
    """A field of a patch's header, which ends where the first difference begins."""
    header = re.split(r"^--- ", text, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.search(rf"^{wanted}: *(.+)$", header, re.MULTILINE)
    if not found:
        raise Refused(f"{name} has no field {wanted}")
    return found[1].strip()


def targets(name: str, text: str) -> Iterator[str]:
    """Files that a patch changes, relative to site-packages."""
    for file in re.findall(r"^\+\+\+ (\S+)", text, re.MULTILINE):
        path = file.removeprefix("b/")
        if path == file or ".." in path.split("/"):
            raise Refused(f"{name} changes {file}: only files below b/ can be changed, none removed")
        yield path


def owner(site: Path, names: set[str]) -> tuple[str, str]:
    """Name and version of the installed distribution that the files belong to, by its record of them."""
    for record in sorted(site.glob("*.dist-info/RECORD")):
        files = {line.partition(",")[0] for line in record.read_text(encoding="utf-8").splitlines()}
        if names & files:
            package, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
            return package, version
    raise Refused(f"no installed distribution has {' or '.join(sorted(names))}")


def within(version: str, wanted: str) -> bool:
    """Whether a release is in a range: comma-separated `>=`, `<` and `==` with numbers, `==0.33.*` too.

    0.32.0+cpu counts as 0.32.0, and so do its pre- and post-releases: their files are those of that release.
    """
    release = numbers(version)
    if not release:
        return False
    for clause in wanted.replace(" ", "").split(","):
        bound = clause.lstrip("<>=")
        limit = numbers(bound)
        if not limit:
            return False
        left = release[: len(limit)] if bound.endswith(".*") else release
        width = max(len(left), len(limit))
        a, b = (n + (0,) * (width - len(n)) for n in (left, limit))
        if not {">=": a >= b, "<": a < b, "==": a == b}.get(clause.removesuffix(bound), False):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The release number at the start of a version: 0.32.0+cpu is (0, 32, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def hunks(told: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Hunks that didn't fit as they are, as GNU patch tells: file, number, what happened, line, offset."""
    file = ""
    for line in told.splitlines():
        file = line.removeprefix("patching file ") if line.startswith("patching file ") else file
        if hunk := HUNK.match(line):
            yield file, hunk[1], hunk[2], hunk[3], hunk[4] or ""


def failures(told: str) -> list[str]:
    """What GNU patch could not do, hunk by hunk where it says so."""
    if "can't find file to patch" in told:
        return ["a file that it changes is not there"]
    if "previously applied" in told:
        return ["the change is there already"]
    failed = [hunk for hunk in hunks(told) if hunk[2] == "FAILED"]
    named = [f"hunk {number} of {file}, line {line}" for file, number, _, line, _ in failed]
    return named or [" ".join(told.split())]


def publish(patched: Path, final: Path, out: Path) -> None:
    """Copy a patched file below `out` under its final path, with byte code that Python never checks again."""
    target = out / final.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(patched, target)
    target.chmod(final.stat().st_mode & 0o777 if final.exists() else 0o644)
    if final.suffix != ".py":
        return
    cached = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    try:
        py_compile.compile(str(target), str(cached), str(final), doraise=True, invalidation_mode=unchecked)
    except py_compile.PyCompileError as broken:
        raise Refused(f"{final} is no Python once patched: {broken.exc_value}") from None


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:4]))
    except Refused as why:
        sys.exit(f"error: {why}")
