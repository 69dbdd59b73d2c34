"""What the aiter scripts say about files, headers and versions: the parts that need no compiler."""

from __future__ import annotations

import copy
import os
import struct
import tomllib
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from image import aiter_builder, aiter_check, aiter_facts, aiter_prebuild, aiter_work, code_objects

ROOT = Path(__file__).parents[2]
PAGE = 4096  # clang aligns the code objects in a bundle to it


def code_object(mach: int) -> bytes:
    """The head of a code object, as LLVM writes it, with some bytes after it."""
    head = b"\x7fELF\x02\x01\x01\x40\x04" + bytes(7) + struct.pack("<HHI", 3, 224, 1) + bytes(24)
    return head + struct.pack("<I", 0x500 | mach) + bytes(12) + b"code" * 8


def bundle(entries: dict[str, bytes]) -> bytes:
    """An offload bundle: the host's empty entry first, then `entries` by target."""
    labels = {"host-x86_64-unknown-linux--": b""}
    labels |= {f"hipv4-amdgcn-amd-amdhsa--{target}": body for target, body in entries.items()}
    table, bodies = b"", b""
    for label, body in labels.items():
        bodies += bytes(-len(bodies) % PAGE)
        table += struct.pack("<QQQ", PAGE + len(bodies), len(body), len(label)) + label.encode()
        bodies += body
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(labels)) + table
    return head + bytes(PAGE - len(head)) + bodies


def compressed(plain: bytes, version: int, method: int = 0) -> bytes:
    """The same bundle as a compressed bundle of `version`, with zlib."""
    body = zlib.compress(plain)
    total = {1: 20, 2: 24, 3: 32}[version] + len(body)
    sizes = {
        1: struct.pack("<I", len(plain)),
        2: struct.pack("<II", total, len(plain)),
        3: struct.pack("<QQ", total, len(plain)),
    }[version]
    return b"CCOB" + struct.pack("<HH", version, method) + sizes + bytes(8) + body


def library(sections: dict[str, bytes]) -> bytes:
    """A little-endian ELF64 file with these sections and nothing else."""
    names = b"\0" + b"".join(f"{name}\0".encode() for name in [*sections, ".shstrtab"])
    bodies = b""
    rows = [bytes(64)]
    at = 1
    for name, body in [*sections.items(), (".shstrtab", names)]:
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(bodies), len(body), 0, 0, 1, 0))
        at += len(name) + 1
        bodies += body
    counts = (0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    head = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(bodies), *counts)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + head
    return head + bodies + b"".join(rows)


def targets(data: bytes) -> list[str]:
    return [one.target for one in code_objects.code_objects(data)]


GFX942, GFX1100 = code_object(0x4C), code_object(0x41)


def test_a_library_without_device_code() -> None:
    assert targets(library({".text": b"x" * 100})) == []
    assert targets(library({".hip_fatbin": bytes(PAGE)})) == []


def test_the_words_of_a_bundle_in_other_sections_are_no_device_code() -> None:
    """The HIP runtime itself holds the magic words, as text."""
    assert targets(library({".rodata": b"__CLANG_OFFLOAD_BUNDLE__CCOB"})) == []


@pytest.mark.parametrize("target", ["gfx942", "gfx942:sramecc+:xnack-"])
def test_a_bundle(target: str) -> None:
    (one,) = code_objects.code_objects(library({".text": b"", ".hip_fatbin": bundle({target: GFX942})}))
    assert (one.target, one.arch, one.size) == (target, "gfx942", len(GFX942))


