"""Leases: who may use a device, on disk, with holders that are real processes of this machine or dead ones."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import lease, processes
from warmstart.errors import DeviceHeld, InputError, NoEngine, UsageError
from warmstart.lease import Lease

GIB = 1 << 30
DEAD = 4_194_305  # more than any pid: the kernel's PID_MAX_LIMIT is 2^22


def one(preset: str, *devices: str, **facts: Any) -> Lease:
    return lease.new(preset, lease.container_name(preset), devices or ("cpu",), **facts)


def dead(preset: str, *devices: str, **facts: Any) -> Lease:
    """A lease whose container's process is gone."""
    return msgspec.structs.replace(one(preset, *devices, **facts), process=DEAD, process_began=1)


def test_a_device_without_sizes_has_one_engine(tmp_path: Path) -> None:
    lease.take(tmp_path, one("a"), {})
    with pytest.raises(DeviceHeld, match=r"cpu is held by a \(starting since .*\): one engine at a time") as held:
        lease.take(tmp_path, one("b"), {})
    assert "`.venv/bin/python build.py down a`" in held.value.hint
    assert [x.preset for x in lease.read(tmp_path)] == ["a"]


def test_engines_share_a_device_as_long_as_the_sum_fits(tmp_path: Path) -> None:
    room = {"0000:c1:00.0": 10 * GIB}
    lease.take(tmp_path, one("a", "0000:c1:00.0", bytes=4 * GIB), room)
    lease.take(tmp_path, one("b", "0000:c1:00.0", bytes=6 * GIB), room)
    with pytest.raises(DeviceHeld, match=r"1\.0 GiB are needed, 0\.0 of 10\.0 GiB are not given away"):
        lease.take(tmp_path, one("c", "0000:c1:00.0", bytes=1 * GIB), room)
    lease.take(tmp_path, one("d", "0000:c6:00.0", bytes=1 * GIB), room)  # another device
    with pytest.raises(DeviceHeld):
        lease.take(tmp_path, one("e", "0000:c6:00.0", "0000:c1:00.0"), room)  # all of both


def test_the_same_preset_runs_once(tmp_path: Path) -> None:
    lease.take(tmp_path, one("a", bytes=1, port=8000), {"cpu": 100})
    with pytest.raises(DeviceHeld, match="a runs already"):
        lease.take(tmp_path, one("a", bytes=1), {"cpu": 100})


def test_a_dead_holder_blocks_nobody_however_it_died(tmp_path: Path) -> None:
    gone = dead("container gone")
    late = msgspec.structs.replace(one("up too late"), expires=time.time() - 1)
    killed = msgspec.structs.replace(one("up killed"), owner=DEAD, owner_began=1)
    reused = msgspec.structs.replace(one("pid used again"), process=os.getpid(), process_began=1)
    half = msgspec.structs.replace(one("died while it was looked at"), process=DEAD, process_began=0)
    rebooted = msgspec.structs.replace(one("before a reboot"), boot="another")
    for stale in (gone, late, killed, reused, half, rebooted):
        assert not lease.alive(stale, time.time()), stale.preset
        lease.take(tmp_path, stale, {})
    lease.take(tmp_path, one("new"), {})
    assert lease.live(tmp_path) == (lease.read(tmp_path)[-1],)


def test_a_running_container_holds_it_after_its_up_has_ended(tmp_path: Path) -> None:
    me = os.getpid()
    held = one("a")
    lease.take(tmp_path, held, {})
    facts = {"owner": DEAD, "process": me, "process_began": processes.began(me), "expires": 0.0}
    moved = msgspec.structs.replace(held, **facts)
    assert lease.alive(moved, time.time())


def test_updates_and_release(tmp_path: Path) -> None:
    held = one("a")
    lease.take(tmp_path, held, {})
    changed = lease.update(tmp_path, held, state="ready", process=7)
    assert changed is not None
    assert (changed.state, changed.process) == ("ready", 7)
    assert lease.find(tmp_path, "warmstart-a") == changed
    lease.release(tmp_path, held)  # by the name that it had from the begin
    assert lease.read(tmp_path) == ()
    assert lease.update(tmp_path, held, state="ready") is None
    lease.release(tmp_path, held)


def test_a_new_start_forgets_the_dead_one_of_its_preset_alone(tmp_path: Path) -> None:
    for stale in (dead("a", stopped=("llama.service",)), dead("b", stopped=("ollama.service",))):
        lease.take(tmp_path, stale, {})
    lease.take(tmp_path, one("a"), {})
    assert [(x.preset, x.process) for x in lease.read(tmp_path)] == [("b", DEAD), ("a", 0)]


