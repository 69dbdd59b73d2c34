"""The run line on a real engine: what the container may do, what reaches it, and how Quadlet reads its file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from warmstart import container, emit, presets, runline
from warmstart.engine import Capabilities
from warmstart.presets import Preset

ROOT = Path(__file__).parents[2]
NASTY = "a b\"c'd%h$e${F}\\g`h`;i=j # k"
GENERATORS = ("/usr/libexec/podman/quadlet", "/usr/lib/podman/quadlet")  # podman 4.4 and newer have it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a tiny model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "hf").mkdir()
    return folder


@pytest.fixture
def line(caps: Capabilities, base: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[runline.RunLine]:
    monkeypatch.setenv("HF_HOME", str(model.parent / "hf"))
    preset = Preset(name="try", model=str(model), port=18199, env={"NASTY": NASTY, "MY_TOKEN": "S3CRET"})
    yield runline.make(ROOT, preset, container.setting(caps, base, ()))
    subprocess.run(["podman", "volume", "rm", "--force", runline.CACHE], check=False, capture_output=True)


def inside(line: runline.RunLine, script: str) -> subprocess.CompletedProcess[str]:
    words = [part.word for part in line.parts if part.flag != "publish"]
    command = ["podman", "run", "--rm", *words, line.image, "sh", "-c", script]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **line.secrets})


def test_the_container_may_do_as_little_as_it_needs(line: runline.RunLine) -> None:
    told = inside(line, "cat /proc/self/status").stdout
    status = dict(entry.split(":\t", 1) for entry in told.splitlines() if ":\t" in entry)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"


def test_only_its_own_places_can_be_written(line: runline.RunLine) -> None:
    assert inside(line, "touch /x").returncode != 0
    assert inside(line, "touch '/model/a tiny model/x'").returncode != 0
    done = inside(
        line,
        "touch /tmp/x /cache/x /models/x && cp /bin/true /tmp/t && /tmp/t && cat '/model/a tiny model/config.json'",
    )
    assert (done.returncode, done.stdout) == (0, "{}"), done.stderr


def test_variables_reach_it_as_they_are(line: runline.RunLine) -> None:
    assert inside(line, 'echo "$NASTY" "$MY_TOKEN"').stdout == f"{NASTY} S3CRET\n"
    assert "S3CRET" not in " ".join(line.words)


def test_the_engine_takes_every_word(line: runline.RunLine) -> None:
    told = subprocess.run(["podman", "create", *line.words], check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    subprocess.run(["podman", "rm", "--force", told.stdout.strip()], check=True, capture_output=True)


@pytest.mark.skipif(not any(map(os.path.exists, GENERATORS)), reason="this podman has no Quadlet")
def test_quadlet_takes_the_file(tmp_path: Path) -> None:
    generator = next(filter(os.path.exists, GENERATORS))
    preset = presets.load(ROOT, "Qwen3.5-9B-w4a16", {"env.NASTY": NASTY, "env.MY_TOKEN": "S3CRET"})
    where = emit.setting(preset, "gfx1102", "i", tmp_path)
    (tmp_path / "x.container").write_text(emit.quadlet(ROOT, tmp_path, preset, where), encoding="utf-8")
    told = subprocess.run(
        [generator, "-dryrun", "-user"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)},
    )
    started = next(row for row in told.stdout.splitlines() if row.startswith("ExecStart="))
    quoted = NASTY.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    assert f'--env "NASTY={quoted}"' in started
    assert "S3CRET" not in told.stdout
    assert "nsupported key" not in told.stderr
    line = runline.make(ROOT, preset, msgspec.structs.replace(where, image="i"))
    assert started.endswith(" ".join(line.command))
    assert shutil.which("podman")
