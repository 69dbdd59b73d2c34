"""What probe finds on the real engine, and when it looks again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from warmstart import probe, run
from warmstart.errors import EngineBroken, EngineMissing
from warmstart.probe import Capabilities


@pytest.fixture
def plain(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has chosen no settings."""
    for name in ("CONTAINERS_CONF", "CONTAINERS_CONF_OVERRIDE", "BUILDAH_ISOLATION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(run, "_wait", refuse)


def images() -> str:
    return run.run(["podman", "images", "--all", "--quiet"]).stdout


def test_containers_start_with_what_was_found(caps: Capabilities, base: str, plain: None) -> None:
    env = probe.environment(caps)
    told = run.run(["podman", "run", "--rm", base, "sh", "-c", "echo works"], env=env)
    assert told.stdout == "works\n"
    assert {"timestamp", "build-context", "secret", "device"} <= set(caps.features)
    assert Path(caps.runtime).is_file()
    assert caps.rootless == (os.geteuid() != 0)


def test_probing_leaves_only_its_answer(store: Path, tmp_path: Path, plain: None) -> None:
    before = images()
    found = probe.probe(tmp_path)
    assert images() == before
    assert run.run(["buildah", "containers", "--quiet"]).stdout == ""
    files = {"engine.json", "containers.conf"} if found.conf else {"engine.json"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_the_second_call_starts_no_process(
    caps: Capabilities, state: Path, plain: None, no_process: None
) -> None:
    spent = []
    for _ in range(5):  # the least of it is its own, without what the processor or Python does besides
        began = time.process_time()
        assert probe.probe(state) == caps
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05


def test_our_own_settings_passed_on_are_not_the_users(
    caps: Capabilities, state: Path, plain: None, no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in probe.environment(caps).items():
        monkeypatch.setenv(name, value)
    assert probe.probe(state) == caps


def test_it_looks_again_when_its_settings_are_gone(store: Path, tmp_path: Path, plain: None) -> None:
    found = probe.probe(tmp_path)
    (tmp_path / "engine.json").write_text("{")
    assert probe.probe(tmp_path) == found
    if found.conf:
        Path(found.conf).unlink()
        assert probe.probe(tmp_path) == found
        assert Path(found.conf).is_file()


def test_the_users_settings_are_used_and_nothing_is_written(
    caps: Capabilities, tmp_path: Path, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.conf"
    mine.write_text(Path(caps.conf).read_text() if caps.conf else "")
    monkeypatch.setenv("CONTAINERS_CONF", str(mine))
    found = probe.probe(tmp_path / "state")
    assert found.conf == ""
    assert "CONTAINERS_CONF" not in probe.environment(found)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["engine.json"]


@pytest.mark.parametrize("runtime", ["no-such-runtime", "/bin/false"])
def test_settings_of_the_user_that_cannot_work_are_told(
    caps: Capabilities, tmp_path: Path, plain: None, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    mine = tmp_path / "mine.conf"
    mine.write_text(f'[engine]\nruntime = "{runtime}"\n')
    monkeypatch.setenv("CONTAINERS_CONF", str(mine))
    with pytest.raises(EngineBroken) as caught:
        probe.probe(tmp_path / "state")
    assert f"CONTAINERS_CONF={mine}" in caught.value.hint
    assert not (tmp_path / "state" / "engine.json").exists()


def test_a_relative_path_is_told(
    caps: Capabilities, tmp_path: Path, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.conf").write_text(Path(caps.conf).read_text() if caps.conf else "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTAINERS_CONF", "mine.conf")
    with pytest.raises(EngineBroken) as caught:
        probe.probe(tmp_path / "state")
    assert "absolute path" in caught.value.hint


def test_an_engine_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissing, match="buildah is not installed") as caught:
        probe.probe(tmp_path / "state")
    assert "tools/setup" in caught.value.hint
