"""vLLM's real sources, pristine and patched, and how to run parts of them without torch or a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warmstart import patchcheck, patches

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".warmstart"
PATCH = ROOT / "image" / "patch.py"
SITE = "lib/python{}.{}/site-packages".format(*sys.version_info)


def unpack(version: str, names: Iterable[str], target: Path) -> Path:
    """Some files of a version's source archive below `target`, which is returned."""
    patchcheck.unpack(patchcheck.fetch(STATE, patchcheck.pinned(ROOT, "vllm", version)), set(names), target)
    return target


def pristine(version: str, target: Path) -> Path:
    """All files that the patches touch or look at."""
    return unpack(version, {f for p in patches.series(ROOT, "vllm") for f in patchcheck.touched(p)}, target)


def venv(source_tree: Path, target: Path, name: str = "vllm-9.9+test") -> Path:
    """A virtual environment with the files of `source_tree` installed as distribution `name`."""
    site = target / SITE
    files = [p.relative_to(source_tree) for p in sorted(source_tree.rglob("*")) if p.is_file()]
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes((source_tree / file).read_bytes())
    (site / f"{name}.dist-info").mkdir(parents=True)
    (site / f"{name}.dist-info" / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    return target


def patch(folder: Path, where: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run image/patch.py as the build does."""
    return subprocess.run(
        [sys.executable, "-I", PATCH, folder, where, out], capture_output=True, text=True, check=False
    )


def parts(file: Path, *names: str, **given: Any) -> dict[str, Any]:
    """Run some functions of a source file, and of its classes, and nothing else of it.

    `given` are the globals that they see. An `if` at the top of the file counts by the text of its condition.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            body += [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]
        elif isinstance(node, ast.FunctionDef):
            body += [node] if node.name in names else []
        elif isinstance(node, ast.If):
            body += [node] if any(name in ast.unparse(node.test) for name in names) else []
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            body += [node] if any(name in ast.unparse(node).partition("=")[0] for name in names) else []
    space = dict(given)
    exec(compile(ast.Module(body, []), str(file), "exec"), space)
    return space
