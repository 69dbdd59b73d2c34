"""Seconds from `podman run` to /health 200: `python bench/start.py [image] [rounds]`.

In turn, in one run: the image as it is with an empty cache volume (first start), the same volume again (warm start),
and a plain image's first start. Plain is the same image without what warmstart adds for starts: no byte code, no cache
volume, no settings for caches. Goal: warm ≤ 0.45 of plain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PLAIN = """\
FROM {image}
RUN find /opt/venv /usr/lib/python3* -name '*.pyc' -delete
ENV PYTHONDONTWRITEBYTECODE=1 VLLM_CACHE_ROOT=/tmp/vllm TORCHINDUCTOR_CACHE_DIR=/tmp/inductor VLLM_USE_AOT_COMPILE=1
"""


def main() -> None:
    """Print the figures as JSON."""
    from tests.image.server import serve, stop, tiny_model
    from warmstart import engine, probe, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="localhost/warmstart/vllm:cpu")
    parser.add_argument("rounds", nargs="?", type=int, default=1)
    asked = parser.parse_args()
    image, rounds = asked.image, asked.rounds
    os.environ |= engine.environment(probe.probe(ROOT / ".warmstart"))
    plain = "localhost/warmstart-bench/plain"
    file = ROOT / ".warmstart" / "plain.Containerfile"
    file.write_text(PLAIN.format(image=image), encoding="utf-8")
    run.run(["buildah", "build", "--pull=never", "--tag", plain, "--file", file, ROOT / "bench"])
    seconds: dict[str, list[float]] = {"first": [], "warm": [], "plain": []}
    try:
        with tiny_model(image) as model:
            for turn in range(rounds):
                for name, ref, cache in (
                    ("first", image, f"warmstart-bench-{os.getpid()}-{turn}"),
                    ("warm", image, f"warmstart-bench-{os.getpid()}-{turn}"),
                    ("plain", plain, f"warmstart-bench-{os.getpid()}-{turn}-plain"),
                ):
                    server = serve(ref, model, cache)
                    server.wait()
                    seconds[name].append(round(server.seconds, 1))
                    print(name, seconds[name][-1], file=sys.stderr, flush=True)
                    stop(server)
                    if name != "first":
                        run.run(["podman", "volume", "rm", "--force", cache])
    finally:
        run.run(["podman", "rmi", "--force", plain], ok=range(256))
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = {name: round(middle["warm"] / middle[name], 3) for name in ("first", "plain")}
    print(json.dumps({"processors": os.cpu_count(), "image": image, "seconds": seconds, "warm to": ratio}, indent=1))


if __name__ == "__main__":
    main()
