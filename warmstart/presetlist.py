"""Presets as people see them: the list of all, and one of them whole. Secrets are masked."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from warmstart import hints, masking, presetfiles, presets, runline, tables
from warmstart.errors import PresetError
from warmstart.presets import Preset


def rows(root: Path) -> list[dict[str, Any]]:
    """One row a preset, in the order of their names. Raises PresetError."""
    return [_row(presets.masked(presets.load(root, name))) for name in presets.names(root)]


def listed(root: Path) -> tuple[list[dict[str, Any]], list[PresetError]]:
    """The same with a row for each preset and file that is broken, its `problem` said, and these errors."""
    found, broken = presetfiles.scan(root)
    files = {f"{presetfiles.FOLDER}/{file}": problem for file, problem in broken.items()}
    told, errors = [_broken(where, problem) for where, problem in files.items()], list(broken.values())
    for name in found:
        try:
            told.append(_row(presets.masked(presets.load(root, name))))
        except PresetError as problem:
            told.append(_broken(name, problem))
            errors.append(problem)
    return sorted(told, key=lambda row: str(row["name"])), errors


def text(found: list[dict[str, Any]]) -> str:
    """The list as a table."""
    head = ["preset", "model", "archs", "port", "notes"]
    none = hints.options("--set model=…")
    cells = [
        [row["name"], row["model"] or none, " ".join(row["archs"]) or "any", str(row["port"]), _notes(row)]
        if not row["problem"]
        else [row["name"], "", "", "", f"broken: {row['problem']}"]
        for row in found
    ]
    return tables.grid([head, *cells])


def one(preset: Preset) -> str:
    """A preset whole: what it runs, where it stands, what is to be known of it."""
    shown = presets.masked(preset)
    top = [
        ["preset", f"{shown.name} ({presetfiles.FOLDER}/{shown.file})"],
        ["model", shown.model or f"none: {hints.options('--set model=…')}"],
        ["archs", " ".join(shown.archs) or "any"],
        ["image", shown.image or "that of the machine's arch"],
        ["port", str(shown.port)],
        ["variables", shlex.join(f"{name}={value}" for name, value in sorted(shown.env.items())) or "none"],
        ["vllm serve", shlex.join(masking.words(presets.command(preset)))],
        ["notes", shown.notes or "none"],
        *([["refused", shown.refused]] if shown.refused else []),
        *[["warning", warning] for warning in shown.warnings],
    ]
    return tables.grid(top)


def _row(preset: Preset) -> dict[str, Any]:
    keys = ("name", "model", "archs", "port", "notes", "refused", "image", "file")
    return {**{key: getattr(preset, key) for key in keys}, "problem": ""}


def _broken(where: str, problem: PresetError) -> dict[str, Any]:
    return {**_row(Preset(name=where)), "problem": problem.message}


def _notes(row: dict[str, Any]) -> str:
    return f"refused: {row['refused']}" if row["refused"] else str(row["notes"])


def markdown(root: Path) -> tuple[str, str]:
    """The two tables of docs/presets.md: the presets, and the flags of the run line with their reasons."""
    shipped = "\n".join(
        f"| `{row['name']}` | {row['model'] or '`--set model=…`'} | {' '.join(row['archs']) or 'any'} | {_notes(row)} |"
        for row in rows(root)
    )
    why = "\n".join(f"| `--{flag}` | {reason} |" for flag, reason in runline.data(root).why.items())
    return f"| preset | model | archs | notes |\n|---|---|---|---|\n{shipped}", f"| flag | why |\n|---|---|\n{why}"


def document(root: Path) -> str:
    """docs/presets.md with its tables made anew."""
    text = (root / "docs" / "presets.md").read_text(encoding="utf-8")
    for mark, table in zip(("shipped", "runline"), markdown(root), strict=True):
        head, begin, rest = re.split(rf"(<!-- {mark}.*-->\n)", text, maxsplit=1)
        text = f"{head}{begin}{table}\n{rest[rest.index('<!-- end -->') :]}"
    return text


if __name__ == "__main__":
    print(document(Path(__file__).parents[1]), end="")
