"""Records: what the recorder's rows become, bans, and what a record changes in the plan of an image."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warmstart import cuts, lock, plan, profile, render

ROOT = Path(__file__).parents[2]
TARGET = {"target": {"backend": "hip", "arch": "gfx1151", "warp_size": 32}, "cu": 40, "versions": {"triton": "3.8.0"}}
SPEC = {
    "name": "m.k",
    "signature": {"x": "*fp32", "B": "constexpr"},
    "constant_keys": [[1]],
    "constant_vals": [64],
    "attrs_keys": [[0]],
    "attrs_vals": [[["tt.divisibility", 16]]],
}
CONFIGS = [{"kwargs": {"Z": 1, "A": 2}, "num_warps": 4}, {"kwargs": {"Z": 2, "A": 2}, "num_warps": 4}]


def kernel(block: int = 64, **options: Any) -> dict[str, Any]:
    return {
        "module": "m",
        "kernel": "k",
        "spec": {**SPEC, "constant_vals": [block]},
        "options": options,
        "hash": f"{block:016x}",
    }


def verdict(times: list[float | None], winner: int = 0, key: int = 5) -> dict[str, Any]:
    return {"module": "m", "tuner": "k", "key": [key], "configs": CONFIGS, "times": times, "winner": winner}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """caches/ and sitecustomize/ as modules."""
    for folder in ("caches", "sitecustomize"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.setenv("WARMSTART_HOOKS", "0")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name in {"record", "replay", "standin", "compilers", "verdicts"} or name.startswith("warmstart_"):
            del sys.modules[name]


def rows(folder: Path, *files: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, lines in enumerate(files):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_same_rows_in_any_order_are_the_same_record(tools: Any, tmp_path: Path) -> None:
    record = tools("record")
    a, b, c = kernel(64), kernel(128, num_warps=8), verdict([1.5, 2.5])
    one = rows(tmp_path / "one", [TARGET, a, b], [TARGET, c, a])
    other = rows(tmp_path / "other", [TARGET, c], [TARGET, b, a, b])
    texts = {record.dumped(record.merged(*record.rows_of(folder))) for folder in (one, other)}
    assert len(texts) == 1
    found = json.loads(texts.pop())
    assert found["kernels"][0]["variants"] == [[[128], {"num_warps": 8}, f"{128:016x}"], [[64], {}, f"{64:016x}"]]
    assert found["verdicts"][0]["verdicts"] == [[[5], [1.5, 2.5], 0]]


def test_a_replay_takes_what_is_recorded_now(tools: Any, tmp_path: Path) -> None:
    folder = rows(tmp_path / "a", [TARGET, kernel()])
    file = tmp_path / "record.json"
    file.write_text(tools("record").dumped(tools("record").merged(*tools("record").rows_of(folder))))
    assert tools("replay").read([file], "gfx1151")[0]["target"] == TARGET["target"]


def test_the_order_of_settings_is_kept(tools: Any, tmp_path: Path) -> None:
    """Triton's key of a verdict holds a configuration as text, in the order of its source."""
    record = tools("record")
    text = record.dumped(record.merged(*record.rows_of(rows(tmp_path / "r", [TARGET, verdict([1.0, 2.0])]))))
    assert [list(config["kwargs"]) for config in json.loads(text)["verdicts"][0]["configs"]] == [["Z", "A"]] * 2


