"""The carried patches on the real sources of vLLM, and image/patch.py with GNU patch: nothing is guessed."""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import CodeType

import pytest

from tests.engine.vllm_sources import PATCH, ROOT, SITE, STATE, patch, pristine, unpack, venv
from warmstart import patchcheck, patches, profile
from warmstart.errors import PatchError

VLLM = [source for source in patchcheck.sources(ROOT) if source.component == "vllm"]
SECONDS = 30  # for all versions, once the archives are there

OLD = "".join(f"line {n}\n" for n in range(1, 41))
NEW = OLD.replace("line 10\n", "line 10\nten = 'added'\n").replace("line 30\n", "line thirty\n")
HEADER = """Subject: s
Why: w
Upstream: none yet
Applies-to: >=1.0,<2.0
Drop-when: >=2.0
Marker: added

"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one patch of two hunks, and pristine sources of `package` beside it."""
    folder = tmp_path / "patches" / "package"
    for path, text in (
        (folder / "0001-ten.patch", HEADER + difference(tmp_path, "package/lines.txt", OLD, NEW)),
        (folder / "series", "0001-ten.patch\n"),
        (tmp_path / "pristine" / "package" / "lines.txt", OLD),
        (tmp_path / "image" / "patch.py", PATCH.read_text(encoding="utf-8")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def difference(work: Path, name: str, old: str, new: str) -> str:
    """What `diff` finds between two texts, as a patch of file `name`."""
    (work / "old").write_text(old)
    (work / "new").write_text(new)
    found = subprocess.run(
        ["diff", "-u", "--label", f"a/{name}", "--label", f"b/{name}", "old", "new"],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 1
    return found.stdout


def change(tree: Path, old: str, new: str) -> Path:
    """Change the pristine file."""
    file = tree / "pristine" / "package" / "lines.txt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return file


def check(tree: Path, version: str = "1.5") -> list[patchcheck.Outcome]:
    return patchcheck.check(tree, "package", tree / "pristine", version)


# --- the carried patches ------------------------------------------------------------------------------------


@pytest.mark.net
@pytest.mark.parametrize("source", VLLM, ids=lambda source: source.version)
def test_the_series_applies_to_each_pinned_version(source: patchcheck.Source, tmp_path: Path) -> None:
    found = patchcheck.check(ROOT, "vllm", pristine(source.version, tmp_path), source.version)
    assert {(o.patch, o.state) for o in found} == {(p.name, "applied") for p in patches.series(ROOT, "vllm")}


@pytest.mark.net
@pytest.mark.parametrize("source", VLLM, ids=lambda source: source.version)
def test_patches_that_are_held_back_apply_too(source: patchcheck.Source, tmp_path: Path) -> None:
    for name in ("image", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    names = sorted(p.name for p in (ROOT / "patches" / "vllm").glob("*.patch"))
    (tmp_path / "patches" / "vllm" / "series").write_text("\n".join(names))
    files = {f for p in patches.series(tmp_path, "vllm") for f in patchcheck.touched(p)}
    sources = unpack(source.version, files, tmp_path / "pristine")
    found = patchcheck.check(tmp_path, "vllm", sources, source.version)
    assert [(o.patch, o.state) for o in found] == [(name, "applied") for name in names]


@pytest.mark.net
def test_patches_check_is_quick_once_the_sources_are_there() -> None:
    profiles = [profile.load(ROOT, arch).profile for arch in profile.archs(ROOT)]
    for source in patchcheck.sources(ROOT):
        patchcheck.fetch(STATE, source)
    started, used = time.monotonic(), os.times()
    found = patchcheck.check_all(ROOT, STATE, profiles)
    spent = sum(os.times()[:4]) - sum(used[:4])
    assert min(time.monotonic() - started, spent) < SECONDS  # a busy machine may take longer by the clock
    chosen = {(c, name) for p in profiles for c in p.patches for name in patches.selected(ROOT, c, p)}
    assert {(o.component, o.patch) for o in found} == chosen


@pytest.mark.net
def test_a_patch_that_no_longer_applies_stops_it_with_file_hunk_and_version(tmp_path: Path) -> None:
    source = VLLM[-1]
    sources = pristine(source.version, tmp_path)
    rocm = sources / "vllm/platforms/rocm.py"
    lines = rocm.read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "amdsmi_get_gpu_asic_info(handles[0])" in line)
    lines[at] = lines[at].replace("handles[0]", "handles[-1]")
    rocm.write_text("".join(lines))
    with pytest.raises(PatchError) as refused:
        patchcheck.check(ROOT, "vllm", sources, source.version)
    assert refused.value.code == 14
    told = f"does not apply to vllm {source.version}: hunk 2 of vllm/platforms/rocm.py, line "
    assert refused.value.message.startswith(f"0001-rocm-chosen-gpu.patch {told}")


# --- image/patch.py -----------------------------------------------------------------------------------------


def test_a_patch_applies_as_it_is(tree: Path) -> None:
    assert check(tree) == [patchcheck.Outcome("package", "1.5", "0001-ten.patch", "applied")]


def test_hunks_that_moved_are_told(tree: Path) -> None:
    change(tree, "line 20\n", "line 20\nnew\nnew\n")
    assert check(tree)[0].moved == ("hunk 2 of package/lines.txt moved by 2 lines",)


def test_fuzz_is_refused_where_patch_alone_would_guess(tree: Path) -> None:
    changed = change(tree, "line 27\n", "another line 27\n")  # the outermost line of context of hunk 2
    copy = tree / "copy.txt"
    shutil.copy(changed, copy)
    plain = subprocess.run(
        ["patch", str(copy), str(tree / "patches/package/0001-ten.patch")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert plain.returncode == 0
    assert "with fuzz" in plain.stdout
    with pytest.raises(
        PatchError, match=r"not apply to package 1\.5: hunk 2 of package/lines\.txt, line 2\d"
    ):
        check(tree)


def test_a_change_that_is_there_already_is_told(tree: Path) -> None:
    change(tree, OLD, NEW)
    result = patch(
        tree / "patches/package", venv(tree / "pristine", tree / "venv", "package-1.5"), tree / "out"
    )
    assert result.returncode == 1
    assert "does not apply to package 1.5: the change is there already" in result.stderr


def test_a_version_out_of_range_is_refused(tree: Path) -> None:
    with pytest.raises(PatchError, match=r"0001-ten\.patch is for package >=1\.0,<2\.0, not 0\.9"):
        check(tree, "0.9")


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("0.33.0", ">=0.32,<0.34", True),
        ("0.33.0+rocm100", ">=0.33", True),
        ("0.34.0", ">=0.32,<0.34", False),
        ("0.31.2", ">=0.32,<0.34", False),
        ("0.32", "==0.32.0", True),
        ("0.32.1", "==0.32", False),
        ("0.32.1", "==0.32.*", True),
        ("0.33.1.dev5", "==0.33.*", True),
        ("1.0", "", False),
        ("unknown", ">=0", False),
    ],
)
def test_ranges_are_understood_as_on_the_host(version: str, wanted: str, fits: bool) -> None:
    spec = importlib.util.spec_from_file_location("image_patch", PATCH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.within(version, wanted) is fits


def test_the_changed_files_come_out_compiled_and_nothing_else_changes(tree: Path) -> None:
    module = tree / "pristine" / "package" / "count.py"
    module.write_text("def one():\n    return 1\n")
    new = "def one():\n    return 1\n\n\ndef added():\n    return one.__code__.co_filename\n"
    folder = tree / "patches" / "package"
    second = difference(tree, "package/count.py", module.read_text(), new)
    third = difference(tree, "package/count.py", new, new + "\n\nthird = added()\n")
    third += "--- /dev/null\n+++ b/package/more.py\n@@ -0,0 +1 @@\n+added = 2\n"
    (folder / "0002-count.patch").write_text(HEADER + second)
    (folder / "0003-new.patch").write_text(HEADER.replace("added", "third") + third)
    (folder / "series").write_text("0001-ten.patch\n0002-count.patch\n0003-new.patch  # on top\n")
    where = venv(tree / "pristine", tree / "venv", "package-1.5")
    before = {p: p.read_bytes() for p in where.rglob("*") if p.is_file()}
    result = patch(folder, where, tree / "out")
    assert result.returncode == 0, result.stderr
    assert before == {p: p.read_bytes() for p in where.rglob("*") if p.is_file()}

    site = where / SITE / "package"
    out = tree / "out" / site.relative_to("/")
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    cached = {importlib.util.cache_from_source(name) for name in ("count.py", "more.py")}
    assert names == {"count.py", "lines.txt", "more.py", *cached}
    assert (out / "count.py").read_text() == new + "\n\nthird = added()\n"
    code = (out / importlib.util.cache_from_source("count.py")).read_bytes()
    assert int.from_bytes(code[4:8], "little") == 0b01  # by hash, never checked again (PEP 552)
    assert code[8:16] == importlib.util.source_hash((out / "count.py").read_bytes())
    loaded = marshal.loads(code[16:])
    assert isinstance(loaded, CodeType)
    assert loaded.co_filename == str(site / "count.py")  # its place in the image, not where it was made


@pytest.mark.net
def test_the_same_patches_give_the_same_bytes(tmp_path: Path) -> None:
    source = VLLM[0]
    where = venv(pristine(source.version, tmp_path / "pristine"), tmp_path / "venv", f"vllm-{source.version}")
    made = []
    for out in (tmp_path / "once", tmp_path / "again"):
        assert patch(ROOT / "patches" / "vllm", where, out).returncode == 0
        made.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert len(made[0]) == 2 * len(
        {f for p in patches.series(ROOT, "vllm") for f in p.files}
    )  # source and code
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            ("series", "0001-ten.patch", "0009-gone.patch"),
            "0009-gone.patch is in the series, but not beside it",
        ),
        (
            ("0001-ten.patch", "Marker: added", "Marker: absent"),
            "its marker 'absent' is in none of the files",
        ),
        (("0001-ten.patch", "Applies-to: >=1.0,<2.0\n", ""), "has no field Applies-to"),
        (("0001-ten.patch", "b/package/lines.txt", "b/../lines.txt"), "only files below b/ can be changed"),
        (("0001-ten.patch", "b/package/lines.txt", "b/package/gone.txt"), "no installed distribution has"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_comes_out(
    tree: Path, spoil: tuple[str, str, str], told: str
) -> None:
    name, old, new = spoil
    file = tree / "patches" / "package" / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    result = patch(file.parent, venv(tree / "pristine", tree / "venv", "package-1.5"), tree / "out")
    assert result.returncode == 1
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tree / "out").exists()


def test_what_is_no_python_once_patched_is_refused(tree: Path) -> None:
    module = tree / "pristine" / "package" / "count.py"
    module.write_text("one = 1\n")
    bad = HEADER + difference(tree, "package/count.py", "one = 1\n", "one = 1\nadded = = 2\n")
    (tree / "patches/package/0001-ten.patch").write_text(bad)
    with pytest.raises(PatchError, match=r"count\.py is no Python once patched: invalid syntax"):
        check(tree)
