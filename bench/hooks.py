"""CPU milliseconds that the hooks add to a start of Python: `python bench/hooks.py [starts] [python]`.

Starts of `python -c pass` in turn in two virtual environments, one with the hooks as the image has them (byte code that
is never checked), one without. Goal: ≤ 0.25 ms. WARMSTART_HOOKS=0 in a third, to see what switching them off saves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(python: str, where: Path, *, hooks: bool) -> str:
    """Make a virtual environment and return its Python."""
    subprocess.run([python, "-m", "venv", "--without-pip", where], check=True)
    program = str(where / "bin/python")
    if hooks:
        (site,) = where.glob("lib/python3.*/site-packages")
        for file in (ROOT / "sitecustomize").glob("warmstart*"):
            shutil.copy(file, site)
        command = [program, "-m", "compileall", "-qf", "--invalidation-mode", "unchecked-hash", str(site)]
        subprocess.run(command, check=True, env={**os.environ, "WARMSTART_HOOKS": "0"})
    return program


def start(python: str, env: dict[str, str]) -> float:
    """CPU milliseconds of one start."""
    pid = os.posix_spawn(python, [python, "-c", "pass"], env)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{python} failed")
    return (used.ru_utime + used.ru_stime) * 1000


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="?", type=int, default=300)
    parser.add_argument("python", nargs="?", default="/usr/bin/python3")
    asked = parser.parse_args()
    starts, python = asked.starts, asked.python
    with tempfile.TemporaryDirectory() as place:
        bare = environment(python, Path(place, "bare"), hooks=False)
        with_hooks = environment(python, Path(place, "hooks"), hooks=True)
        env = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}  # as in the image
        kinds = {
            "without": (bare, env),
            "hooks": (with_hooks, env),
            "switched off": (with_hooks, {**env, "WARMSTART_HOOKS": "0"}),
        }
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(starts + 5):
            for name, (program, variables) in kinds.items():
                milliseconds = start(program, variables)
                if turn >= 5:  # the first ones fill the page cache
                    found[name].append(milliseconds)
    middle = {name: statistics.median(values) for name, values in found.items()}
    figures = {name: round(value, 3) for name, value in middle.items()}
    added = {name: round(middle[name] - middle["without"], 3) for name in ("hooks", "switched off")}
    # In pairs, so that a machine that others use at the same time does not count.
    pairs = [a - b for a, b in zip(found["hooks"], found["without"], strict=True)]
    low, high = statistics.quantiles(pairs, n=4)[::2]
    print(
        json.dumps(
            {
                "processors": os.cpu_count(),
                "python": python,
                "starts": starts,
                "cpu_milliseconds": figures,
                "added": added,
                "added, median of pairs and quartiles": [round(x, 3) for x in (statistics.median(pairs), low, high)],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