@pytest.mark.parametrize("change", [{"cu": 60}, {"versions": {"triton": "3.9.0"}}, {"target": {"arch": "gfx942"}}])
def test_two_kinds_of_gpu_are_refused(
    tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    folder = rows(tmp_path / "r", [TARGET, kernel()], [{**TARGET, **change}, kernel()])
    assert tools("record").main([str(folder), "-o", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"record: {next(iter(change))} differs: ")
    assert not (tmp_path / "out").exists()


def test_nothing_recorded_is_told(tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("record").main([str(rows(tmp_path / "r", [{"no": "header"}]))]) == 1
    assert "holds nothing that was recorded" in capsys.readouterr().err


def test_a_torn_line_is_left_out(tools: Any, tmp_path: Path) -> None:
    record = tools("record")
    folder = rows(tmp_path / "r", [TARGET, kernel()])
    with (folder / "0.jsonl").open("a") as file:
        file.write('{"module": "m", "ker')
    assert len(record.merged(*record.rows_of(folder))["kernels"]) == 1


@pytest.mark.parametrize(
    ("times", "winners", "expected", "winner"),
    [
        (([1.0, 2.0], [1.1, 1.9]), (0, 0), [1.0, 1.9], 0),
        (([1.0, 2.0], [3.0, 0.5]), (0, 1), [1.0, 0.5], 1),
        (([1.0, None], [3.0, 2.0]), (0, 1), [1.0, 2.0], 0),
    ],
)
def test_a_verdict_measured_twice(
    tools: Any, tmp_path: Path, times: Any, winners: Any, expected: list[float], winner: int
) -> None:
    record = tools("record")
    both = [verdict(list(each), won) for each, won in zip(times, winners, strict=True)]
    found = record.merged(*record.rows_of(rows(tmp_path / "r", [TARGET, *both])))["verdicts"]
    assert found[0]["verdicts"] == [[[5], expected, winner]]


def test_what_is_left_out_is_counted(tools: Any, tmp_path: Path) -> None:
    record = tools("record")
    folder = rows(
        tmp_path / "r", [TARGET, {"artefact": "a"}, {"artefact": "b"}, {"left out": "m.k", "why": "measured in doubt"}]
    )
    found = record.merged(*record.rows_of(folder))["left out"]
    assert found == {"artefacts of Inductor": 2, "measured in doubt": ["m.k"]}


@pytest.mark.parametrize(
    ("arch", "version", "step", "capability"),
    [("gfx1151", "110501", 32, (11, 5)), ("gfx90a", "90010", 64, (9, 0)), ("gfx942", "90402", 64, (9, 4))],
)
def test_an_arch_in_others_words(tools: Any, arch: str, version: str, step: int, capability: tuple[int, int]) -> None:
    assert tools("standin").kfd_version(arch) == version
    assert tools("standin").capability(types.SimpleNamespace(arch=arch)) == capability
    assert tools("replay").target_of([], arch)["warp_size"] == step
    assert tools("standin").capability(types.SimpleNamespace(arch=90)) == (9, 0)


@pytest.mark.parametrize(
    ("records", "arch", "said"),
    [
        ([], "", "no record given"),
        (["{"], "", "0.json is no record"),
        (['{"schema": 2}'], "", "0.json is no record"),
        (['{"schema": 0, "target": {"backend": "hip"}, "kernels": []}'], "", "another version"),
        (['{"schema": 2, "target": {"backend": "cuda"}, "kernels": []}'], "gfx942", "say nothing about gfx942"),
        (
            [
                f'{{"schema": 2, "target": {{"backend": "hip", "arch": "{a}"}}, "kernels": []}}'
                for a in ("gfx942", "gfx950")
            ],
            "",
            "choose one with --arch",
        ),
    ],
)
def test_what_cant_be_replayed_is_told(tools: Any, tmp_path: Path, records: list[str], arch: str, said: str) -> None:
    files = []
    for number, text in enumerate(records):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(text)
    with pytest.raises(tools("replay").ReplayError, match=said):
        tools("replay").read(files, arch)


# --- bans -------------------------------------------------------------------------

BAN = '[[ban]]\nkernel = "chunk_*"\narch = "gfx11*"\nconfig = { BK = 64, num_warps = 8 }\nwhy = "x"\nlink = "y"\n'


def configs(*pairs: tuple[int, int]) -> list[Any]:
    return [types.SimpleNamespace(all_kwargs=lambda b=b, w=w: {"BK": b, "num_warps": w}) for b, w in pairs]


@pytest.fixture
def bans(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = tools("warmstart_bans")
    monkeypatch.setattr(module, "BANS", str(tmp_path / "bans.toml"))
    (tmp_path / "bans.toml").write_text(BAN)
    return module


def driver(arch: str) -> Any:
    target = types.SimpleNamespace(arch=arch)
    return types.SimpleNamespace(active=types.SimpleNamespace(get_current_target=lambda: target))


@pytest.mark.parametrize(
    ("kernel_name", "arch", "left"),
    [("chunk_o", "gfx1151", 1), ("chunk_o", "gfx1151:xnack-", 1), ("chunk_o", "gfx942", 2), ("other", "gfx1151", 2)],
)
def test_a_banned_configuration_is_not_tried(bans: Any, kernel_name: str, arch: str, left: int) -> None:
    every = configs((64, 8), (64, 4))
    assert bans.allowed(kernel_name, every, driver(arch)) == every[-left:]


def test_where_none_would_be_left_all_are_tried(bans: Any, capsys: pytest.CaptureFixture[str]) -> None:
    every = configs((64, 8), (64, 8))
    assert bans.allowed("chunk_o", every, driver("gfx1151")) == every
    assert "all configurations of chunk_o are banned" in capsys.readouterr().err


def test_a_broken_file_of_bans_changes_nothing(bans: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bans.toml").write_text("[[ban")
    every = configs((64, 8), (64, 4))
    tuner = type("Autotuner", (), {"prune_configs": lambda self, kwargs: every, "base_fn": bans.install})
    module = types.SimpleNamespace(Autotuner=tuner, driver=driver("gfx1151"))
    bans.install(module)
    for _ in range(2):
        assert tuner().prune_configs({}) == every
    assert capsys.readouterr().err.count("banned configurations are tried") == 1


@pytest.mark.parametrize("text", [None, "[[ban"])
def test_bans_that_cant_be_read_end_a_replay(tools: Any, tmp_path: Path, text: str | None, capsys: Any) -> None:
    if text:
        (tmp_path / "bans.toml").write_text(text)
    words = [tmp_path / "x.json", "--out", tmp_path / "out", "--bans", tmp_path / "bans.toml"]
    assert tools("replay").main([str(word) for word in words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"replay: no bans from {tmp_path}/bans.toml: ")


def test_the_projects_own_bans_have_a_source(tools: Any) -> None:
    for ban in tools("replay").read_bans(ROOT / "caches/bans.toml"):
        assert ban.keys() == {"kernel", "arch", "config", "why", "link"}
        assert ban["config"]
        assert ban["link"].startswith("https://")


# --- Inductor's choices -----------------------------------------------------------


@pytest.fixture
def inductor(tools: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """warmstart_inductor around a pretended Inductor: .measure(times) and .store(), which gives what was stored."""
    module = tools("warmstart_inductor")
    kept: list[str] = []
    benchmarking = types.SimpleNamespace(
        InductorBenchmarker=type("B", (), {"benchmark_gpu": lambda self, fn, return_mode="min": fn()})
    )
    cache = types.SimpleNamespace(AutotuneCache=type("C", (), {"save": lambda self, config, ns: kept.append(config)}))
    module.watch(benchmarking)
    module.guard(cache)
    monkeypatch.setattr(module, "events_are_right", lambda: module.right)
    module.right = True

    def store(name: str) -> list[str]:
        cache.AutotuneCache().save(name, 1)
        return kept

    def measure(times: Any) -> Any:
        return benchmarking.InductorBenchmarker().benchmark_gpu(lambda: times)

    module.store, module.measure = store, measure
    return module


@pytest.mark.parametrize("times", [0.0, -0.01, float("nan"), 0.0001, [0.5, 0.0]])
def test_a_choice_made_in_doubt_is_not_stored(
    inductor: Any, capsys: pytest.CaptureFixture[str], times: float | list[float]
) -> None:
    assert inductor.measure(0.5) == 0.5
    inductor.measure(times)
    inductor.measure(0.7)
    assert inductor.store("doubtful") == []
    inductor.measure(0.5)
    assert inductor.store("right") == ["right"]
    assert capsys.readouterr().err.count("Inductor's choices are not stored") == 1


def test_times_that_can_be_are_stored(inductor: Any) -> None:
    for times in (0.01, float("inf"), [0.5, 0.6]):
        inductor.measure(times)
    assert inductor.store("a") == ["a"]


def test_events_that_are_wrong_about_a_known_load_store_nothing(inductor: Any) -> None:
    inductor.right = False
    inductor.measure(0.5)
    assert inductor.store("a") == []


@pytest.mark.parametrize("right", [True, False])
def test_a_device_is_looked_at_once(tools: Any, monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    module, device = tools("warmstart_inductor"), tools("warmstart_device")
    looked = []

    def known_load(interface: Any, flush: Any) -> tuple[bool, float]:
        looked.append(interface)
        return right, 0.1

    monkeypatch.setattr(device, "known_load", known_load)
    monkeypatch.setattr(device, "flusher", lambda driver: (None, True))
    active = types.SimpleNamespace(get_device_interface=lambda: "cuda", get_current_device=lambda: 0)
    runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=active))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(runtime=runtime))
    assert [module.events_are_right() for _ in range(3)] == [right] * 3
    assert looked == ["cuda"]


# --- the plan ---------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("arch", "image", "sitecustomize", "caches", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.rmtree(tmp_path / "caches/records", ignore_errors=True)
    (tmp_path / "caches/records").mkdir()
    shutil.copy(ROOT / "Containerfile.j2", tmp_path)
    return tmp_path


def make(tree: Path, arch: str) -> plan.Plan:
    loaded = profile.load(ROOT, arch)
    return plan.make(tree, loaded, lock.parse(lock.committed(ROOT, arch)), cuts.load(tree, loaded.profile))


def test_without_a_record_there_is_no_stage(tree: Path) -> None:
    made = make(tree, "gfx1151")
    assert "kernels" not in made.steps
    assert "AS kernels" not in render.render(tree, made)
    assert "records" not in made.inputs


def test_a_record_is_replayed_in_images_of_its_arch_alone(tree: Path) -> None:
    before = {arch: make(tree, arch) for arch in ("gfx1151", "gfx1150", "gfx942", "cpu")}
    for name in ("gfx1151.json", "gfx1151-qwen.json", "gfx11510.json", "cpu.json"):
        (tree / "caches/records" / name).write_text("{}")
    after = {arch: make(tree, arch) for arch in before}
    assert [arch for arch in before if after[arch].plan_id != before[arch].plan_id] == ["gfx1151"]
    made = after["gfx1151"]
    assert made.records == ("gfx1151-qwen.json", "gfx1151.json")
    assert made.steps[-2:] == ("kernels", "runtime")
    assert made.cache_key == before["gfx1151"].cache_key
    text = render.render(tree, made)
    assert text.index("FROM whole AS kernels") < text.index("FROM whole AS runtime") < text.index("image/start")
    line = next(line for line in text.splitlines() if "replay.py" in line)
    assert "/ws/caches/records/gfx1151-qwen.json /ws/caches/records/gfx1151.json" in line
    assert made.inputs["records"][:16] in line
    assert made.inputs["replay"][:16] in line


def test_another_record_another_layer(tree: Path) -> None:
    file = tree / "caches/records/gfx1151.json"
    file.write_text("{}")
    one = render.render(tree, make(tree, "gfx1151"))
    file.write_text("{ }")
    other = render.render(tree, make(tree, "gfx1151"))
    changed = [b for a, b in zip(one.splitlines(), other.splitlines(), strict=True) if a != b]
    assert any(line.strip().startswith(": kernels@") for line in changed)
    assert not any("caches@" in line or "from=vllm" in line for line in changed)


def test_images_with_triton_have_the_manager(tree: Path) -> None:
    env = make(tree, "gfx1151").env
    assert env["TRITON_CACHE_MANAGER"] == "warmstart_cache:SeededCacheManager"
    assert env["WARMSTART_SEED"] == "/opt/warmstart/seed"
    assert env["WARMSTART_VERDICTS"].endswith("/verdicts")
    assert env["TRITON_CACHE_AUTOTUNING"] == "1"
    assert not {"TRITON_CACHE_MANAGER", "WARMSTART_SEED", "WARMSTART_VERDICTS"} & make(tree, "cpu").env.keys()


# --- the recorder -----------------------------------------------------------------


@pytest.fixture
def recorder(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """warmstart_record, writing to `tmp_path`; .rows() is what it wrote after the first."""
    monkeypatch.setenv("WARMSTART_RECORD", str(tmp_path / "rows"))
    module = tools("warmstart_record")
    monkeypatch.setattr(module, "target_row", lambda: TARGET)

    def written() -> list[Any]:
        files = list((tmp_path / "rows").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()][1:]

    module.rows = written
    return module


def test_what_inductor_made_is_counted_by_its_key(recorder: Any) -> None:
    made = type("CompiledKernel", (), {"__init__": lambda self, src, group, hash: setattr(self, "hash", hash)})
    recorder.artefacts(types.SimpleNamespace(CompiledKernel=made))
    for module, key in (("torch._inductor.runtime.compile_tasks.cab", "a"), ("vllm.ops", "b")):
        fn = types.SimpleNamespace()
        fn.__module__ = module
        made(types.SimpleNamespace(fn=fn), {}, key)
    assert recorder.rows() == [{"artefact": "a"}]


def tuner_of(recorder: Any, tools: Any, doubtful: bool) -> Any:
    """An autotuner that chooses the second of two configurations, with the recorder around it."""
    doubt = tools("warmstart_bench").doubt

    def check(self: Any, key: Any, configs: Any, bench: Any) -> bool:
        bench()
        return False

    def base() -> None: ...

    autotuner = type("Autotuner", (), {"check_disk_cache": check, "base_fn": staticmethod(base)})
    recorder.verdicts(types.SimpleNamespace(Autotuner=autotuner))
    tuner: Any = autotuner()
    config = type("Config", (), {"pre_hook": None, "__str__": lambda self: str(self.kwargs)})
    configs = []
    for number in (1, 2):
        configs.append(config())
        configs[-1].kwargs = {"B": number}

    def bench() -> None:
        tuner.cache, tuner.configs_timings = {("k", 5): configs[1]}, {configs[0]: [2.0], configs[1]: [1.23456789]}
        doubt.found = doubtful

    tuner.check_disk_cache(("k", 5), configs, bench)
    return tuner


def test_a_verdict_is_written_with_all_its_times(recorder: Any, tools: Any) -> None:
    tuner_of(recorder, tools, False)
    (row,) = recorder.rows()
    assert row.items() >= {"key": ["k", 5], "times": [2.0, 1.2346], "winner": 1}.items()
    assert row["configs"] == [{"kwargs": {"B": 1}}, {"kwargs": {"B": 2}}]


def test_a_verdict_measured_in_doubt_is_left_out(recorder: Any, tools: Any) -> None:
    tuner_of(recorder, tools, True)
    (row,) = recorder.rows()
    assert row["why"] == "measured in doubt"


def test_a_row_is_written_once_and_a_full_disk_is_told_once(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        recorder.put({"artefact": "a"})
    assert recorder.rows() == [{"artefact": "a"}]
    monkeypatch.setattr(recorder.os, "write", lambda *_: (_ for _ in ()).throw(OSError("full")))
    for key in "bcd":
        recorder.put({"artefact": key})
    assert capsys.readouterr().err == "warmstart: the recorder left something out: OSError: full\n"
