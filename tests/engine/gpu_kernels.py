"""Kernels of the kinds that models have: plain, made by a function, with heuristics and autotuned."""

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def add(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def factory(offset):  # type: ignore[no-untyped-def]
    @triton.jit  # type: ignore[untyped-decorator]
    def scale(x, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, at < n) * factor, at < n)

    return scale


made = factory(3)  # type: ignore[no-untyped-call]


@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})  # type: ignore[untyped-decorator]
@triton.autotune(  # type: ignore[untyped-decorator]
    [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (2, 4)], key=["n"]
)
@triton.jit  # type: ignore[untyped-decorator]
def tuned(x, y, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at) if EVEN else tl.load(x + at, at < n)
    tl.store(y + at, value, at < n)
