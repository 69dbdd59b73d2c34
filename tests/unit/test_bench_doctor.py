"""`bench-doctor`: what it says of clocks that are right and on ones that lie, in the image and as a verb."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_seed_make import CAPS
from warmstart import benchdoctor, container, engine, run
from warmstart.errors import ClockDoubtful, CommandFailed, NoDevice
from warmstart.run import Result
from warmstart.runline import Setting

SCRIPT = Path(__file__).parents[2] / "caches" / "bench_doctor.py"


@pytest.fixture(scope="module")
def doctor() -> Any:
    spec = importlib.util.spec_from_file_location("bench_doctor", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cuda:
    """torch.cuda on a pretended device: `read` turns a true time into what events say."""

    def __init__(self, clock: Any, read: Any, sleeping: float = 1.0, clearing: float = 0.5) -> None:
        self.clock, self.read = clock, read
        self.done = 0.0  # when the device will be idle
        self.tick = sleeping / 2_000_000  # milliseconds
        self.clearing = clearing  # of 256 MiB

    def work(self, milliseconds: float) -> None:
        self.clock.now += 0.005  # the host launches
        self.done = max(self.done, self.clock.now) + milliseconds

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.done)

    def _sleep(self, ticks: int) -> None:
        self.work(ticks * self.tick)

    def Event(self, enable_timing: bool) -> Any:
        cuda = self

        class Event:
            def record(self) -> None:
                self.at = max(cuda.clock.now, cuda.done)

            def elapsed_time(self, end: Any) -> float:
                return float(cuda.read(end.at - self.at))

        return Event()

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(name="Radeon", gcnArchName="gfx1151:sramecc-", multi_processor_count=40)


class Clock:
    """The host's clock, in milliseconds."""

    now = 1000.0

    def perf_counter(self) -> float:
        self.now += 0.0001
        return self.now / 1e3


@pytest.fixture
def diagnosed(doctor: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the script on a device whose events say `read(true time)`; exit code and measurements."""

    def call(read: Any = lambda true: true) -> tuple[int, dict[str, Any]]:
        clock = Clock()
        cuda = Cuda(clock, read)

        def tensor(size: int, **options: Any) -> Any:
            cleared = size * 4 / doctor.ESTIMATE_FLUSH * cuda.clearing
            return SimpleNamespace(zero_=lambda: cuda.work(cleared), add_=lambda number: cuda.work(0.006))

        torch = SimpleNamespace(
            cuda=cuda, empty=tensor, zeros=tensor, int=int, __version__="2", version=SimpleNamespace(hip="7")
        )
        monkeypatch.setattr(doctor, "time", clock)
        monkeypatch.setattr(doctor, "device", lambda: (torch, ""))
        code = doctor.main(["--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_a_right_clock(diagnosed: Any) -> None:
    code, told = diagnosed()
    assert (code, told["trusted"], told["doubts"]) == (0, True, [])
    assert told["arch"] == "gfx1151"
    assert 100 < told["estimate"]["launches"] < 500
    assert "can be trusted on Radeon" in told["summary"]
    assert "\n" not in told["summary"]


@pytest.mark.parametrize(
    ("read", "doubt"),
    [
        (lambda true: 0.0, "would fail"),
        (lambda true: 0.001, "times"),  # 125,000 launches and 122 TiB cleared for one configuration
        (lambda true: -true, "are zero, negative or no number"),
        (lambda true: math.nan, "would fail"),
        (lambda true: true / 2, "ms and reads"),
        (lambda true: true * 1.3, "ms reads"),
        (lambda true: true if true > 1 else 0.00001, "a tiny kernel reads"),
    ],
)
def test_a_clock_that_lies(diagnosed: Any, read: Any, doubt: str) -> None:
    code, told = diagnosed(read)
    assert (code, told["trusted"]) == (1, False)
    assert doubt in told["summary"]
    assert "with the hooks kernels are timed by the host" in told["summary"]
    assert "\n" not in told["summary"]


def test_single_bad_readings_are_no_reason_for_doubt(diagnosed: Any) -> None:
    """HIP's events are sometimes just below zero for short kernels."""
    count = [0]

    def read(true: float) -> float:
        count[0] += 1
        return -0.0001 if true < 1 and count[0] % 20 == 0 else true

    assert diagnosed(read)[0] == 0


def test_events_that_raise(diagnosed: Any) -> None:
    def read(true: float) -> float:
        raise RuntimeError("device event failed")

    assert diagnosed(read)[0] == 1


def test_no_gpu_is_one_line(doctor: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "device", lambda: (None, "torch sees none"))
    assert doctor.main([]) == 3
    assert capsys.readouterr().out == "no GPU: torch sees none\n"
    assert doctor.main(["--json"]) == 3
    assert json.loads(capsys.readouterr().out)["trusted"] is None


# --- the verb ------------------------------------------------------------------------------


def result(code: int, told: Any, stderr: str = "") -> Result:
    return Result(told if isinstance(told, str) else json.dumps(told), stderr, code, 1.0)


def test_the_verb_takes_the_images_word() -> None:
    told = {"trusted": True, "summary": "device events can be trusted"}
    assert benchdoctor.read(result(0, told)) == told


@pytest.mark.parametrize(
    ("done", "error", "line"),
    [
        (result(1, {"summary": "device events can't be trusted"}), ClockDoubtful, "device events can't be trusted"),
        (result(3, {"summary": "no GPU: torch sees none"}), NoDevice, "no GPU: torch sees none"),
        (result(64, "", "warmstart: this image is for gfx1201\n"), NoDevice, "this image is for gfx1201"),
        (result(2, "", "python: can't open file\n"), CommandFailed, "can't open file"),
        (result(0, ""), CommandFailed, "it printed no measurements"),
        (result(3, {"verdict": "no GPU"}), CommandFailed, "it printed no measurements"),  # of an older image
        (result(0, "[]"), CommandFailed, "it printed no measurements"),
    ],
)
def test_the_verbs_failures(done: Result, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line):
        benchdoctor.read(done)


NODES = ("/dev/kfd", "/dev/dri/renderD128")


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        (Setting(image="i", models="/m", selinux=True), []),
        (Setting(image="i", models="/m", devices=NODES), ["--group-add=keep-groups"]),
        (
            Setting(image="i", models="/m", devices=NODES, rootless=False, groups=(44, 105), selinux=True),
            ["--group-add=44", "--group-add=105", "--security-opt=label=disable"],
        ),
    ],
)
def test_only_the_gpus_devices_are_passed(setting: Setting, options: list[str]) -> None:
    assert benchdoctor.devices(setting) == [*(f"--device={node}" for node in setting.devices), *options]


@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_run_in_the_image(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    ran: list[list[str]] = []
    told = {"trusted": True, "summary": "device events can be trusted"}

    def start(words: list[str], **_: Any) -> Result:
        ran.append(words)
        return result(0, told)

    setting = Setting(image="i", models="/m", devices=NODES if gpu else ())
    monkeypatch.setattr(engine, "inspect", lambda *_: None)
    monkeypatch.setattr(container, "setting", lambda *_: setting)
    monkeypatch.setattr(run, "run", start)
    assert benchdoctor.examine(CAPS, "ref") == told
    (words,) = ran
    assert [word for word in words if word.startswith("--device=")] == [f"--device={node}" for node in setting.devices]
    assert words[-5:] == [
        "--entrypoint=/opt/warmstart/start",
        "ref",
        "/opt/venv/bin/python",
        "/opt/warmstart/caches/bench_doctor.py",
        "--json",
    ]
