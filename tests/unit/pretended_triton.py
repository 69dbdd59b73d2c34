"""As much of Triton as the hooks on compiled kernels see: its table, its two hooks, and when it calls which."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

TYPES = {"fp16", "fp32"}


class JITFunction:
    """A kernel; `compile` does what a first launch does."""

    def __init__(self, module: str, name: str, **options: Any) -> None:
        self.fn = types.SimpleNamespace(__module__=module, __qualname__=name)
        backend = types.SimpleNamespace(parse_options=lambda given: types.SimpleNamespace(num_warps=4))
        self.device_caches: dict[int, Any] = {0: ({}, None, backend, None)}

    def _call_hook(
        self,
        hook: Any,
        key: str,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        configs: Any,
        is_warmup: bool,
    ) -> Any:
        if not hook:
            return None
        if isinstance(signature, Exception):  # what JSON can't hold
            raise signature
        fn = types.SimpleNamespace(module=self.fn.__module__, name=self.fn.__qualname__, jit_function=self)
        told = {"specialization_data": signature, "device": device, "constants": constants}
        return hook(key=key, fn=fn, compile=told, is_manual_warmup=is_warmup)

    def compile(self, specialization: Any, *, warmup: bool = False, constants: Any = ()) -> None:
        """The table's key is the specialisation; Triton's own data is made from it."""
        runtime = sys.modules["triton.knobs"].runtime
        rest: Any = (0, dict(enumerate(constants)), None, [], warmup)
        if self._call_hook(runtime.jit_cache_hook, str(specialization), specialization, *rest):
            return
        self.device_caches[0][0][str(specialization)] = object()
        self._call_hook(runtime.jit_post_compile_hook, str(specialization), specialization, *rest)


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put it in place of Triton; triton.knobs.runtime, which has the hooks."""
    knobs: Any = types.ModuleType("triton.knobs")
    knobs.runtime = types.SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    jit: Any = types.ModuleType("triton.runtime.jit")
    jit.JITFunction = type("JITFunction", (JITFunction,), {"_call_hook": JITFunction._call_hook})  # to be changed
    language: Any = types.ModuleType("triton.language")
    language.dtype = types.SimpleNamespace(is_dtype=TYPES.__contains__)
    for module in (types.ModuleType("triton"), knobs, jit, language, types.ModuleType("triton.runtime._async_compile")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return knobs.runtime


def kernel(module: str, name: str) -> Any:
    """A kernel of the Triton in place."""
    return sys.modules["triton.runtime.jit"].JITFunction(module, name)
