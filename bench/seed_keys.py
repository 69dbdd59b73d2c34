"""Are the keys of kernels that a machine without a GPU compiled those of a real launch? Asked on an NVIDIA GPU.

`python bench/seed_keys.py record|replay|prove --fla FOLDER --out FOLDER`, where the former holds `fla-core` unpacked:

- record (GPU): the forward pass of a gated delta rule, once, with the hooks and the recorder; leaves record.json.
- replay (no GPU: none is visible to it): compiles what the record holds, with a stand-in driver; leaves seed/.
- prove (GPU): the same pass with an empty cache volume and that seed. Prints what was compiled and measured as JSON;
  fails unless both are nothing.

The figures are those of the GPU named in them; none is an AMD result.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEED = ("TRITON_CACHE_MANAGER", "WARMSTART_SEED", "WARMSTART_VERDICTS", "WARMSTART_RECORD", "WARMSTART_CU")


def environment(out: Path, *, seeded: bool) -> None:
    """The variables of an image, before Triton is imported."""
    for name in SEED:
        os.environ.pop(name, None)
    volume = out / ("volume" if seeded else "first")
    shutil.rmtree(volume, ignore_errors=True)
    os.environ |= {"TRITON_CACHE_DIR": str(volume / "triton"), "TRITON_CACHE_AUTOTUNING": "1"}
    if seeded:
        os.environ |= {
            "TRITON_CACHE_MANAGER": "warmstart_cache:SeededCacheManager",
            "WARMSTART_SEED": str(out / "seed"),
            "WARMSTART_VERDICTS": str(volume / "verdicts"),
        }
    else:
        shutil.rmtree(out / "recorded", ignore_errors=True)
        os.environ["WARMSTART_RECORD"] = str(out / "recorded")


def load() -> Any:
    """What measures on the GPU, under the hooks; the number of compute units is where an entry point would put it."""
    kit = importlib.import_module("bench.kit_gpu")
    os.environ["WARMSTART_CU"] = str(kit.torch.cuda.get_device_properties(0).multi_processor_count)
    return kit


def counted(kit: Any) -> dict[str, Any]:
    """The pass once: seconds, kernels compiled and found, benchmarks, and a digest of its result."""
    call, torch, triton = kit.gdn_call(), kit.torch, kit.triton
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    bench, benched = tuner._bench, []
    compiled: list[str] = []
    found: list[str] = []

    def listener(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else compiled).append(f"{src.name} {metadata['hash'][:16]}")

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        benched.append(self.base_fn.__name__)
        return bench(self, *args, **kwargs)

    counting.__dict__.update(getattr(bench, "__dict__", {}))
    tuner._bench, triton.knobs.compilation.listener = counting, listener
    began = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    call()
    second = time.perf_counter() - began
    apart = getattr(sys.modules.get("warmstart_workers"), "compiled", 0)
    data = b"".join(tensor.float().cpu().numpy().tobytes() for tensor in result)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "triton": triton.__version__,
        "first call s": round(seconds, 2),
        "second call s": round(second, 4),
        "compiled": len(compiled) + apart,
        "of them in workers": apart,
        "found in a cache": len(found),
        "configurations measured": len(benched),
        "finite": bool(torch.isfinite(result[0]).all()),
        "result": hashlib.sha256(data).hexdigest()[:16],
        "compiled here": sorted(set(compiled)),
    }


def record(out: Path) -> int:
    """The first pass, recorded."""
    environment(out, seeded=False)
    told = counted(load())
    code: int = importlib.import_module("record").main([str(out / "recorded"), "-o", str(out / "record.json")])
    if code == 0:
        rows = json.loads((out / "record.json").read_text())
        told["record"] = {
            "bytes": (out / "record.json").stat().st_size,
            "kernels": sum(len(group["variants"]) for group in rows["kernels"]),
            "verdicts": sum(len(group["verdicts"]) for group in rows["verdicts"]),
            "left out": rows["left out"],
        }
    del told["compiled here"]
    (out / "record-run.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(json.dumps(told))
    return code


def replay(out: Path) -> int:
    """The seed, made where no GPU is seen."""
    shutil.rmtree(out / "seed", ignore_errors=True)
    code: int = importlib.import_module("replay").main(["--out", str(out / "seed"), str(out / "record.json")])
    return code


def prove(out: Path) -> int:
    """The pass with the seed; 1 unless nothing is compiled and nothing measured."""
    environment(out, seeded=True)
    told = counted(load())
    volume = Path(os.environ["TRITON_CACHE_DIR"])
    adopted = {file.name for file in (out / "seed").rglob("*.so")}
    told["C modules built here"] = sum(file.name not in adopted for file in volume.rglob("*.so"))
    if (out / "record-run.json").exists():
        before = json.loads((out / "record-run.json").read_text())
        told["result as recorded"] = told["result"] == before["result"]
        told["first call, of the recorded one"] = round(told["first call s"] / before["first call s"], 4)
    told["proven"] = told["compiled"] == 0 and told["configurations measured"] == 0 and told["found in a cache"] > 0
    (out / "prove.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(json.dumps(told))
    return 0 if told["proven"] else 1


def main() -> int:
    """One of the steps."""
    steps: dict[str, Callable[[Path], int]] = {"record": record, "replay": replay, "prove": prove}
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("step", choices=steps)
    options.add_argument("--fla", type=Path, help="folder that holds the package fla; else an installed one")
    options.add_argument("--out", type=Path, default=ROOT / ".warmstart" / "seed_keys")
    asked = options.parse_args()
    if asked.fla:
        sys.path.insert(0, str(asked.fla.resolve()))
    sys.path[:0] = [str(ROOT), str(ROOT / "caches")]
    asked.out.mkdir(parents=True, exist_ok=True)
    return steps[asked.step](asked.out.resolve())


if __name__ == "__main__":
    sys.exit(main())
