"""CPU seconds of the quick verbs, median of several runs: `python bench/cli.py [runs]`.

Goals: `--help` ≤ 0.080 s, `plan --json` ≤ 0.150 s, rendering all archs ≤ 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = str(ROOT / ".venv/bin/python")
RENDER = """
from pathlib import Path
from warmstart import cuts, lock, plan, profile, render
root = Path(".").resolve()
for arch in profile.archs(root):
    loaded = profile.load(root, arch)
    planned = plan.make(root, loaded, lock.parse(lock.committed(root, arch)), cuts.load(root, loaded.profile))
    render.render(root, planned)
"""


def cpu(argv: Sequence[str]) -> float:
    """User and system seconds of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # As on a machine that keeps byte code: a setting against it would be measured otherwise.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(argv, cwd=ROOT, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median(argv: Sequence[str], runs: int) -> float:
    """Median CPU seconds after one uncounted run, which fills the page cache and compiles byte code."""
    cpu(argv)
    return round(statistics.median(cpu(argv) for _ in range(runs)), 4)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=int, default=9)
    runs = parser.parse_args().runs
    figures = {
        "python -c pass": median([PYTHON, "-c", "pass"], runs),
        "build.py --help": median([PYTHON, "build.py", "--help"], runs),
        "build.py plan --json": median([PYTHON, "build.py", "plan", "cpu", "--json"], runs),
        "render of all archs, one process": median([PYTHON, "-c", RENDER], runs),
    }
    print(json.dumps({"processors": os.cpu_count(), "runs": runs, "cpu_seconds": figures}, indent=1))


if __name__ == "__main__":
    main()
