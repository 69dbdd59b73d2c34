"""Wheels: which one fits, what is fetched in which order, and what counts as being there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from warmstart import profile, targets, wheels
from warmstart.errors import LockNotResolved, ProfileError
from warmstart.lock import Wheel
from warmstart.profile import Profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cpu() -> Profile:
    return profile.load(ROOT, "cpu").profile


def wheel(name: str, size: int = 1000, content: bytes | None = None, version: str = "1.0") -> Wheel:
    digest = hashlib.sha256(content if content is not None else name.encode()).hexdigest()
    return Wheel(name, version, "python", f"{name}-{version}-py3-none-any.whl", digest, size)


# What an installer chooses for CPython 3.11 and glibc 2.36, by PEP 425, 427, 600.
CHOICES = {
    "native before pure": (
        ["a-1-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl"],
        "a-1-cp311-cp311-manylinux_2_17_x86_64.whl",
    ),
    "this version before the stable ABI": (
        ["a-1-cp38-abi3-manylinux_2_28_x86_64.whl", "a-1-cp311-cp311-manylinux2014_x86_64.whl"],
        "a-1-cp311-cp311-manylinux2014_x86_64.whl",
    ),
    "newest glibc that fits": (
        [f"a-1-cp311-cp311-manylinux_2_{minor}_x86_64.whl" for minor in (17, 28, 34, 39)],
        "a-1-cp311-cp311-manylinux_2_34_x86_64.whl",
    ),
    "one of several tags": (
        ["a-1-cp311-cp311-manylinux_2_12_x86_64.manylinux2010_x86_64.whl", "a-1-py2.py3-none-any.whl"],
        "a-1-cp311-cp311-manylinux_2_12_x86_64.manylinux2010_x86_64.whl",
    ),
    "not for musl, other machines or versions": (
        [
            "a-1-cp311-cp311-musllinux_1_2_x86_64.whl",
            "a-1-cp311-cp311-manylinux_2_17_aarch64.whl",
            "a-1-cp312-cp312-manylinux_2_17_x86_64.whl",
            "a-1-cp312-abi3-manylinux_2_17_x86_64.whl",
        ],
        "",
    ),
    "highest build": (["a-1-2-py3-none-any.whl", "a-1-10-py3-none-any.whl"], "a-1-10-py3-none-any.whl"),
    "plain linux last": (
        ["a-1-cp311-cp311-linux_x86_64.whl", "a-1-cp311-cp311-manylinux_2_5_x86_64.whl"],
        "a-1-cp311-cp311-manylinux_2_5_x86_64.whl",
    ),
    "only plain linux, a local version": (
        ["a-1+rocm10.0.0-cp311-cp311-linux_x86_64.whl", "not a wheel.whl"],
        "a-1+rocm10.0.0-cp311-cp311-linux_x86_64.whl",
    ),
    "nothing": ([], ""),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_best_wheel(cpu: Profile, case: str) -> None:
    files, expected = CHOICES[case]
    assert targets.best(files, cpu) == expected
    assert targets.best(reversed(files), cpu) == expected


def test_tags_are_ordered_like_an_installers() -> None:
    ranks = targets.ranks("3.11", "x86_64-manylinux_2_36")
    order = [
        Tag("cp311", "cp311", "manylinux_2_36_x86_64"),
        Tag("cp311", "cp311", "linux_x86_64"),
        Tag("cp311", "abi3", "manylinux_2_28_x86_64"),
        Tag("cp310", "abi3", "manylinux_2_28_x86_64"),
        Tag("py3", "none", "any"),
    ]
    assert sorted(order, key=ranks.__getitem__) == order


@pytest.mark.parametrize(
    ("platform", "first", "last"),
    [
        ("x86_64-manylinux_2_36", "manylinux_2_36_x86_64", ["manylinux1_x86_64", "linux_x86_64"]),
        ("aarch64-manylinux_2_28", "manylinux_2_28_aarch64", ["manylinux2014_aarch64", "linux_aarch64"]),
    ],
)
def test_platforms(platform: str, first: str, last: list[str]) -> None:
    names = targets.platforms(platform)
    assert names[0] == first
    assert names[-2:] == last
    assert len(names) == len(set(names))


@pytest.mark.parametrize("bad", ["x86_64-unknown-linux-gnu", "windows", "x86_64-manylinux_1_9", ""])
def test_other_platforms_are_refused(bad: str) -> None:
    with pytest.raises(ProfileError, match="not supported"):
        targets.platforms(bad)


def test_pip_is_told_the_platforms_of_the_files_best_first(cpu: Profile) -> None:
    files = ["a-1-cp38-abi3-manylinux_2_17_x86_64.whl", "b-1-cp311-cp311-manylinux_2_28_x86_64.whl"]
    args = targets.for_pip(cpu, files)
    assert args[:6] == ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
    assert args[6:] == ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"]


def test_pip_never_takes_the_hosts_platform(cpu: Profile) -> None:
    assert targets.for_pip(cpu, ["a-1-py3-none-any.whl"])[6:] == ["--platform", "linux_x86_64"]


def test_placeholders(cpu: Profile) -> None:
    assert targets.fill("torch=={torch} for {arch}", cpu) == f"torch=={cpu.versions.torch} for cpu"
    with pytest.raises(ProfileError, match=r"\{rocm\}"):  # the profile leaves it empty
        targets.fill("rocm=={rocm}", cpu)
    with pytest.raises(ProfileError, match=r"\{tourch\}"):
        targets.fill("torch=={tourch}", cpu)


@given(st.lists(st.integers(0, 200_000_000), max_size=60), st.sets(st.integers(0, 59)))
def test_jobs_hold_every_wheel_once_the_longest_first(sizes: list[int], vendors: set[int]) -> None:
    every = [wheel(f"w{i}", size) for i, size in enumerate(sizes)]
    listed = {f"w{i}" for i in vendors}
    work = wheels.jobs(every, listed)
    assert sorted(w.name for job in work for w in job) == sorted(w.name for w in every)
    assert all(len(job) == 1 for job in work if any(w.size >= wheels.ALONE or w.name in listed for w in job))
    assert sum(len(job) > 1 or job[0].size < wheels.ALONE for job in work) <= wheels.WORKERS + len(listed)
    weights = [sum(w.size + wheels.EACH for w in job) for job in work]
    assert weights == sorted(weights, reverse=True)


def test_only_locked_content_counts(tmp_path: Path) -> None:
    good, bad, absent = wheel("good", content=b"good"), wheel("bad", content=b"right"), wheel("absent")
    (tmp_path / good.file).write_bytes(b"good")
    (tmp_path / bad.file).write_bytes(b"wrong")
    assert wheels.missing([good, bad, absent], tmp_path) == [bad, absent]


def test_a_checked_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = wheel("one", content=b"one")
    (tmp_path / one.file).write_bytes(b"one")
    hashed: list[Path] = []
    real = wheels.sha256

    def counted(file: Path) -> str:
        hashed.append(file)
        return real(file)

    monkeypatch.setattr(wheels, "sha256", counted)
    assert wheels.missing([one], tmp_path) == []
    assert wheels.missing([one], tmp_path) == []
    assert len(hashed) == 1
    # Same size, later: a change that only the time tells.
    (tmp_path / one.file).write_bytes(b"eno")
    os.utime(tmp_path / one.file, ns=(1, 1))
    assert wheels.missing([one], tmp_path) == [one]


def test_a_file_checked_for_one_lock_is_checked_again_for_another(tmp_path: Path) -> None:
    one = wheel("one", content=b"one")
    (tmp_path / one.file).write_bytes(b"one")
    assert wheels.missing([one], tmp_path) == []
    other = msgspec.structs.replace(one, sha256="0" * 64)
    assert wheels.missing([other], tmp_path) == [other]
    assert wheels.missing([one], tmp_path) == []


def test_a_broken_stamp_only_costs_a_hash(tmp_path: Path) -> None:
    one = wheel("one", content=b"one")
    (tmp_path / one.file).write_bytes(b"one")
    (tmp_path / wheels.STAMP).write_text("{", encoding="utf-8")
    assert wheels.missing([one], tmp_path) == []


def test_nothing_to_do_starts_nothing(cpu: Profile, tmp_path: Path) -> None:
    one = wheel("one", content=b"one")
    (tmp_path / one.file).write_bytes(b"one")
    wheels.fetch(cpu, [one], tmp_path)  # a process would fail this test


def test_wheels_without_hash_are_refused(cpu: Profile, tmp_path: Path) -> None:
    with pytest.raises(LockNotResolved):
        wheels.fetch(cpu, [msgspec.structs.replace(wheel("one"), sha256="")], tmp_path)
