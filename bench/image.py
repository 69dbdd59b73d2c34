"""Wall seconds of a cold build and of one with nothing to do: `python bench/image.py [arch]`.

Cold: no cached layer, no base; the wheels are fetched anew into an empty folder. It builds in a state folder of its
own and puts back what was there. Goals: cold ≤ 200 s, nothing to do ≤ 3 s, two cold builds one image id.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = str(ROOT / ".venv/bin/python")
STATE = ROOT / ".warmstart"


def build(arch: str, *flags: str) -> dict[str, object]:
    """Build once and return the record with the wall seconds of the whole command."""
    began = time.monotonic()
    done = subprocess.run(
        [PYTHON, "build.py", "image", arch, "--json", *flags], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    record = json.loads(done.stdout.splitlines()[-1])
    return {
        "seconds": round(time.monotonic() - began, 1),
        "image_id": record["image_id"],
        "size_mb": round(record["size_bytes"] / 1e6, 1),
        "rebuilt": record["rebuilt"],
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="?", default="cpu")
    arch = parser.parse_args().arch
    kept = STATE / "wheels.kept"
    if (STATE / "wheels").exists():
        (STATE / "wheels").rename(kept)
    try:
        cold = build(arch, "--no-cache")
    finally:
        if kept.exists():
            shutil.rmtree(STATE / "wheels", ignore_errors=True)
            kept.rename(STATE / "wheels")
    again = build(arch, "--no-cache")
    figures: dict[str, object] = {
        "cold": cold,
        "again without cache": again,
        "nothing to do": build(arch),
    }
    print(json.dumps({"processors": os.cpu_count(), "arch": arch, **figures}, indent=1))


if __name__ == "__main__":
    main()
