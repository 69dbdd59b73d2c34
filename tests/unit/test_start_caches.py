"""The caches of a start: any UID, leftover locks, other processors and images, disks that are full or slow."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.starting import KEY, Gpu, Start, load
from warmstart import cuts, lock, manifest, plan, profile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    made = load(tmp_path, monkeypatch)
    yield made
    made.end()


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def events(start: Start) -> list[dict[str, Any]]:
    """What the newest start record says."""
    newest = sorted((start.key / "starts").glob("*.jsonl"))[-1]
    return [json.loads(line) for line in newest.read_text().splitlines()]


def fill(path: Path, name: str = "kernel", size: int = 10) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"x" * size)
    return path / name


def old_key(start: Start, number: int, days: float, size: int = 100_000) -> Path:
    """A key that another image left, unused for some days."""
    key = start.root / f"gfx1151-{number:012x}"
    fill(key / "triton", size=size)
    host = fill(key, "host.json")
    for path in (host, key):
        os.utime(path, (time.time() - days * 86400,) * 2)
    return key


# --- directories -------------------------------------------------------------------------


def test_directories_are_open_to_any_uid(start: Start) -> None:
    start("cpu", "true")
    for path in (*map(Path, start.caches.values()), start.key):
        assert path.stat().st_mode & 0o7777 == 0o1777
    assert (start.key / "in-use").stat().st_mode & 0o777 == 0o666
    assert (start.key / "host.json").stat().st_mode & 0o777 == 0o666


def test_what_programs_make_in_them_is_open_too(start: Start) -> None:
    """Whatever their umask is: a second UID has to write into the folders that the first one made."""
    start("cpu", "true")
    old = os.umask(0o077)
    try:
        made = fill(start.key / "inductor" / "ab")
    finally:
        os.umask(old)
    if "system.posix_acl_default" not in os.listxattr(start.caches["inductor"]):
        pytest.skip("no ACLs on this file system")
    assert made.parent.stat().st_mode & 0o777 == 0o777
    assert made.stat().st_mode & 0o666 == 0o666


def test_what_its_writer_kept_to_itself_is_opened_by_the_next_start(start: Start) -> None:
    start("cpu", "true")
    model = fill(start.key / "vllm" / "abc", "model")
    other = fill(start.key / "vllm" / "abc", "other")
    for file in (model, other):
        file.chmod(0o600)
    start.again()
    assert (model.stat().st_mode & 0o777, other.stat().st_mode & 0o777) == (0o644, 0o600)


def test_an_image_without_caches(start: Start) -> None:
    start.caches = {}
    assert start("cpu", "true") == ["true"]
    assert not start.root.exists()
    assert "WARMSTART_START" not in os.environ


def test_every_profile_tells_the_script_what_it_needs(start: Start) -> None:
    for arch in profile.archs(ROOT):
        loaded = profile.load(ROOT, arch)
        planned = plan.make(ROOT, loaded, lock.parse(lock.committed(ROOT, arch)), cuts.load(ROOT, loaded.profile))
        volume = manifest.manifest(planned)["volume"]
        assert set(volume) == set(start.volume)
        below = f"{volume['root']}/{planned.cache_key}/"
        for path in (
            *volume["cpu_code"],
            *volume["locks"],
            *volume["batons"],
            *volume["private"],
            *planned.caches.values(),
        ):
            assert path.startswith(below)


# --- a volume that can't be written ------------------------------------------------------------


def read_only(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing below the volume can be written, by root neither."""
    below = f"{start.root}"
    access, mkdir = os.access, Path.mkdir

    def no_access(path: Any, mode: int) -> bool:
        return access(path, mode) and not (str(path).startswith(below) and mode & os.W_OK)

    def no_mkdir(self: Path, *args: Any, **more: Any) -> None:
        if str(self).startswith(below) and not self.exists():
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **more)

    monkeypatch.setattr(os, "access", no_access)
    monkeypatch.setattr(Path, "mkdir", no_mkdir)


