"""Warm starts of the cpu image beside vLLM's own: `python bench/imports.py [image] [rounds]`.

In turn, in one run, each from `podman run` to /health 200 on caches of its own that one start filled before:
- stock: vLLM as its own wheel starts it. Same image, byte code and cache settings, but without hooks and patches;
- spawned: the image, its processes spawned as vLLM does (WARMSTART_HOOK_FORK=0);
- warm: the image.
CPU seconds of all processes beside the wall's, because other programs of the machine slow the wall alone. The answers'
hashes (temperature 0; drawn with a seed) must be the same from all of them. Goal: warm ≤ 0.6 of stock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SITE = "/opt/venv/lib/python3.11/site-packages"
STOCK = """\
FROM {image}
COPY vllm {site}/vllm
RUN {python} -IB -m compileall -qf --invalidation-mode unchecked-hash {files}
ENV WARMSTART_HOOKS=0
"""


def stock(image: str, name: str) -> None:
    """Make the image without hooks, its patched files as they were before."""
    from warmstart import patches, run

    files: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        for patch in reversed(patches.series(ROOT, "vllm")):
            if patch.lanes and "cpu" not in patch.lanes:
                continue
            for file in patch.files:
                text = run.run(["podman", "run", "--rm", "--entrypoint", "cat", image, f"{SITE}/{file}"]).stdout
                (here / file).parent.mkdir(parents=True, exist_ok=True)
                (here / file).write_text(text, encoding="utf-8")
            source = ROOT / "patches" / "vllm" / patch.name
            run.run(["patch", "-R", "-p1", "--fuzz=0", "--batch", "-d", here, "-i", source])
            files |= set(patch.files)
        recipe = here / "Containerfile"
        compiled = " ".join(f"{SITE}/{file}" for file in sorted(files))
        text = STOCK.format(image=image, site=SITE, python="/opt/venv/bin/python", files=compiled)
        recipe.write_text(text, encoding="utf-8")
        run.run(["buildah", "build", "--pull=never", "--tag", name, "--file", recipe, here])


def cpu_seconds(container: str) -> float:
    """CPU seconds of all processes of a running container, by its control group."""
    from warmstart import run

    pid = run.run(["podman", "inspect", "--format", "{{.State.Pid}}", container]).stdout.strip()
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            stat = Path(f"/sys/fs/cgroup{path}/cpu.stat")
            if stat.is_file() and (words := stat.read_text(encoding="ascii").split())[:1] == ["usage_usec"]:
                return int(words[1]) / 1e6
        elif "cpuacct" in controllers.split(","):
            return int(Path(f"/sys/fs/cgroup/{controllers}{path}/cpuacct.usage").read_text(encoding="ascii")) / 1e9
    return float("nan")


def answers(server: Any) -> str:
    """A hash over text and log probabilities of an answer without chance, and of one with a seed."""
    from tests.image.server import PROMPT, completion

    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0.9, "seed": 7, "logprobs": 5}
    drawn = json.loads(server.ask("/v1/completions", **body))["choices"][0]
    both = [completion(server), drawn["text"], drawn["logprobs"]]
    return hashlib.sha256(json.dumps(both, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    """Print the figures as JSON."""
    from tests.image.server import serve, stop, tiny_model
    from warmstart import engine, probe, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="localhost/warmstart/vllm:cpu")
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    asked = parser.parse_args()
    image, rounds = asked.image, asked.rounds
    os.environ |= engine.environment(probe.probe(ROOT / ".warmstart"))
    made = "localhost/warmstart-bench/stock"
    stock(image, made)
    kinds: dict[str, tuple[str, list[str]]] = {
        "stock": (made, []),
        "spawned": (image, ["--env", "WARMSTART_HOOK_FORK=0"]),
        "warm": (image, []),
    }
    wall: dict[str, list[float]] = {name: [] for name in kinds}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    hashes = set()
    caches = {name: f"warmstart-bench-{os.getpid()}-{name}" for name in kinds}
    try:
        with tiny_model(image) as model:
            for turn in range(rounds + 1):
                for name, (ref, options) in kinds.items():
                    server = serve(ref, model, caches[name], options=options)
                    server.wait()
                    used = cpu_seconds(server.container)
                    hashes.add(answers(server))
                    stop(server)
                    print(turn, name, round(server.seconds, 1), round(used, 1), file=sys.stderr, flush=True)
                    if turn:  # the first one fills the caches
                        wall[name].append(round(server.seconds, 1))
                        cpu[name].append(round(used, 1))
    finally:
        for cache in caches.values():
            run.run(["podman", "volume", "rm", "--force", cache], ok=range(256))
        run.run(["podman", "rmi", "--force", made], ok=range(256))
    ratio = {
        f"warm to {name}, {what}": round(statistics.median(found["warm"]) / statistics.median(found[name]), 3)
        for name in ("stock", "spawned")
        for what, found in (("wall", wall), ("cpu", cpu))
    }
    figures = {"processors": os.cpu_count(), "image": image, "wall_seconds": wall, "cpu_seconds": cpu}
    print(json.dumps({**figures, "same answers": len(hashes) == 1, "ratio of medians": ratio}, indent=1))


if __name__ == "__main__":
    main()
