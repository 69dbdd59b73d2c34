"""Kernels on their way to a worker: by their code and the globals they use, so that no module is imported there.

The module of a kernel imports torch, and torch opens the device.
"""

import ast
import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any

# What a worker may import, besides Python's own library. Anything else could bring torch in.
ALLOWED = ("triton", "warmstart_pack")


def dumps(value: Any) -> bytes:
    """A value with kernels in it as bytes for pickle.loads; raises pickle.PicklingError and whatever pickle does."""
    buffer = io.BytesIO()
    Packer(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class Packer(pickle.Pickler):
    """Pickles kernels by their code and the globals they use, so that their modules need not be imported."""

    def reducer_override(self, value: Any) -> Any:
        if is_kernel(value):
            if found_by_name(value):
                return named, (value.__module__, value.__qualname__)
            return kernel_parts(value)
        if isinstance(value, types.ModuleType):
            if not importable(value.__name__):
                raise pickle.PicklingError(value.__name__)
            return importlib.import_module, (value.__name__,)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and not (
            importable(str(value.__module__))
        ):
            raise pickle.PicklingError(repr(value))
        return NotImplemented


def kernel_parts(kernel: Any) -> tuple[Any, ...]:
    """A kernel for pickle: how to make it, then the values it uses, which may lead back to it."""
    if getattr(kernel, "_repr", None) is not None:
        raise pickle.PicklingError("a kernel named by a function")
    function = kernel.fn
    names = {node.id for node in ast.walk(kernel.parse()) if isinstance(node, ast.Name)}
    used = {name: v for name, v in function.__globals__.items() if name in names and sendable(v)}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    notes = {name: v if sendable(v) else None for name, v in getattr(function, "__annotations__", {}).items()}
    options = {
        name: getattr(kernel, name)
        for name in ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
        if hasattr(kernel, name)
    }
    made = (
        type(kernel).__name__,
        marshal.dumps(function.__code__.replace(co_firstlineno=kernel.starting_line_number)),
        (function.__module__, function.__name__, function.__qualname__),
        function.__defaults__,
        function.__kwdefaults__,
        notes,
        options,
    )
    return new_kernel, made, (used, cells), None, None, fill


def is_kernel(value: Any) -> bool:
    """Whether it is a function of Triton's own kinds: jit or constexpr_function."""
    jit = sys.modules.get("triton.runtime.jit")
    return any(type(value) is getattr(jit, name, ()) for name in ("JITFunction", "ConstexprFunction"))


def found_by_name(value: Any) -> bool:
    """Whether it is one of Triton's own, which a worker has too."""
    module = sys.modules.get(value.__module__)
    return value.__module__.partition(".")[0] == "triton" and getattr(module, value.__qualname__, None) is value


def importable(module: str) -> bool:
    """Whether a worker may import it."""
    top = module.partition(".")[0]
    return top in ALLOWED or top in sys.stdlib_module_names


def sendable(value: Any) -> bool:
    """Whether a global may be needed by a compiler; the host's own things (torch, the launcher) are not."""
    if isinstance(value, types.ModuleType):
        return importable(value.__name__)
    if isinstance(value, (list, tuple, set)):
        return all(map(sendable, value))
    if isinstance(value, dict):
        return all(map(sendable, value.values()))
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return importable(str(value.__module__))
    return is_kernel(value) or importable(type(value).__module__)


def named(module: str, name: str) -> Any:
    """One of Triton's own functions."""
    return getattr(importlib.import_module(module), name)


def new_kernel(
    kind: str,
    code: bytes,
    names: tuple[str, str, str],
    defaults: Any,
    kwdefaults: Any,
    annotations: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """The kernel with the given code, its globals still missing."""
    module, name, qualname = names
    made = marshal.loads(code)
    scope = {"__name__": module, "__builtins__": __builtins__}
    cells = tuple(types.CellType() for _ in made.co_freevars)
    function = types.FunctionType(made, scope, name, defaults, cells)
    function.__kwdefaults__, function.__annotations__, function.__qualname__ = kwdefaults, annotations, qualname
    return getattr(importlib.import_module("triton.runtime.jit"), kind)(function, **options)


def fill(kernel: Any, values: tuple[dict[str, Any], list[Any]]) -> None:
    """Give a kernel the values it uses."""
    used, contents = values
    kernel.fn.__globals__.update(used)
    for cell, content in zip(kernel.fn.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
