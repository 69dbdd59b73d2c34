#!/usr/bin/env python3
"""What reading a log costs: lines a second, and how much of a core it takes to follow a start or a server.

Run: python bench/phases_speed.py [FILE…]. Without files the logs of the unit tests are read. The busiest log
that is assumed is that of a server which writes an access line for each of 100 requests a second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from warmstart import phases  # noqa: E402

REPEAT = 20
REQUESTS = 100  # access lines a second
ACCESS = '(APIServer pid=1) INFO:     127.0.0.1:39372 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
LIMIT = 0.01  # of one core


def cost(lines: list[str]) -> float:
    """CPU seconds for one line, the best of REPEAT runs over all of them."""
    best = float("inf")
    for _ in range(REPEAT):
        reader, begin = phases.Reader(), time.process_time()
        for number, line in enumerate(lines):
            reader.feed(line, 1e9 + number)
        best = min(best, time.process_time() - begin)
    return best / len(lines)


def main(names: list[str]) -> int:
    """Prints one line for each log; returns 1 when following one takes more of a core than LIMIT."""
    worst = 0.0
    for path in [Path(name) for name in names] or sorted((ROOT / "tests/unit/data/phases").glob("*.log")):
        text = path.read_text(encoding="utf-8", errors="replace").split("\n")
        record, each = phases.read(text), cost(text)
        share = each * len(text) / max(record.seconds, 1.0)
        worst = max(worst, share)
        size = f"{len(text)} lines in {record.seconds:.1f} s"
        print(f"{path.stem:<32}{size:>24}{1 / each:10,.0f} lines/s{share:9.4%} of a core")
    each = cost([ACCESS] * 1000)
    share = each * REQUESTS
    print(f"{f'{REQUESTS} requests a second':<32}{'':24}{1 / each:10,.0f} lines/s{share:9.4%} of a core")
    return int(max(worst, share) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
