"""Patch headers, series and the choice of patches: what is refused, and with which hint."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from pathlib import Path

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from warmstart import patchcheck, patches, profile, run
from warmstart.errors import PatchError
from warmstart.patchcheck import Source
from warmstart.schema import Profile

ROOT = Path(__file__).parents[2]
HEADER = {
    "Subject": "count to three",
    "Why": "upstream counts to two\n and stops there",
    "Upstream": "https://example.org/issues/1",
    "Applies-to": ">=1.0,<2.0",
    "Drop-when": "package/count.py: range\\(4\\)",
    "Marker": "three",
}
DIFFERENCE = """
--- a/package/count.py
+++ b/package/count.py
@@ -1,2 +1,3 @@
 one
 two
+three
"""
PINNED = tuple(patchcheck.sources(ROOT))
FILES = sorted((ROOT / "patches").glob("*/*.patch"))


def put(root: Path, name: str = "0001-count.patch", /, **changes: str | None) -> Path:
    """A patch of the component `package`, in its series; a field that is None is left out."""
    difference = changes.pop("difference", DIFFERENCE) or ""
    fields = HEADER | {field.replace("_", "-"): value for field, value in changes.items()}
    folder = root / "patches" / "package"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{field}: {value}\n" for field, value in fields.items() if value is not None)
    (folder / name).write_text(text + difference, encoding="utf-8")
    with (folder / "series").open("a", encoding="utf-8") as series:
        series.write(f"{name}  # in the order of their names\n")
    return folder / name


def with_arch(arch: str, lane: str) -> Profile:
    real = profile.load(ROOT, "cpu").profile
    return msgspec.structs.replace(real, arch=arch, lane=lane)


def test_a_header_is_read(tmp_path: Path) -> None:
    found = patches.read(put(tmp_path, Lanes="wheel source", Archs="gfx1151, gfx12*"))
    assert found.why == "upstream counts to two and stops there"
    assert found.lanes == ("wheel", "source")
    assert found.archs == ("gfx1151", "gfx12*")
    assert found.files == ("package/count.py",)
    assert (found.component, found.name) == ("package", "0001-count.patch")


@pytest.mark.parametrize("field", patches.REQUIRED)
def test_each_required_field_is_missed(tmp_path: Path, field: str) -> None:
    with pytest.raises(PatchError, match=f"lacks {field}"):
        patches.read(put(tmp_path, **{field.replace("-", "_"): None}))
    with pytest.raises(PatchError, match=f"lacks {field}"):
        patches.read(put(tmp_path, **{field.replace("-", "_"): ""}))


def test_a_misspelt_field_is_told_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="unknown field 'Drop-wen'") as refused:
        patches.read(put(tmp_path, Drop_wen=">=2"))
    assert refused.value.hint == "did you mean Drop-when?"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"Applies_to": "newer than 1"}, "no range"),
        ({"Applies_to": "~=1.0"}, "no range"),  # image/patch.py doesn't know it
        ({"Drop_when": "someday"}, "neither a range"),
        ({"Drop_when": "package/count.py: range("}, "neither a range"),
        ({"Upstream": "I will ask"}, "neither a link"),
        ({"Marker": "two"}, "no line that it adds"),  # stands in the context
        ({"Lanes": "wheels"}, "unknown lane"),
        ({"Archs": "rdna3"}, "no arch"),
        ({"difference": "\nnothing\n"}, "unknown field"),
        ({"difference": "\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"}, "no file below b/"),
    ],
)
def test_what_a_header_says_has_to_be_possible(tmp_path: Path, changes: dict[str, str], problem: str) -> None:
    with pytest.raises(PatchError, match=problem) as refused:
        patches.read(put(tmp_path, **changes))
    assert refused.value.hint


def test_a_field_can_not_stand_twice(tmp_path: Path) -> None:
    file = put(tmp_path)
    file.write_text("Marker: three\n" + file.read_text())
    with pytest.raises(PatchError, match="Marker stands twice"):
        patches.read(file)


def test_the_series_decides_what_and_in_which_order(tmp_path: Path) -> None:
    put(tmp_path, "0002-b.patch")
    put(tmp_path, "0001-a.patch")
    put(tmp_path, "0003-c.patch")
    series = tmp_path / "patches" / "package" / "series"
    series.write_text("# first\n0002-b.patch\n\n0001-a.patch # second\n# 0003-c.patch: not yet\n")
    assert [p.name for p in patches.series(tmp_path, "package")] == ["0002-b.patch", "0001-a.patch"]
    assert patches.series(tmp_path, "another") == ()


def test_a_series_names_only_what_is_there(tmp_path: Path) -> None:
    put(tmp_path).rename(tmp_path / "patches" / "package" / "0001-counts.patch")
    with pytest.raises(PatchError, match=r"0001-count\.patch, which is not there") as refused:
        patches.series(tmp_path, "package")
    assert refused.value.hint == "did you mean 0001-counts.patch?"


def test_lanes_and_archs_choose(tmp_path: Path) -> None:
    put(tmp_path, "1.patch")
    put(tmp_path, "2.patch", Lanes="wheel vendor")
    put(tmp_path, "3.patch", Archs="gfx1151 gfx12*")
    put(tmp_path, "4.patch", Lanes="wheel", Archs="gfx1201")
    for arch, lane, expected in (
        ("cpu", "cpu", "1"),
        ("gfx1151", "wheel", "123"),
        ("gfx1201", "wheel", "1234"),
        ("gfx1201", "source", "13"),
        ("gfx1100", "vendor", "12"),
    ):
        names = patches.selected(tmp_path, "package", with_arch(arch, lane))
        assert "".join(name[0] for name in names) == expected, arch


def test_a_patch_that_is_no_longer_needed_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "1.patch", Drop_when=">=2")
    put(tmp_path, "2.patch")
    count = tmp_path / "pristine" / "package" / "count.py"
    count.parent.mkdir(parents=True)
    count.write_text("for n in range(4):\n")
    found = patchcheck.check(tmp_path, "package", tmp_path / "pristine", "2.1")
    assert [o.state for o in found] == ["no longer needed"] * 2
    told = capsys.readouterr().err
    assert "package 2.1 no longer needs 1.patch (Drop-when: >=2)" in told
    assert "package 2.1 no longer needs 2.patch" in told
    assert patchcheck.check(tmp_path, "package", tmp_path / "pristine", "2.1", only=["2.patch"]) == found[1:]


def test_a_marker_that_is_there_without_the_patch_proves_nothing(tmp_path: Path) -> None:
    put(tmp_path)
    count = tmp_path / "pristine" / "package" / "count.py"
    count.parent.mkdir(parents=True)
    count.write_text("one\ntwo\nthree\n")
    with pytest.raises(PatchError, match=r"marker 'three' is in package 1\.1 without it"):
        patchcheck.check(tmp_path, "package", tmp_path / "pristine", "1.1")


def test_only_the_files_asked_for_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "package-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("package/count.py", "package/other.py", "../outside.py"):
            member = tarfile.TarInfo(f"package-1.0/{name}")
            member.size = 2
            packed.addfile(member, io.BytesIO(b"x\n"))
    patchcheck.unpack(archive, {"package/count.py", "package/absent.py"}, tmp_path / "to")
    assert list(tmp_path.rglob("*.py")) == [tmp_path / "to" / "package" / "count.py"]


def test_an_archive_that_is_there_is_not_fetched_again(tmp_path: Path, attempts: list[str]) -> None:
    archive = tmp_path / "cache" / "sources" / "package-1.0.tar.gz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"x")
    source = Source("package", "1.0", "package", archive.name, hashlib.sha256(b"x").hexdigest())
    assert patchcheck.fetch(tmp_path, source) == archive
    archive.write_bytes(b"damaged")
    with pytest.raises(pytest.fail.Exception):  # pip is asked, and a unit test may not start it
        patchcheck.fetch(tmp_path, source)
    attempts.clear()


def test_a_dry_run_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path)
    (tmp_path / "patches" / "package").rename(tmp_path / "patches" / "vllm")
    shutil.copy(ROOT / "patches" / "sources.toml", tmp_path / "patches")
    monkeypatch.setattr(run.recorder, "on", True)
    one = msgspec.structs.replace(profile.load(ROOT, "cpu").profile, patches=("vllm",))
    assert patchcheck.check_all(tmp_path, tmp_path, [one]) == []
    assert f"would apply 0001-count.patch to vllm-{one.versions.vllm}.tar.gz" in capsys.readouterr().err


def test_a_version_without_pinned_sources_is_told(tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / "patches" / "sources.toml").write_text("source = []\n")
    with pytest.raises(PatchError, match=r"no source of package 9\.9 is pinned") as refused:
        patchcheck.pinned(tmp_path, "package", "9.9")
    assert "patches/sources.toml" in refused.value.hint


# --- the patches that this project carries ------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_patch_is_complete_and_in_the_series_or_excused_there(file: Path) -> None:
    patches.read(file)
    series = (file.parent / "series").read_text(encoding="utf-8")
    assert re.search(rf"^(# )?{re.escape(file.name)}(: .+)?$", series, re.MULTILINE)


def test_every_patched_version_has_pinned_sources() -> None:
    for arch in profile.archs(ROOT):
        loaded = profile.load(ROOT, arch).profile
        for component in loaded.patches:
            assert patches.series(ROOT, component), f"{arch} names {component}, which has no series"
            patchcheck.pinned(ROOT, component, getattr(loaded.versions, component))


def test_every_patch_covers_the_versions_it_is_chosen_for() -> None:
    for arch in profile.archs(ROOT):
        loaded = profile.load(ROOT, arch).profile
        for component in loaded.patches:
            chosen = patches.selected(ROOT, component, loaded)
            for patch in patches.series(ROOT, component):
                if patch.name in chosen:
                    assert getattr(loaded.versions, component) in SpecifierSet(patch.applies_to), (
                        arch,
                        patch.name,
                    )


@pytest.mark.parametrize("source", PINNED, ids=lambda source: source.file)
def test_a_pinned_source_is_named_like_its_version(source: Source) -> None:
    assert source.file == f"{source.project}-{source.version}.tar.gz"
    assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
