"""Triton's cache manager with a seed below it, on a pretended Triton; engine/test_seed_replay.py has real ones."""

from __future__ import annotations

import errno
import importlib
import json
import os
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[2] / "sitecustomize"
KEY = "K" * 52


class FileCacheManager:
    """Triton's own, as far as it is asked here."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.asked: list[Any] = [(key, override, dump)]

    def get_file(self, filename: str) -> Any:
        self.asked.append(filename)
        return "stock"

    get_group = get_file

    def put(self, data: Any, filename: str, binary: bool = True) -> Any:
        self.asked.append((data, filename, binary))
        return "stock"

    def put_group(self, filename: str, group: Any) -> Any:
        self.asked.append((filename, group))
        return "stock"


class Knobs:
    """triton.knobs.cache, which asks the environment each time."""

    @property
    def dir(self) -> str:
        return os.environ["TRITON_CACHE_DIR"]


class Config:
    """triton.Config."""

    def __init__(self, kwargs: Any, num_warps: int = 4, num_stages: int = 3, pre_hook: Any = None) -> None:
        self.kwargs = kwargs


def code(size: int = 200) -> bytes:
    """The beginning and the end of an ELF file whose table of sections ends it: two rows of 64 bytes."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 40, size - 128)
    struct.pack_into("<HH", head, 58, 64, 2)
    return bytes(head).ljust(size, b"\1")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """warmstart_cache; volume and seed are folders of `tmp_path`."""
    runtime = types.ModuleType("triton.runtime.cache")
    runtime.FileCacheManager = FileCacheManager  # type: ignore[attr-defined]
    knobs = types.ModuleType("triton.knobs")
    knobs.cache = Knobs()  # type: ignore[attr-defined]
    autotuner = types.ModuleType("triton.runtime.autotuner")
    autotuner.Config = Config  # type: ignore[attr-defined]
    for name, module in (
        ("triton", types.ModuleType("triton")),
        ("triton.runtime", types.ModuleType("triton.runtime")),
        ("triton.runtime.cache", runtime),
        ("triton.knobs", knobs),
        ("triton.runtime.autotuner", autotuner),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(HOOKS))
    for name in ("warmstart_cache", "warmstart_whole", "warmstart_hooks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name, value in {
        "TRITON_CACHE_DIR": tmp_path / "volume/triton",
        "WARMSTART_VERDICTS": tmp_path / "volume/verdicts",
        "WARMSTART_SEED": tmp_path / "seed",
        "WARMSTART_CU": "40",
        "WARMSTART_HOOKS": "0",
    }.items():
        monkeypatch.setenv(name, str(value))
    yield importlib.import_module("warmstart_cache")
    for name in ("warmstart_cache", "warmstart_whole", "warmstart_hooks"):
        sys.modules.pop(name, None)


def entry(folder: Path, **files: bytes) -> Path:
    """An entry as Triton makes it, its index with the paths of another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"k.hsaco": code(), "k.json": b'{"target": {"backend": "hip"}}', **files}
    for name, data in whole.items():
        (folder / name).write_bytes(data)
    index = {"child_paths": {name: f"/elsewhere/{folder.name}/{name}" for name in whole}}
    (folder / "__grp__k.json").write_text(json.dumps(index))
    return folder


def fails(monkeypatch: pytest.MonkeyPatch, cache: Any, number: int, below: Path, after: int = 0) -> None:
    """Let writing below a folder fail, from a certain write on."""
    write, count = cache.write, [0]

    def failing(path: str, data: bytes) -> str:
        if Path(path).is_relative_to(below):
            count[0] += 1
            if count[0] > after:
                raise OSError(number, os.strerror(number))
        return str(write(path, data))

    monkeypatch.setattr(cache, "write", failing)


def test_without_its_variables_it_is_tritons_own(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMSTART_SEED")
    monkeypatch.delenv("WARMSTART_VERDICTS")
    manager = cache.SeededCacheManager(KEY)
    assert (
        manager.get_file("a")
        == manager.get_group("b")
        == manager.put(b"", "c")
        == manager.put_group("d", {})
        == "stock"
    )
    assert len(manager.asked) == 5


@pytest.mark.parametrize("kind", ["override", "dump"])
def test_dumps_and_overrides_are_tritons_own(cache: Any, kind: str) -> None:
    assert cache.SeededCacheManager(KEY, **{kind: True}).get_group("k.json") == "stock"


def test_a_kernel_of_the_seed_is_copied_when_it_is_asked_for(cache: Any, tmp_path: Path) -> None:
    entry(tmp_path / "seed/triton" / KEY)
    manager = cache.SeededCacheManager(KEY)
    assert not (tmp_path / "volume").exists()  # asking makes no folders
    group = manager.get_group("k.json")
    assert group == {n: str(tmp_path / "volume/triton" / KEY / n) for n in ("k.hsaco", "k.json")}
    assert Path(group["k.hsaco"]).read_bytes() == code()
    assert manager.get_group("other.json") is None


def test_the_index_is_copied_last(cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path / "seed/triton" / KEY)
    order = []
    write = cache.write

    def noted(path: str, data: bytes) -> str:
        order.append(Path(path).name)
        return str(write(path, data))

    monkeypatch.setattr(cache, "write", noted)
    cache.SeededCacheManager(KEY).get_group("k.json")
    assert order == ["k.hsaco", "k.json", "__grp__k.json"]


@pytest.mark.parametrize("name", ["k.hsaco", "k.json", "__grp__k.json"])
@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_a_pipe_or_a_huge_file_is_not_whole(cache: Any, tmp_path: Path, name: str, kind: str) -> None:
    """A pipe would be waited for without end."""
    folder = entry(tmp_path / "volume/triton" / KEY)
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        with open(folder / name, "wb") as sparse:
            sparse.truncate(20_000_000_000)
    assert cache.SeededCacheManager(KEY).get_group("k.json") is None


def test_a_link_to_a_file_is_whole(cache: Any, tmp_path: Path) -> None:
    """As a private copy of a volume that can't be written has the large ones."""
    folder = entry(tmp_path / "volume/triton" / KEY)
    (folder / "k.hsaco").rename(tmp_path / "large")
    (folder / "k.hsaco").symlink_to(tmp_path / "large")
    assert cache.SeededCacheManager(KEY).get_group("k.json")


