"""Make one layer of an image slim: `slim.py RULES LAYER PREFIX`, run in the build by the image's own Python.

RULES is a JSON file with the tables of `arch/cuts.toml` that hold for one arch. PREFIX is the directory that
will be `/` in the image. In this order: cuts are removed (what a keep names stays), RECORD files forget what
was removed, libraries lose their symbols, second names of distributions are added, byte code is compiled.

Standard library only. The same tree and the same rules give the same bytes: nothing depends on time, on the
order of a directory or on the number of processors. A glob that matches nothing ends the run with status 3: a
dead rule means that the packages have changed and that its figures are no longer true. So does a rule that would
reach out of PREFIX, by its glob or by a link: nothing there is removed or written.
"""

from __future__ import annotations

import csv
import io
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Rules = dict[str, Any]
Group = list[tuple[str, str]]

# Byte code is written by this many groups of files, each in a fresh process. The number is fixed because
# marshal's output depends on what its process has seen before (bpo-34093): a group per processor would give
# other bytes on other machines.
GROUPS = 16

# What the rules may hold: table → the keys that each of its entries has, and those that it may have.
TABLES = {
    "cut": ({"layer", "paths"}, {"optional"}),
    "keep": ({"layer", "paths"}, {"optional"}),
    "strip": ({"layer", "paths"}, {"optional"}),
    "bytecode": ({"layer", "paths"}, {"optional", "skip"}),
    "alias": ({"layer", "name", "version", "of", "of-version"}, {"optional"}),
}
WORD = re.compile(r"\w[\w.+!-]*")  # of an alias: part of a file's name

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
DEAD_RULE = 3


class SlimError(Exception):
    """A rule can't be applied; the message says which."""


def check(rules: object) -> None:
    """Raise SlimError for a table, key or value that isn't known, and for a glob that leaves the image."""
    tables = dict(rules) if isinstance(rules, dict) else {}
    for place in ("site", "venv"):
        if leaves(str(tables.pop(place, ""))):
            raise SlimError(f"{place} is no place in the image, or missing")
    for table, entries in tables.items():
        if table not in TABLES or not isinstance(entries, list):
            raise SlimError(f"unknown table {table!r}; known: {', '.join(TABLES)}")
        for entry in entries:
            check_entry(table, entry)


def check_entry(table: str, entry: object) -> None:
    """Raise SlimError for an entry of a table that isn't of its form."""
    needed, more = TABLES[table]
    if not isinstance(entry, dict) or not needed <= set(entry) <= needed | more:
        raise SlimError(f"an entry of {table} needs {sorted(needed)}, may have {sorted(more)}, and is {entry!r}")
    for key, value in entry.items():
        if key == "optional":
            good = isinstance(value, bool)
        elif key in ("paths", "skip"):
            good = isinstance(value, list) and all(isinstance(glob, str) and not leaves(glob) for glob in value)
        else:
            good = bool(WORD.fullmatch(str(value)))
        if not good:
            raise SlimError(f"an entry of {table} has a wrong {key}, or one that leaves the image: {value!r}")


def leaves(glob: str) -> bool:
    """Return whether a glob isn't one for what lies below the root."""
    parts = glob.split("/")
    return glob.startswith("/") or ".." in parts or "\0" in glob or not set(parts) - {"", "."}


def inside(path: Path, prefix: Path) -> Path:
    """Return a path that will be written to; raise SlimError when links lead it out of the image."""
    if not path.resolve().is_relative_to(prefix.resolve()):
        raise SlimError(f"{path} leads out of the image, to {path.resolve()}")
    return path


def of_layer(rules: Rules, table: str, layer: str) -> list[Rules]:
    """Return the entries of `table` for `layer`, in the order of the file."""
    return [entry for entry in rules.get(table, []) if entry["layer"] == layer]