def test_several_archs_and_several_bundles() -> None:
    both = bundle({"gfx942": GFX942, "gfx1100": GFX1100})
    data = library({".hip_fatbin": both + bytes(PAGE - len(both) % PAGE) + bundle({"gfx1100": GFX1100})})
    assert targets(data) == ["gfx942", "gfx1100", "gfx1100"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_compressed_bundle(version: int) -> None:
    packed = compressed(bundle({"gfx1100": GFX1100}), version)
    after = compressed(bundle({"gfx942": GFX942}), version)
    assert targets(library({".hip_fatbin": packed + after})) == ["gfx1100", "gfx942"]


def test_a_plain_bundle_after_a_compressed_one() -> None:
    both = compressed(bundle({"gfx1100": GFX1100}), 2) + bundle({"gfx942": GFX942})
    assert targets(library({".hip_fatbin": both})) == ["gfx1100", "gfx942"]


def test_a_bundle_that_ends_after_its_section_is_refused() -> None:
    with pytest.raises(ValueError, match="past the end of its section"):
        targets(library({".hip_fatbin": bundle({"gfx942": GFX942})[:-10], ".data": bytes(100)}))


def test_an_unknown_compressed_bundle_is_refused() -> None:
    packed = compressed(bundle({"gfx1100": GFX1100}), 1)
    with pytest.raises(ValueError, match="version 9"):
        targets(library({".hip_fatbin": packed.replace(b"CCOB\x01", b"CCOB\x09")}))


def test_a_code_object_embedded_as_data_and_one_alone() -> None:
    """aiter's assembly kernels: files hsa/*/*.co, or such a file inside a library."""
    assert targets(library({".data": bytes(10) + GFX942})) == ["gfx942"]
    assert targets(GFX942[:40] + bytes(8) + GFX942[48:58] + bytes(6) + GFX942[64:]) == ["gfx942"]


def test_a_label_that_lies_is_refused() -> None:
    with pytest.raises(ValueError, match="labelled gfx1151 but its code object is for gfx942"):
        targets(library({".hip_fatbin": bundle({"gfx1151": GFX942})}))


def test_what_is_no_bundle_is_refused() -> None:
    with pytest.raises(ValueError, match="without an offload bundle"):
        targets(library({".hip_fatbin": b"something else"}))


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match="no little-endian ELF64 file"):
        targets(b"text")


@given(st.integers(min_value=0, max_value=12000))
def test_a_library_cut_short_is_refused(length: int) -> None:
    whole = library({".text": b"x" * 100, ".hip_fatbin": bundle({"gfx942": GFX942})})
    if length < len(whole):
        with pytest.raises(ValueError, match=r"cut short|no little-endian"):
            targets(whole[:length])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "module_x.so").touch()
    with pytest.raises(ValueError, match="an empty file"):
        code_objects.code_objects_of(tmp_path / "module_x.so")


HEADER = """
#pragma once
// enum class Comment : int { A = 1 };
enum class ActivationType : int
{
    No     = -1, // none
    Silu   = 0,
    Gelu,
    /* Old = 7, */
    Swiglu = 0x10u,
    Same = Gelu,
    Next
};
enum class QuantType : int { No, per_Token, };
typedef enum { AITER_DTYPE_fp8 } AiterDtype;
"""
ENUMS = {
    "ActivationType": {"No": -1, "Silu": 0, "Gelu": 1, "Swiglu": 16, "Same": 1, "Next": 2},
    "QuantType": {"No": 0, "per_Token": 1},
}


def test_the_enums_of_a_header() -> None:
    assert aiter_check.enums(HEADER) == ENUMS


def test_a_value_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the enum value 'sizeof\(int\)' is not understood"):
        aiter_check.enums("enum class A { B = sizeof(int) };")


def test_a_fresh_module_has_no_problems_and_may_hold_more() -> None:
    assert aiter_check.enum_problems(ENUMS, ENUMS | {"MxDtype": {"FP4": 0}}) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda m: m.pop("QuantType"), "enum QuantType is in the header but not in the module"),
        (lambda m: m["QuantType"].pop("per_Token"), "differs between header and module: per_Token=1"),
        (lambda m: m["QuantType"].update(per_Token=2), "module: per_Token=1, per_Token=2"),
    ],
)
def test_a_stale_module(change: Any, line: str) -> None:
    module = copy.deepcopy(ENUMS)
    change(module)
    (problem,) = aiter_check.enum_problems(ENUMS, module)
    assert line in problem


def test_a_header_without_enums_is_a_problem() -> None:
    assert aiter_check.enum_problems({}, ENUMS)


def objects(*names: str) -> list[code_objects.CodeObject]:
    return [code_objects.CodeObject(name, 1, 0) for name in names]


@pytest.mark.parametrize(
    ("names", "host_only", "at_least", "problem"),
    [
        (["gfx942"], False, False, ""),
        (["gfx942:xnack-", "gfx942"], False, False, ""),
        ([], False, False, ""),
        ([], True, False, ""),
        (["gfx942", "gfx950"], False, True, ""),
        (["gfx942", "gfx950"], False, False, "holds device code for gfx942 gfx950, expected gfx942 alone"),
        (["gfx1100"], False, True, "holds device code for gfx1100, expected gfx942 at least"),
        (["gfx942"], True, False, "holds device code for gfx942, expected none"),
    ],
)
def test_the_archs_of_a_module(names: list[str], host_only: bool, at_least: bool, problem: str) -> None:
    found = aiter_check.arch_problems(objects(*names), "gfx942", host_only=host_only, at_least=at_least)
    assert found == ([problem] if problem else [])


