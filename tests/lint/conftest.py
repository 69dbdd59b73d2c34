"""The project's files, and the tools that look at them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = {"__pycache__", "node_modules"}  # besides folders whose name starts with a dot
DOT_FOLDERS = {".ci", ".github"}

Tool = Callable[..., str]


def project_files(pattern: str = "*") -> list[Path]:
    """All files of the project whose name matches `pattern`, relative to its root, sorted."""

    def walk(folder: Path) -> list[Path]:
        found = []
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                hidden = path.name.startswith(".") and path.name not in DOT_FOLDERS
                found += [] if hidden or path.name in NOT_OURS else walk(path)
            elif path.match(pattern):
                found.append(path.relative_to(ROOT))
        return found

    return sorted(walk(ROOT))


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Run a tool of .venv on the project; its output. The test fails with that output when the tool does."""

    def call(name: str, *args: str | Path, stdin: str | None = None) -> str:
        command = [str(Path(sys.executable).parent / name), *map(str, args)]
        done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(f"{name} exited {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
        return done.stdout

    return call
