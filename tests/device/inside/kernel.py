"""Compile a Triton kernel for the GPU, run it, and print whether its result is right and where it was kept."""

import json
import os
import time
from pathlib import Path

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def scale(source, target, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * factor, mask=at < count)


source = torch.arange(5000, dtype=torch.float32, device="cuda")
target = torch.zeros_like(source)
began = time.monotonic()
scale[(triton.cdiv(5000, 256),)](source, target, 3.0, 5000, BLOCK=256)
torch.cuda.synchronize()
folder = Path(os.environ["TRITON_CACHE_DIR"])
print(
    json.dumps(
        {
            "right": bool(torch.equal(target, source * 3.0)),
            "seconds": time.monotonic() - began,
            "kept": len(list(folder.rglob("scale.hsaco"))),
            "launchers": len(list(folder.rglob("*.so"))),
        }
    )
)
