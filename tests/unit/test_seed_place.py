"""Files of a seed get into a cache whole, index last, through no link; and a second time is nothing to do."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests import seed_cache
from tests.seed_cache import FACTS, KEY, name
from tests.unit import starting
from tests.unit.test_seed_make import CAPS
from warmstart import cachedir, run, seedfiles, seedlabels, seedlayout, seedplace, seedtiers
from warmstart.errors import Busy, DiskFull, InputError, NothingToSeed, SeedDamaged, SeedUnsafe, WarmstartError
from warmstart.seedlayout import Image
from warmstart.seedplace import Placed

ALL = msgspec.structs.replace(FACTS, tiers=seedtiers.TIERS, model="m", flags="", gpu="g", cpu="avx2,sse2")
BACKBONE = "vllm/torch_compile_cache/0123456789/rank_0_0/backbone"


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return made(tmp_path, ALL)


def made(tmp_path: Path, facts: seedlabels.Facts) -> Path:
    key, stage = seed_cache.cache(tmp_path / "source" / KEY), tmp_path / "stage"
    stage.mkdir()
    with cachedir.opened(key) as folder:
        taken = seedfiles.take(folder, f"/cache/{KEY}", facts.tiers, facts.cu, stage)
    seedlayout.write(tmp_path / "layout", facts, taken.copies, 1_700_000_000)
    return tmp_path / "layout"


def place(top: Path, layout: Path) -> Placed:
    top.mkdir(exist_ok=True)
    return seedplace.place(top, layout, seedlayout.read(layout))


def there(key: Path) -> dict[str, bytes]:
    """The cache files of a key: what Triton, vLLM and Inductor can see."""
    tops = ("triton", "verdicts", "vllm", "inductor")
    return {str(f.relative_to(key)): f.read_bytes() for t in tops for f in (key / t).rglob("*") if f.is_file()}


def test_every_file_gets_to_its_place(tmp_path: Path, layout: Path) -> None:
    placed = place(tmp_path / "cache", layout)
    found = there(tmp_path / "cache" / KEY)
    assert placed == Placed(len(found), len(found), sum(map(len, found.values())))
    source = there(tmp_path / "source" / KEY)
    groups = [path for path in found if "/__grp__" in path]
    assert len(groups) == 3
    assert {path: data for path, data in found.items() if path not in groups}.items() <= source.items()
    assert not [f for f in (tmp_path / "cache" / KEY).iterdir() if f.name.startswith(cachedir.STAGE)]


def test_any_uid_can_use_and_mend_it(tmp_path: Path, layout: Path) -> None:
    old = os.umask(0o077)
    try:
        place(tmp_path / "cache", layout)
    finally:
        os.umask(old)
    key = tmp_path / "cache" / KEY
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in key.rglob("*")}
    assert {modes[p] for p in modes if p.is_file() and p.parent.name != KEY} == {0o644}
    tops = [key, *(path for path in key.iterdir() if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tops} == {0o1777}
    assert {modes[p] for p in modes if p.is_dir() and p not in tops} == {0o777}
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o1777


def test_what_programs_add_below_is_as_open(tmp_path: Path, layout: Path) -> None:
    place(tmp_path / "cache", layout)
    folder = tmp_path / "cache" / KEY / "triton"
    if "system.posix_acl_default" not in os.listxattr(folder):
        probed = tmp_path / "probed"
        probed.mkdir()
        with pytest.raises(OSError, match="not supported"):  # else it should be there
            os.setxattr(probed, "system.posix_acl_default", cachedir.OPEN)
        pytest.skip("no ACLs on this file system")
    old = os.umask(0o077)
    try:
        (folder / "new").mkdir()
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o777


def test_a_second_time_is_nothing_to_do(tmp_path: Path, layout: Path) -> None:
    top, image = tmp_path / "cache", seedlayout.read(layout)
    assert seedplace.there(tmp_path, image) is None
    first = place(top, layout)
    times = {file: file.stat().st_mtime_ns for file in (top / KEY).rglob("*") if file.is_file()}
    assert seedplace.there(top, image) == Placed(first.files, 0, 0)
    again = place(top, layout)
    assert (again.files, again.placed) == (first.files, 0)
    changed = [f for f, t in times.items() if f.stat().st_mtime_ns != t and f.parent.name not in {KEY, "seeds"}]
    assert changed == []
    (top / KEY / f"triton/{name(1)}/__grp__kernel_1.json").unlink()
    assert seedplace.there(top, image) is None
    assert place(top, layout).placed == 3  # the entry as a whole


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "files": [{"path": "/etc/passwd"}]}'])
def test_a_changed_record_is_not_believed(tmp_path: Path, layout: Path, text: str) -> None:
    place(tmp_path / "cache", layout)
    for file in (tmp_path / "cache" / KEY / "seeds").iterdir():
        file.write_text(text)
    assert seedplace.there(tmp_path / "cache", seedlayout.read(layout)) is None


def test_what_a_cache_has_stays(tmp_path: Path, layout: Path) -> None:
    key = tmp_path / "cache" / KEY
    own = seed_cache.kernel(key, 1, texts=("source",))
    verdict = f"verdicts/cu40/{name(20)}/kernel_0.autotune.json"
    seed_cache.write(key, verdict, "own")
    before = there(key)
    place(tmp_path / "cache", layout)
    after = there(key)
    assert before.items() <= after.items()
    assert {path for path in after if path.startswith(own)} == {path for path in before if path.startswith(own)}


def test_a_broken_off_entry_is_completed_from_one_hand(tmp_path: Path, layout: Path) -> None:
    """Without an index its files are leftovers: they don't mix with those that the seed's index names."""
    key = tmp_path / "cache" / KEY
    seed_cache.write(key, f"{BACKBONE}/artifact_compile_range_1_512_subgraph_0", "of another compilation")
    seed_cache.write(key, f"{BACKBONE}/cache_key_factors.json", "of another compilation")
    place(tmp_path / "cache", layout)
    source = there(tmp_path / "source" / KEY)
    found = {path: data for path, data in there(key).items() if path.startswith(BACKBONE)}
    assert len(found) == 3
    assert found.items() <= source.items()


class Killed(BaseException):
    """The process ended here."""


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the run end at the n-th file that is put in place."""
    real = cachedir.put

    def after(number: int) -> None:
        left = [number]

        def put(stage: int, name: str, key: int, path: str, *, replace: bool) -> bool:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(stage, name, key, path, replace=replace)

        monkeypatch.setattr(cachedir, "put", put)

    return after


