"""Every check of the doctor with a machine that is well, one that isn't, and one that can't be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.hosts import NAMES, device, plant, put
from warmstart import doctor, findings, presets, probe, run
from warmstart.errors import InputError
from warmstart.findings import Engine, Host, Image

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
HEALTHY = Engine(
    version="5.4.2",
    runtime="/usr/bin/crun",
    rootless=True,
    storage="/home/user/.local/share/containers",
    tried=True,
)
GROUP = "root:x:0:\nvideo:x:44:\nrender:x:105:\n"  # without the user

Change = Callable[[Path, Host], Any]  # alters the files, or returns another host


def machine(root: Path, name: str, image: Image | None = None) -> Host:
    """A host with a healthy engine."""
    plant(root, name)
    found = doctor.collect(ROOT, root, root, image or doctor.expected(ROOT, root))
    return msgspec.structs.replace(found, engine=HEALTHY)


def write(path: str, text: str) -> Change:
    return lambda root, host: put(root, path, text) and None


def blind(path: str) -> Change:
    """A folder in place of a file can't be read, not even by root."""

    def change(root: Path, host: Host) -> None:
        (root / path).unlink(missing_ok=True)
        (root / path).mkdir(parents=True)

    return change


def replaced(**values: Any) -> Change:
    return lambda root, host: msgspec.structs.replace(host, **values)


def changed(*changes: Change) -> Change:
    """Several changes, of which the last may return a host."""
    return lambda root, host: [change(root, host) for change in changes][-1]


def shut(root: Path, host: Host) -> None:
    put(root, "dev/kfd", "", 0o600)


def gone(root: Path, host: Host) -> None:
    (root / "dev/kfd").unlink()


def uncomputing(root: Path, host: Host) -> None:
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*"):
        (node / "properties").write_text("cpu_cores_count 16\n")


def unmeasured(root: Path, host: Host) -> None:
    for file in device(root, 1).glob("mem_info_*"):
        file.unlink()


def sized(root: Path, host: Host, **sizes: int) -> None:
    for name, size in sizes.items():
        put(root, f"sys/class/drm/card1/device/mem_info_{name}", f"{size}\n")


def lost(root: Path, host: Host) -> Host:
    return msgspec.structs.replace(host, state=root / "proc" / "meminfo")


def nothing(root: Path, host: Host) -> None:
    pass


KFD = "sys/class/kfd/kfd/topology/nodes/1/properties"
MES = "sys/class/drm/card1/device/fw_version/mes_fw_version"
DPM = "sys/class/drm/card1/device/power_dpm_force_performance_level"
HALO = "strix-halo-0.5g"
OLD = Image(source="x:gfx1151", arch="gfx1151", min_kernel="7.1", bad_firmware=("20251125",))

