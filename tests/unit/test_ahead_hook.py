"""When kernels are described and compiled ahead, on a pretended vLLM and Triton; tests/engine has real Triton."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The hook's file, freshly imported, beside a Triton with an asynchronous mode."""
    monkeypatch.syspath_prepend(str(HOOKS))
    names = [file.stem for file in HOOKS.glob("warmstart_*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("WARMSTART_HOOKS", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("WARMSTART_AHEAD", raising=False)
    knobs: Any = types.ModuleType("triton.knobs")
    knobs.runtime = types.SimpleNamespace(jit_post_compile_hook=None)
    for module in (types.ModuleType("triton"), knobs, types.ModuleType("triton.runtime._async_compile")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield importlib.import_module("warmstart_ahead")
    for name in names:
        sys.modules.pop(name, None)


def loader(ahead: Any) -> Any:
    """vLLM's class, hooked; what it loads."""

    loaded: list[Any] = []

    class DefaultModelLoader:
        def load_weights(self, model: Any, model_config: Any) -> str:
            loaded.append((model, model_config.model))
            return "loaded"

    DefaultModelLoader.loaded = loaded  # type: ignore[attr-defined]
    module = types.SimpleNamespace(DefaultModelLoader=DefaultModelLoader)
    ahead.install(module)
    ahead.install(module)
    return module.DefaultModelLoader


def test_it_begins_before_the_weights_are_loaded(ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int]] = []
    made = loader(ahead)
    monkeypatch.setattr(ahead, "begin", lambda model: begun.append((model, len(made.loaded))))
    assert made().load_weights("m", types.SimpleNamespace(model="me/tiny")) == "loaded"
    assert (begun, made.loaded) == ([("me/tiny", 0)], [("m", "me/tiny")])


def test_a_fault_of_its_own_is_one_line(
    ahead: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ahead, "begin", lambda model: 1 // 0)
    assert loader(ahead)().load_weights("m", types.SimpleNamespace(model="x")) == "loaded"
    assert capsys.readouterr().err.startswith("warmstart: kernels are not compiled ahead: ZeroDivisionError")


@pytest.mark.parametrize("without", ["triton", "cache"])
def test_where_nothing_can_be_kept_nothing_is_watched(
    ahead: Any, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "triton":  # the cpu image has none
        monkeypatch.delitem(sys.modules, "triton.runtime._async_compile")
    else:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    ahead.begin("me/tiny")
    assert sys.modules["triton.knobs"].runtime.jit_post_compile_hook is None


def test_the_hook_that_was_there_is_called_too(ahead: Any) -> None:
    runtime, told = sys.modules["triton.knobs"].runtime, list[Any]()

    def hook(**event: Any) -> str:
        told.append(event)
        return "its answer"

    runtime.jit_post_compile_hook = hook
    ahead.begin("me/tiny")
    ahead.begin("me/draft")  # a second model is no second hook
    assert runtime.jit_post_compile_hook(fn=None) == "its answer"  # what can't be described disturbs nobody
    assert told == [{"fn": None}]


def test_a_kernel_is_described_once_and_inductors_not_at_all(ahead: Any, tmp_path: Path) -> None:
    def event(data: str, module: str = "m") -> dict[str, Any]:
        backend = types.SimpleNamespace(parse_options=lambda options: types.SimpleNamespace(num_warps=4))
        fn = types.SimpleNamespace(__module__=module, __qualname__="k")
        kernel = types.SimpleNamespace(fn=fn, device_caches={0: (None, backend, None)})
        compiled = {"specialization_data": json.dumps({"name": data, "options": {"num_warps": 8}}), "device": 0}
        return {"fn": types.SimpleNamespace(jit_function=kernel), "compile": compiled}

    ahead.begin("me/tiny")
    hook = sys.modules["triton.knobs"].runtime.jit_post_compile_hook
    for one in (event("a"), event("a"), event("b"), event("c", "torch._inductor.codecache")):
        hook(**one)
    rows = [json.loads(file.read_text()) for file in (tmp_path / "triton/warmstart-used").rglob("*.json")]
    assert sorted(row["spec"]["name"] for row in rows) == ["a", "b"]
    assert {json.dumps(row["options"]) for row in rows} == {'{"num_warps": 8}'}
    for file in (tmp_path / "triton/warmstart-used").rglob("*.json"):
        file.write_text("as it was")
    ahead.state.folder = ""  # the next start
    ahead.begin("me/tiny")
    hook(**event("a"))
    assert {file.read_text() for file in (tmp_path / "triton/warmstart-used").rglob("*.json")} == {"as it was"}