@pytest.mark.parametrize("files", range(0, 20, 3))
def test_a_run_that_is_broken_off_leaves_whole_entries(
    tmp_path: Path, layout: Path, stops: Callable[[int], None], files: int
) -> None:
    stops(files)
    with pytest.raises(Killed):
        place(tmp_path / "cache", layout)
    key, source = tmp_path / "cache" / KEY, there(tmp_path / "source" / KEY)
    found = there(key)
    assert all(data == source[path] for path, data in found.items() if "/__grp__" not in path)
    for path in found:
        kind = seedtiers.kind(path)
        assert kind
        if kind.index:  # then nothing of the entry is missing
            missing = [p for p in source if p.startswith(f"{kind.entry}/") and seedtiers.kind(p) and p not in found]
            assert not [
                p for p in missing if not p.endswith(seed_cache.TEXTS) and ".pid_" not in p and ".lock" not in p
            ]
    assert seedplace.there(tmp_path / "cache", seedlayout.read(layout)) is None


def test_it_can_be_repeated_after_that(tmp_path: Path, layout: Path, stops: Callable[[int], None]) -> None:
    stops(7)
    with pytest.raises(Killed):
        place(tmp_path / "cache", layout)
    left = tmp_path / "cache" / KEY / f"{cachedir.STAGE}dead"
    left.mkdir()
    (left / "0").write_text("of a run that was killed")
    stops(1000)
    place(tmp_path / "cache", layout)
    assert not left.exists()
    assert place(tmp_path / "cache", layout).placed == 0


