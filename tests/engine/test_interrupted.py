"""Builds that are broken off, in each phase and each way: nothing is left, and the build can be repeated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import EPOCH
from warmstart import engine
from warmstart.engine import Capabilities
from warmstart.leftovers import _processes
from warmstart.run import run
from warmstart.store import made, marked, unreadable

ROOT = Path(__file__).parents[2]
TAG = "localhost/warmstart-test:interrupted"

# argv: the .warmstart folder, the name, the base, the Containerfile. Prints the image's id.
BUILD = """
import sys
from pathlib import Path
from warmstart import engine, log, signals
from warmstart.errors import WarmstartError

state, name, containerfile = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
log.configure(quiet=True)
signals.catch()
caps = engine.probe(state)
folder = state / name
try:
    with engine.hold(state, name):
        print(engine.build(
            caps, containerfile, context=folder / "context", tags=[sys.argv[4]], epoch=int(sys.argv[5]),
            log_file=folder / "build.log", volumes=[(folder / "gate", "/gate")],
        ))
except WarmstartError as failure:
    print(type(failure).__name__, failure.message)
    sys.exit(failure.code)
"""

# Phase → a step that stays in it for a while, and what the log shows just before.
BIG = 120_000_000
PHASES = {
    "run": ("RUN echo begin; [ -e /gate/open ] || sleep 30; echo end > /end", "begin"),
    "copy": ("COPY big /big", "COPY big /big"),
    "commit": (f"RUN head -c {BIG} /dev/zero > /zeros; echo begin", "begin"),
}


class Build:
    """A build in a process of its own."""

    def __init__(self, state: Path, name: str, containerfile: str) -> None:
        self.folder = state / name
        self.process = subprocess.Popen(
            [sys.executable, "-c", BUILD, str(state), name, containerfile, TAG, str(EPOCH)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def logged(self, text: str) -> bool:
        log = self.folder / "build.log"
        return log.exists() and any(line.endswith(text) for line in log.read_text().splitlines())

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=300)
        return self.process.returncode, out.strip()


@pytest.fixture
def name(state: Path, base: str, request: pytest.FixtureRequest) -> str:
    name = f"i{abs(hash(request.node.name))}"
    for folder in ("context", "gate"):
        (state / name / folder).mkdir(parents=True)
    with (state / name / "context" / "big").open("wb") as file:
        file.truncate(BIG)
    return name


def until(true: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def left(caps: Capabilities, state: Path, name: str) -> list[str]:
    """What is left of a build: working containers, mounts, processes, temporary files, a tag."""
    storage = Path(caps.storage)
    found = [f"container {c}" for c in marked(storage, state / name / "build.containerfile")]
    working = json.loads((storage / "overlay-containers" / "containers.json").read_bytes() or "[]")
    found += [f"working container {c['id']}" for c in working]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found += [f"mount {m}" for m in mounts if f"{storage}/overlay/" in m or str(state / name) in m]
    found += [f"process {process}" for process in _processes(state / name / "tmp")]
    running = json.loads(run([caps.runtime, "list", "--format", "json"]).stdout) or []
    found += [f"OCI container {c['id']}" for c in running if c["bundle"].startswith(str(state / name))]
    found += [f"file {f}" for f in (state / name / "tmp").glob("*")]
    found += [f"tag {TAG}"] if engine.exists(caps, TAG) else []
    return found


def layers_of_no_image(storage: Path) -> set[str]:
    layers = json.loads((storage / "overlay-layers" / "layers.json").read_bytes())
    images = json.loads((storage / "overlay-images" / "images.json").read_bytes())
    parents = {layer["id"]: layer.get("parent", "") for layer in layers}
    used: set[str] = set()
    for image in images:
        for top in (image["layer"], *image.get("mapped-layers", ())):
            while top and top not in used:
                used.add(top)
                top = parents.get(top, "")
    return set(parents) - used


WAYS = [
    ("run", "SIGINT"),
    ("copy", "SIGINT"),
    ("commit", "SIGINT"),
    ("run", "SIGTERM"),
    ("commit", "SIGTERM"),
    ("run", "SIGKILL"),
    ("copy", "SIGKILL"),
    ("commit", "SIGKILL"),
    ("run", "power cut"),
    ("commit", "power cut"),
]
CODES = {"SIGINT": (130, "Interrupted"), "SIGTERM": (143, "Terminated")}


# A module that `build.py` finds in the place of Python's own, and what then happens while it is loaded or at the end.
STAYS = "import time; print('here', flush=True); time.sleep(30)"
MOMENTS = {
    "imports": ("argparse.py", STAYS),
    "end": ("sitecustomize.py", f"import atexit; atexit.register(exec, {STAYS!r}, {{}})"),
}


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_before_and_after_the_work_it_is_one_line_too(
    tmp_path: Path, moment: str, number: signal.Signals, flags: list[str]
) -> None:
    name, text = MOMENTS[moment]
    (tmp_path / name).write_text(text)
    process = subprocess.Popen(
        [sys.executable, "build.py", "archs", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert any(line == "here\n" for line in process.stdout)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    told = "stopped by Ctrl-C" if number == signal.SIGINT else "stopped by SIGTERM"
    assert process.returncode == 128 + number
    assert err.splitlines() == [f"error: {told}", "  hint: it is safe to run it again"]
    if flags:
        event = {"event": "error", "message": told, "hint": "it is safe to run it again", "code": 128 + number}
        assert json.loads(out) == event
    else:
        assert out == ""


@pytest.mark.parametrize(("phase", "way"), WAYS)
def test_nothing_is_left_and_the_build_can_be_repeated(
    caps: Capabilities, base: str, state: Path, name: str, phase: str, way: str
) -> None:
    engine.remove(caps, TAG)
    line, before = PHASES[phase]
    text = f"FROM {base}\n{line} # {name}\n" if phase != "copy" else f"FROM {base}\n{line}\n"
    build = Build(state, name, text)
    assert until(lambda: build.logged(before) or build.process.poll() is not None)
    assert build.process.poll() is None
    time.sleep(0.05)
    if way == "power cut":  # nobody is there to clean up
        build.process.send_signal(signal.SIGSTOP)
        for process in (*_processes(state / name / "tmp"), build.process.pid):
            with contextlib.suppress(ProcessLookupError):  # it ended because another did
                os.kill(process, signal.SIGKILL)
    else:
        build.process.send_signal(getattr(signal, way))
    code, out = build.end()
    if way in CODES:
        assert (code, out.split()[0]) == CODES[way]
    else:  # the next build, whatever it builds, removes what is left
        assert code == -signal.SIGKILL
        if way == "power cut":
            assert left(caps, state, name) != []
        assert Build(state, name, f"FROM {base}\nRUN true\n").end()[0] == 0
        engine.remove(caps, TAG)
    assert left(caps, state, name) == []
    (state / name / "gate" / "open").touch()
    code, image = Build(state, name, text).end()
    assert code == 0
    assert engine.inspect(caps, TAG).image_id == image
    assert layers_of_no_image(Path(caps.storage)) == set()
    engine.remove(caps, TAG)
    assert left(caps, state, name) == []


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_an_image_that_was_broken_off_is_gone_after_it(
    caps: Capabilities, base: str, state: Path, name: str, way: signal.Signals
) -> None:
    """The image is one that a step made, without the manifest that buildah writes last."""
    text = f"FROM {base}\nLABEL step={name}\nRUN echo begin; [ -e /gate/open ] || sleep 30\n"
    build = Build(state, name, text)
    assert until(lambda: build.logged("begin"))
    (step,) = made(caps, name)
    next(Path(caps.storage).glob(f"*-images/{step}/manifest")).unlink()
    assert unreadable(Path(caps.storage)) == {step}
    build.process.send_signal(way)
    code, _ = build.end()
    assert code == (130 if way == signal.SIGINT else -way)
    (state / name / "gate" / "open").touch()
    if way == signal.SIGINT:
        assert unreadable(Path(caps.storage)) == set()
    assert Build(state, name, text).end()[0] == 0
    assert unreadable(Path(caps.storage)) == set()
    assert engine.exists(caps, TAG)
    engine.remove(caps, TAG)
    assert left(caps, state, name) == []
