"""The doctor asks the real podman: its version, an image's labels, containers that ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from warmstart import doctor, engine, run
from warmstart.errors import ImageMissing, InputError
from warmstart.probe import Capabilities

ROOT = Path(__file__).parents[2]


def built(folder: Path, base: str, *labels: str) -> str:
    """An image with these labels; its id."""
    file = folder / "Containerfile"
    file.write_text(f"FROM {base}\n" + "".join(f"LABEL {label}\n" for label in labels), encoding="utf-8")
    told = run.run(["buildah", "build", "--quiet", "--file", file, folder])
    return told.stdout.split()[-1]


def test_this_machine(caps: Capabilities, state: Path) -> None:
    began, used = time.monotonic(), os.times()
    report = doctor.examine(ROOT, state)
    seconds = time.monotonic() - began
    rows = {row.check: row for row in report.findings}
    assert rows["engine"].severity == "ok"
    assert caps.podman in rows["engine"].evidence
    assert rows["leftovers"].severity == "ok"
    assert "can't be understood" not in doctor.text(report)
    spent = sum(os.times()[:4]) - sum(used[:4])
    assert min(seconds, spent) <= 1.5  # a busy machine may take longer by the clock


def test_the_same_without_what_was_probed(caps: Capabilities, tmp_path: Path) -> None:
    found = doctor.engine(tmp_path)
    assert (found.version, found.rootless, found.problem) == (caps.podman, caps.rootless, "")


def test_an_images_labels(caps: Capabilities, base: str, tmp_path: Path) -> None:
    mine = built(
        tmp_path,
        base,
        "io.warmstart.arch=gfx1151",
        'io.warmstart.min-kernel="99.1"',
        'io.warmstart.bad-firmware="20251125 20251126"',
    )
    found = doctor.labels(mine)
    assert (found.arch, found.min_kernel, found.bad_firmware) == ("gfx1151", "99.1", ("20251125", "20251126"))
    rows = {row.check: row for row in doctor.examine(ROOT, tmp_path, image=mine).findings}
    assert rows["kernel"].severity == "error"
    assert "older than 99.1" in rows["kernel"].evidence


def test_other_images(caps: Capabilities, base: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no image of warmstart"):
        doctor.labels(built(tmp_path, base, "other=1"))
    with pytest.raises(ImageMissing, match="there is no image"):
        doctor.labels("localhost/nothing:here")


def test_containers_that_ended_are_named(caps: Capabilities, base: str, tmp_path: Path) -> None:
    mine = built(tmp_path, base, "io.warmstart.arch=cpu")
    run.run(["podman", "run", "--name", "ended", mine, "true"])
    run.run(["podman", "run", "--name", "not-ours", base, "true"])
    try:
        rows = {row.check: row for row in doctor.examine(ROOT, tmp_path).findings}
        assert rows["leftovers"].remedy == "podman rm ended"
        run.run(rows["leftovers"].remedy.split())
        rows = {row.check: row for row in doctor.examine(ROOT, tmp_path).findings}
        assert rows["leftovers"].severity == "ok"
    finally:
        run.run(["podman", "rm", "--ignore", "ended", "not-ours"])


def test_engine_is_that_of_the_builds(state: Path, caps: Capabilities) -> None:
    assert doctor.engine(state).runtime == engine.probe(state).runtime
