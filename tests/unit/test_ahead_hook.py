"""When kernels are described and compiled ahead, on a pretended vLLM and Triton; tests/engine has real Triton."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit import pretended_triton

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
    pretended_triton.install(monkeypatch)
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
    assert not hasattr(sys.modules["triton.runtime.jit"].JITFunction._call_hook, "takers")


def test_the_hooks_of_others_are_called_and_launches_go_on(ahead: Any, tmp_path: Path) -> None:
    """Whatever can't be described: a layout as a constant, which JSON can't hold, or a string that names a type."""
    runtime, told = sys.modules["triton.knobs"].runtime, list[str]()

    def hook(**event: Any) -> None:
        told.append(event["fn"].name)

    runtime.jit_post_compile_hook = hook
    ahead.begin("me/tiny")
    ahead.begin("me/draft")  # a second model is no second hook
    assert len(sys.modules["triton.runtime.jit"].JITFunction._call_hook.takers) == 1
    pretended_triton.kernel("m", "k").compile(specialization("a"), constants=["fp16"])
    pretended_triton.kernel("m", "l").compile(specialization("a"), constants=[("a", ("fp16",))])
    assert told == ["k", "l"]
    runtime.jit_post_compile_hook = None
    pretended_triton.kernel("m", "k").compile(TypeError("not JSON serializable"))
    assert not (tmp_path / "triton").exists()


def specialization(name: str) -> str:
    return json.dumps({"name": name, "options": {"num_warps": 8}, "key": "k", "target": "t"})


def test_a_kernel_is_described_once_and_inductors_not_at_all(ahead: Any, tmp_path: Path) -> None:
    ahead.begin("me/tiny")
    for module, name in (("m", "a"), ("m", "a"), ("m", "b"), ("torch._inductor.codecache", "c")):
        pretended_triton.kernel(module, "k").compile(specialization(name))
    files = list((tmp_path / "triton/warmstart-used").rglob("*.json"))
    rows = [json.loads(file.read_text()) for file in files]
    assert sorted(row["spec"]["name"] for row in rows) == ["a", "b"]
    assert {json.dumps(row["options"]) for row in rows} == {'{"num_warps": 8}'}
    for file in files:
        file.write_text("as it was")
    ahead.state.folder = ""  # the next start
    ahead.begin("me/tiny")
    pretended_triton.kernel("m", "k").compile(specialization("a"))
    assert {file.read_text() for file in (tmp_path / "triton/warmstart-used").rglob("*.json")} == {"as it was"}


# --- whether a start compiles ahead ----------------------------------------------------------------


@pytest.fixture
def before(ahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What two images before this one used: the last of them has not served the model."""
    ahead.begin("me/tiny")
    pretended_triton.kernel("m", "k").compile(specialization("a"))
    (tmp_path / "triton/warmstart-used").rename(tmp_path / "old")
    (tmp_path / "newer").mkdir()
    monkeypatch.setenv("WARMSTART_AHEAD", f"{tmp_path / 'newer'}:{tmp_path / 'old'}")
    monkeypatch.setattr(ahead, "more", lambda: None)  # the module of its kernel is never imported
    return tmp_path / "old"


def starts(ahead: Any) -> int:
    """How many kernels the next start would have compiled ahead."""
    if ahead.state.claim >= 0:
        os.close(ahead.state.claim)  # the process before it has ended
    ahead.state = types.SimpleNamespace(folder="", names=set(), wanted=False, left=[], given=[], claim=-1)
    ahead.begin("me/tiny")
    return len(ahead.state.left)


def mark(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "triton/warmstart-used").glob("*/ahead")
    return found


def test_what_is_broken_off_is_begun_once_more(ahead: Any, before: Path, tmp_path: Path) -> None:
    assert starts(ahead) == 1
    assert mark(tmp_path).read_bytes() == ahead.BEGUN
    assert starts(ahead) == 1
    assert mark(tmp_path).read_bytes() == b""
    assert starts(ahead) == 0


def test_a_key_with_descriptions_of_its_own_needs_no_others(ahead: Any, before: Path, tmp_path: Path) -> None:
    own = next(before.iterdir())
    (tmp_path / "triton/warmstart-used").mkdir(parents=True)
    own.rename(tmp_path / "triton/warmstart-used" / own.name)
    assert starts(ahead) == 0
    assert sorted(path.suffix for path in (tmp_path / "triton/warmstart-used").rglob("*.*")) == [".json"]


def test_one_process_does_it_for_all(ahead: Any, before: Path, tmp_path: Path) -> None:
    assert starts(ahead) == 1
    with mark(tmp_path).with_name("ahead.lock").open() as other:
        os.close(ahead.state.claim)
        ahead.state.claim = -1
        fcntl.flock(other, fcntl.LOCK_EX)
        assert starts(ahead) == 0
    assert starts(ahead) == 1


def test_huge_and_broken_descriptions_are_not_read(ahead: Any, before: Path) -> None:
    (folder,) = before.iterdir()
    (folder / "huge.json").write_text(json.dumps({"module": "x" * ahead.LONGEST}))
    (folder / "broken.json").write_text("{")
    os.mkfifo(folder / "pipe.json")
    assert starts(ahead) == 1