def test_a_clean_directory(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "module_x.so").touch()
    assert aiter_check.directory_problems(tmp_path) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("build/lock_module_x", "lock left behind"),
        ("build/lock_module_x.steal", "lock left behind"),
        ("build/module_x/build/lock", "lock left behind"),
        ("build/module_x/build/.ninja_lock", "lock left behind"),
        ("build/module_x/x.o", "is not empty"),
        (".module_x.so.17", "half-made file"),
    ],
)
def test_a_directory_with_leavings(tmp_path: Path, place: str, line: str) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    assert any(line in problem for problem in aiter_check.directory_problems(tmp_path))


def test_a_directory_without_build(tmp_path: Path) -> None:
    assert aiter_check.directory_problems(tmp_path) == [f"no directory {tmp_path}/build"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "module_a.so").write_bytes(library({".hip_fatbin": bundle({"gfx942": GFX942})}))
    assert aiter_check.main([str(tmp_path), "--arch", "gfx942"]) == 0
    assert "gfx942" in capsys.readouterr().out
    assert aiter_check.main([str(tmp_path), "--arch", "gfx1100", "--core", "module_c"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"aiter-check: {tmp_path}: no module_c.so"
    assert said[1].endswith("expected gfx1100 alone")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return tomllib.loads((ROOT / "arch" / "aiter.toml").read_text(encoding="utf-8"))


def test_the_rows_stand_in_order_and_change_something(data: dict[str, Any]) -> None:
    since = [row["since"] for row in data["version"]]
    assert since == sorted(since, key=Version)
    for row, version in zip(data["version"], since, strict=True):
        keys = [key for key in row if key != "since"]
        assert keys
        assert set(keys) <= set(data["version"][0])
        earlier = aiter_facts.facts({"version": data["version"][:1]}, version)
        if row is not data["version"][0]:
            assert any(row[key] != earlier.get(key) for key in keys) or len(keys) == 1


numbers = st.integers(min_value=0, max_value=12)
releases = st.lists(numbers, min_size=1, max_size=4).map(lambda ns: ".".join(map(str, ns)))
endings = [
    st.just("") | st.builds("{}{}".format, st.sampled_from(["a", "b", "rc"]), numbers),
    st.just("") | st.builds(".post{}".format, numbers),
    st.just("") | st.builds(".dev{}".format, numbers),
    st.sampled_from(["", "+rocm7.14.0.a63ede7"]),
]
versions = st.builds("{}{}{}{}{}".format, releases, *endings)


@given(versions, versions)
def test_versions_sort_as_packaging_sorts_them(left: str, right: str) -> None:
    one, two = (Version(Version(text).public) for text in (left, right))
    assert (aiter_facts.order(left) < aiter_facts.order(right)) == (one < two)
    assert (aiter_facts.order(left) == aiter_facts.order(right)) == (one == two)


@pytest.mark.parametrize("text", ["", "main", "0.1.x", "0.1.7-1-gabc"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(aiter_facts.Stop, match="is no version number of aiter"):
        aiter_facts.order(text)


@pytest.mark.parametrize(
    ("version", "core"),
    [
        ("0.1.7.post2.dev18", "module_aiter_enum"),
        ("0.1.11.post1", "module_aiter_enum"),
        ("0.1.12", "module_aiter_core"),
        ("0.1.26", "module_aiter_core"),
        ("0.1.19.post3+rocm7.14.0.a63ede7", "module_aiter_core"),
    ],
)
def test_the_name_of_the_core_module(data: dict[str, Any], version: str, core: str) -> None:
    assert aiter_facts.facts(data, version)["core"] == core


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [
        ("0.1.11", "core-env", {}),
        ("0.1.12", "core-env", {"ENABLE_CK": "0"}),
        ("0.1.15.post3", "core-env", {"ENABLE_CK": "0"}),
        ("0.1.16", "core-env", {}),
        ("0.1.15.post3", "triton-only", False),
        ("0.1.16", "triton-only", True),
        ("0.1.14.post1", "import-hides-errors", True),
        ("0.1.13", "import-hides-errors", False),
        ("0.1.20.post1", "flydsl-required", False),
        ("0.1.21", "flydsl-required", True),
        ("0.1.17", "stale-lock", "waits"),
        ("0.1.18", "stale-lock", "breaks"),
    ],
)
def test_what_changed_with_a_version(data: dict[str, Any], version: str, key: str, value: object) -> None:
    assert aiter_facts.facts(data, version)[key] == value


@pytest.mark.parametrize(
    ("arch", "before", "since"),
    [
        ("gfx950", "0.1.2", "0.1.3"),
        ("gfx1151", "0.1.7.post2.dev18", "0.1.7.post3"),
        ("gfx1201", "0.1.7.post5", "0.1.8"),
        ("gfx1250", "0.1.11.post1", "0.1.12"),
    ],
)
def test_an_arch_is_let_through_from_one_version_on(
    data: dict[str, Any], arch: str, before: str, since: str
) -> None:
    aiter_facts.require_arch(data, since, arch)
    message = rf"aiter {before} does not know {arch} \({arch} came with {since}\)"
    with pytest.raises(aiter_facts.Stop, match=message):
        aiter_facts.require_arch(data, before, arch)


def test_a_version_older_than_all_rows_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(aiter_facts.Stop, match="older than any known here"):
        aiter_facts.facts(data, "0.1.0")


def package(folder: Path, version: str = "0.1.20", text: str = "AITER_TRITON_ONLY") -> aiter_facts.Package:
    for name, body in {"aiter/__init__.py": text, "aiter_meta/csrc/include/aiter_enum.h": HEADER}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    (folder / "aiter" / "jit").mkdir()
    return aiter_facts.Package(version, folder / "aiter", folder / "aiter_meta")


def test_mode_off(data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aiter_facts.off(data, package(tmp_path))
    assert capsys.readouterr().out == "ENV AITER_TRITON_ONLY=1\n"


def test_mode_off_with_an_aiter_that_does_not_read_it(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(aiter_facts.Stop, match="does not read AITER_TRITON_ONLY"):
        aiter_facts.off(data, package(tmp_path, text="import torch"))


def test_modules_are_placed_for_both_settings(tmp_path: Path) -> None:
    one, work, dest = package(tmp_path / "site"), tmp_path / "work", tmp_path / "opt"
    (work / "jit").mkdir(parents=True)
    (work / "jit" / "module_x.so").write_bytes(b"new")
    for folder in (dest, one.folder / "jit"):
        (folder / "build" / "module_x").mkdir(parents=True)
        (folder / "build" / "lock_module_x").touch()
    (one.folder / "jit" / "module_x.so").write_bytes(b"old")
    aiter_prebuild.make_ready(dest, one)
    assert aiter_prebuild.install([work / "jit" / "module_x.so"], dest, one) == [dest / "module_x.so"]
    assert (one.folder / "jit" / "module_x.so").readlink() == dest / "module_x.so"
    assert (dest / "module_x.so").read_bytes() == b"new"
    assert (tmp_path / "site" / "aiter-prebuilt.pth").read_text() == f"{dest}\n"
    for folder in (dest, one.folder / "jit"):
        assert aiter_check.directory_problems(folder) == []
    assert sorted(p.name for p in dest.iterdir()) == ["build", "module_x.so"]


def test_a_working_folder_of_a_killed_build_goes_and_one_in_use_stays(tmp_path: Path) -> None:
    dest = tmp_path / "aiter"
    killed = tmp_path / ".aiter.work-killed"
    (killed / "jit").mkdir(parents=True)
    first, handle = aiter_work.folder(dest)
    try:
        second, other = aiter_work.folder(dest)
        os.close(other)
        assert not killed.exists()
        assert first.is_dir()
        assert second.is_dir()
        assert first != second
    finally:
        os.close(handle)


def test_the_builder_sees_none_of_our_own_aiter_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_REBUILD", "1")
    monkeypatch.setenv("HIPCC_COMPILE_FLAGS_APPEND", "-DX")
    monkeypatch.setenv("GPU_ARCHS", "native")
    env = aiter_prebuild.environment(tmp_path, "gfx1151", 2, {"ENABLE_CK": "0"})
    assert "AITER_REBUILD" not in env
    assert env["GPU_ARCHS"] == "gfx1151"
    assert env["ENABLE_CK"] == "0"
    assert env["HIPCC_COMPILE_FLAGS_APPEND"] == "-DX -fuse-cuid=none"


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("-1", -1), ("True", True), ("_Float16", "_Float16"), ("4x", "4x")]
)
def test_the_values_of_a_library_of_cpp_itfs(text: str, value: object) -> None:
    assert aiter_builder.literal(text) == value
