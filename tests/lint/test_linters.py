"""Linters and type checks, one test each."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from tests.lint.conftest import ROOT, Tool, project_files

SHELL = re.compile(r"#!\s*/\S*\b(sh|bash|dash)\b")
LOCKS = sorted(path.name.removesuffix(".lock.json") for path in ROOT.glob("arch/*.lock.json"))


def is_shell(path: Path) -> bool:
    """Whether `path` is a shell script, by its suffix or its first line."""
    if path.suffix == ".sh":
        return True
    with open(ROOT / path, "rb") as file:
        return SHELL.match(file.readline(80).decode("utf-8", "replace")) is not None


SCRIPTS = [str(path) for path in project_files() if is_shell(path)]


def test_ruff(tool: Tool) -> None:
    tool("ruff", "check", "--no-fix", "--output-format", "concise", ".")


def test_types(tool: Tool) -> None:
    tool("mypy")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="PyPI has shellcheck for x86-64 only")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(tool: Tool, script: str) -> None:
    tool("shellcheck", script)


@pytest.mark.parametrize("slug", LOCKS)
def test_hadolint(tool: Tool, slug: str) -> None:
    arch, _, lane = slug.partition(".")
    containerfile = tool("python", "build.py", "render", arch, "--lane", lane, "-q")
    tool("hadolint", "--config", ROOT / ".hadolint.yaml", "-", stdin=containerfile)


def test_workflows(tool: Tool) -> None:
    tool("zizmor", "--offline", "--no-progress", "--quiet", ".github")