def test_a_warm_read_only_cache_serves(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a copy, to which the variables point."""
    for name, path in start.caches.items():
        monkeypatch.setenv(f"{name.upper()}_CACHE", path)
    monkeypatch.setenv("WARMSTART_CACHES", ":".join(start.caches.values()))
    start("cpu", "true")
    fill(start.key / "triton" / "abc")
    fill(start.key / "vllm", "large", 2_000_000)
    before = sorted(str(path) for path in start.root.rglob("*"))
    read_only(start, monkeypatch)
    start.again()
    line = told(capsys)
    assert "works on a copy of it, and what it makes is lost" in line
    own = Path(os.environ["TRITON_CACHE"]).parent
    assert not str(own).startswith(str(start.root))
    assert (own / "triton" / "abc" / "kernel").read_bytes() == b"x" * 10
    assert not (own / "triton" / "abc" / "kernel").is_symlink()
    assert (own / "vllm" / "large").is_symlink()
    assert (own / "vllm" / "large").stat().st_size == 2_000_000
    assert os.environ["WARMSTART_CACHES"].split(":") == [str(own / name) for name in start.caches]
    assert os.environ["WARMSTART_START"].startswith(str(own / "starts"))
    assert sorted(str(path) for path in start.root.rglob("*")) == before
    fill(own / "triton" / "new")


def test_a_copy_has_no_links_and_pipes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_CACHE", start.caches["inductor"])
    start("cpu", "true")
    inductor = fill(start.key / "inductor").parent
    (inductor / "around").symlink_to(inductor)
    (inductor / "gone").symlink_to("nowhere")
    os.mkfifo(inductor / "pipe")
    (start.key / "triton").rmdir()
    (start.key / "triton").symlink_to(inductor)
    read_only(start, monkeypatch)
    start.again()
    own = Path(os.environ["INDUCTOR_CACHE"])
    assert os.listdir(own) == ["kernel"]
    assert os.listdir(own.parent / "triton") == []


def test_too_deep_to_be_copied(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("cpu", "true")

    def copytree(*args: Any, **more: Any) -> None:
        raise RecursionError

    monkeypatch.setattr("shutil.copytree", copytree)
    read_only(start, monkeypatch)
    start.again()
    assert "begins with empty caches" in told(capsys)


def test_a_copy_that_is_interrupted_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("cpu", "true")

    def copytree(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copytree", copytree)
    with pytest.raises(KeyboardInterrupt):
        start.parts["start_copy"].copy(start.key, ["triton"])
    assert os.listdir(start.folder / "tmp") == []


def test_an_empty_read_only_cache(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start.root.mkdir()
    read_only(start, monkeypatch)
    start("cpu", "true")
    line = told(capsys)
    assert "read-only file system" in line
    assert "begins with empty caches" in line


def test_no_place_at_all(start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def mkdtemp(**options: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    start.root.write_text("a file")
    start.manifest("cpu")
    with pytest.raises(SystemExit) as left:
        start.module.main(["vllm"])
    assert left.value.code == 65
    assert "mount a writable volume at" in told(capsys)


# --- full and slow disks ----------------------------------------------------------------------


def test_a_full_disk_is_made_room_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By removing what other images left, the longest unused first, and no more than is needed."""
    old, newer = old_key(start, 1, 9), old_key(start, 2, 3)
    start.volume["need_mb"] = 200
    monkeypatch.setattr(start.parts["start_volume"], "free", lambda path: 0 if old.exists() else 1e9)
    start("cpu", "true")
    assert (old.exists(), newer.exists()) == (False, True)
    assert f"removed {old.name}, unused for 9 days" in told(capsys)
    assert events(start)[0]["kept"]


@pytest.mark.parametrize(("room", "line"), [(1e9, "works on a copy"), (1e6, "can't be stored, and that may end it")])
def test_a_disk_that_stays_full(
    start: Start, room: float, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start.volume["need_mb"] = 200
    monkeypatch.setattr(start.parts["start_volume"], "free", lambda path: 3e6)
    monkeypatch.setattr(start.parts["start_copy"], "room", lambda: room)
    assert start("cpu", "true") == ["true"]
    text = told(capsys)
    assert "is full (3 MB free)" in text
    assert line in text


def test_no_more_files_is_full_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(start.folder)
    fields = {name: getattr(real, name) for name in ("f_bavail", "f_frsize")}
    monkeypatch.setattr(os, "statvfs", lambda path: type("Disk", (), {**fields, "f_files": 9, "f_favail": 0}))
    assert start.parts["start_volume"].free(start.folder) == 0


@pytest.mark.parametrize(
    ("kind", "warned"),
    [("nfs4", True), ("fuse.sshfs", True), ("ext4", False), ("overlay", False), ("fuse.fuse-overlayfs", False)],
)
def test_network_file_systems_are_told(
    start: Start, kind: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    mounts = f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:9 / {start.root} rw,noatime shared:1 - {kind} server:/x rw\n"
    (start.folder / "mountinfo").write_text(mounts + f"3 1 0:9 / {start.root}-2 rw - tmpfs x rw\n")
    start("cpu", "true")
    assert (kind in capsys.readouterr().err) == warned


# --- leftover locks ----------------------------------------------------------------------------


def test_leftover_locks_are_removed(start: Start) -> None:
    start("cpu", "true")
    baton, flock = fill(start.key / "triton" / "build", "lock_module"), fill(start.key / "inductor" / "locks", "a.lock")
    other = fill(start.key / "inductor" / "locks", "data")
    start.again()
    assert (baton.exists(), flock.exists(), other.exists()) == (False, False, True)


def test_locks_of_another_container_stay(start: Start) -> None:
    """It holds the key, so its batons may be its own."""
    start("cpu", "true")
    baton, flock = fill(start.key / "triton" / "build", "lock_module"), fill(start.key / "inductor" / "locks", "a.lock")
    start("cpu", "true")  # the first still runs
    assert (baton.exists(), flock.exists()) == (True, True)
    os.close(start.held.pop(0))
    start("cpu", "true")  # the second still runs
    assert baton.exists()


def test_another_users_files_are_opened_without_making_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux wants it in folders like the cache's (fs.protected_regular)."""
    start("cpu", "true")
    plain = os.open

    def protected(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not flags & os.O_EXCL and os.path.lexists(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, flags, *mode)

    monkeypatch.setattr(os, "open", protected)
    fd, alone = start.parts["start_key"].hold(start.key)
    assert fd >= 0
    assert not alone
    os.close(fd)


def test_who_makes_the_key_ready_is_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """He has it alone for as long; on a busy machine that is more than a moment."""
    start("cpu", "true")
    start.end()
    with open(start.key / "in-use") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        looks: list[float] = []

        def sleep(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 100:
                fcntl.flock(other, fcntl.LOCK_SH)

        monkeypatch.setattr(start.parts["start_key"], "time", SimpleNamespace(sleep=sleep))
        fd, alone = start.parts["start_key"].hold(start.key)
        assert fd >= 0
        assert not alone
        os.close(fd)


def test_a_lock_that_is_held_past_the_script_stays(start: Start) -> None:
    start("cpu", "true")
    flock = fill(start.key / "inductor" / "locks", "a.lock")
    with open(flock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start.again()
        assert flock.exists()
    start.again()
    assert not flock.exists()


@pytest.mark.parametrize("alone", [True, False])
def test_where_nobody_can_tell_a_baton_is_left_over_after_an_hour_of_silence(start: Start, alone: bool) -> None:
    """Of a build of which a file changed since, the holder lives."""
    start("cpu", "true")
    module, key = fill(start.key / "triton" / "build" / "module", "a.o"), start.parts["start_key"]
    baton = fill(start.key / "triton" / "build", "lock_module")
    long_ago = time.time() - 2 * key.QUIET
    for path in (baton, baton.parent, module.parent):
        os.utime(path, (long_ago,) * 2)
    key.clear_locks(start.key, [], ["triton/build/lock_*"], alone, alone)
    assert baton.exists()
    os.utime(module, (long_ago,) * 2)
    key.clear_locks(start.key, [], ["triton/build/lock_*"], alone, alone)
    assert not baton.exists()


# --- host.json -------------------------------------------------------------------------------------


def aside(start: Start) -> list[str]:
    return sorted(path.name.partition(".aside-")[0] for path in start.key.glob("*.aside-*"))


def test_host_json_says_what_the_key_was_used_on(start: Start) -> None:
    start.machine(Gpu(110501, 0xC400, simds=80))
    start("gfx1151", "true")
    host = json.loads((start.key / "host.json").read_text())
    assert host == {"schema": 1, "cpu": ["avx2", "sse4_2"], "gpus": [{"arch": "gfx1151", "cu": 40}]}
    assert os.environ["WARMSTART_CU"] == "40"


def test_each_start_counts_as_use(start: Start) -> None:
    start("cpu", "true")
    os.utime(start.key / "host.json", (1, 1))
    start.again()
    assert time.time() - (start.key / "host.json").stat().st_mtime < 60


def test_code_for_a_larger_processor_is_set_aside(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start.processor("sse4_2 avx2 avx512f avx512_bf16")
    start("cpu", "true")
    fill(start.key / "inductor")
    fill(start.key / "triton")
    start.processor("sse4_2 avx2")
    start.again()
    assert aside(start) == ["inductor"]  # vllm had nothing in it, triton holds no CPU code
    assert list(Path(start.caches["inductor"]).iterdir()) == []
    assert "inductor and vllm of the cache are set aside" in (line := told(capsys))
    assert "avx512_bf16, avx512f" in line
    start.again()
    assert aside(start) == ["inductor"]


def test_code_for_a_smaller_processor_is_kept(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs; and what the larger one adds is then not for the smaller one any more."""
    start("cpu", "true")
    fill(start.key / "inductor")
    start.processor("sse4_2 avx2 avx512f")
    start.again()
    assert (aside(start), capsys.readouterr().err) == ([], "")
    start.processor("sse4_2 avx2")
    start.again()
    assert aside(start) == ["inductor"]


@pytest.mark.parametrize(
    "text", [b"{", b"", b"\xff\0", b"[]", b'{"schema": 1}', b'{"schema": 2, "cpu": []}', b"[" * 9999]
)
def test_a_damaged_host_json_costs_a_compilation(start: Start, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    start("cpu", "true")
    fill(start.key / "inductor")
    (start.key / "host.json").write_bytes(text)
    start.again()
    assert "host.json is damaged" in told(capsys)
    assert aside(start) == ["inductor"]
    assert json.loads((start.key / "host.json").read_text())["cpu"] == ["avx2", "sse4_2"]


def test_a_seed_without_host_json_is_used(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fill(start.key / "inductor")
    start("cpu", "true")
    assert (aside(start), capsys.readouterr().err) == ([], "")


def test_a_processor_that_says_nothing(start: Start) -> None:
    start("cpu", "true")
    fill(start.key / "inductor")
    (start.folder / "cpuinfo").unlink()
    start.again()
    assert aside(start) == []


def test_what_another_machine_uses_is_left_to_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("cpu", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", start.caches["inductor"])
    monkeypatch.setenv("TRITON_CACHE_DIR", start.caches["triton"])
    fill(start.key / "inductor")
    start.processor("sse4_2")
    start("cpu", "true")
    assert aside(start) == []
    assert "left to another machine" in told(capsys)
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(start.root))
    assert os.environ["TRITON_CACHE_DIR"] == start.caches["triton"]


def test_what_cannot_be_set_aside_is_not_used(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's folder, of which one part alone could be renamed: none is, and host.json keeps the flag."""
    start.processor("sse4_2 avx2 avx512f")
    start("cpu", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", start.caches["inductor"])
    monkeypatch.setenv("VLLM_CACHE_ROOT", start.caches["vllm"])
    kernels = [fill(Path(start.caches[name])) for name in ("inductor", "vllm")]
    host = (start.key / "host.json").read_bytes()
    rename = Path.rename

    def refuse(self: Path, target: Any) -> Path:
        if self == start.key / "vllm":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    start.processor("sse4_2 avx2")
    start.again()
    assert aside(start) == []
    assert [kernel.exists() for kernel in kernels] == [True, True]
    assert (start.key / "host.json").read_bytes() == host
    assert "avx512f" in (line := told(capsys))
    assert "can't be set aside (operation not permitted), this start has its own" in line
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        own = Path(os.environ[variable])
        assert not own.is_relative_to(start.root)
        assert list(own.iterdir()) == []


def test_no_room_for_code_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("cpu", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", start.caches["inductor"])
    fill(start.key / "inductor")
    monkeypatch.setattr(start.parts["start_copy"], "copy", lambda *args, **more: None)
    start.processor("sse4_2")
    start("cpu", "true")  # the first still runs
    assert "there is no room for others, so they are used" in told(capsys)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == start.caches["inductor"]


# --- what somebody put on the volume ---------------------------------------------------------------------


def outside(start: Start) -> Path:
    """A file of somebody else's, beside the volume."""
    file = fill(start.folder / "outside", "model")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    "name", ["host.json", "in-use", "inductor/locks/a.lock", "vllm/x/model", "triton/build/lock_a"]
)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_not_followed(start: Start, name: str, there: bool) -> None:
    start("cpu", "true")
    file = outside(start)
    before = file.stat()
    link = start.key / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(file if there else file.parent / "new")
    start.again()
    assert file.read_bytes() == b"x" * 10
    assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert os.listdir(file.parent) == ["model"]


@pytest.mark.parametrize("name", ["inductor/locks", "triton/build", "vllm/x", "starts"])
def test_a_link_to_a_folder_is_not_followed(start: Start, name: str) -> None:
    start("cpu", "true")
    names = ["a.lock", "lock_a", "model", *(f"{number}.jsonl" for number in range(9))]
    for one in names:
        fill(start.folder / "outside", one).chmod(0o600)
    link = start.key / name
    if link.exists():
        link.rename(start.folder / "before")
    link.symlink_to(start.folder / "outside")
    start.again()
    assert sorted(os.listdir(start.folder / "outside")) == sorted(names)
    assert {file.stat().st_mode & 0o777 for file in (start.folder / "outside").iterdir()} == {0o600}


def test_names_that_can_be_guessed_are_no_way_out(start: Start) -> None:
    """What is written beside host.json, the size of another key, and a key that is a link itself."""
    file, old = outside(start), old_key(start, 1, 3)
    start.key.mkdir(parents=True)
    (start.key / f".host.json.{os.getpid()}").symlink_to(file)
    (old / "size").symlink_to(file)
    (start.root / f"gfx1151-{2:012x}").symlink_to(file.parent)
    start("cpu", "true")
    assert file.read_bytes() == b"x" * 10
    assert os.listdir(file.parent) == ["model"]


def test_a_file_with_another_name_elsewhere_is_left_as_it_is(start: Start) -> None:
    file, old = outside(start), old_key(start, 1, 3)
    (old / "size").hardlink_to(file)
    (start.key / "vllm" / "x").mkdir(parents=True)
    (start.key / "vllm" / "x" / "model").hardlink_to(file)
    start("cpu", "true")
    assert file.read_bytes() == b"x" * 10
    assert file.stat().st_mode & 0o777 == 0o600


def test_another_users_host_json_is_written_in_place(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("cpu", "true")
    inode = (start.key / "host.json").stat().st_ino

    def refuse(self: Path, target: Any) -> Path:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "replace", refuse)
    start.processor("sse4_2 avx2 avx512f")
    start.again()
    assert json.loads((start.key / "host.json").read_text())["cpu"] == ["avx2", "avx512f", "sse4_2"]
    assert (start.key / "host.json").stat().st_ino == inode
    assert not list(start.key.glob(".host.json*"))


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_pipes_and_huge_files_hold_nothing_up(start: Start, kind: str) -> None:
    """A pipe would be waited for without end, in a unit test too."""
    start("cpu", "true")
    old = old_key(start, 1, 3)
    for file in (
        start.key / "in-use",
        start.key / "host.json",
        start.key / "inductor/locks/a.lock",
        start.key / "vllm/x/model",
        old / "in-use",
        old / "size",
    ):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        else:
            with open(file, "wb") as sparse:
                sparse.truncate(20_000_000_000)
    os.utime(old / "host.json", (1, 1))  # so that its size's note is newer
    assert start.again() == ["vllm", "serve"]


# --- caches of other images ----------------------------------------------------------------------------


def test_the_longest_unused_goes_first(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [old_key(start, 1, 5), old_key(start, 2, 30), old_key(start, 3, 1)]
    other = fill(start.root / "something-else", size=500_000)
    start.volume["keep_gb"] = 0.00025
    start("cpu", "true")
    assert [key.exists() for key in keys] == [True, False, True]
    assert other.exists()
    assert f"removed {keys[1].name}, unused for 30 days: 0.0 GB" in told(capsys)
    start.volume["keep_gb"] = 0
    fill(start.key / "triton", size=500_000)
    start.again()
    assert [path.name for path in start.root.iterdir() if path.name.startswith(("cpu", "gfx", "."))] == [KEY]


def test_what_was_set_aside_goes_before_a_key(start: Start) -> None:
    key = old_key(start, 1, 30)
    left = fill(start.key / "vllm.aside-20260101T000000", size=200_000)
    start.volume["keep_gb"] = 0.00015
    start("cpu", "true")
    assert (left.exists(), key.exists()) == (False, True)


def test_a_key_in_use_stays(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    key = old_key(start, 1, 30)
    with open(key / "in-use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        start.volume["keep_gb"] = 0
        start("cpu", "true")
        assert key.exists()
        assert "they are in use" in told(capsys)


def test_the_user_says_how_much(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    key = old_key(start, 1, 30)
    start.volume["keep_gb"] = 0
    for setting in ("inf", "20"):
        monkeypatch.setenv("WARMSTART_KEEP_GB", setting)
        start.again()
        assert key.exists()
    monkeypatch.setenv("WARMSTART_KEEP_GB", "lots")
    start.again()
    assert not key.exists()


@pytest.mark.parametrize("setting", ["nan", "-1", "-inf", "lots"])
def test_what_is_no_size_is_told(
    start: Start, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = old_key(start, 1, 30)
    monkeypatch.setenv("WARMSTART_KEEP_GB", setting)
    start("cpu", "true")
    assert key.exists()
    assert f"WARMSTART_KEEP_GB={setting} is no number of gigabytes: 20 are kept" in told(capsys)


def test_sizes_are_measured_once_per_use(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    key = old_key(start, 1, 3)
    volume = start.parts["start_volume"]
    measured: list[Path] = []
    measure = volume.measure

    def noted(top: Path) -> int:
        measured.append(top)
        return int(measure(top))

    monkeypatch.setattr(volume, "measure", noted)
    start("cpu", "true")
    start.again()
    assert measured == [key]
    os.utime(key / "host.json")
    start.again()
    assert measured == [key, key]


def test_what_was_half_removed_goes(start: Start) -> None:
    left = fill(start.root / ".gone-cpu-000000000000-7")
    start("cpu", "true")
    assert not left.parent.exists()


# --- start records ------------------------------------------------------------------------------------------


def test_the_record_begins_with_the_start(start: Start) -> None:
    start.machine(Gpu(90402, 0x0500, simds=1216, per_cu=4))
    start("gfx942", "vllm", "serve", "/models/secret", "--api-key", "secret")
    (event,) = events(start)
    assert os.environ["WARMSTART_START"] == str(next((start.key / "starts").iterdir()))
    assert event["event"] == "start"
    assert event["command"] == ["vllm", "serve"]
    assert event["gpus"] == [{"arch": "gfx942", "cu": 304}]
    assert event["pid"] == os.getpid()
    assert abs(event["t"] - time.time()) < 60
    assert "secret" not in json.dumps(event)


def described(start: Start, name: str, days: float) -> Path:
    """A key whose image described the kernels that it used."""
    key = start.root / name
    fill(key / "triton/warmstart-used/model")
    os.utime(fill(key, "host.json"), (time.time() - days * 86400,) * 2)
    return key / "triton/warmstart-used"


def test_the_hooks_are_told_what_the_image_before_used(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMSTART_AHEAD", raising=False)
    start("cpu", "true")
    assert "WARMSTART_AHEAD" not in os.environ
    described(start, "gfx1151-000000000001", 0)  # another arch's
    described(start, KEY, 0)  # the own one
    first = described(start, "cpu-000000000002", 9)
    last = described(start, "cpu-000000000003", 3)
    fill(start.root / "cpu-000000000004" / "triton")  # it has none
    described(start, "cpu-backup", 1)
    link = start.root / "cpu-000000000005"
    link.mkdir()
    (link / "triton").symlink_to(start.root / "cpu-000000000003" / "triton")
    (start.root / "cpu-000000000006").symlink_to(start.root / "cpu-000000000003")
    start("cpu", "true")
    assert os.environ["WARMSTART_AHEAD"] == f"{last}:{first}"
    monkeypatch.setattr(start.parts["start_caches"], "MOST_BEFORE", 1)
    monkeypatch.delenv("WARMSTART_AHEAD")
    start("cpu", "true")
    assert os.environ["WARMSTART_AHEAD"] == str(last)
    for given in ("", "/mine"):
        monkeypatch.setenv("WARMSTART_AHEAD", given)
        start("cpu", "true")
        assert os.environ["WARMSTART_AHEAD"] == given


def test_few_records_stay(start: Start) -> None:
    names = []
    for _ in range(5):
        start.again()
        names.append(Path(os.environ["WARMSTART_START"]).name)
        time.sleep(0.002)
    assert sorted(path.name for path in (start.key / "starts").iterdir()) == names[2:]


def test_the_users_word_on_the_record_stands(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTART_START", "")
    start("cpu", "true")
    assert list((start.key / "starts").iterdir()) == []
    monkeypatch.setenv("WARMSTART_START", str(start.folder / "mine.jsonl"))
    start("cpu", "true")
    assert json.loads((start.folder / "mine.jsonl").read_text())["event"] == "start"


def test_compute_units_that_are_not_told(start: Start) -> None:
    start.machine(Gpu(110501, 0xC400, per_cu=0))
    start("gfx1151", "true")
    assert "WARMSTART_CU" not in os.environ
