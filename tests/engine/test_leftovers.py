"""One build of a name at a time, and what prune frees."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import EPOCH
from warmstart import doctor, engine, leftovers, log, store
from warmstart import run as process
from warmstart.engine import Capabilities
from warmstart.errors import Busy, EngineBroken
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


def test_the_second_build_waits_and_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = {time.strftime("%H:")}
    first = holder(tmp_path, 300)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        first.kill()

    monkeypatch.setattr(log, "info", tell)
    with engine.hold(tmp_path, "cpu"):
        assert first.wait(timeout=60) == -signal.SIGKILL
    hours.add(time.strftime("%H:"))
    assert len(told) == 1
    begin = f"cpu: waiting for pid {first.pid} (-c {tmp_path} 300) since "
    assert told[0].startswith(tuple(begin + hour for hour in hours))


def test_another_name_is_free(tmp_path: Path) -> None:
    first = holder(tmp_path, 300)
    with engine.hold(tmp_path, "gfx1151", wait=False):
        pass
    first.kill()
    first.wait()


def test_without_waiting_it_is_busy(tmp_path: Path) -> None:
    first = holder(tmp_path, 300)
    with (
        pytest.raises(Busy, match=f"cpu is being built by pid {first.pid} "),
        engine.hold(tmp_path, "cpu", wait=False),
    ):
        pass
    first.kill()
    first.wait()


def test_who_only_asks_whether_a_build_runs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` and `prune` hold the lock for the moment of the question."""
    (tmp_path / "cpu").mkdir()
    with (tmp_path / "cpu" / "build.lock").open("w") as asks:
        fcntl.flock(asks, fcntl.LOCK_SH)
        answered = types.SimpleNamespace(sleep=lambda _: fcntl.flock(asks, fcntl.LOCK_UN), time=time.time)
        monkeypatch.setattr(leftovers, "time", answered)
        with engine.hold(tmp_path, "cpu", wait=False):
            assert leftovers._held(tmp_path / "cpu" / "build.lock")


def test_a_dead_owner_does_not_block(tmp_path: Path) -> None:
    first = holder(tmp_path, 300)
    first.kill()
    first.wait()
    with engine.hold(tmp_path, "cpu", wait=False):
        assert json.loads((tmp_path / "cpu" / "build.lock").read_text())["pid"] != first.pid


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    first = holder(tmp_path, 300)
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
    _, told = second.communicate(timeout=60)
    assert "Interrupted: stopped by Ctrl-C" in told
    first.kill()
    first.wait()


def ids() -> set[str]:
    return set(run(["podman", "images", "--all", "--quiet", "--no-trunc"]).stdout.split())


def test_prune_frees_what_the_newest_builds_do_not_need(caps: Capabilities, base: str, tmp_path: Path) -> None:
    state, work, known = tmp_path, tmp_path / "cpu", ids()
    (work / "context").mkdir(parents=True)

    def build(text: str, *tags: str, folder: Path = work) -> str:
        return engine.build(caps, text, context=work / "context", tags=tags, epoch=EPOCH, log_file=folder / "build.log")

    text = "FROM {base}\nRUN echo prune\nRUN echo v{n} > /v\nLABEL io.warmstart.arch=cpu\n"
    with engine.hold(state, "cpu"):
        old = build(text.format(base=base, n=1), f"{NAME}:cpu", f"{NAME}:cpu-vllm1-000000000001")
        new = build(text.format(base=base, n=2), f"{NAME}:cpu", f"{NAME}:cpu-vllm1-000000000002")
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

    monkeypatch.setattr("warmstart.pruning.run.run", run_and_write)
    freed = engine.prune(caps, tmp_path)
    assert freed["images"] == 2  # the image and the step before its label
    assert (tmp_path / "other").exists()
    assert 0 <= freed["bytes"] - size - 500_000 < 20_000  # beside the file: the folders of its layer, as tar has them


def test_prune_leaves_a_running_build_alone(caps: Capabilities, tmp_path: Path) -> None:
    first = holder(tmp_path, 300)
    try:
        assert engine.prune(caps, tmp_path) == {"bytes": 0, "images": 0}
    finally:
        first.kill()
        first.wait()


