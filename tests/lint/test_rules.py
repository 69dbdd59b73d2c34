"""The project's own rules on its files; those on its modules are in tests/unit/test_chain.py."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import build
from tests.lint.conftest import ROOT, project_files

# The general package registries are a matter of the user's own configuration, so no file may name one.
REGISTRIES = re.compile(
    r"\b(pypi\.org|pythonhosted\.org|(deb|security|ftp)\.debian\.org|archive\.ubuntu\.com|registry\.npmjs\.org)\b"
)
TEXT = {"", ".py", ".toml", ".txt", ".md", ".ini", ".json", ".j2", ".sh", ".yml", ".yaml", ".cfg", ".patch"}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def test_no_file_names_a_package_registry() -> None:
    named = {
        f"{path}: {match[0]}"
        for path in project_files()
        if path.suffix in TEXT and path != Path("tests/lint/test_rules.py")
        for match in REGISTRIES.finditer((ROOT / path).read_text(encoding="utf-8", errors="replace"))
    }
    assert not named


@pytest.mark.parametrize("path", project_files("*.md"), ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    lost = [
        target
        for target in LINK.findall((ROOT / path).read_text(encoding="utf-8"))
        if not (ROOT / path.parent / target).exists()
    ]
    assert not lost


def test_make_has_every_verb_and_no_other() -> None:
    called = re.findall(r"\$\(build\) ([a-z-]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(called) == set(build.VERBS)


def pins(name: str) -> dict[str, tuple[str, int]]:
    """A requirements file as {package: (version, number of hashes)}."""
    found: dict[str, tuple[str, int]] = {}
    for line in (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            spec, *options = line.split("--hash=sha256:")
            wanted = Requirement(spec.strip())
            version = next(iter(wanted.specifier))
            assert version.operator == "==", line
            assert all(re.fullmatch(r"[0-9a-f]{64}", option.strip()) for option in options), line
            found[wanted.name] = (version.version, len(options))
    return found


@pytest.mark.parametrize(("name", "groups"), [("requirements.txt", []), ("requirements-test.txt", ["test"])])
def test_requirements_are_pinned_with_hashes_and_follow_pyproject(name: str, groups: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [line for group in groups for line in project["optional-dependencies"][group]]
    pinned = pins(name)
    assert all(hashes for _, hashes in pinned.values())
    for requirement in map(Requirement, wanted):
        assert requirement.name in pinned, f"{requirement}: run make requirements"
        assert pinned[requirement.name][0] in requirement.specifier, f"{requirement}: run make requirements"


def test_both_requirements_files_pin_the_same_versions() -> None:
    assert pins("requirements.txt").items() <= pins("requirements-test.txt").items()
