"""Compile a kernel for an arch, without a GPU; print by which cache manager it was kept and whether it was found."""

import json
import os
import sys
from typing import Any

arch, wave, os.environ["TRITON_CACHE_DIR"] = sys.argv[1:]

import triton  # type: ignore[import-not-found]  # noqa: E402
import triton.language as tl  # type: ignore[import-not-found]  # noqa: E402
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]  # noqa: E402
from triton.compiler import ASTSource  # type: ignore[import-not-found]  # noqa: E402


@triton.jit  # type: ignore[untyped-decorator]
def double(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) * 2)


found: list[bool] = []


def listener(*, cache_hit: bool, **_: Any) -> None:
    found.append(cache_hit)


triton.knobs.compilation.listener = listener
source = ASTSource(double, {"x": "*fp32", "BLOCK": "constexpr"}, {(1,): 64}, {})
kernel = triton.compile(source, target=GPUTarget("hip", arch, int(wave)))
manager = triton.knobs.cache.manager_class
print(json.dumps({"manager": manager.__name__ if manager else "", "found": found, "key": kernel.hash}))
