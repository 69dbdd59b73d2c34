"""What a kernel was specialised for, described by one version of Triton and used by another.

Standard library only; caches/replay.py uses it as well.
"""

import functools
import importlib
import json
import sys
from typing import Any


class Collected(Exception):
    """Carries what Triton would have compiled now."""


class Collector:
    """In place of Triton's asynchronous mode (3.5 and later)."""

    def submit(self, key: Any, compile_fn: Any, *then: Any) -> Any:
        """Keep Triton from going on (to one function `then`, from 3.9 on two): its table of kernels stays as it is."""
        raise Collected(compile_fn)


def collected(call: Any) -> Any:
    """The function by which Triton would compile what `call` asks for; None when it would not compile."""
    mode = sys.modules["triton.runtime._async_compile"].active_mode
    before = mode.set(Collector())
    try:
        call()
    except Collected as found:
        return found.args[0]
    finally:
        mode.reset(before)
    return None


def to_compile(kernel: Any, row: "dict[str, Any]", target: Any) -> Any:
    """The function by which Triton would compile a described kernel for this target; raises what Triton does."""
    spec = {**fitted(row["spec"]), "options": row["options"], "key": "described", "target": target.__dict__}
    return collected(lambda: kernel.preload(json.dumps(spec)))


def fitted(spec: "dict[str, Any]") -> "dict[str, Any]":
    """A specialisation with the attributes that this Triton gives to constants, which are part of a kernel's key.

    Up to 3.6 it reads those of an argument from a constant that is a string, too; later each has an empty list.
    """
    attributes = {tuple(path): value for path, value in zip(spec["attrs_keys"], spec["attrs_vals"], strict=True)}
    constants = {tuple(path): value for path, value in zip(spec["constant_keys"], spec["constant_vals"], strict=True)}
    is_dtype = importlib.import_module("triton.language").dtype.is_dtype
    for number, kind in enumerate(spec["signature"].values()):
        if kind == "constexpr":
            value = constants.get((number,))
            attributes.pop((number,), None)
            own = of_constant(value if isinstance(value, str) and not is_dtype(value) else None)
            if own is not None:
                attributes[number,] = own
    paths = sorted(attributes)
    return {**spec, "attrs_keys": paths, "attrs_vals": [attributes[path] for path in paths]}


@functools.cache
def of_constant(value: "str | None") -> Any:
    """The attributes that Triton gives to a constant (None: one that is no string), by asking it; None without any."""
    if "triton.runtime._async_compile" not in sys.modules:
        return None  # 3.4 has none either, and can't be asked
    kernel = importlib.import_module("triton").jit(nothing)
    compile_fn = collected(lambda: kernel.run(0 if value is None else value, grid=(1,), warmup=True))
    cells = dict(zip(compile_fn.__code__.co_freevars, compile_fn.__closure__, strict=True))
    return cells["src"].cell_contents.attrs.get((0,))


def nothing(x: "constexpr"):  # type: ignore[name-defined, no-untyped-def] # noqa: F821
    """A kernel with one constant."""