def test_prune_leaves_what_another_checkout_built_last(caps: Capabilities, base: str, tmp_path: Path) -> None:
    """`up` uses it by the arch's name, whoever made it."""
    made = {}
    for checkout in ("this", "other"):
        work = tmp_path / checkout / "cpu"
        (work / "context").mkdir(parents=True)
        text = f"FROM {base}\nRUN echo {checkout} > /v\nLABEL io.warmstart.arch=cpu\n"
        tags = [f"{NAME}:cpu-vllm1-{checkout.encode().hex():0>12.12}", f"{NAME}:cpu"]
        with engine.hold(tmp_path / checkout, "cpu"):
            made[checkout] = engine.build(
                caps, text, context=work / "context", tags=tags, epoch=EPOCH, log_file=work / "build.log"
            )
        (work / "image.json").write_text(json.dumps({"image_id": made[checkout]}))
    engine.prune(caps, tmp_path / "this")
    assert engine.inspect(caps, f"{NAME}:cpu").image_id == made["other"]
    assert engine.exists(caps, made["this"])
    engine.remove(caps, made["this"])
    engine.remove(caps, f"{NAME}:cpu")


def test_prune_leaves_seeds(caps: Capabilities, base: str, tmp_path: Path) -> None:
    (work := tmp_path / "cpu").mkdir()
    text = "FROM scratch\nCOPY a /a\nLABEL io.warmstart.arch=cpu\n"
    (work / "a").touch()
    tags = {"seed": "localhost/warmstart/seed:x-cu40", "old": f"{NAME}:no-seed-000000000003"}
    made = {}
    for kind, tag in tags.items():
        more = "LABEL io.warmstart.seed=1\n" if kind == "seed" else f"LABEL kind={kind}\n"
        with engine.hold(tmp_path, "cpu"):
            made[kind] = engine.build(
                caps, text + more, context=work, tags=[tag], epoch=EPOCH, log_file=work / "build.log"
            )
    (work / "build.steps").write_text(f"! {' '.join(image.removeprefix('sha256:') for image in made.values())}\n")
    (work / "image.json").write_text(json.dumps({"image_id": "sha256:" + "0" * 64}))
    engine.prune(caps, tmp_path)
    assert [engine.exists(caps, tag) for tag in tags.values()] == [True, False]
    engine.remove(caps, tags["seed"])


# ---- images that can't be read -----------------------------------------------------------------------


def manifest(caps: Capabilities, image: str) -> Path:
    (file,) = Path(caps.storage).glob(f"*-images/{image.removeprefix('sha256:')}/manifest")
    return file


@pytest.fixture
def family(caps: Capabilities, base: str, tmp_path: Path) -> Iterator[list[str]]:
    """Ids of an image of three steps: parent, child, and the image itself."""
    work = tmp_path / "family"
    (work / "context").mkdir(parents=True)
    text = f"FROM {base}\nLABEL family={tmp_path.name}\nLABEL a=1\nLABEL b=2\n"
    before = ids()
    with engine.hold(tmp_path, "family"):
        engine.build(
            caps, text, context=work / "context", tags=[f"{NAME}:family"], epoch=EPOCH, log_file=work / "build.log"
        )
    listed = engine.images(caps, f"label=family={tmp_path.name}")
    whole = next(image["Id"] for image in listed if image.get("Names"))
    line = [whole]
    known = {image["Id"]: image for image in store.images(caps, "--all")}
    while (parent := known[line[-1]]["ParentId"]) and f"sha256:{parent}" not in before:
        line.append(parent)
    assert len(line) == 3
    yield line[::-1]
    for image in line:
        run(["podman", "rmi", "--force", "--no-prune", image], ok=range(256))