def test_what_another_run_waits_with_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with (
        cachedir.opened(tmp_path, "key") as key,
        cachedir.staged(key) as first,
        cachedir.opened(tmp_path, "key") as again,
        cachedir.staged(again) as second,
    ):
        cachedir.create(first, "0").close()
        cachedir.create(second, "0").close()
        assert len(list((tmp_path / "key").iterdir())) == 2
    assert list((tmp_path / "key").iterdir()) == []


@pytest.mark.parametrize("what", ["layer", "file"])
def test_nothing_is_placed_of_a_damaged_seed(tmp_path: Path, layout: Path, what: str) -> None:
    image = seedlayout.read(layout)
    file = layout / "blobs/sha256" / image.layer[7:]
    if what == "layer":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    else:
        image = msgspec.structs.replace(image, diff_id="sha256:" + "0" * 64)
    (tmp_path / "cache").mkdir()
    with pytest.raises(SeedDamaged):
        seedplace.place(tmp_path / "cache", layout, image)
    assert there(tmp_path / "cache" / KEY) == {}
    key = tmp_path / "cache" / KEY
    assert not key.exists() or not [f for f in key.iterdir() if f.name.startswith(cachedir.STAGE)]


@pytest.mark.parametrize("part", ["", "triton", f"triton/{name(1)}", f"verdicts/cu40/{name(20)}", "seeds"])
def test_no_link_in_a_cache_leads_out_of_it(tmp_path: Path, layout: Path, part: str) -> None:
    """A container can plant links on the volume; the host's root must not follow them."""
    outside = tmp_path / "etc"
    outside.mkdir()
    link = tmp_path / "cache" / KEY / part if part else tmp_path / "cache" / KEY
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(InputError, match="is a link or no folder"):
        place(tmp_path / "cache", layout)
    assert list(outside.iterdir()) == []


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path, layout: Path) -> None:
    outside = seed_cache.write(tmp_path, "passwd", "root")
    verdict = tmp_path / "cache" / KEY / f"verdicts/cu40/{name(20)}/kernel_0.autotune.json"
    verdict.parent.mkdir(parents=True)
    verdict.symlink_to(outside)
    place(tmp_path / "cache", layout)
    assert outside.read_text() == "root"


def test_the_processor_is_noted(tmp_path: Path, layout: Path) -> None:
    """So that a start on another one sets the seed's machine code aside."""
    host = tmp_path / "cache" / KEY / "host.json"
    place(tmp_path / "cache", layout)
    assert json.loads(host.read_text())["cpu"] == ["avx2", "sse2"]
    host.write_text(json.dumps({"schema": 1, "cpu": ["avx512f"], "gpus": [{"arch": "gfx1151", "cu": 40}]}))
    place(tmp_path / "cache", layout)
    told = json.loads(host.read_text())
    assert told == {"schema": 1, "cpu": ["avx2", "avx512f", "sse2"], "gpus": [{"arch": "gfx1151", "cu": 40}]}
    assert stat.S_IMODE(host.stat().st_mode) == 0o666  # the next start, of whatever user, adds what it compiles for
    for damaged in ("{", "[" * 100_000):
        host.write_text(damaged)
        place(tmp_path / "cache", layout)
        assert host.read_text() == damaged


def test_kernels_say_nothing_of_a_processor(tmp_path: Path) -> None:
    place(tmp_path / "cache", made(tmp_path, FACTS))
    assert not (tmp_path / "cache" / KEY / "host.json").exists()


def test_who_has_the_cache_to_himself_is_not_waited_for_for_ever(
    tmp_path: Path, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachedir, "PATIENCE", 0.0)
    place(tmp_path / "cache", layout)
    with (tmp_path / "cache" / KEY / cachedir.HOLD).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        place(tmp_path / "cache", layout)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="in-use"):
            place(tmp_path / "cache", layout)
        monkeypatch.setattr(cachedir, "PATIENCE", 10.0)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        place(tmp_path / "cache", layout)


