"""The start-up kit measured on a GPU: `python bench/startup_kit.py [--out DIR] [PART…]`, all parts without PART.

Needs torch, Triton and `fla-core` for that GPU in the Python it runs with, the parts vllm-* also vLLM. Every part is a
process of its own and leaves DIR/<part>.json; parts that are there are not run again, so that an interrupted run goes
on where it was. Prints the summary (goals, figures, met or not) and leaves it with a chart in DIR. Figures hold for the
GPU named in them alone.

- first-*: the first call of gated-delta-net's chunk kernels: stock, the article's 3 + 10 loop, the bounded loop, and
  that with parallel compilation, in threads and in processes; seeded: kernels and verdicts from a seed.
- ranking, faults: see kit_ranking.py and kit_faults.py.
- vllm-*: seconds from vLLM's command to /health (kit_vllm.py, kit_starts.py), first and warm, without and with the kit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import kit_starts, kit_summary

ROOT = Path(__file__).resolve().parents[1]
FIRST = {  # part → the variables that give it
    "first-stock": {"WARMSTART_HOOKS": "0"},
    "first-snippet": {"WARMSTART_HOOKS": "0", "BENCH_SNIPPET": "1"},
    "first-ours": {"WARMSTART_HOOK_COMPILE": "0"},
    "first-threads": {"WARMSTART_HOOK_WORKERS": "0"},
    "first-parallel": {},
}
PARTS = [*FIRST, "first-seeded", "ranking", "faults", *kit_starts.PARTS]


def here(part: str, deadline: float) -> dict[str, Any]:
    """One part in this process."""
    if part == "ranking":
        from bench import kit_ranking as found

        result: dict[str, Any] = {"cases": found.ranking(deadline)}
    elif part == "faults":
        from bench import kit_faults

        result = kit_faults.each_fault()
    else:
        from bench import kit_first

        result = kit_first.first()
    from bench import kit_gpu

    return {"machine": kit_gpu.machine(), **result}


def child(part: str, env: dict[str, str], minutes: float, cache: str) -> dict[str, Any]:
    """Run one part in a Python of its own; what it prints last, as JSON."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WARMSTART_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, __file__, "--here", part, "--minutes", str(minutes)],
        env={**clean, "TRITON_CACHE_DIR": cache, "TRITON_CACHE_AUTOTUNING": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": done.returncode, "said": lines[-3:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(part: str, out: Path, minutes: float) -> dict[str, Any]:
    """Run a part in whatever way it is run."""
    if part in kit_starts.PARTS:
        return kit_starts.PARTS[part](part, out)
    with tempfile.TemporaryDirectory() as cache:
        if part == "first-seeded":
            return child(part, kit_starts.seed_of_first(Path(cache), child), minutes, f"{cache}/triton")
        if part == "faults":  # the same faults for the hooks and for stock
            sides = {"ours": {}, "stock": {"WARMSTART_HOOKS": "0"}}
            return {side: child(part, env, minutes, f"{cache}/{side}") for side, env in sides.items()}
        return child(part, FIRST.get(part, {}), minutes, cache)


def main() -> None:
    """Run what is asked for and not there yet; print the summary."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=", ".join(PARTS))
    options.add_argument("--out", type=Path, default=ROOT / ".warmstart" / "startup_kit")
    options.add_argument("--minutes", type=float, default=9, help="nothing is begun after that")
    options.add_argument("--here", help=argparse.SUPPRESS)
    asked = options.parse_args()
    deadline = time.monotonic() + 60 * asked.minutes
    if asked.here:
        print(json.dumps(here(asked.here, deadline)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    for part in asked.parts or PARTS:
        file = asked.out / f"{part}.json"
        if file.exists() or time.monotonic() > deadline:
            continue
        result = measure(part, asked.out.resolve(), asked.minutes)
        if "failed" not in result:
            file.write_text(json.dumps(result, indent=1), encoding="utf-8")
        short = {k: v for k, v in result.items() if k not in ("compiled", "tuned")}
        print(part, json.dumps(short), file=sys.stderr, flush=True)
    print(json.dumps(kit_summary.write(asked.out), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
