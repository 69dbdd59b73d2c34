"""What the Makefile does beyond calling build.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TAKEN = ("MAKE", "MFLAGS", "ARCH", "ARGS", "CMD", "DO", "FILE", "KIND", "PRESET", "REF")  # by make, of the environment


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """make with these words; the machine counts as ready."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(TAKEN)}
    old = [f"--old-file=ready{more}" for more in ("", "-engine", "-test", "-all")]
    return subprocess.run(["make", *old, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_phases_without_a_log_says_how_to_name_it() -> None:
    done = make("phases")
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "make phases FILE=vllm.log" in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "gfx1151"], "did you mean make plan ARCH=gfx1151?"),
        (["gfx1151"], "did you mean make image ARCH=gfx1151?"),
        (["up", "smoke-cpu"], "did you mean make up PRESET=smoke-cpu?"),
        (["smoke-cpu", "logs"], "did you mean make logs PRESET=smoke-cpu?"),
        (["seed", "pull"], "did you mean make seed DO=pull?"),
        (["seed", "verify"], "did you mean make seed DO=verify?"),  # which is a verb of its own
        (["seed", "make", "cpu"], "did you mean make seed DO=make ARCH=cpu?"),
        (["plan", "nonsense"], "there is no verb nonsense: make help lists all"),
        (["up", "preset=x"], "did you mean PRESET=x?"),
        (["plan", "arch=cpu"], "did you mean ARCH=cpu?"),
        (["emit", "PRESET=x"], "which kind? make emit KIND=quadlet PRESET=…"),
    ],
)
def test_a_word_without_its_variable(words: list[str], told: str) -> None:
    done = make(*words)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up"], "`make up PRESET=…`; `make presets` lists them"),
        (["watch"], "`make watch PRESET=…`"),
        (["plan", "ARGS=--frozn"], "did you mean --frozen? `make plan ARGS=--help` shows"),
        (["plan", "ARCH=cpu gfx1151"], "`make plan ARCH=gfx1151`"),
        (["presets", "PRESET=smok"], "did you mean PRESET=smoke-cpu?"),
    ],
)
def test_hints_are_in_the_words_of_make(words: list[str], told: str) -> None:
    done = make(*words)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[1]


@pytest.mark.parametrize("verb", ["plan", "up", "watch", "emit", "phases", "seed"])
def test_the_help_that_hints_name_is_there(verb: str) -> None:
    done = make(verb, "ARGS=--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: .venv/bin/python build.py {verb} ")


def test_help_names_variables_and_the_flags_of_all_verbs() -> None:
    text = make("help").stdout
    wanted = "ARCH= PRESET= ARGS= CMD= DO= REF= KIND= FILE= MARK= --json --dry-run --debug -q".split()
    assert [word for word in wanted if word not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("verb", ["rehearse", "verify", "image", "up"])
def test_a_dry_run_installs_nothing_but_what_it_runs_with(verb: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(TAKEN)}
    words = ["make", "--dry-run", verb, "ARGS=--all --dry-run", "PRESET=x"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    setups = [line for line in done.stdout.splitlines() if line.startswith("tools/setup")]
    assert [line for line in setups if "--plan" not in line] == ["tools/setup run"]
    assert len(setups) == 2
