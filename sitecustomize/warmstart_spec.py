"""What a kernel was specialised for, described by one version of Triton and used by another.

Standard library only; caches/replay.py uses it as well.
"""

import contextlib
import functools
import importlib
import inspect
import json
import sys
from typing import Any


def on_use(jit: Any, take: Any, failed: Any = lambda kernel, problem: None) -> None:
    """Call `take(kernel, told, compiled)` for each kernel that is compiled or loaded from now on, once it can be used.

    `jit` is triton.runtime.jit; told is what Triton tells its hooks. `failed(kernel, problem)` hears of what can't be
    described. Not one of Triton's own hooks: with one set, Triton writes down what a kernel was specialised for outside
    of any guard, and a launch fails where JSON can't hold that (a layout, a type in a tuple).
    """
    call = jit.JITFunction._call_hook
    if not hasattr(call, "takers"):
        device = list(inspect.signature(call).parameters).index("device") - 2  # among what follows the hook

        def _call_hook(self: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                # Triton calls before it compiles and after; only then is the kernel in its table.
                compiled = self.device_caches[args[device]][0].get(args[0])
                if compiled is not None and not hasattr(type(compiled), "result"):
                    tell(_call_hook.takers, self, compiled, lambda taker: call(self, taker, *args, **kwargs))  # type: ignore[attr-defined]
            return call(self, hook, *args, **kwargs)

        _call_hook.takers = []  # type: ignore[attr-defined]
        jit.JITFunction._call_hook = _call_hook
    takers = jit.JITFunction._call_hook.takers
    if (take, failed) not in takers:
        takers.append((take, failed))


def tell(takers: Any, kernel: Any, compiled: Any, ask: Any) -> None:
    """Tell all takers of one kernel; `ask` has Triton call a function with what it tells its hooks."""

    def collect(**told: Any) -> None:
        if ambiguous(told["compile"]["constants"].values()):
            raise TypeError("a string that names a type would be read back as the type")
        for take, _ in takers:
            take(kernel, told, compiled)

    try:
        ask(collect)
    except Exception as problem:
        for _, failed in takers:
            failed(kernel, problem)


def ambiguous(values: Any) -> bool:
    """Whether one of these constants is a string that names a type: Triton tells it, and keys it, like the type."""
    is_dtype = importlib.import_module("triton.language").dtype.is_dtype
    return any(
        ambiguous(value)
        if isinstance(value, (tuple, list))
        else isinstance(text := getattr(value, "value", value), str) and is_dtype(text)
        for value in values
    )


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
    spec = {**fitted(row["spec"], kernel), "options": row["options"], "key": "described", "target": target.__dict__}
    return collected(lambda: kernel.preload(json.dumps(spec)))


def fitted(spec: "dict[str, Any]", kernel: Any) -> "dict[str, Any]":
    """A specialisation with the attributes that this Triton gives to constants, which are part of a kernel's key.

    Up to 3.6 it reads those of an argument from a constant that is a string, too; later each has an empty list. Raises
    ValueError for a kernel with other parameters: constants are told by number, and Triton's key has but their values.
    """
    if list(spec["signature"]) != list(kernel.arg_names):
        raise ValueError("its parameters are other ones by now, or in another order")
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
