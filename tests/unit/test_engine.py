"""What the engine is asked to do, word by word, and what its answers mean. The real engine: tests/engine/."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmstart import containersconf, engine, failure, leftovers, probe, proof, pruning, run, store
from warmstart.containersconf import Facts, Settings
from warmstart.engine import Capabilities
from warmstart.errors import (
    BuildFailed,
    CommandFailed,
    DiskFull,
    EngineBroken,
    EngineTooOld,
    Unreachable,
    WheelMismatch,
)
from warmstart.run import Result

HEALTHY = Capabilities(
    buildah="1.39.3",
    podman="5.4.2",
    features=("timestamp",),
    rootless=True,
    runtime="/usr/bin/crun",
    storage="/home/u/storage",
    cgroups=2,
)
PLAIN = Facts(
    may_raise_limits=True,
    files=1 << 20,
    processes=-1,
    pid_max=4194304,
    hybrid_cgroups=False,
    systemd=True,
    runtimes=("crun",),
    rootless=True,
)


@pytest.fixture
def recorded() -> Iterator[list[list[str]]]:
    run.dry_run()
    yield run.recorder.commands
    run.recorder.on, run.recorder.commands = False, []


# ---- argument lists ----------------------------------------------------------------------------------


def test_the_build_command(recorded: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    image = engine.build(
        HEALTHY,
        "FROM x\n",
        context=tmp_path / "context",
        tags=["localhost/x:1"],
        epoch=1700000000,
        log_file=tmp_path / "cpu" / "build.log",
        contexts={"b": tmp_path / "b", "a": tmp_path / "a"},
        secrets={"token": tmp_path / "token", "ca": tmp_path / "missing"},
        volumes=[(tmp_path / "wheels", "/wheels")],
        devices=["/dev/kfd"],
        network="none",
        target="os",
        no_cache=True,
    )
    work = tmp_path / "cpu"
    selinux = ["--security-opt=label=disable"] if os.path.exists("/sys/fs/selinux/enforce") else []
    assert image == ""
    assert recorded == [
        [
            *"buildah build --layers --force-rm --pull=never --format oci --timestamp 1700000000".split(),
            *["--iidfile", f"{work}/build.iid", "--file", f"{work}/build.containerfile"],
            *[
                "--secret",
                f"id=mark,src={work}/build.containerfile",
                "--annotation",
                "io.warmstart.build=cpu",
            ],
            *[f"--build-context=a={tmp_path}/a", f"--build-context=b={tmp_path}/b"],
            *[f"--secret=id=token,src={tmp_path}/token", f"--volume={tmp_path}/wheels:/wheels:ro"],
            *["--device=/dev/kfd", "--network=none", "--target=os", "--no-cache", *selinux],
            f"{tmp_path}/context",
        ]
    ]
    assert not work.exists()


def test_a_rootfs_is_imported_without_the_cache(recorded: list[list[str]], tmp_path: Path) -> None:
    engine.import_rootfs(HEALTHY, tmp_path / "os.tar", "localhost/base:1", 5, tmp_path / "cpu" / "base.log")
    assert "--no-cache" in recorded[0]
    assert recorded[0][recorded[0].index("--timestamp") + 1] == "5"


def test_the_run_command(recorded: list[list[str]], tmp_path: Path) -> None:
    engine.run_container(
        HEALTHY,
        "x",
        ["serve"],
        name="n",
        env={"A": "b c"},
        publish=["127.0.0.1:8000:8000"],
        options=["--init"],
    )
    assert recorded == [
        [
            *"podman run --detach --pull=never --cap-drop=all --security-opt=no-new-privileges".split(),
            *"--read-only --tmpfs=/tmp --name=n".split(),
            "--env=A=b c",
            *"--publish=127.0.0.1:8000:8000 --init x serve".split(),
        ]
    ]


def test_hold_makes_nothing_with_dry_run(recorded: list[list[str]], tmp_path: Path) -> None:
    with engine.hold(tmp_path, "cpu"):
        assert list(tmp_path.iterdir()) == []


def test_devices_in_a_chroot_are_warned_of(
    recorded: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caps = msgspec.structs.replace(HEALTHY, isolation="chroot")
    log_file = tmp_path / "x" / "build.log"
    engine.build(caps, "", context=tmp_path, tags=[], epoch=0, log_file=log_file, devices=["/dev/kfd"])
    assert "devices are ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"cgroups": 1}, {"PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}),
        ({"conf": "/s/c.conf", "variable": "CONTAINERS_CONF"}, {"CONTAINERS_CONF": "/s/c.conf"}),
        ({"isolation": "chroot"}, {"BUILDAH_ISOLATION": "chroot"}),
    ],
)
def test_environment(changes: dict[str, Any], expected: dict[str, str]) -> None:
    assert engine.environment(msgspec.structs.replace(HEALTHY, **changes)) == expected


# ---- what --help says --------------------------------------------------------------------------------

HELP = """
Flags:
      --annotation stringArray    set metadata for an image (default [])
  -f, --file strings              pathname or URL of a Dockerfile; see --timestamp
      --sbom string               scan working container