def test_too_little_room(tmp_path: Path, layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.host.free_bytes", lambda path: 10)
    with pytest.raises(DiskFull, match="unpacking the seed"):
        place(tmp_path / "cache", layout)


def test_a_file_system_without_hard_links(tmp_path: Path, layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", link)
    key = tmp_path / "cache" / KEY
    verdict = f"verdicts/cu40/{name(20)}/kernel_0.autotune.json"
    seed_cache.write(key, verdict, "own")
    placed = place(tmp_path / "cache", layout)
    assert placed.placed == placed.files - 1
    assert there(key)[verdict] == b"own"


@pytest.mark.parametrize("linking", [True, False])
@pytest.mark.parametrize("replace", [True, False])
def test_what_came_meanwhile_stays_unless_it_is_a_leftover(
    tmp_path: Path, linking: bool, replace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise PermissionError(1, "not permitted")

    if not linking:
        monkeypatch.setattr(os, "link", link)
    seed_cache.write(tmp_path, "key/triton/x", "theirs")
    with cachedir.opened(tmp_path, "key") as key, cachedir.staged(key) as stage:
        with cachedir.create(stage, "0") as sink:
            sink.write(b"ours")
        assert cachedir.put(stage, "0", key, "triton/x", replace=replace) is replace
    assert (tmp_path / "key/triton/x").read_text() == ("ours" if replace else "theirs")


@pytest.mark.parametrize("place", ["name with space", "-x", ""])
def test_neither_a_volume_nor_a_folder(place: str) -> None:
    with pytest.raises(WarmstartError):
        cachedir.locate(CAPS, place)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NothingToSeed):
        cachedir.locate(CAPS, f"{tmp_path}/none")
    assert cachedir.locate(CAPS, f"{tmp_path}/new", make=True).is_dir()


def test_a_dry_run_never_takes_the_working_directory_for_a_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(seed_cache.cache(tmp_path / KEY).parent)
    monkeypatch.setattr(run.recorder, "on", True)
    monkeypatch.setattr(run.recorder, "commands", [])
    monkeypatch.setattr(cachedir, "_mountpoint", lambda *_: "")
    assert cachedir.locate(CAPS, "none", make=True) == Path(CAPS.storage) / "volumes/none/_data"
    with pytest.raises(NothingToSeed, match="there is no volume none"):
        cachedir.locate(CAPS, "none")


def test_the_image_has_the_same_words_for_its_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image can't import what the host has, nor the other way round."""
    start = starting.load(tmp_path, monkeypatch)
    key, volume = start.parts["start_key"], start.parts["start_volume"]
    assert (key.HOLD, key.HOST, key.OPEN) == (cachedir.HOLD, seedplace.HOST, cachedir.OPEN)
    assert volume.KEY.pattern == cachedir.KEY
    old = os.umask(0)  # the entry point's
    key.make(tmp_path / "made")
    os.umask(old)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == cachedir.MODE
    flags = key.cpu_flags(start.volume["cpu_flags"])
    assert flags == ["avx2", "sse4_2"]
    assert seedlabels.processor(start.volume["cpu_flags"], tmp_path / "cpuinfo") == tuple(flags)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "sitecustomize"))
    assert importlib.import_module("warmstart_whole").INDEX == seedfiles.GROUP


def test_an_image_is_judged_before_its_layer(layout: Path) -> None:
    """A layer with another name of a tier, behind labels that fit: nothing gets past the list's check."""
    image: Image = seedlayout.read(layout)
    lie = msgspec.structs.replace(image, facts=msgspec.structs.replace(image.facts, tiers=("kernels",)))
    from warmstart import unpack

    with pytest.raises((SeedDamaged, SeedUnsafe)), seedlayout.layer(layout, image) as layer:
        unpack.unpack(layer, lie.expected)
