"""Who else holds a GPU, on the trees of several machines; and how services are stopped, without stopping any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import MIB, plant
from tests.unit import proctree
from warmstart import holders, run
from warmstart.errors import CommandFailed, DeviceHeld, EngineMissing, UsageError
from warmstart.run import Result

CARD = "0000:03:00.0"
MI = "0000:0c:00.0"


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands are noted, not run. llama.service runs, old.service doesn't, locked.service can't be stopped."""
    called: list[list[str]] = []

    def answer(argv: list[str], **_: object) -> Result:
        called.append(argv)
        unit = argv[-1]
        if "show" in argv:
            state = "active" if unit in ("llama.service", "locked.service") else "inactive"
            load = "not-found" if unit == "typo.service" else "loaded"
            return Result(f"LoadState={load}\nActiveState={state}\n", "", 0, 0.0)
        if unit == "locked.service":
            raise CommandFailed("sudo failed with exit code 1: a password is required")
        return Result("", "", 0, 0.0)

    monkeypatch.setattr(run, "run", answer)
    return called


def test_a_desktop_is_no_holder(tmp_path: Path) -> None:
    assert holders.others([CARD], (), plant(tmp_path, "rx7600xt-desktop")) == []


def test_a_service_with_the_card(tmp_path: Path) -> None:
    found = holders.others([CARD], (), plant(tmp_path, "r9700-igpu-first"))
    assert [(one.who, one.unit, one.bytes) for one in found] == [
        ("llama.service", "llama.service", {CARD: 18400 * MIB})
    ]
    with pytest.raises(DeviceHeld, match=r"llama\.service has 18\.0 GiB of the device") as held:
        holders.refuse(found)
    assert "--stop llama.service" in held.value.hint


def test_another_card_is_not_meant(tmp_path: Path) -> None:
    root = plant(tmp_path, "mi300x-8")
    assert holders.others(["0000:1e:00.0"], (), root) == []


def test_a_container_but_not_our_own(tmp_path: Path) -> None:
    root = plant(tmp_path, "mi300x-8")
    found = holders.others([MI], (), root)
    assert [one.who for one in found] == ["container 3f0c1d9a7b5e"]
    with pytest.raises(DeviceHeld) as held:
        holders.refuse(found)
    assert "--stop" not in held.value.hint
    assert holders.others([MI], ["3f0c1d9a7b5e" + "3f0c1d9a7b5e" * 4], root) == []


def test_a_process_counts_by_its_size(tmp_path: Path) -> None:
    root = plant(tmp_path, "mi300x-8")
    (root / "proc/7788/cgroup").write_text("0::/user.slice/session-3.scope\n")
    assert [one.who for one in holders.others([MI], (), root)] == ["VLLM::EngineCor (pid 7788)"]
    for file in root.glob("sys/class/kfd/kfd/proc/7788/vram_*"):
        file.write_text(f"{500 * MIB}\n")
    assert holders.others([MI], (), root) == []


def test_a_service_that_loads_at_a_request_holds_it_too(tmp_path: Path) -> None:
    root = plant(tmp_path, "rx7600xt-desktop")
    proctree.add(root, 500, name="llama-server", group="/system.slice/llama.service")
    proctree.add(
        root, 501, name="ollama", group="/user.slice/user-1000.slice/user@1000.service/app.slice/ollama.service"
    )
    proctree.add(root, 502, name="sshd", group="/system.slice/sshd.service")
    found = holders.others([CARD], (), root)
    assert [(one.who, one.unit) for one in found] == [
        ("llama.service", "llama.service"),
        ("ollama.service", "user:ollama.service"),
    ]
    with pytest.raises(DeviceHeld, match="loads a model at any request"):
        holders.refuse(found)
    assert holders.others(["cpu"], (), root) == []  # no GPU is at stake


def test_stop_and_start(systemctl: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert holders.stop("llama") == "llama.service"
    assert systemctl[-1] == ["systemctl", "stop", "llama.service"]
    assert holders.stop("old.service") == ""  # it didn't run, so nobody starts it later
    assert systemctl[-1][1] == "show"
    assert holders.start("llama.service")
    assert systemctl[-1] == ["systemctl", "start", "llama.service"]


def test_a_user_s_own_service_needs_no_sudo(systemctl: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert holders.start("user:ollama.service")
    assert systemctl[-1] == ["systemctl", "--user", "start", "ollama.service"]
    assert holders.stop("llama") == "llama.service"
    assert systemctl[-1] == ["sudo", "-n", "systemctl", "stop", "llama.service"]


def test_a_service_that_is_not_there(systemctl: list[list[str]]) -> None:
    with pytest.raises(UsageError, match=r"no service typo\.service"):
        holders.stop("typo")


def test_a_machine_without_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> Result:
        return Result("", "System has not been booted with systemd as init system.\nFailed to connect\n", 1, 0.0)

    def missing(*_: object, **__: object) -> Result:
        raise EngineMissing("systemctl is not installed", hint="run `make image`")

    monkeypatch.setattr(holders, "BOOTED", tmp_path / "none")
    for answer in (silent, missing):
        monkeypatch.setattr(run, "run", answer)
        with pytest.raises(UsageError, match=r"^--stop nosuch\.service: no systemd runs on this machine") as told:
            holders.stop("nosuch")
        assert "\n" not in told.value.message
        assert "leave out --stop" in told.value.hint
    monkeypatch.setattr(holders, "BOOTED", tmp_path)
    monkeypatch.setattr(run, "run", silent)
    with pytest.raises(CommandFailed, match=r"^systemctl says nothing of x\.service: Failed to connect$") as failed:
        holders.stop("user:x")
    assert "leave out --stop" in failed.value.hint


def test_how_to_end_it_is_told_in_the_words_of_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    with pytest.raises(DeviceHeld) as held:
        holders.refuse(holders.others([CARD], (), plant(tmp_path, "r9700-igpu-first")))
    wanted = "ARGS='--stop llama.service' stops it until `make down`; ARGS='--force' starts beside it"
    assert held.value.hint == wanted


def test_a_service_that_can_not_be_stopped(
    systemctl: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(CommandFailed) as failed:
        holders.stop("locked")
    assert failed.value.hint == "by hand: sudo systemctl stop locked.service"
    assert not holders.start("locked.service")  # told, but no failure: the rest of `down` goes on
    assert "by hand: sudo systemctl start locked.service" in capsys.readouterr().err


def test_memory_that_comes_back_and_that_does_not(tmp_path: Path) -> None:
    root = plant(tmp_path, "r9700-igpu-first")
    held = holders.used([CARD], root)
    assert held == {CARD: 18530 * MIB}
    assert holders.drained([CARD], held, 0.0, root) == 0
    assert holders.drained([CARD], {CARD: 530 * MIB}, 0.0, root) == (18000 - 256) * MIB
    assert holders.drained([CARD], {}, 0.0, root) == 0  # what was there before isn't known
