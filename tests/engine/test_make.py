"""What the Makefile does beyond calling build.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_phases_without_a_log_says_how_to_name_it() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    env.pop("FILE", None)
    done = subprocess.run(
        ["make", "--old-file=ready", "phases"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "make phases FILE=vllm.log" in line
