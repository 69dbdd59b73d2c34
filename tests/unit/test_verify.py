"""The record of the image tests, from pytest's JUnit file."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmstart import verify
from warmstart.errors import VerifyFailed

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.image.test_x" name="test_good" time="1.5"/>
<testcase classname="tests.image.test_x" name="test_bad" time="0.5">
<failure message="AssertionError: 1 == 2&#10;more"/></testcase>
<testcase classname="tests.image.test_x" name="test_away" time="0"><skipped message="no"/></testcase>
<testcase classname="tests.image.test_x" name="test_broken" time="0"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def test_counts_and_names(tmp_path: Path) -> None:
    (tmp_path / "verify.xml").write_text(JUNIT, encoding="utf-8")
    found = verify.read(tmp_path / "verify.xml", "sha256:1", "plan", tmp_path / "log")
    assert (found.passed, found.failed, found.skipped) == (1, 2, 1)
    assert found.tests[1] == verify.Test("test_x::test_bad", "failed", 0.5, "AssertionError: 1 == 2")
    assert verify.text(found).splitlines()[-1] == "1 passed, 2 failed, 1 skipped"


def test_no_file_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(VerifyFailed, match="could not be run"):
        verify.read(tmp_path / "verify.xml", "sha256:1", "plan", tmp_path / "log")


def test_why_a_whole_file_was_skipped(tmp_path: Path) -> None:
    text = "('/x/tests/image/test_y.py', 19, 'Skipped: needs a GPU')"
    skipped = f'<skipped message="collection skipped">{text}</skipped>'
    case = f'<testcase classname="" name="tests.image.test_y" time="0">{skipped}</testcase>'
    (tmp_path / "verify.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>", encoding="utf-8")
    (found,) = verify.read(tmp_path / "verify.xml", "sha256:1", "plan", tmp_path / "log").tests
    assert (found.outcome, found.message) == ("skipped", "needs a GPU")
