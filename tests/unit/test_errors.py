"""Exit codes: distinct, documented."""

from __future__ import annotations

from pathlib import Path

from warmstart import errors

ROOT = Path(__file__).parents[2]


def test_codes_are_distinct() -> None:
    codes = [code for code, _, _ in errors.table()]
    assert len(codes) == len(set(codes))


def test_every_error_says_what_it_means() -> None:
    assert all(meaning for _, _, meaning in errors.table())


def test_the_document_is_current() -> None:
    assert (ROOT / "docs/exit-codes.md").read_text(encoding="utf-8") == errors.markdown(), (
        "python -m warmstart.errors > docs/exit-codes.md"
    )
