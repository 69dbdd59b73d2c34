"""The groups of tests, from the quickest to the slowest: each folder of tests/ is one.

Tests of engine/, image/ and device/ get the marker of that name. A failing group finishes, so that all its
failures are seen, and the slower groups after it are skipped. The summary says how long each group took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmstart import log

TESTS = Path(__file__).parent
GROUPS = ("lint", "unit", "golden", "engine", "image", "device")
MARKED = ("engine", "image", "device")

seconds: defaultdict[str, float] = defaultdict(float)
failed: set[str] = set()


def group(path: Path) -> str:
    """The folder of tests/ that `path` lies in; empty for a path elsewhere."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def place(path: Path) -> int:
    """Where the group of `path` stands in the order; unknown folders come last."""
    name = group(path)
    return GROUPS.index(name) if name in GROUPS else len(GROUPS)


@pytest.hookimpl(tryfirst=True)  # before pytest picks by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path))
    for item in items:
        if group(item.path) in MARKED:
            item.add_marker(group(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    broken = sorted(name for name in failed if GROUPS.index(name) < place(item.path))
    if broken:
        pytest.skip(f"not run, because tests in {' and '.join(broken)} failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = group(TESTS.parent / report.nodeid.partition("::")[0])
    seconds[name] += report.duration
    if report.failed and name in GROUPS:
        failed.add(name)


@pytest.fixture(autouse=True)
def progress() -> Iterator[None]:
    """A test that runs a command line leaves its form of progress to no other test."""
    yield
    log.configure()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(seconds) > 1:
        told = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
        terminalreporter.write_line(f"time by group: {told}")