def matches(rules: Rules, entry: Rules, key: str, prefix: Path) -> list[Path]:
    """Return the sorted paths that the globs under `key` match; raise SlimError for one without a match."""
    found: set[Path] = set()
    for pattern in entry.get(key, []):
        glob = pattern.replace("{site}", rules["site"]).replace("{venv}", rules["venv"])
        try:
            hits = set(prefix.glob(glob))
        except ValueError as error:
            raise SlimError(f"rule of layer {entry['layer']}, {pattern!r}: {error}") from None
        for hit in hits:
            if hit == prefix:
                raise SlimError(f"rule of layer {entry['layer']} names the whole image: {pattern!r}")
            if not hit.parent.resolve().is_relative_to(prefix.resolve()):
                raise SlimError(f"rule of layer {entry['layer']} leaves the image: {hit} lies behind a link")
        if not hits and not entry.get("optional", False):
            raise SlimError(f"dead rule of layer {entry['layer']}: nothing matches {pattern} under {prefix}")
        found |= hits
    return sorted(found)


def files_under(paths: Iterable[Path]) -> set[Path]:
    """Return `paths` with each directory replaced by all files and links below it; links are not followed."""
    found: set[Path] = set()
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            found.add(path)
            continue
        for folder, folders, names in os.walk(path):
            found.update(Path(folder, name) for name in names)
            found.update(Path(folder, name) for name in folders if Path(folder, name).is_symlink())
    return found


def remove_empty(folder: Path) -> None:
    """Remove `folder` and the folders below it that hold no file."""
    for name, _, _ in sorted(os.walk(folder), reverse=True):
        if not os.listdir(name):
            os.rmdir(name)


def cut(rules: Rules, layer: str, prefix: Path) -> set[Path]:
    """Remove what the cuts of `layer` match, except what its keeps match, and return the removed files."""
    kept: set[Path] = set()
    for entry in of_layer(rules, "keep", layer):
        kept |= files_under(matches(rules, entry, "paths", prefix))
    removed: set[Path] = set()
    for entry in of_layer(rules, "cut", layer):
        # All globs are matched before anything of this entry goes, so that one glob may lie inside another.
        found = matches(rules, entry, "paths", prefix)
        gone = files_under(found) - kept
        for path in gone:
            path.unlink()
        for path in found:
            if path.is_dir() and not path.is_symlink():
                remove_empty(path)
        removed |= gone
    return removed


def forget(rules: Rules, prefix: Path, removed: set[Path]) -> None:
    """Take the removed files out of the RECORD of their distributions, in the sorted order that pip writes.

    Python reads every RECORD to map modules to distributions, at each start: torch's alone names ten thousand
    headers.
    """
    site = prefix / rules["site"]
    gone = {os.path.relpath(path, site) for path in removed}
    for record in sorted(site.glob("*.dist-info/RECORD")):
        rows = list(csv.reader(io.StringIO(inside(record, prefix).read_text(encoding="utf-8"))))
        left = [row for row in rows if row and row[0] not in gone and not row[0].endswith(".pyc")]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(left)
        record.write_text(text.getvalue(), encoding="utf-8")


def strip_symbols(path: Path) -> None:
    """Remove symbols and debug information that the loader doesn't need, in place."""
    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def strip(rules: Rules, layer: str, prefix: Path, strip_one: Callable[[Path], None]) -> None:
    """Strip the libraries that the strip rules of `layer` name."""
    for entry in of_layer(rules, "strip", layer):
        for path in matches(rules, entry, "paths", prefix):
            strip_one(inside(path, prefix))


def add_name(rules: Rules, layer: str, prefix: Path) -> None:
    """Write the metadata of a second name for an installed distribution that looks itself up under it.

    No requirements and no entry points go in: they stand under the first name, and would be counted twice. Both
    names get a wheel tag of this interpreter, because the first name's own may be of another: such a wheel
    installs by its file name and is then reported as foreign.
    """
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"Tag: cp{sys.version_info.major}{sys.version_info.minor}-abi3-{platform}"
    for entry in of_layer(rules, "alias", layer):
        folder = prefix / rules["site"] / f"{entry['name']}-{entry['version']}.dist-info"
        original = folder.parent / f"{entry['of'].replace('-', '_')}-{entry['of-version']}.dist-info"
        if not original.is_dir() and entry.get("optional"):
            continue
        if not original.is_dir():
            raise SlimError(f"dead alias of layer {layer}: {original.name} isn't installed")
        summary = f"Second name of {entry['of']} {entry['of-version']}, under which it looks itself up"
        head = {"Metadata-Version": "2.1", "Name": entry["name"], "Version": entry["version"], "Summary": summary}
        for path in (original, original / "WHEEL", folder, folder / "WHEEL", folder / "METADATA"):
            inside(path, prefix)
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in head.items()))
        wheel = original / "WHEEL"
        lines = [line for line in wheel.read_text().splitlines() if line and not line.startswith("Tag:")]
        for target in (wheel, folder / "WHEEL"):
            target.write_text("\n".join([*lines, tag]) + "\n")


