"""`bench-doctor`: its verdict on clocks that are right and on ones that lie, in the image and as a verb."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warmstart import benchdoctor
from warmstart.errors import ClockDoubtful, CommandFailed, NoDevice
from warmstart.probe import Capabilities
from warmstart.run import Result

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
    assert "can be trusted on Radeon" in told["verdict"]
    assert "\n" not in told["verdict"]


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
    assert doubt in told["verdict"]
    assert "with the hooks kernels are timed by the host" in told["verdict"]
    assert "\n" not in told["verdict"]


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
    told = {"trusted": True, "verdict": "device events can be trusted"}
    assert benchdoctor.read(result(0, told)) == told


@pytest.mark.parametrize(
    ("done", "error", "line"),
    [
        (result(1, {"verdict": "device events can't be trusted"}), ClockDoubtful, "device events can't be trusted"),
        (result(3, {"verdict": "no GPU: torch sees none"}), NoDevice, "no GPU: torch sees none"),
        (result(64, "", "warmstart: this image is for gfx1201\n"), NoDevice, "this image is for gfx1201"),
        (result(2, "", "python: can't open file\n"), CommandFailed, "can't open file"),
        (result(0, ""), CommandFailed, "it printed nothing"),
    ],
)
def test_the_verbs_failures(done: Result, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line):
        benchdoctor.read(done)


def caps(rootless: bool = False, runtime: str = "/usr/bin/crun") -> Capabilities:
    return Capabilities(
        buildah="1", podman="5", features=(), rootless=rootless, runtime=runtime, storage="/x", cgroups=2
    )


def test_only_the_gpus_devices_are_passed(tmp_path: Path) -> None:
    assert benchdoctor.devices(caps(), tmp_path) == []
    (tmp_path / "dev/dri").mkdir(parents=True)
    for node in ("dev/kfd", "dev/dri/renderD128", "dev/dri/card0", "dev/null"):
        (tmp_path / node).touch()
    found = benchdoctor.devices(caps(rootless=True), tmp_path)
    assert found == ["--device=/dev/kfd", "--device=/dev/dri/renderD128", "--group-add=keep-groups"]


def test_groups_go_by_number() -> None:
    assert benchdoctor.groups(caps(), (44, 105)) == ["--group-add=44", "--group-add=105"]
    assert benchdoctor.groups(caps(rootless=True, runtime="/usr/bin/runc"), (105,)) == ["--group-add=105"]