# check, machine, what is changed, severity, part of the evidence or of the remedy
CASES: list[tuple[str, str, Change, str, str]] = [
    ("gpus", HALO, nothing, "ok", "gfx1151 at 0000:c5:00.0, 40 CUs"),
    ("gpus", "mi300x-8", nothing, "ok", "8 GPUs: gfx942"),
    ("gpus", "cpu-only", nothing, "ok", "no AMD GPU"),
    ("gpus", HALO, uncomputing, "error", "card1 of AMD, none of it in KFD"),
    ("gpus", HALO, unmeasured, "unreadable", "no memory sizes"),
    ("gpus", HALO, blind(KFD), "unreadable", KFD),
    ("arch", HALO, nothing, "ok", "which is here"),
    ("arch", HALO, replaced(image=Image(source="x:gfx942", arch="gfx942")), "error", "make image ARCH=gfx1151"),
    ("arch", "cpu-only", replaced(image=Image(source="x:gfx942", arch="gfx942")), "error", "here is no AMD GPU"),
    ("arch", HALO, blind(KFD), "unreadable", KFD),
    ("igpu", HALO, nothing, "skipped", "not several"),
    ("igpu", "mi300x-8", nothing, "ok", "the first GPU is gfx942"),
    ("igpu", "r9700-igpu-first", nothing, "warning", "export ROCR_VISIBLE_DEVICES=GPU-40a92f3a2d070023"),
    ("igpu", "r9700-igpu-first", replaced(environment={"HIP_VISIBLE_DEVICES": "1"}), "ok", "HIP_VISIBLE_DEVICES=1"),
    ("igpu", "r9700-igpu-first", blind(KFD), "unreadable", KFD),
    ("kernel", HALO, nothing, "ok", "6.18.9-arch1-1, at least 6.18.4"),
    ("kernel", HALO, write("proc/sys/kernel/osrelease", "6.18.4\n"), "ok", "at least 6.18.4"),
    ("kernel", HALO, write("proc/sys/kernel/osrelease", "6.18.3-200.fc43\n"), "error", "older than 6.18.4"),
    ("kernel", HALO, write("proc/sys/kernel/osrelease", "6.9.12-generic\n"), "error", "older than 6.18.4"),
    ("kernel", HALO, replaced(image=OLD), "error", "older than 7.1, which gfx1151 needs (x:gfx1151)"),
    ("kernel", HALO, blind("proc/sys/kernel/osrelease"), "unreadable", "osrelease"),
    ("firmware", HALO, nothing, "ok", "mes 0x00000086"),
    ("firmware", "rx7600xt-desktop", nothing, "skipped", "no firmware is known to fail"),
    ("firmware", HALO, write(MES, "0x00000083\n"), "error", "page faults and hangs"),
    ("firmware", HALO, write(MES, "0x00010083\n"), "error", "mes firmware 0x00010083"),
    ("firmware", HALO, replaced(package="20251125-1"), "error", "linux-firmware 20251125-1 is installed"),
    ("firmware", HALO, replaced(package="20260110-1"), "ok", "linux-firmware 20260110-1"),
    ("firmware", HALO, blind(MES), "unreadable", MES),
    ("gtt", HALO, nothing, "ok", "0.5 GiB set aside by the firmware, 120.0 GiB of GTT, 125.0 GiB of RAM"),
    ("gtt", "mi300x-8", nothing, "skipped", "shares"),
    ("gtt", "strix-halo-96g", nothing, "ok", "engines use what is set aside"),
    # 62 GiB less 4 for programs, in pages of 4 KiB: 58 · 262,144.
    ("gtt", "strix-halo-64g", lambda r, h: sized(r, h, vram_total=32 * GIB, gtt_total=31 * GIB), "warning", "15204352"),
    ("gtt", HALO, lambda r, h: sized(r, h, gtt_total=124 * GIB), "warning", "ttm.pages_limit=31719424"),
    ("gtt", HALO, lambda r, h: sized(r, h, gtt_total=8 * GIB), "warning", "too little for most models"),
    ("gtt", HALO, lambda r, h: sized(r, h, vram_total=4 * GIB), "warning", "set aside 512 MiB"),
    ("gtt", HALO, unmeasured, "unreadable", "memory sizes"),
    ("command-line", HALO, nothing, "ok", "nothing on it"),
    ("command-line", HALO, write("proc/cmdline", "ro amd_iommu=pt\n"), "warning", "no value of amd_iommu"),
    ("command-line", HALO, write("proc/cmdline", "amdgpu.gttsize=126976\n"), "warning", "deprecated"),
    (
        "command-line",
        HALO,
        write("proc/cmdline", "amdgpu.gttsize=65536 ttm.pages_limit=31457280\n"),
        "error",
        "ttm.pages_limit says 120.0 GiB, amdgpu.gttsize 64.0 GiB",
    ),
    ("command-line", HALO, write("proc/cmdline", "nomodeset\n"), "error", "does not load"),
    ("command-line", HALO, write("proc/cmdline", "modprobe.blacklist=nouveau,amdgpu\n"), "error", "keeps"),
    ("command-line", "cpu-only", write("proc/cmdline", "amd_iommu=pt\n"), "ok", "nothing on it"),
    ("command-line", "cpu-only", write("proc/cmdline", "nomodeset\n"), "error", "does not load"),
    ("command-line", HALO, blind("proc/cmdline"), "unreadable", "proc/cmdline"),
    ("free-memory", HALO, nothing, "ok", "116.0 GiB of 125.0 GiB available"),
    ("free-memory", "r9700-igpu-first", nothing, "warning", "sudo systemctl stop llama.service"),
    ("free-memory", "mi300x-8", nothing, "warning", "podman stop 3f0c1d9a7b5e"),
    (
        "free-memory",
        HALO,
        write("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 900000 kB\nSwapTotal: 1000 kB\nSwapFree: 100 kB\n"),
        "warning",
        "swap in use",
    ),
    ("free-memory", HALO, blind("proc/meminfo"), "unreadable", "meminfo"),
    ("device-nodes", HALO, nothing, "ok", "/dev/kfd -rw-rw-rw-"),
    ("device-nodes", "cpu-only", nothing, "skipped", "uses no device"),
    ("device-nodes", HALO, gone, "error", "sudo modprobe amdgpu"),
    ("device-nodes", HALO, shut, "error", "/dev/kfd is -rw-------"),
    ("device-nodes", HALO, blind("proc/self/status"), "unreadable", "status"),
    ("groups", HALO, nothing, "ok", "user is in render and video"),
    (
        "groups",
        HALO,
        write("proc/self/status", "Uid:\t12345\t12345\nGroups:\t44 \n"),
        "warning",
        "log out and in again",
    ),
    (
        "groups",
        HALO,
        changed(write("proc/self/status", "Uid:\t12345\t12345\nGroups:\t\n"), write("etc/group", GROUP)),
        "warning",
        "sudo usermod -aG render,video user",
    ),
    ("groups", HALO, write("proc/self/status", "Uid:\t0\t0\nGroups:\t0\n"), "ok", "root needs none"),
    ("groups", HALO, blind("etc/group"), "unreadable", "etc/group"),
    ("engine", HALO, nothing, "ok", "podman 5.4.2, rootless, /usr/bin/crun; it starts containers"),
    ("engine", HALO, replaced(engine=Engine(version="5", runtime="crun")), "ok", "was not tried"),
    (
        "engine",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, conf="/w/containers.conf")),
        "ok",
        "it starts containers with /w/containers.conf alone",
    ),
    (
        "engine",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, isolation="chroot")),
        "warning",
        "starts no container",
    ),
    ("engine", HALO, replaced(engine=None), "skipped", "this machine itself"),
    ("engine", HALO, replaced(engine=Engine(problem="podman is not installed")), "error", "tools/setup run engine"),
    ("engine", HALO, replaced(engine=Engine()), "unreadable", "no version"),
    ("runtime", HALO, nothing, "ok", "crun: devices by keep-groups"),
    ("runtime", HALO, replaced(engine=Engine(version="4", runtime="runc", rootless=True)), "error", "install"),
    ("runtime", HALO, replaced(engine=Engine(version="4", runtime="runc")), "ok", "numbers of groups"),
    ("runtime", HALO, replaced(engine=Engine(problem="broken")), "unreadable", "runtime"),
    ("selinux", HALO, nothing, "ok", "no SELinux"),
    ("selinux", HALO, write("sys/fs/selinux/enforce", "0"), "ok", "permissive"),
    (
        "selinux",
        HALO,
        changed(write("sys/fs/selinux/enforce", "1"), write("sys/fs/selinux/booleans/container_use_devices", "0 0")),
        "warning",
        "sudo setsebool -P container_use_devices=true",
    ),
    (
        "selinux",
        HALO,
        changed(write("sys/fs/selinux/enforce", "1"), write("sys/fs/selinux/booleans/container_use_devices", "1 1")),
        "ok",
        "container_use_devices on",
    ),
    ("selinux", HALO, blind("sys/fs/selinux/enforce"), "unreadable", "enforce"),
    ("shm", HALO, nothing, "ok", "62.5 GiB"),
    ("shm", "mi300x-8", write("proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n"), "warning", "size=1024M"),
    ("shm", HALO, write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\n"), "error", "not mounted"),
    ("shm", HALO, blind("proc/mounts"), "unreadable", "proc/mounts"),
    ("disk", HALO, nothing, "ok", "100 GB for image and caches"),
    ("disk", HALO, replaced(facts=None), "warning", "make prune"),  # of a machine with little space: see the test
    ("disk", HALO, replaced(facts=None), "unreadable", "Input/output error"),
    ("leftovers", HALO, nothing, "ok", "none"),
    (
        "leftovers",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, exited=("ws-a",))),
        "warning",
        "podman rm ws-a",
    ),
    (
        "leftovers",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, exited=("warmstart-Qwen3-0.6B-smoke", "a", "b"))),
        "warning",
        "make down PRESET=Qwen3-0.6B-smoke; podman rm a b",
    ),
    (
        "leftovers",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, cut=("working containers a-working-container",))),
        "warning",
        "of a build that was cut off: working containers a-working-container make prune",
    ),
    (
        "leftovers",
        HALO,
        replaced(engine=msgspec.structs.replace(HEALTHY, cut=("x",), broken=("9d69", "9d70"), exited=("ws-a",))),
        "warning",
        "podman rmi 9d69 9d70; podman rm ws-a; make prune",
    ),
    ("leftovers", HALO, replaced(engine=Engine(problem="broken")), "unreadable", "containers"),
    ("leftovers", HALO, lost, "unreadable", "Not a directory"),
    ("environment", HALO, nothing, "ok", "nothing in it"),
    (
        "environment",
        HALO,
        replaced(environment={"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}),
        "error",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "environment",
        HALO,
        replaced(environment={"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}),
        "warning",
        "counts within",
    ),
    ("environment", HALO, replaced(environment={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}), "warning", "another arch"),
    ("environment", HALO, replaced(environment={"VLLM_USE_V1": "1"}), "warning", "There is only V1"),
    ("environment", HALO, replaced(environment={"LD_LIBRARY_PATH": "/opt/rocm/lib"}), "warning", "another ROCm"),
    ("environment", HALO, replaced(environment=None), "unreadable", "environ"),
    ("power", HALO, nothing, "ok", "GPU level auto"),
    ("power", HALO, write(DPM, "low\n"), "warning", f"echo auto | sudo tee /{DPM}"),
    ("power", HALO, write("sys/firmware/acpi/platform_profile", "low-power\n"), "warning", "echo performance"),
    ("power", HALO, write("etc/tuned/active_profile", "powersave\n"), "warning", "accelerator-performance"),
    (
        "power",
        HALO,
        changed(write("sys/class/power_supply/AC/type", "Mains\n"), write("sys/class/power_supply/AC/online", "0\n")),
        "warning",
        "on battery",
    ),
    ("power", HALO, blind(DPM), "unreadable", DPM),
    ("power", "cpu-only", nothing, "skipped", "nothing tells"),
]


def finding(name: str, root: Path, host: Host, change: Change) -> doctor.Row:
    """The finding of one check after a change; what lies in files is collected again."""
    other = change(root, host)
    if not isinstance(other, Host):
        again = doctor.collect(ROOT, root, root, host.image)
        other = msgspec.structs.replace(again, engine=host.engine, facts=host.facts)
    return next(row for row in doctor.report(other).findings if row.check == name)


@pytest.mark.parametrize(
    ("check", "name", "change", "severity", "told"),
    [case for case in CASES if case[0] != "disk"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check(tmp_path: Path, check: str, name: str, change: Change, severity: str, told: str) -> None:
    found = finding(check, tmp_path, machine(tmp_path, name), change)
    assert found.severity == severity, found
    assert told in f"{found.evidence} {found.remedy}", found
    assert bool(found.remedy) == (found.severity in {"warning", "error"}), found


@pytest.mark.parametrize(("free", "severity"), [(100e9, "ok"), (3e9, "warning"), (None, "unreadable")])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float | None, severity: str) -> None:
    def measured(path: Path) -> float:
        if free is None:
            raise OSError(5, "Input/output error")
        return free

    monkeypatch.setattr("warmstart.host.free_bytes", measured)
    found = finding("disk", tmp_path, machine(tmp_path, HALO), nothing)
    told = next(case[4] for case in CASES if case[0] == "disk" and case[3] == severity)
    assert found.severity == severity
    assert told in f"{found.evidence} {found.remedy}"


@pytest.mark.parametrize(("name", "short"), [("cpu-only", False), (HALO, True)])
def test_what_is_small_for_a_gpus_models_is_enough_for_a_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, short: bool
) -> None:
    host = machine(tmp_path, name)
    hub = presets.models_folder({"HOME": "/root", **(host.environment or {})})
    monkeypatch.setattr("warmstart.host.free_bytes", lambda path: 5e9 if str(path).endswith(hub) else 100e9)
    found = finding("disk", tmp_path, host, nothing)
    assert found.severity == ("warning" if short else "ok")
    assert "prune" not in found.remedy  # that frees nothing there
    assert (f"delete models below {hub}" in found.remedy and "HF_HOME" in found.remedy) == short


def test_a_processors_models_need_some_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.host.free_bytes", lambda path: 1e9)
    found = finding("disk", tmp_path, machine(tmp_path, "cpu-only"), nothing)
    assert "models want 2" in found.evidence
    assert found.remedy.startswith("make prune; podman image prune; delete models below ")


@pytest.mark.parametrize("check", doctor.CHECKS)
def test_every_check_was_seen_well_bad_and_blind(check: str) -> None:
    seen = {case[3] for case in CASES if case[0] == check}
    assert "ok" in seen
    assert seen & {"warning", "error"}
    assert "unreadable" in seen


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_gives_a_whole_report(tmp_path: Path, name: str) -> None:
    plant(tmp_path, name)
    report = doctor.examine(ROOT, tmp_path, tmp_path)
    assert [row.check for row in report.findings] == list(doctor.CHECKS)
    assert doctor.text(report).count("\n") >= len(doctor.CHECKS)
    assert "unreadable" not in {row.severity for row in report.findings}


def test_the_exit_code_is_the_worst_finding(tmp_path: Path) -> None:
    host = machine(tmp_path, HALO)
    codes = {}
    for severity in findings.ORDER:
        worst = doctor.Report("x", "gfx1151", severity, ())
        codes[severity] = doctor.code(worst)
    assert codes == {"ok": 0, "skipped": 0, "unreadable": 75, "warning": 73, "error": 74}
    put(tmp_path, "proc/cmdline", "amd_iommu=pt\n")
    assert doctor.report(host).worst == "warning"
    gone(tmp_path, host)
    assert doctor.report(host).worst == "error"


def test_a_root_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        doctor.examine(ROOT, tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        (
            "var/lib/dpkg/status",
            "Package: a\nVersion: 1\n\nPackage: firmware-amd-graphics\nStatus: ok\nDepends: x,\n y\n"
            "Version: 20251125-1\n",
            "20251125-1",
        ),
        ("var/lib/dpkg/status", "Package: linux-firmware\nVersion: 20260110.git1\n", "20260110.git1"),
        ("var/lib/dpkg/status", "Package: linux-firmware\nStatus: gone\n\nPackage: b\nVersion: 2\n", ""),
        ("var/lib/pacman/local/linux-firmware-amdgpu-20251125-2/desc", "", "20251125-2"),
        ("var/lib/pacman/local/linux-firmware-whence-20251125-2/desc", "", ""),
    ],
)
def test_the_installed_firmware(tmp_path: Path, path: str, text: str, version: str) -> None:
    put(tmp_path, path, text)
    assert doctor.package(tmp_path, live=False) == version


def test_the_disk_of_the_model_cache_is_looked_at(tmp_path: Path) -> None:
    for env in ({"HF_HOME": "/big/hf"}, {"XDG_CACHE_HOME": "/big"}):
        other = msgspec.structs.replace(machine(tmp_path, HALO).facts.disk, models=1e12)
        facts = msgspec.structs.replace(machine(tmp_path, HALO).facts, disk=other)
        host = msgspec.structs.replace(machine(tmp_path, HALO), environment=env, facts=facts)
        found = next(row for row in doctor.report(host).findings if row.check == "disk")
        assert presets.models_folder(env) in found.evidence
        assert "/big/" in found.evidence


def test_the_page_has_every_check_and_says_what_it_looks_at() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+?) \|", page, re.MULTILINE))
    told = {name: (check.__doc__ or "").strip().splitlines()[0] for name, check in doctor.CHECKS.items()}
    assert rows == told


@pytest.mark.parametrize("text", ["", "garbage\n", "-1\n", "a:b:c\n" * 9, "\0\0"])
def test_files_that_hold_anything_end_no_report(tmp_path: Path, text: str) -> None:
    host = machine(tmp_path, HALO)
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        before = file.read_text()
        file.write_text(text)
        again = doctor.collect(ROOT, tmp_path, tmp_path, host.image)
        assert len(doctor.report(again).findings) == len(doctor.CHECKS), file
        file.write_text(before)


def test_options_are_regular_expressions() -> None:
    assert all(re.compile(row.option) for row in findings.facts(ROOT).option)


def test_the_engine_is_what_was_tried_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a kept answer that still holds says that a container was started; nothing is tried for a report."""
    info = '{"version": {"Version": "4.9"}, "host": {"ociRuntime": {"name": "crun"}, "security": {"rootless": true}}'
    asked: list[str] = []

    def podman(words: list[str], **_: object) -> run.Result:
        asked.append(words[1])
        return run.Result(info + ', "store": {"graphRoot": "/s"}}' if words[1] == "info" else "", "", 0, 0.0)

    monkeypatch.setattr(run, "run", podman)
    assert doctor.engine(tmp_path) == Engine(version="4.9", runtime="crun", rootless=True, storage="/s")
    info = info.replace('{"name": "crun"}', "null")
    assert doctor.engine(tmp_path) == Engine(problem="podman finds no OCI runtime")
    (conf := tmp_path / "containers.conf").touch()
    caps = probe.Capabilities(
        buildah="1", podman="4.3", features=(), rootless=False, runtime="runc", storage="/s", cgroups=2, conf=str(conf)
    )
    kept = {"key": probe._key(), "capabilities": caps}
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(kept))
    asked.clear()
    found = doctor.engine(tmp_path)
    assert (found.version, found.tried, found.conf, asked) == ("4.3", True, str(conf), ["ps"])
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(kept | {"key": "of another machine"}))
    assert doctor.engine(tmp_path).tried is False