def test_cold_starts_wait_for_each_other_in_order(tmp_path: Path) -> None:
    room = {"cpu": 100}
    first, second = one("a", bytes=1), one("b", bytes=1)
    lease.take(tmp_path, first, room)
    lease.take(tmp_path, second, room)
    assert lease.starting(tmp_path, second) == (first,)
    assert lease.starting(tmp_path, first) == ()  # else both would wait for ever
    lease.update(tmp_path, first, state="ready")
    assert lease.starting(tmp_path, second) == ()


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    won: list[str] = []
    start = threading.Barrier(8)

    def attempt(name: str) -> None:
        start.wait()
        try:
            lease.take(tmp_path, one(name), {})
            won.append(name)
        except DeviceHeld:
            pass

    threads = [threading.Thread(target=attempt, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert [x.preset for x in lease.read(tmp_path)] == won


@pytest.mark.parametrize("content", [b"", b"{", b'[{"preset": "a"}]', b"null", b"[" * 100_000])
def test_a_file_that_was_spoiled_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leases.json").write_bytes(content)
    assert lease.read(tmp_path) == ()
    lease.take(tmp_path, one("a"), {})
    assert [x.preset for x in lease.read(tmp_path)] == ["a"]


def test_a_time_that_no_clock_shows_spoils_the_file(tmp_path: Path) -> None:
    lease.take(tmp_path, one("a"), {})
    file = tmp_path / "leases.json"
    (told,) = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode([told | {"since": 1e300}]))
    assert lease.read(tmp_path) == ()


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "warmstart").write_text("")
    with pytest.raises(InputError, match="warmstart can't be made"):
        lease.take(tmp_path / "warmstart", one("a"), {})


def test_which_engine_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoEngine, match="no engine runs"):
        lease.pick(tmp_path)
    lease.take(tmp_path, one("a", "0"), {})
    assert lease.pick(tmp_path).preset == "a"
    lease.take(tmp_path, one("b", "1"), {})
    with pytest.raises(UsageError, match="several") as which:
        lease.pick(tmp_path)
    assert which.value.hint == "name one: a or b"
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(UsageError) as which:
        lease.pick(tmp_path)
    assert which.value.hint == "name one: PRESET=a or PRESET=b"
    assert lease.pick(tmp_path, "b").preset == "b"
    with pytest.raises(NoEngine) as none:
        lease.pick(tmp_path, "c")
    assert "a, b" in none.value.hint


def test_where_leases_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, me = Path("/x/.warmstart"), os.getuid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lease.folder(state) == tmp_path / "warmstart"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    assert lease.folder(state) == state / "run"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert lease.folder(state, tmp_path) == state / "run"
    own = tmp_path / "run/user" / str(me or 1000)
    own.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: me or 1000)
    monkeypatch.setattr(Path, "stat", _owned(me or 1000))
    assert lease.folder(state, tmp_path) == own / "warmstart"  # by cron, or by ssh without a session
    monkeypatch.setattr(Path, "stat", _owned(4711))
    assert lease.folder(state, tmp_path) == state / "run"


def _owned(user: int) -> Any:
    """Path.stat, as if everything belonged to that user."""
    real = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = list(real(path, follow_symlinks=follow_symlinks))
        found[4] = user
        return os.stat_result(found)

    return stat


def test_where_the_leases_of_root_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a session or without one: root's containers outlive it."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    state = tmp_path / ".warmstart"
    assert lease.folder(state, tmp_path) == state / "run"  # there is no /run
    (tmp_path / "run/user/0").mkdir(parents=True)
    assert lease.folder(state, tmp_path) == tmp_path / "run/warmstart"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run/user/0"))
    assert lease.folder(state, tmp_path) == tmp_path / "run/warmstart"


def test_the_folder_is_its_owner_s_alone(tmp_path: Path) -> None:
    lease.take(tmp_path / "warmstart", one("a"), {})
    assert (tmp_path / "warmstart").stat().st_mode & 0o777 == 0o700


def test_an_engine_that_starts_does_not_answer_yet(tmp_path: Path) -> None:
    holder = one("a", port=8000)
    for state, told in (
        ("starting", "doesn't answer yet: `.venv/bin/python build.py status`"),
        ("ready", "it answers on port 8000"),
    ):
        with pytest.raises(DeviceHeld) as held:
            lease.refuse_same(msgspec.structs.replace(holder, state=state))
        assert told in held.value.hint
        assert "`.venv/bin/python build.py down a` stops it" in held.value.hint


def test_a_container_s_name() -> None:
    assert lease.container_name("Qwen3-0.6B-smoke") == "warmstart-Qwen3-0.6B-smoke"
    assert lease.container_name("a/b c:d") == "warmstart-a-b-c-d"
