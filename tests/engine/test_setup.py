"""tools/setup on pretended hosts: what it would install where, what it refuses, how it is interrupted."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.engine.machine import ENGINE, FILES, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("release", "manager", "has", "lacks"),
    [
        ("bookworm", "apt-get", "buildah podman mmdebstrap iptables slirp4netns uidmap", "nftables passt"),
        ("noble", "apt-get", "buildah iptables slirp4netns debian-archive-keyring", "nftables passt"),
        ("trixie", "apt-get", "buildah nftables passt", "iptables slirp4netns"),
        ("fedora", "dnf", "buildah shadow-utils debian-keyring mmdebstrap", "uidmap debian-archive-keyring"),
        ("rocky", "dnf", "buildah passt", "uidmap"),
        ("arch", "pacman", "buildah shadow netavark", "uidmap mmdebstrap -"),
    ],
)
def test_packages_of_a_bare_machine(machine: Machine, release: str, manager: str, has: str, lacks: str) -> None:
    machine.release(release)
    code, said = machine.setup("--plan", "engine")
    assert code == 0
    first, second = said.splitlines()
    start, packages = first.split(": ")
    assert start == f"• would install packages with {manager}"
    assert set(has.split()) <= set(packages.split())
    assert not set(lacks.split()) & set(packages.split())
    assert second.startswith("• would make .venv from requirements.txt with Python 3.")
    assert machine.called() == []
    assert not (machine.project / ".warmstart").exists()


@pytest.mark.parametrize(("hybrid", "runtime"), [(True, "runc"), (False, "crun")])
def test_the_runtime_follows_the_cgroups(machine: Machine, hybrid: bool, runtime: str) -> None:
    machine.release("bookworm")
    machine.venv()
    machine.engine()
    (machine.bin / "crun").unlink()
    if hybrid:
        (machine.host / "sys/fs/cgroup/unified").mkdir(parents=True)
    assert machine.setup("--plan", "engine")[1].endswith(f": {runtime}\n")


def test_does_nothing_when_all_is_there(machine: Machine) -> None:
    machine.release("bookworm")
    machine.engine()
    machine.venv("test")
    for args in (["run"], ["test"], ["run", "engine"], ["test", "engine"]):
        assert machine.setup(*args) == (0, "")
    assert machine.called() == []
    assert not (machine.project / ".warmstart").exists()


@pytest.mark.parametrize("change", ["requirements", "folder", "python", "stamp", "kind"])
def test_a_venv_that_no_longer_fits_is_made_again(machine: Machine, change: str) -> None:
    machine.release("bookworm")
    machine.venv("run")
    venv = machine.project / ".venv"
    if change == "requirements":
        (machine.project / "requirements.txt").write_text("x==1\n", encoding="utf-8")
    elif change == "folder":
        machine.project = machine.project.rename(machine.project.with_name("moved"))
    elif change == "python":
        (venv / "bin/python").unlink()
        (venv / "bin/python").symlink_to("/nonexistent/python3")
    elif change == "stamp":
        (venv / ".stamp").write_text("cut off\n", encoding="utf-8")
    wanted = "test" if change == "kind" else "run"
    assert "would make .venv" in machine.setup("--plan", wanted)[1]


@pytest.mark.parametrize(
    ("release", "reason"),
    [("jammy", "buildah 1.23 and Python 3.10"), ("nixos", "only Debian, Ubuntu, Fedora, Arch")],
)
def test_releases_that_are_refused(machine: Machine, release: str, reason: str) -> None:
    machine.release(release)
    code, said = machine.setup("engine")
    assert code == {"jammy": 44, "nixos": 30}[release]
    error, hint = said.splitlines()
    assert error.startswith("error: ")
    assert reason in error
    assert hint.startswith("  hint: ")
    assert machine.called() == []


def test_a_system_without_its_package_manager_shows_the_packages(machine: Machine) -> None:
    machine.release("fedora")
    (machine.bin / "dnf").unlink()
    code, said = machine.setup("engine")
    assert code == 30
    assert said.startswith("error: packages are missing, and Fedora Linux 43 has no dnf\n  hint: install these, ")
    assert "shadow-utils" in said


def test_another_system_is_refused(machine: Machine) -> None:
    machine.program("uname", "echo Darwin")
    code, said = machine.setup("run")
    assert code == 44
    assert said.startswith("error: images are built on Linux, and this is Darwin\n")


def test_an_old_python_is_refused(machine: Machine) -> None:
    machine.release("bookworm")
    machine.program("python3", "exit 1")
    code, said = machine.setup("run")
    assert code == 44
    assert said.startswith("error: no Python 3.11 or later on PATH\n")


def test_a_later_python_on_path_is_taken(machine: Machine) -> None:
    machine.release("bookworm")
    machine.link("python3.12", sys.executable)
    machine.program("python3", "exit 1")
    assert "would make .venv" in machine.setup("--plan", "run")[1]


def test_neither_root_nor_sudo(machine: Machine) -> None:
    machine.release("bookworm")
    machine.venv()
    machine.program("id", "echo 1000")
    code, said = machine.setup("engine")
    assert code == 30
    error, hint = said.splitlines()
    assert error.startswith("error: packages are missing: buildah podman ")
    assert "neither root nor sudo here; as root run: apt-get install buildah podman" in hint
    assert machine.called() == []


def test_sudo_never_asks_in_ci(machine: Machine) -> None:
    machine.release("bookworm")
    machine.venv()
    machine.program("id", "echo 1000")
    machine.program("sudo", "exit 1")
    code, said = machine.setup("engine")
    assert code == 30
    assert "error: sudo refused to install packages" in said
    assert machine.called() == ["sudo -n true"]


APT = """
case "$*" in
  *update*) touch "$0.fresh" ;;
  *install*)
    [ -e "$0.fresh" ] || { echo "E: Unable to locate package buildah"; exit 100; }
    touch "$0.installed" ;;