def test_broken_images_are_removed_and_all_others_stay(
    caps: Capabilities, family: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, broken = ids(), family[:2]
    for image in broken:
        manifest(caps, image).unlink()
    assert run(["podman", "images"], ok=range(256)).code == 125  # the failure that all this is about
    started = time.monotonic()
    listed = engine.images(caps, "reference=" + f"{NAME}:family")
    assert time.monotonic() - started >= store.PAUSE
    assert [image["Id"] for image in listed] == family[2:]
    assert before - ids() == {f"sha256:{image}" for image in broken}
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2
    assert all(f"podman rmi --force {image[:12]}" in "".join(warned) for image in broken)


def test_a_broken_parent_hides_no_image(caps: Capabilities, family: list[str]) -> None:
    manifest(caps, family[1]).unlink()
    with pytest.raises(EngineBroken, match="can't read image") as caught:
        doctor.labels(f"{NAME}:family")
    assert caught.value.hint == f"podman rmi {family[1]}"
    assert engine.inspect(caps, f"{NAME}:family").image_id == f"sha256:{family[2]}"
    assert engine.exists(caps, family[0])


def test_an_image_that_is_just_being_written_stays(
    caps: Capabilities, family: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = manifest(caps, family[1])
    content = file.read_bytes()
    file.unlink()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        file.write_bytes(content)

    monkeypatch.setattr(store, "time", types.SimpleNamespace(sleep=pause))
    assert family[2] in {image["Id"] for image in engine.images(caps)}
    assert pauses == [store.PAUSE]
    assert engine.exists(caps, family[1])
    assert capsys.readouterr().err == ""


def test_a_dry_run_removes_no_broken_image_and_does_not_fail(
    caps: Capabilities, family: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(caps, family[1]).unlink()
    process.dry_run()
    try:
        assert engine.images(caps) == []
        assert engine.prune(caps, tmp_path) == {"bytes": 0, "images": 0}
    finally:
        process.recorder.on, process.recorder.commands = False, []
    assert f"podman rmi --force {family[1]}" in capsys.readouterr().err
    assert store.unreadable(Path(caps.storage)) == {family[1]}
    assert f"podman rmi {family[1]}" in doctor_row(tmp_path).remedy
    engine.prune(caps, tmp_path)
    assert doctor_row(tmp_path).severity == "ok"


def doctor_row(state: Path) -> doctor.Row:
    return next(row for row in doctor.examine(ROOT, state).findings if row.check == "leftovers")


# ---- what is left of builds that were cut off --------------------------------------------------------

BUILD = """
import sys
from pathlib import Path
from warmstart import engine, log
state, name, base, probed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
log.configure(quiet=True)
file = state / name / "build.log"
with engine.hold(state, name):
    text = f"FROM {base} AS one\\nRUN echo begin; sleep 600 # {state}\\nFROM {base}\\nCOPY --from=one /bin /b\\n"
    engine.build(engine.probe(probed), text, context=state / name, tags=[], epoch=0, log_file=file)
"""


@contextlib.contextmanager
def building(state: Path, name: str, base: str, probed: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A build in the middle of a step."""
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(state), name, base, str(probed)], cwd=ROOT)
    log, end = state / name / "build.log", time.monotonic() + 120
    try:
        while not (begun := log.exists() and "\nbegin" in log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        assert (begun, process.poll()) == (True, None)
        yield process
    finally:
        cut(state, name, process)


def cut(state: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    """As when the power goes: nobody cleans up."""
    for number in (process.pid, *leftovers._processes(state / name / "tmp")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def containers(caps: Capabilities) -> set[str]:
    return {one["id"] for one in store.stored(Path(caps.storage), "containers")}


def tags(caps: Capabilities, image: str) -> list[str]:
    images = {one["id"]: one for one in store.stored(Path(caps.storage), "images")}
    return images[image].get("names") or [] if image in images else ["gone"]


def test_what_a_cut_off_build_left_is_named_and_removed(
    caps: Capabilities, base: str, state: Path, family: list[str], tmp_path: Path
) -> None:
    temporary = f"docker.io/library/{'0' * 63}{{}}-tmp:latest"
    ours, foreign = temporary.format(1), temporary.format(2)
    run(["podman", "tag", family[1], ours])
    run(["podman", "tag", family[2], ours.replace("1-tmp", "3-tmp")])  # whole, and so it stays
    other = run(["buildah", "from", base]).stdout.strip()
    run(["podman", "tag", run(["buildah", "commit", "--quiet", other]).stdout.strip(), foreign])
    theirs = containers(caps)
    with building(tmp_path, "cpu", base, state):
        pass
    left = containers(caps) - theirs
    assert left
    row = doctor_row(tmp_path)
    assert row.severity == "warning"
    assert row.remedy == "make prune"
    assert "working-container" in row.evidence
    assert family[1][:12] in row.evidence
    assert f"files in {tmp_path / 'cpu'}" in row.evidence
    process.dry_run()
    try:
        engine.prune(caps, tmp_path)
        assert ["buildah", "rm", *sorted(left)] in process.recorder.commands
        assert ["podman", "untag", family[1], ours] in process.recorder.commands
    finally:
        process.recorder.on, process.recorder.commands = False, []
    assert containers(caps) == theirs | left
    assert tags(caps, family[1]) == [ours]

    (tmp_path / "family" / "build.steps").write_text(f"= {family[0]} {family[2]}\n")
    engine.prune(caps, tmp_path)
    assert containers(caps) == theirs
    assert tags(caps, family[2]) == [f"{NAME}:family"]
    assert tags(caps, family[1]) == []  # the newest build needs it
    assert doctor_row(tmp_path).severity == "ok"
    assert list((tmp_path / "cpu" / "tmp").iterdir()) == []
    assert run(["podman", "image", "exists", foreign], ok=(0, 1)).code == 0
    run(["buildah", "rm", other])
    run(["podman", "rmi", foreign])


def test_an_image_that_only_buildah_has_named_is_removed(caps: Capabilities, family: list[str], tmp_path: Path) -> None:
    temporary = f"docker.io/library/{'a' * 64}-tmp:latest"
    run(["podman", "tag", family[2], temporary])
    run(["podman", "untag", family[2], f"{NAME}:family"])
    (tmp_path / "family" / "build.steps").unlink()  # a build that was killed notes nothing
    with engine.hold(tmp_path, "family"):
        assert leftovers.cut_off(Path(caps.storage), tmp_path) == []
    row = doctor_row(tmp_path)
    assert row.evidence == f"of a build that was cut off: images that were being written {family[2][:12]}"
    assert engine.prune(caps, tmp_path)["images"] == 1
    assert tags(caps, family[2]) == ["gone"]
    assert tags(caps, family[1]) == []
    assert doctor_row(tmp_path).severity == "ok"


def test_a_container_that_buildah_had_not_noted_yet(
    caps: Capabilities, base: str, family: list[str], tmp_path: Path
) -> None:
    """Of a step of ours, as when buildah is killed between making a container and writing its options."""
    before = containers(caps)
    started = {}
    for kind, image in (("ours", family[1]), ("theirs", base)):
        name = run(["buildah", "from", image]).stdout.strip()
        started[kind] = next(
            one["id"] for one in store.stored(Path(caps.storage), "containers") if name in one["names"]
        )
    podman = run(["podman", "create", "--name", f"{family[1][:12]}-working-container-9", family[1], "true"])
    started["podman"] = podman.stdout.strip()
    noted = {}
    for kind in ("ours", "theirs"):
        (file,) = Path(caps.storage).glob(f"*-containers/{started[kind]}/userdata/buildah.json")
        noted[kind] = file
    text = noted["theirs"].read_bytes()
    assert leftovers.cut_off(Path(caps.storage), tmp_path) == []  # with options that aren't ours it isn't ours
    noted["ours"].unlink()
    noted["theirs"].unlink()
    with engine.hold(tmp_path, "family"):
        assert leftovers.cut_off(Path(caps.storage), tmp_path) == []
    assert f"{family[1][:12]}-working-container" in doctor_row(tmp_path).evidence
    engine.prune(caps, tmp_path)
    assert containers(caps) - before == {started["theirs"], started["podman"]}
    noted["theirs"].write_bytes(text)
    run(["buildah", "rm", started["theirs"]])
    run(["podman", "rm", started["podman"]])


def test_what_a_running_build_has_stays(caps: Capabilities, base: str, state: Path, tmp_path: Path) -> None:
    before = containers(caps)
    with building(tmp_path, "cpu", base, state) as build:
        running = containers(caps)
        assert running > before
        assert doctor_row(tmp_path).severity == "ok"
        assert leftovers.cut_off(Path(caps.storage), tmp_path) == []
        assert engine.prune(caps, tmp_path) == {"bytes": 0, "images": 0}
        assert build.poll() is None
        assert containers(caps) == running
        assert (tmp_path / "cpu" / "tmp" / "running").exists()
    engine.prune(caps, tmp_path)
    assert containers(caps) == before


def test_a_probe_that_was_cut_off(caps: Capabilities, tmp_path: Path) -> None:
    (running := tmp_path / "probe-running").mkdir()
    (over := tmp_path / "probe-over").mkdir()
    holder = subprocess.Popen(["flock", "--no-fork", running, "sleep", "600"])
    while not leftovers._held(running):
        time.sleep(0.01)
    row = doctor_row(tmp_path)
    assert "probe-over" in row.evidence
    assert "probe-running" not in row.evidence
    assert row.remedy == "make prune"
    engine.prune(caps, tmp_path)
    assert running.exists()
    assert not over.exists()
    holder.kill()
    holder.wait()
    engine.prune(caps, tmp_path)
    assert not running.exists()