def python_files(rules: Rules, layer: str, prefix: Path) -> list[Path]:
    """Return the .py files of `layer` that get byte code; all byte code found under its roots is removed."""
    wanted: set[Path] = set()
    for entry in of_layer(rules, "bytecode", layer):
        roots = matches(rules, entry, "paths", prefix)
        skipped = files_under(matches(rules, entry, "skip", prefix))
        for root in roots:
            for cache in sorted(inside(root, prefix).rglob("__pycache__")):
                if cache.is_symlink() or not cache.is_dir():
                    cache.unlink()
                else:
                    shutil.rmtree(cache)
            wanted |= {path for path in root.rglob("*.py") if path.is_file()} - skipped
    return sorted(wanted)


def compile_group(group: Group) -> list[str]:
    """Compile pairs of (file, its path in the image) and return the files that aren't valid Python."""
    broken = []
    for source, final in group:
        try:
            py_compile.compile(source, dfile=final, doraise=True, invalidation_mode=UNCHECKED)
        except (py_compile.PyCompileError, UnicodeDecodeError):
            broken.append(final)
    return broken


def compile_groups(groups: list[Group]) -> list[list[str]]:
    """Compile each group in a fresh process, as many at once as there are processors."""
    with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        return pool.map(compile_group, groups, chunksize=1)


def compile_all(files: list[Path], prefix: Path, run: Callable[[list[Group]], list[list[str]]]) -> list[str]:
    """Compile `files` in `GROUPS` groups and return those that aren't valid Python (templates)."""
    pairs = [(str(path), "/" + str(path.relative_to(prefix))) for path in files]
    groups = [pairs[at::GROUPS] for at in range(GROUPS)]
    return sorted(name for names in run([group for group in groups if group]) for name in names)


def slim(
    rules: Rules,
    layer: str,
    prefix: Path,
    strip_one: Callable[[Path], None] = strip_symbols,
    run: Callable[[list[Group]], list[list[str]]] = compile_groups,
) -> dict[str, int]:
    """Apply all rules of `layer` to `prefix`; return counts: removed, compiled, and not valid Python."""
    check(rules)
    if not prefix.is_dir():
        raise SlimError(f"{prefix} is no directory")
    removed = cut(rules, layer, prefix)
    forget(rules, prefix, removed)
    strip(rules, layer, prefix, strip_one)
    add_name(rules, layer, prefix)
    files = python_files(rules, layer, prefix)
    broken = compile_all(files, prefix, run)
    return {"removed": len(removed), "compiled": len(files) - len(broken), "broken": len(broken)}


def main(arguments: list[str]) -> int:
    """Run from the command line; return the exit status.

    0, 3 for a rule that can't be applied, 2 for a wrong command line, 1 for no JSON or what a tool or the tree refuses.
    """
    if len(arguments) != 3:
        print("slim: wanted: slim.py RULES LAYER PREFIX", file=sys.stderr)
        return 2
    rules_file, layer, prefix = arguments
    try:
        counts = slim(json.loads(Path(rules_file).read_text(encoding="utf-8")), layer, Path(prefix))
    except (SlimError, OSError, ValueError, RecursionError, csv.Error, subprocess.CalledProcessError) as error:
        print(f"slim: {rules_file}: {error}", file=sys.stderr)
        return DEAD_RULE if isinstance(error, SlimError) else 1
    print(f"slim: {layer}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0


if __name__ == "__main__":
    # Sets of strings are written into byte code in hash order, so the order must be the same in each run.
    if sys.flags.hash_randomization:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
