"""The vLLM parts of the start-up kit's bench, in the order in which they need each other.

Stock's caches and the kit's lie apart. The kit's first start fills its caches; seeds are then made of them as for any
user: kernels and verdicts recorded and replayed without a GPU, or all three tiers packed into an image's layer, checked
and unpacked where the caches were.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import kit_vllm

ROOT = Path(__file__).resolve().parents[1]
KEY = "cpu-000000000000"  # a cache key; NVIDIA's archs have no name here
CU = "132"  # multiprocessors of an H200; an image's entry point reads KFD
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def model(out: Path) -> Path:
    """The model's folder, made when it is not there."""
    folder = out / "model"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "bench" / "kit_model.py", folder], check=True)
    return folder


def starts(part: str, out: Path, cache: Path, times: int, *, kit: bool, **more: str) -> dict[str, Any]:
    """So many starts on one cache, one after the other."""
    rows = []
    for turn in range(times):
        given = {"WARMSTART_CU": CU, **more} if kit else more
        row = kit_vllm.start(f"{part}-{turn}", model(out), cache, out, kit=kit, more=given)
        if "failed" in row:
            return row
        rows.append(row)
    return {"starts": rows}


def stock_first(part: str, out: Path) -> dict[str, Any]:
    return starts(part, out, kit_vllm.emptied(out / "stock"), 1, kit=False)


def stock_warm(part: str, out: Path) -> dict[str, Any]:
    return starts(part, out, out / "stock", 1, kit=False)


def first(part: str, out: Path) -> dict[str, Any]:
    return starts(part, out, kit_vllm.emptied(out / "caches" / KEY), 1, kit=True)


def warm(part: str, out: Path) -> dict[str, Any]:
    return starts(part, out, out / "caches" / KEY, 1, kit=True)


def without_fork(part: str, out: Path) -> dict[str, Any]:
    return starts(part, out, out / "caches" / KEY, 1, kit=True, WARMSTART_HOOK_FORK="0")


def record(part: str, out: Path) -> dict[str, Any]:
    """A warm start that is recorded, unless the record is there, and the record replayed where no GPU is seen."""
    told: dict[str, Any] = {}
    caches, file = ROOT / "caches", out / "record.json.txt"  # not .json: it is no part
    if not file.exists():
        rows = kit_vllm.emptied(out / "recorded")
        told = starts(part, out, out / "caches" / KEY, 1, kit=True, WARMSTART_RECORD=str(rows))
        if "failed" in told:
            return told
        subprocess.run([sys.executable, caches / "record.py", rows, "-o", file], check=True)
    seed = kit_vllm.emptied(out / "seed")
    done = subprocess.run(
        [sys.executable, caches / "replay.py", "--out", seed, file],
        env=os.environ | NO_GPU,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {**told, "bytes": file.stat().st_size, "replayed": json.loads(done.stdout.splitlines()[-1])}


def kernels(part: str, out: Path) -> dict[str, Any]:
    """A first start with that seed, baked and read-only."""
    return starts(part, out, kit_vllm.emptied(out / "second"), 1, kit=True, WARMSTART_SEED=str(out / "seed"))


def ahead(part: str, out: Path) -> dict[str, Any]:
    """A first start, for another image's key, that knows what the kit's first start used."""
    used = next(out.glob(f"[bc]*/{KEY}/triton/warmstart-used"))  # caches or, once they are packed, before
    return starts(part, out, kit_vllm.emptied(out / "third"), 1, kit=True, WARMSTART_AHEAD=str(used))


def seeded(part: str, out: Path) -> dict[str, Any]:
    """A first start after a pull of a seed with all three tiers, made of the kit's caches."""
    if not (out / "caches" / KEY / "seeds").exists():  # what a pull notes last
        pack(out)
    return starts(part, out, out / "caches" / KEY, 1, kit=True)


def pack(out: Path) -> None:
    """Caches → layer of a seed → caches in the same place; those that there were lie in `before` then. Repeatable."""
    from warmstart import seedfiles, seedlayout, seedplace, seedtiers
    from warmstart.seedlabels import Facts

    if not (out / "before").exists():
        (out / "caches").rename(out / "before")
    stage = kit_vllm.emptied(out / "stage")
    stage.mkdir()
    with seedplace.cache(out / "before", KEY) as folder:
        taken = seedfiles.take(folder, f"/cache/{KEY}", seedtiers.TIERS, int(CU), stage)
    facts = Facts(
        cache_key=KEY, arch="cpu", tiers=seedtiers.TIERS, cu=int(CU), model="bench", flags="bench", gpu="H200"
    )
    layout = kit_vllm.emptied(out / "layout")
    image = seedlayout.write(layout, facts, taken.copies, 0)
    kit_vllm.emptied(out / "caches").mkdir()
    placed = seedplace.place(out / "caches", layout, image)
    print(f"seed: {placed.files} files, layer {image.layer_size} bytes", file=sys.stderr)
    shutil.rmtree(stage)


def seed_of_first(cache: Path, child: Callable[..., dict[str, Any]]) -> dict[str, str]:
    """Record the first call of gated-delta-net, replay it without a GPU; the variables that give this seed."""
    out = cache / "made"
    child("first-parallel", {"WARMSTART_RECORD": str(out / "recorded"), "WARMSTART_CU": CU}, 9, f"{out}/triton")
    caches = ROOT / "caches"
    subprocess.run([sys.executable, caches / "record.py", out / "recorded", "-o", out / "record"], check=True)
    replay = [sys.executable, caches / "replay.py", "--out", out / "seed", out / "record"]
    subprocess.run(list(map(str, replay)), env=os.environ | NO_GPU, stdout=subprocess.DEVNULL, check=True)
    manager = kit_vllm.KIT["TRITON_CACHE_MANAGER"]
    verdicts = str(cache / "verdicts")
    return {
        "TRITON_CACHE_MANAGER": manager,
        "WARMSTART_SEED": str(out / "seed"),
        "WARMSTART_VERDICTS": verdicts,
        "WARMSTART_CU": CU,
    }


PARTS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "vllm-stock-first": stock_first,
    "vllm-stock-warm": stock_warm,
    "vllm-first": first,
    "vllm-warm": warm,
    "vllm-warm-2": warm,
    "vllm-stock-warm-2": stock_warm,
    "vllm-no-fork": without_fork,
    "vllm-record": record,
    "vllm-kernels": kernels,
    "vllm-ahead": ahead,
    "vllm-seeded": seeded,
}
