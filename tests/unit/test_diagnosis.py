"""Failures by their log lines: every entry of diagnosis.toml has one, as such a log has it."""

from __future__ import annotations

import re

import pytest

from warmstart import diagnosis
from warmstart.diagnosis import Entry

WITH_LINE = [entry for entry in diagnosis.entries() if entry.match]
QUIET = "(EngineCore pid=33) INFO 11-29 23:05:12 [gpu_model_runner.py:299] Starting to load model x..."


def test_every_entry_can_be_found() -> None:
    assert all(bool(entry.match) == bool(entry.line) for entry in diagnosis.entries())
    assert all(entry.match or entry.codes for entry in diagnosis.entries())
    assert len({entry.name for entry in diagnosis.entries()}) == len(diagnosis.entries())


@pytest.mark.parametrize("entry", WITH_LINE, ids=lambda entry: entry.name)
def test_entry(entry: Entry) -> None:
    told = diagnosis.diagnose([QUIET, f"(EngineCore pid=33) ERROR 11-29 23:05:12 [core.py:9] {entry.line}", QUIET], 1)
    assert told is not None
    assert told.name == entry.name
    assert entry.line[:100] in told.line
    assert "{" not in told.means.replace("{}", "")
    assert told.remedy
    assert not re.search(r"\bmake [a-z]+\b(?<!make a)", told.remedy), "a command stands as `warmstart verb`"


@pytest.mark.parametrize("code", [137, 139, 134, 64, 65, 143])
def test_by_exit_code(code: int) -> None:
    told = diagnosis.diagnose([QUIET], code)
    assert told is not None
    assert told.line == ""


def test_a_cause_comes_before_what_it_leads_to() -> None:
    lines = [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "ValueError: No available memory for the cache blocks.",
    ]
    told = diagnosis.diagnose(lines, 1)
    assert told is not None
    assert told.name == "no KV"


def test_a_line_comes_before_the_exit_code() -> None:
    told = diagnosis.diagnose(["torch.OutOfMemoryError: HIP out of memory."], 137)
    assert told is not None
    assert told.name == "device memory"


@pytest.mark.parametrize(
    "line",
    [
        "'[Errno -3] Temporary failure in name resolution' thrown while requesting HEAD https://huggingface.co/x/y",
        "httpx.ConnectError: [Errno -5] No address associated with hostname",
        "OSError: We couldn't connect to 'https://mirror.example' to load the files, and couldn't find them",
    ],
)
def test_a_hub_without_an_address(line: str) -> None:
    told = diagnosis.diagnose([QUIET, line], 1)
    assert told is not None
    assert told.name == "hub not reachable"


def test_what_is_not_known() -> None:
    assert diagnosis.diagnose([QUIET, "Exception: something new"], 1) is None


def test_figures_of_the_line_are_in_the_answer() -> None:
    line = next(entry.line for entry in WITH_LINE if entry.name == "less than desired")
    told = diagnosis.diagnose([line], 1)
    assert told is not None
    assert "9.55/15.98 GiB" in told.means


def test_secrets_are_masked() -> None:
    line = "huggingface_hub.errors.GatedRepoError: 401, token hf_abcdefghijklmnop, Cannot access gated repo"
    told = diagnosis.diagnose([line], 1)
    assert told is not None
    assert "abcdefgh" not in told.line
    assert "abcdefgh" not in diagnosis.tail([line])


def test_the_tail_is_short() -> None:
    shown = diagnosis.tail([str(n) for n in range(100)])
    assert shown.splitlines() == [f"  | {n}" for n in range(100 - diagnosis.TAIL, 100)]
