"""A first start from a seed beside a first and a warm start: `python bench/seeded.py [rounds]`, on the cpu image.

In turn, in one run: a start on an empty volume, a warm one on the same; then a seed of that volume (compile artefacts:
the CPU has no kernels of Triton) is made, pulled into a new volume, and started from. Goal: seeded ≤ 1.1 of warm.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
IMAGE = "localhost/warmstart/vllm:cpu"


def main() -> None:
    """Print the figures as JSON."""
    from tests.image.server import FLAGS, serve, stop, tiny_model
    from warmstart import engine, probe, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=1)
    rounds = parser.parse_args().rounds
    os.environ |= engine.environment(probe.probe(ROOT / ".warmstart"))
    seconds: dict[str, list[float]] = {}
    verb = [sys.executable, str(ROOT / "build.py"), "seed"]

    def timed(name: str, model: str, volume: str) -> None:
        server = serve(IMAGE, model, volume)
        server.wait()
        seconds.setdefault(name, []).append(round(server.seconds, 1))
        print(name, seconds[name][-1], file=sys.stderr, flush=True)
        stop(server)

    with tiny_model(IMAGE) as model:
        for turn in range(rounds):
            own, other = (f"warmstart-bench-{os.getpid()}-{turn}-{name}" for name in ("own", "other"))
            tag = ""
            try:
                timed("first", model, own)
                timed("warm", model, own)
                made = run.run(
                    [*verb, "make", "cpu", "--json", "-q", "--from", own, "--tier", "artefacts"]
                    + ["--model", "/models/tiny", "--flags", shlex.join(FLAGS)]
                )
                tag = json.loads(made.stdout.splitlines()[-1])["seed"]
                run.run([*verb, "pull", tag, "--arch", "cpu", "--into", other])
                timed("seeded", model, other)
                timed("warm again", model, own)
            finally:
                for volume in (own, other):
                    run.run(["podman", "volume", "rm", "--force", volume], ok=range(256))
                if tag:
                    run.run(["podman", "rmi", "--force", f"localhost/warmstart/seed:{tag}"], ok=range(256))
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = {name: round(middle["seeded"] / middle[name], 3) for name in middle if name != "seeded"}
    print(json.dumps({"processors": os.cpu_count(), "seconds": seconds, "seeded to": ratios}, indent=1))


if __name__ == "__main__":
    main()