esac
"""


@pytest.mark.parametrize("fresh", [True, False])
def test_the_package_index_is_refreshed_only_when_it_has_to_be(machine: Machine, fresh: bool) -> None:
    machine.release("bookworm")
    machine.venv()
    machine.link("touch", shutil.which("touch"))
    machine.program("dpkg")
    machine.program("apt-get", APT)
    if fresh:
        (machine.bin / "apt-get.fresh").touch()
    code, said = machine.setup("engine")
    assert code == 0
    assert (machine.bin / "apt-get.installed").exists()
    updates = [call for call in machine.called() if call == "apt-get update"]
    assert len(updates) == (0 if fresh else 1)
    assert ("refreshing the package index" in said) is not fresh
    installs = [call for call in machine.called() if " install " in call]
    assert all("-y" in call.split() and "--no-install-recommends" in call for call in installs)


def test_a_failed_installation_shows_the_end_of_its_log(machine: Machine) -> None:
    machine.release("fedora")
    machine.venv()
    machine.program("dnf", "echo 'No match for argument: mmdebstrap'; exit 1")
    code, said = machine.setup("engine")
    assert code == 45
    assert "  | No match for argument: mmdebstrap\nerror: dnf could not install the packages\n" in said


def test_an_installation_that_was_cut_off_is_done_again(machine: Machine) -> None:
    machine.release("fedora")
    machine.venv()
    machine.program("dnf", "exit 1")
    assert machine.setup("engine")[0] == 45
    machine.engine()  # all programs are there by now, but were they set up?
    machine.program("dnf")
    said = machine.setup("engine")[1]
    assert said.startswith("• install packages with dnf: buildah podman ")
    assert machine.setup("engine") == (0, "")


# A package manager that is at work until a file says that it may go on, a minute at most.
WORKS = 'touch "$0.begun"; n=0; while [ ! -e "$0.go" ] && [ $((n += 1)) -lt 600 ]; do sleep 0.1; done'


def wait_for(path: Path) -> None:
    """Until `path` is there, a minute at most."""
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path} never appeared")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_making_the_venv(machine: Machine, number: int, code: int) -> None:
    machine.release("bookworm")
    machine.venv()
    stamp = (machine.project / ".venv/.stamp").read_text(encoding="utf-8")
    machine.link("sleep", shutil.which("sleep"))
    machine.program(
        "python3",
        f'case "$*" in *-Im*) mkdir -p "$3/bin"; exec sleep 60 ;; *) exec {sys.executable} "$@" ;; esac',
    )
    running = machine.start("test")
    wait_for(machine.project / ".venv.new")
    running.send_signal(number)
    _, said = running.communicate(timeout=30)  # less than the step would take
    assert running.returncode == code, said
    assert not (machine.project / ".venv.new").exists()
    assert (machine.project / ".venv/.stamp").read_text(encoding="utf-8") == stamp
    assert machine.setup("run") == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_package_installation_is_not_cut_off(machine: Machine, number: int, code: int) -> None:
    machine.release("bookworm")
    machine.venv()
    for name in ("sleep", "touch"):
        machine.link(name, shutil.which(name))
    machine.program("apt-get", f'{WORKS}; touch "$0.ended"')
    running = machine.start("engine")
    wait_for(machine.bin / "apt-get.begun")
    running.send_signal(number)
    assert running.stderr
    assert any("stopping as soon as the packages are installed" in line for line in running.stderr)
    assert not (machine.bin / "apt-get.ended").exists()
    (machine.bin / "apt-get.go").touch()
    _, said = running.communicate(timeout=60)
    assert running.returncode == code, said
    assert (machine.bin / "apt-get.ended").exists()


def test_the_second_of_two_waits_for_the_first(machine: Machine) -> None:
    machine.release("bookworm")
    machine.venv()
    for name in ("sleep", "touch"):
        machine.link(name, shutil.which(name))
    programs = " ".join(str(machine.bin / name) for name in ENGINE)
    for name in FILES:
        (machine.host / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.host / name).touch()
    machine.link("cp", shutil.which("cp"))
    machine.program("apt-get", f'{WORKS}; for p in {programs}; do cp "$0" "$p"; done')
    first = machine.start("engine")
    wait_for(machine.bin / "apt-get.begun")
    second = machine.start("engine")
    assert second.stderr
    said = second.stderr.readline()
    (machine.bin / "apt-get.go").touch()
    said += second.stderr.read()
    assert second.wait(timeout=60) == 0
    assert said == "• waiting for another tools/setup\n"
    second.communicate()
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert len([call for call in machine.called() if call.startswith("apt-get")]) == 1