"""


def test_flags_are_read_from_help() -> None:
    assert probe.flags(HELP) == ("annotation", "file", "sbom")


def test_an_engine_with_all_that_is_needed() -> None:
    for name, version in (
        ("buildah", "1.28.2"),
        ("podman", "4.3.1"),
        ("podman", "5.0.0-rc1"),
        ("buildah", "?"),
    ):
        probe.check(name, version, tuple(probe.NEEDED[name]))


@pytest.mark.parametrize(
    ("name", "version", "lacking", "told"),
    [
        (
            "buildah",
            "1.23.1",
            ["build-context"],
            "buildah 1.23.1 is too old (lacks --build-context): 1.28 or",
        ),
        ("buildah", "1.27.9", [], "buildah 1.27.9 is too old: 1.28 or later is needed"),
        ("podman", "3.4.4", [], "podman 3.4.4 is too old: 4.3 or later is needed"),
        ("buildah", "dev", ["secret", "timestamp"], "(lacks --secret, --timestamp)"),
    ],
)
def test_an_engine_that_is_too_old(name: str, version: str, lacking: list[str], told: str) -> None:
    with pytest.raises(EngineTooOld) as caught:
        probe.check(name, version, tuple(flag for flag in probe.NEEDED[name] if flag not in lacking))
    assert told in caught.value.message


# ---- settings from facts -----------------------------------------------------------------------------


def test_limits_are_never_above_what_the_kernel_grants() -> None:
    facts = msgspec.structs.replace(PLAIN, files=20000, processes=96364, pid_max=32768)
    assert containersconf.ulimits(facts) == ("nofile=20000:20000", "nproc=32768:32768")
    facts = msgspec.structs.replace(PLAIN, files=-1, processes=-1, pid_max=99)
    assert containersconf.ulimits(facts) == ("nofile=1048576:1048576", "nproc=99:99")


def test_the_first_candidate_follows_from_the_facts() -> None:
    def first(**changes: Any) -> Settings:
        return containersconf.candidates(msgspec.structs.replace(PLAIN, **changes))[0]

    limits = containersconf.ulimits(PLAIN)
    assert first(may_raise_limits=False) == Settings(ulimits=limits)
    assert first(hybrid_cgroups=True, runtimes=("crun", "runc")) == Settings(runtime="runc")
    both = first(may_raise_limits=False, hybrid_cgroups=True, runtimes=("crun", "runc"))
    assert both == Settings(ulimits=limits, runtime="runc")
    assert first(hybrid_cgroups=True, runtimes=("crun",)).runtime != "runc"


def test_the_hosts_network_is_tried_last() -> None:
    tried = containersconf.candidates(PLAIN)
    own = [settings.network == "" for settings in tried]
    assert own == sorted(own, reverse=True)
    assert Settings() not in tried
    assert len(set(map(repr, tried))) == len(tried)


def test_the_file_says_what_the_settings_are() -> None:
    below = {
        "containers": {"env": ["A=1"], "pids_limit": 7},
        "engine": {"runtimes": {"a b": ["/x"]}},
        "x": True,
    }
    settings = Settings(ulimits=("nofile=1:1",), runtime="runc", cgroups="cgroupfs", network="host")
    assert tomllib.loads(containersconf.text(settings, below)) == {
        "x": True,
        "containers": {"env": ["A=1"], "pids_limit": 7, "default_ulimits": ["nofile=1:1"], "netns": "host"},
        "engine": {"runtimes": {"a b": ["/x"]}, "runtime": "runc", "cgroup_manager": "cgroupfs"},
    }


def test_existing_files_are_merged_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containersconf, "SYSTEM", (str(tmp_path / "usr.conf"), str(tmp_path / "etc.conf")))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "usr.conf").write_text('[engine]\nruntime = "crun"\n[containers]\nenv = ["A=1"]\n')
    (tmp_path / "etc.conf.d").mkdir()
    (tmp_path / "etc.conf.d" / "b.conf").write_text('[engine]\nruntime = "youki"\n')
    (tmp_path / "etc.conf.d" / "a.conf").write_text('[engine]\nruntime = "kata"\n')
    assert containersconf.existing() == {"engine": {"runtime": "youki"}, "containers": {"env": ["A=1"]}}
    (tmp_path / "home" / "containers").mkdir(parents=True)
    (tmp_path / "home" / "containers" / "containers.conf").write_text("engine = 1\nbroken")
    with pytest.raises(EngineBroken, match=r"containers\.conf can't be read"):
        containersconf.existing()


# ---- the decision ------------------------------------------------------------------------------------

Fault = Callable[[dict[str, Any]], str]


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Capabilities]:
    """What probe decides on a machine where `fault` tells the error for the settings in a containers.conf."""
    for name in (*probe.CONF, "BUILDAH_ISOLATION"):
        monkeypatch.delenv(name, raising=False)

    def decided(fault: Fault, *, builds_in_chroot: bool = False, facts: Facts = PLAIN) -> Capabilities:
        def told(folder: Path, env: Mapping[str, str], *, podman: bool = True) -> str:
            if "BUILDAH_ISOLATION" in env:
                assert not podman
                return "" if builds_in_chroot else "chroot: no"
            conf = next((Path(env[name]).read_text() for name in probe.CONF if name in env), "")
            return fault(tomllib.loads(conf))

        monkeypatch.setattr(proof, "fault", told)
        monkeypatch.setattr(containersconf, "facts", lambda: facts)
        monkeypatch.setattr(probe, "_variable", lambda folder: ("CONTAINERS_CONF", {"x": {"y": 1}}))
        return probe._prove(tmp_path, HEALTHY)

    return decided


def test_a_healthy_machine_is_left_alone(decide: Callable[..., Capabilities], tmp_path: Path) -> None:
    assert decide(lambda conf: "") == HEALTHY
    assert list(tmp_path.iterdir()) == []


def test_limits_are_lowered_where_they_are_too_high(decide: Callable[..., Capabilities], tmp_path: Path) -> None:
    found = decide(lambda conf: "" if "default_ulimits" in conf.get("containers", {}) else "setrlimit: denied")
    assert found == msgspec.structs.replace(HEALTHY, conf=str(tmp_path / "containers.conf"), variable="CONTAINERS_CONF")
    written = tomllib.loads((tmp_path / "containers.conf").read_text())
    assert set(written) == {"x", "containers", "engine"}
    assert "netns" not in written["containers"]
    assert [path.name for path in tmp_path.iterdir()] == ["containers.conf"]


def test_without_tools_for_networks_the_hosts_is_used_and_said(
    decide: Callable[..., Capabilities], capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def fault(conf: dict[str, Any]) -> str:
        tried.append(conf)
        return "" if conf.get("containers", {}).get("netns") == "host" else "netavark: No such file"

    assert decide(fault).network == "host"
    assert len(tried) == 2
    assert "share the host's network" in capsys.readouterr().err


def test_builds_in_a_chroot_are_the_last_resort(
    decide: Callable[..., Capabilities], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = decide(lambda conf: "no way", builds_in_chroot=True)
    assert (found.isolation, found.conf) == ("chroot", "")
    assert "without devices" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_when_nothing_works_the_first_error_is_told(decide: Callable[..., Capabilities]) -> None:
    with pytest.raises(EngineBroken, match="can't start a container: crun: no way") as caught:
        decide(lambda conf: "later" if conf else "crun: no way")
    assert "OCI runtime" in caught.value.hint


def test_a_file_of_a_time_when_one_was_needed_goes(decide: Callable[..., Capabilities], tmp_path: Path) -> None:
    (tmp_path / "containers.conf").touch()
    decide(lambda conf: "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("netavark: No such file or directory (os error 2)", "iptables"),
        ("newuidmap: write to uid_map failed", "/etc/subuid"),
        ("creating overlay mount to /x: invalid argument", "CONTAINERS_STORAGE_CONF"),
        ("crun: cgroups in hybrid mode not supported", "runtime"),
    ],
)
def test_hints(error: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    assert part in proof.hint(error)


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        ('Error: crun: no\ntime="…" level=warning msg="x"\n\n', "crun: no"),
        (
            'error running container: error setting rlimit type 7\n: exit status 1\ntime="…" level=error msg="EOF"\n'
            'Error: building at STEP "RUN x": while running runtime: exit status 1\n',
            "error running container: error setting rlimit type 7",
        ),
        ('Error: building at STEP "COPY x": no such file\n', 'building at STEP "COPY x": no such file'),
    ],
)
def test_the_last_line_that_says_something(stderr: str, told: str) -> None:
    failed = CommandFailed("failed")
    failed.result = Result("", stderr, 1, 0.0)  # type: ignore[attr-defined]
    assert proof.last_line(failed) == told
    assert proof.last_line(CommandFailed("took too long")) == "took too long"


def test_the_tiny_program_is_an_elf_file() -> None:
    for machine, number in (("x86_64", 62), ("aarch64", 183)):
        program = proof.tiny_program(machine)
        assert program[:5] == b"\x7fELF\x02"
        assert int.from_bytes(program[18:20], "little") == number
        assert int.from_bytes(program[24:32], "little") == 0x400000 + 120
        assert len(program) < 160
    assert proof.tiny_program("s390x") == b""


# ---- failures ----------------------------------------------------------------------------------------

STEPS = [
    "[1/2] STEP 1/2: FROM a AS b",
    "--> Using cache 0123456789ab",
    "[2/2] STEP 2/3: RUN --mount=type=bind,x y",
]
END = ['Error: building at STEP "RUN --mount=type=bind,x y": while running runtime: exit status 1']


@pytest.mark.parametrize(
    ("lines", "error", "told"),
    [
        (["before", "the reason", ""], BuildFailed, "step 'RUN y' failed: the reason"),
        (["tar: no space left on device"], DiskFull, "no space left on the disk in step 'RUN y'"),
        (
            [
                "error: Failed to download `six==1.16.0`",
                "  cause: Hash mismatch for `six==1.16.0`",
                "",
                "         Expected:",
                "           sha256:0000",
            ],
            WheelMismatch,
            "six==1.16.0: its sha256",
        ),
        (
            [
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
                "    six==1.16.0 from file:///w/six-1.16.0-py2.py3-none-any.whl (from -r r.txt (line 1)):",
            ],
            WheelMismatch,
            "six-1.16.0-py2.py3-none-any.whl: its sha256",
        ),
        (
            ["E: Failed to fetch http://mirror.example/debian/x.deb  Could not connect"],
            Unreachable,
            "mirror.example ",
        ),
        (
            ["W: Temporary failure resolving 'deb.example.org'"],
            Unreachable,
            "deb.example.org does not answer",
        ),
        (["curl: (6) Could not resolve host: index.example.org"], Unreachable, "index.example.org does not"),
        (
            ["dial tcp: lookup reg.example.com on 1.1.1.1:53: no such host"],
            Unreachable,
            "reg.example.com does",
        ),
        (
            ["fatal: unable to access 'https://x.org/': Could not resolve host: x.org"],
            Unreachable,
            "x.org does",
        ),
        (["curl: (7) Failed to connect to localhost port 1 after 0 ms"], Unreachable, "localhost does not"),
        (["  cause: Failed to fetch: https://i.example:8/simple/x/"], Unreachable, "i.example:8 does not"),
        (["error: Failed to download `six==1.16.0`", "No such file"], BuildFailed, "No such file"),
        (["dial tcp 127.0.0.1:1: connect: connection refused"], Unreachable, "127.0.0.1:1 does not answer"),
    ],
)
def test_failures_are_told_apart(lines: list[str], error: type[Exception], told: str) -> None:
    found = failure.explain([*STEPS, *lines, *END], Path("/s/build.log"), Path("/s/build.sh"), 1)
    assert type(found) is error
    assert told in found.message
    assert "\n" not in found.message
    assert "/s/build.log" in found.hint
    assert "/s/build.sh" in found.hint


def test_without_output_buildahs_own_error_is_told() -> None:
    lines = ["STEP 1/1: FROM localhost/none", "Error: creating build container: no such image"]
    found = failure.explain(lines, Path("l"), Path("s"), 125)
    assert found.message == "step 'FROM localhost/none' failed: creating build container: no such image"
    assert failure.explain([], Path("l"), Path("s"), 137).message.endswith("exit code 137")


def test_a_step_after_output_without_line_break_is_seen() -> None:
    found = failure.explain(["no breakSTEP 2/3: RUN x", "why"], Path("l"), Path("s"), 1)
    assert found.message == "step 'RUN x' failed: why"


# ---- what is old -------------------------------------------------------------------------------------


def image(name: str, parent: str = "", names: tuple[str, ...] = (), **labels: str) -> dict[str, Any]:
    return {"Id": name, "ParentId": parent, "Names": list(names), "Labels": labels}


def test_old_images_go_children_first_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "ID", re.compile(r"\w+"))  # names instead of digests, to be read
    listed = [
        image("base", names=("localhost/base:1",)),
        image("step1", "base"),
        image("old2", "step1"),
        image("old3", "old2", names=("localhost/w:cpu-000000000001",), **{"io.warmstart.arch": "cpu"}),
        image("new2", "step1"),
        image("new3", "new2", names=("localhost/w:cpu-000000000002",), **{"io.warmstart.arch": "cpu"}),
        image("pulled", names=("registry.example/w:1",), **{"io.warmstart.arch": "cpu"}),
        image("gfx", names=("localhost/w:gfx",), **{"io.warmstart.arch": "gfx1151"}),
        image("lost", names=("localhost/w:cpu-000000000000",), **{"io.warmstart.arch": "cpu"}),
        image("current", names=("localhost/w:cpu", "localhost/w:cpu-000000000004"), **{"io.warmstart.arch": "cpu"}),
        image("foreign", "base"),
        image("seed", names=("localhost/warmstart/seed:x",), **{"io.warmstart.arch": "cpu", "io.warmstart.seed": "1"}),
    ]
    (tmp_path / "cpu").mkdir()
    steps = "= base step1 old2 old3\n! step1 new2\n= base step1 new2 new3\n"
    (tmp_path / "cpu" / "build.steps").write_text(steps)
    old = pruning._old({found["Id"]: found for found in listed}, tmp_path)
    assert old == ["old3", "old2"]
    (tmp_path / "cpu" / "image.json").write_text(json.dumps({"image_id": "sha256:new3"}))
    old = pruning._old({found["Id"]: found for found in listed}, tmp_path)
    assert old == ["old3", "old2", "lost"]  # of an arch with a record, its label is enough


@pytest.mark.parametrize("noted", ["! 3", "! 3\n", "! ", "\n! 33333333333", b"\xff\xfe\n"])
def test_a_broken_note_names_no_image(tmp_path: Path, noted: str | bytes) -> None:
    foreign = image("3" * 64, names=("localhost/foreign/mine:1",))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "build.steps").write_bytes(noted if isinstance(noted, bytes) else noted.encode())
    (tmp_path / "x" / "image.json").write_bytes(b"{")
    assert pruning._old({foreign["Id"]: foreign}, tmp_path) == []


def test_the_owner_of_a_build(tmp_path: Path) -> None:
    told = leftovers._owner(json.dumps({"pid": 7, "command": "build.py image cpu", "since": 0}))
    assert told.startswith("pid 7 (build.py image cpu) since ")
    assert leftovers._owner("") == "another process"
    assert leftovers._owner('{"pid": 7}') == "another process"


def test_only_containers_with_the_mark_are_ours(tmp_path: Path) -> None:
    mark = tmp_path / 'a "b"' / "build.containerfile"
    for name, source in (("ours", mark), ("theirs", tmp_path / "other" / "build.containerfile")):
        folder = tmp_path / "overlay-containers" / name / "userdata"
        folder.mkdir(parents=True)
        options = {"CommonBuildOpts": {"Secrets": [f"id=mark,src={source}"]}}
        (folder / "buildah.json").write_text(json.dumps(options))
    assert store.marked(tmp_path, mark) == ["ours"]


# ---- the image store ---------------------------------------------------------------------------------

GONE = "9d69" * 16
ERROR = f'locating item named "manifest" for image with ID "{GONE}" (consider removing the image to resolve the issue)'
OTHER = "0" * 64


@pytest.mark.parametrize(
    ("stderr", "code", "image"),
    [
        (f"Error: {ERROR}: file does not exist", 125, GONE),
        (f'time="2026" level=error msg="{ERROR}"'.replace('"manifest"', '\\"manifest\\"'), 125, GONE),
        (f'Error: retrieving parent of image "{OTHER}": you may need to remove the image: {ERROR}', 125, GONE),
        (f"level=warning {ERROR}", 0, ""),
        (f'Error: locating image with ID "{GONE}"', 125, ""),
        (ERROR.replace('"manifest"', '"signature"'), 125, ""),
    ],
)
def test_the_image_that_podman_complains_of(stderr: str, code: int, image: str) -> None:
    assert store.broken_image(Result("", stderr, code, 0.0)) == image


class Podman:
    """Answers as podman does with broken images: the first of them ends every listing."""

    def __init__(self, storage: Path, *broken: str) -> None:
        self.storage, self.broken, self.removes, self.calls = storage, list(broken), True, list[list[str]]()
        images = [{"id": image} for image in (*broken, OTHER)]
        put = storage / "overlay-images"
        (put / OTHER).mkdir(parents=True)
        (put / OTHER / "manifest").write_text("{}")
        (put / "images.json").write_text(json.dumps(images))

    def __call__(self, words: list[str], *, ok: Any = (0,), **_: object) -> Result:
        self.calls.append(words)
        if words[1] == "rmi":
            if self.removes:
                self.broken.remove(words[-1])
            return Result("", "", 0 if self.removes else 125, 0.0)
        told = Result(f'[{{"Id": "{OTHER}"}}]', "", 0, 0.0)
        if self.broken:
            told = Result("", ERROR.replace(GONE, self.broken[0]), 125, 0.0)
        if told.code not in ok:
            failed = CommandFailed("podman failed")
            failed.result = told  # type: ignore[attr-defined]
            raise failed
        return told


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("warmstart.store.time.sleep", slept.append)
    return slept


def test_several_broken_images_cost_one_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    podman = Podman(tmp_path, "1" * 64, "2" * 64, "3" * 64)
    monkeypatch.setattr(run, "run", podman)
    caps = msgspec.structs.replace(HEALTHY, storage=str(tmp_path))
    assert engine.images(caps) == [{"Id": OTHER}]
    assert [words[-1] for words in podman.calls if words[1] == "rmi"] == ["1" * 64, "2" * 64, "3" * 64]
    assert pauses == [store.PAUSE]
    podman.broken.append("4" * 64)  # a new one is waited for again
    assert store.ask(caps, "image", "inspect", "x", ok=(0, 125)).code == 0
    assert pauses == [store.PAUSE] * 2


@pytest.mark.parametrize("why", ["it can be read", "podman can't remove it"])
def test_a_broken_image_that_stays_is_told_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], why: str
) -> None:
    podman = Podman(tmp_path, GONE)
    podman.removes = False
    monkeypatch.setattr(run, "run", podman)
    if why == "it can be read":
        (tmp_path / "overlay-images" / GONE).mkdir()
        (tmp_path / "overlay-images" / GONE / "manifest").touch()
    caps = msgspec.structs.replace(HEALTHY, storage=str(tmp_path))
    with pytest.raises(CommandFailed, match=f"can't read image {GONE[:12]}") as caught:
        engine.images(caps)
    assert caught.value.hint == f"podman rmi --force {GONE}"
    assert any(words[1] == "rmi" for words in podman.calls) == (why != "it can be read")


def test_only_what_lasts_is_left_over(pauses: list[float]) -> None:
    looks = iter([{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2}])
    assert store.lasting(lambda: next(looks)) == {"a": 1}
    assert pauses == [store.PAUSE]
    assert store.lasting(dict) == {}
    assert len(pauses) == 1


def test_buildahs_temporary_names_are_told_from_others(tmp_path: Path) -> None:
    names = {
        "ours": [f"docker.io/library/{'a' * 64}-tmp:latest"],
        "running": [f"localhost/{'b' * 64}-tmp:latest"],
        "foreign": [f"docker.io/library/{'c' * 64}-tmp:latest"],
        "named": ["docker.io/library/mine-tmp:latest", f"localhost/x:{'a' * 64}-tmp", "localhost/x:1"],
    }
    for image, build in (("ours", "cpu"), ("running", "gfx1151"), ("foreign", ""), ("named", "cpu")):
        (tmp_path / "overlay-images" / image).mkdir(parents=True)
        manifest = {"annotations": {"io.warmstart.build": build}} if build else {}
        (tmp_path / "overlay-images" / image / "manifest").write_text(json.dumps(manifest))
    listed = [{"id": image, "names": names[image]} for image in names]
    (tmp_path / "overlay-images" / "images.json").write_text(json.dumps(listed))
    assert store.temporary(tmp_path, {"cpu"}) == {"ours": names["ours"]}
    assert set(store.temporary(tmp_path, {"cpu", "gfx1151"})) == {"ours", "running"}