def test_an_index_cant_lead_elsewhere(cache: Any, tmp_path: Path) -> None:
    folder = entry(tmp_path / "volume/triton" / KEY)
    (tmp_path / "volume/secret.hsaco").write_bytes(code())
    index = {"child_paths": {"k.json": "x", "../../secret.hsaco": str(tmp_path / "volume/secret.hsaco")}}
    (folder / "__grp__k.json").write_text(json.dumps(index))
    assert cache.SeededCacheManager(KEY).get_group("k.json") is None


def test_intermediate_forms_may_be_left_out(cache: Any, tmp_path: Path) -> None:
    """As seeds and TRITON_STORE_BINARY_ONLY leave them out; code and metadata may not."""
    folder = entry(tmp_path / "seed/triton" / KEY, **{"k.ttir": b"module", "k.llir": b"define"})
    (folder / "k.ttir").unlink()
    (folder / "k.llir").write_bytes(b"")
    assert cache.SeededCacheManager(KEY).get_group("k.json").keys() == {"k.hsaco", "k.json"}
    for name in ("k.hsaco", "k.json"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (tmp_path / "volume/triton" / KEY / name).unlink()
        assert cache.SeededCacheManager(KEY).get_group("k.json") is None
        (folder / name).write_bytes(data)
        assert cache.SeededCacheManager(KEY).get_group("k.json")
    index = {"child_paths": {"k.json": "x"}}
    (folder / "__grp__k.json").write_text(json.dumps(index))
    assert cache.whole_group(str(folder), "k.json") is None


@pytest.mark.parametrize("size", [0, 3, 63, 64, 100, 199])
def test_code_that_is_cut_off_is_not_used(cache: Any, tmp_path: Path, size: int) -> None:
    entry(tmp_path / "volume/triton" / KEY, **{"k.hsaco": code()[:size]})
    assert cache.SeededCacheManager(KEY).get_group("k.json") is None
    entry(tmp_path / "volume/triton" / KEY)
    assert cache.SeededCacheManager(KEY).get_group("k.json")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_a_volume_that_cant_be_written(
    cache: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    after: int,
) -> None:
    """Half of a kernel is on the volume when it fills up: all of it is where the process goes on."""
    fails(monkeypatch, cache, number, tmp_path / "volume", after)
    manager = cache.SeededCacheManager(KEY)
    group = {name: manager.put(data, name) for name, data in (("k.hsaco", code()), ("k.json", b'{"target": {}}'))}
    manager.put_group("k.json", group)
    aside = Path(os.environ["TRITON_CACHE_DIR"])
    assert aside != tmp_path / "volume/triton"
    assert cache.SeededCacheManager(KEY).get_group("k.json") == {n: str(aside / KEY / n) for n in group}
    entry(tmp_path / "volume/triton" / ("O" * 52))  # what the volume has is still found
    assert cache.SeededCacheManager("O" * 52).get_group("k.json")
    entry(tmp_path / "seed/triton" / ("S" * 52))
    assert cache.SeededCacheManager("S" * 52).get_group("k.json")
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"warmstart: {tmp_path}/volume/triton can't be written" in err


def test_a_seed_is_used_in_its_place_where_nothing_can_be_written(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = entry(tmp_path / "seed/triton" / KEY)
    fails(monkeypatch, cache, errno.ENOSPC, Path("/"))
    assert cache.SeededCacheManager(KEY).get_group("k.json")["k.hsaco"] == str(folder / "k.hsaco")
    with pytest.raises(OSError, match="No space"):
        cache.SeededCacheManager(KEY).put(b"x", "new")


def test_another_fault_of_the_disk_is_the_callers(cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, cache, errno.EIO, tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        cache.SeededCacheManager(KEY).put(b"x", "k")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "volume/triton")


@pytest.mark.parametrize("problem", [OSError(errno.EIO, "broken"), KeyboardInterrupt("broken")])
def test_a_write_that_fails_leaves_nothing(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    monkeypatch.setattr(cache.os, "replace", lambda *_: (_ for _ in ()).throw(problem))
    with pytest.raises(type(problem), match="broken"):
        cache.write(str(tmp_path / "a/b"), b"x")
    assert list((tmp_path / "a").iterdir()) == []


def test_an_entry_that_is_pruned_meanwhile_is_made_again(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = cache.files.make
    pruned: list[str] = []

    def and_prune(path: str) -> None:
        make(path)
        if not pruned:
            pruned.append(path)
            Path(path).rmdir()

    monkeypatch.setattr(cache.files, "make", and_prune)
    assert Path(cache.SeededCacheManager(KEY).put(b"x", "k")).read_bytes() == b"x"
    assert len(pruned) == 1


@pytest.mark.parametrize(("mode", "expected"), [(0o1777, 0o1777), (0o755, 0o755)])
def test_folders_are_open_to_any_uid_where_the_volume_is(cache: Any, tmp_path: Path, mode: int, expected: int) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(mode)
    cache.SeededCacheManager(KEY).put(VERDICT, "k.autotune.json")
    below = [f for f in (tmp_path / "volume").rglob("*") if f.is_dir()]
    assert [f.name for f in below] == ["verdicts", "cu40", KEY]
    assert {f.stat().st_mode & 0o7777 for f in below} == {expected}


VERDICT = json.dumps({"configs_timings": [[{"kwargs": {"B": 1}, "num_warps": 4}, [1.5, 1.0, 2.0]]]})


@pytest.mark.parametrize(("told", "part"), [("40", "cu40"), ("60", "cu60"), ("", "cu0"), ("-1", "cu0"), ("x", "cu0")])
def test_verdicts_lie_by_compute_units(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, part: str
) -> None:
    monkeypatch.setenv("WARMSTART_CU", told)
    manager = cache.SeededCacheManager(KEY)
    place = tmp_path / "volume/verdicts" / part / KEY / "k.autotune.json"
    assert manager.get_file("k.autotune.json") is None
    assert manager.put(VERDICT, "k.autotune.json", binary=False) == str(place)
    assert manager.get_file("k.autotune.json") == str(place)
    assert not (tmp_path / "volume/triton").exists()


def test_a_verdict_of_the_volume_comes_before_the_seeds(cache: Any, tmp_path: Path) -> None:
    seed = tmp_path / "seed/verdicts/cu40" / KEY / "k.autotune.json"
    seed.parent.mkdir(parents=True)
    seed.write_text(VERDICT)
    manager = cache.SeededCacheManager(KEY)
    assert manager.get_file("k.autotune.json") == str(seed)
    kept = manager.put(VERDICT, "k.autotune.json", binary=False)
    assert manager.get_file("k.autotune.json") == kept
    Path(kept).write_text("{")
    assert manager.get_file("k.autotune.json") == str(seed)


def test_a_verdict_that_cant_be_kept_is_told(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(monkeypatch, cache, errno.EROFS, tmp_path / "volume/verdicts")
    cache.SeededCacheManager(KEY).put(VERDICT, "k.autotune.json", binary=False)
    assert "a verdict can't be kept (Read-only file system)" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.autotune.json"))


@pytest.mark.parametrize("number", [1.5, [1.5], [0.1, 0.2], [float("inf")], 3])
def test_times_as_triton_stores_them(cache: Any, tmp_path: Path, number: Any) -> None:
    file = tmp_path / "v.json"
    file.write_text(json.dumps({"configs_timings": [[{"kwargs": {}}, number]]}))
    assert cache.is_verdict(str(file))
    wrongs: list[Any] = [True, None, "1", [], {}, [float("nan")]]
    for wrong in wrongs:
        file.write_text(json.dumps({"configs_timings": [[{"kwargs": {}}, wrong]]}))
        assert not cache.is_verdict(str(file))


def test_a_fault_of_its_own_is_a_miss(
    cache: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "whole_group", lambda *_: 1 / 0)
    for _ in range(2):
        assert cache.SeededCacheManager(KEY).get_group("k.json") is None
    assert capsys.readouterr().err.count("\n") == 1
