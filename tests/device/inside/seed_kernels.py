"""Kernels for the tests of seeds, in a module of their own, as models have them."""

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def scale(source, target, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * factor, mask=at < count)


@triton.autotune(  # type: ignore[untyped-decorator]
    [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (2, 4)], key=["count"]
)
@triton.jit  # type: ignore[untyped-decorator]
def add(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) + 1.0, mask=at < count)
