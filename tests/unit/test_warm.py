"""`caches/warm.py`: what counts as warm. Servers themselves are in tests/image/test_warm.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "caches" / "warm.py"


@pytest.fixture(scope="module")
def warm() -> Any:
    spec = importlib.util.spec_from_file_location("warm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def second(log: str = "", kept: bool = True, **counts: Any) -> dict[str, Any]:
    """A second start."""
    return {"log": log, "kept": kept, "counts": {"start": {"count": 1, "seconds": 0.0, "names": []}, **counts}}


def counted(*names: str) -> dict[str, Any]:
    return {"count": len(names), "seconds": 1.0, "names": list(names)}


def test_a_start_that_does_nothing_is_warm(warm: Any) -> None:
    log = f"x\nINFO {warm.AOT_LOADED} from path /cache\n"
    assert warm.judge(second(log, imports=counted("torch"), capture=counted()), [], True) == []


@pytest.mark.parametrize(
    ("start", "differing", "aot", "told"),
    [
        (second(compile=counted("softmax", "dot")), [], False, "Triton compiled: 2 times (softmax, dot)"),
        (second(bench=counted("chunk_o")), [], False, "was tuned: 1 times (chunk_o)"),
        (second(), ["stored triton/abc/x.json"], False, "stored triton/abc/x.json"),
        (second("WARNING Triton kernel JIT compilation during inference: _zero"), [], False, "_zero"),
        (second("Compiling model again due to a load failure from x, reason: y"), [], False, "reason: y"),
        (second("torch.compile took 1 s"), [], True, "vLLM did not load what it compiled ahead of time"),
        (second(kept=False), [], False, "the cache volume can't be written, so nothing is kept"),
        ({"log": "", "kept": True, "counts": {}}, [], False, "nothing was counted: there is no start record"),
    ],
)
def test_what_makes_a_start_cold(warm: Any, start: Any, differing: list[str], aot: bool, told: str) -> None:
    (problem,) = warm.judge(start, differing, aot)
    assert told in problem


def test_changes_are_told_file_by_file(warm: Any, tmp_path: Path) -> None:
    caches = {"triton": tmp_path / "a", "vllm": tmp_path / "b", "none": tmp_path / "c"}
    for file in ("a/same", "a/old", "a/x/gone", "b/locks/one.lock", "b/log/always"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    before = warm.snapshot(caches)
    (tmp_path / "a/same").touch()
    (tmp_path / "a/old").write_text("2")
    (tmp_path / "a/x/gone").unlink()
    (tmp_path / "a/x/new").write_text("1")
    (tmp_path / "b/locks/one.lock").unlink()
    (tmp_path / "b/log/always").write_text("2")
    found = warm.changes(before, warm.snapshot(caches), ["vllm/log/*", "*/locks/*.lock"])
    assert found == ["changed triton/old", "removed triton/x/gone", "stored triton/x/new"]


def test_every_exception_has_its_reason(warm: Any) -> None:
    import tomllib

    table = tomllib.loads((SCRIPT.parent / "caches.toml").read_text(encoding="utf-8"))
    names = {cache["name"] for cache in table["cache"]}
    for row in table.get("written", []):
        assert row["cache"] in names
        assert row["why"]
    assert len(warm.written()) == len(table.get("written", []))


def test_events_and_their_summary(warm: Any, tmp_path: Path) -> None:
    record = tmp_path / "start.jsonl"
    record.write_text(
        '{"event": "start", "kept": true, "seconds": 0.02}\n'
        '{"event": "import", "module": "torch", "seconds": 3.5}\n{"event": "import", "module": "torch", "seconds": 4}\n'
        '{"event": "capture", "graphs": 12, "seconds": 2.0}\n{"event": "compile", "name": "a", "seconds": null}\n{"eve'
    )
    counts = warm.summary(warm.events(record))
    assert counts["import"] == {"count": 2, "seconds": 7.5, "names": ["torch"]}
    assert counts["capture"]["count"] == 12
    assert counts["compile"] == {"count": 1, "seconds": 0.0, "names": ["a"]}
    assert warm.events(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("log", "command", "expected"),
    [
        ("saved AOT compiled function to x", ["m"], True),
        ("Directly load AOT compilation from path x", ["m"], True),
        ("nothing", ["m"], False),
        ("saved AOT compiled function to x", ["m", "--enforce-eager"], False),
    ],
)
def test_when_the_load_of_compiled_functions_is_expected(
    warm: Any, tmp_path: Path, log: str, command: list[str], expected: bool
) -> None:
    assert warm.aot_expected([{"log": log}], {"vllm": tmp_path}, command) is expected


def test_after_a_first_start_elsewhere_the_cache_says_so(warm: Any, tmp_path: Path) -> None:
    assert not warm.aot_expected([], {"vllm": tmp_path}, ["m"])
    model = tmp_path / "torch_compile_cache/torch_aot_compile/abc/rank_0_0/model"
    model.parent.mkdir(parents=True)
    model.touch()
    assert warm.aot_expected([], {"vllm": tmp_path}, ["m"])


def test_the_words_after_two_dashes_are_vllms(warm: Any) -> None:
    options, command = warm.parse(["--second", "--record", "/r", "--", "/models/x", "--port-like", "--", "z"])
    assert (options.second, options.record, command) == (True, "/r", ["/models/x", "--port-like", "--", "z"])


@pytest.mark.parametrize("argv", [[], ["--"], ["/models/x"], ["--limit", "soon", "--", "x"]])
def test_wrong_use(warm: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        warm.parse(argv)
    assert left.value.code == 2
