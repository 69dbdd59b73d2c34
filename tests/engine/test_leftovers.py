"""One build of a name at a time, and what prune frees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import EPOCH
from warmstart import engine
from warmstart.engine import Capabilities
from warmstart.errors import Busy
from warmstart.run import run

ROOT = Path(__file__).parents[2]
NAME = "localhost/warmstart-test"

HOLDER = """
import sys, time
from pathlib import Path
from warmstart import engine
with engine.hold(Path(sys.argv[1]), "cpu"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(state: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(state), str(seconds)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_build_waits_and_says_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = holder(tmp_path, 1)
    with engine.hold(tmp_path, "cpu"):
        assert first.wait(timeout=1) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith(
        f"cpu: waiting for pid {first.pid} (-c {tmp_path} 1) since {time.strftime('%H:')}"
    )


def test_another_name_is_free(tmp_path: Path) -> None:
    first = holder(tmp_path, 20)
    with engine.hold(tmp_path, "gfx1151", wait=False):
        pass
    first.kill()
    first.wait()


def test_without_waiting_it_is_busy(tmp_path: Path) -> None:
    first = holder(tmp_path, 20)
    with (
        pytest.raises(Busy, match=f"cpu is being built by pid {first.pid} "),
        engine.hold(tmp_path, "cpu", wait=False),
    ):
        pass
    first.kill()
    first.wait()


def test_a_dead_owner_does_not_block(tmp_path: Path) -> None:
    first = holder(tmp_path, 20)
    first.kill()
    first.wait()
    with engine.hold(tmp_path, "cpu", wait=False):
        assert json.loads((tmp_path / "cpu" / "build.lock").read_text())["pid"] != first.pid


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    first = holder(tmp_path, 30)
    words = [
        sys.executable,
        "-c",
        "from warmstart import signals; signals.catch()\n" + HOLDER,
        str(tmp_path),
        "0",
    ]
    second = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert second.stderr
    assert "waiting for pid" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    _, told = second.communicate(timeout=10)
    assert "Interrupted: stopped by Ctrl-C" in told
    first.kill()
    first.wait()


def ids() -> set[str]:
    return set(run(["podman", "images", "--all", "--quiet", "--no-trunc"]).stdout.split())


def test_prune_frees_what_the_newest_builds_do_not_need(
    caps: Capabilities, base: str, tmp_path: Path
) -> None:
    state, work, known = tmp_path, tmp_path / "cpu", ids()
    (work / "context").mkdir(parents=True)

    def build(text: str, *tags: str, folder: Path = work) -> str:
        return engine.build(
            caps, text, context=work / "context", tags=tags, epoch=EPOCH, log_file=folder / "build.log"
        )

    text = "FROM {base}\nRUN echo prune\nRUN echo v{n} > /v\nLABEL io.warmstart.arch=cpu\n"
    with engine.hold(state, "cpu"):
        old = build(text.format(base=base, n=1), f"{NAME}:cpu", f"{NAME}:cpu-1")
        new = build(text.format(base=base, n=2), f"{NAME}:cpu", f"{NAME}:cpu-2")
    (work / "image.json").write_text(json.dumps({"image_id": new}))
    cache = work / "tmp" / "buildah-cache" / "x"
    cache.mkdir(parents=True)
    (cache / "big").write_bytes(b"x" * 1000)
    elsewhere = tmp_path.parent / (tmp_path.name + "-elsewhere")
    others = build(f"FROM {base}\nRUN echo somebody else\n", f"{NAME}:other", folder=elsewhere / "cpu")

    before = ids()
    freed = engine.prune(caps, state)
    gone = before - ids()
    assert old in gone
    assert freed["images"] == len(gone)
    assert len(gone - known) == 2  # the image and the step before its label; other tests leave steps, too
    assert engine.inspect(caps, others).tags == (f"{NAME}:other",)
    assert engine.inspect(caps, f"{NAME}:cpu").image_id == new
    assert engine.exists(caps, base)
    assert not cache.parent.exists()
    assert build(text.format(base=base, n=2)) == new
    assert (work / "build.log").read_text().count("Using cache") == 3
    assert engine.prune(caps, state)["images"] == 0


def test_prune_counts_what_it_removed_and_nobody_elses_writing(
    caps: Capabilities, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, size = tmp_path / "counted", 3_000_000
    (work / "context").mkdir(parents=True)
    text = "FROM {base}\nRUN head -c {size} /dev/zero > /v{n}\nLABEL io.warmstart.arch=counted\n"
    for n in (1, 2):  # the second is the one to stay
        with engine.hold(tmp_path, "counted"):
            image = engine.build(
                caps,
                text.format(base=base, n=n, size=size),
                context=work / "context",
                tags=[f"{NAME}:counted"],
                epoch=EPOCH,
                log_file=work / "build.log",
            )
    (work / "image.json").write_text(json.dumps({"image_id": image}))
    cache = work / "tmp" / "buildah-cache"
    cache.mkdir(parents=True)
    (cache / "big").write_bytes(b"x" * 500_000)

    def run_and_write(words: Sequence[str], **options: Any) -> Any:
        if words[:2] == ["podman", "rmi"]:
            (tmp_path / "other").write_bytes(b"x" * 50_000_000)
        return run(words, **options)

    monkeypatch.setattr("warmstart.leftovers.run.run", run_and_write)
    freed = engine.prune(caps, tmp_path)
    assert freed["images"] == 2  # the image and the step before its label
    assert (tmp_path / "other").exists()
    assert 0 <= freed["bytes"] - size - 500_000 < 20_000  # beside the file: the folders of its layer, as tar has them


def test_prune_leaves_a_running_build_alone(caps: Capabilities, tmp_path: Path) -> None:
    first = holder(tmp_path, 20)
    try:
        assert engine.prune(caps, tmp_path) == {"bytes": 0, "images": 0}
    finally:
        first.kill()
        first.wait()
