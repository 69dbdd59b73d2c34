"""Shared libraries written byte by byte: the loader takes them, and so do the readers of the image tests."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from pathlib import Path
from types import ModuleType

import pytest

from image.code_objects import code_objects, sections
from warmstart import devicecode, elf

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="libraries for x86-64")


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loader_finds_what_a_library_needs(tmp_path: Path) -> None:
    (tmp_path / "libaa.so.1").write_bytes(elf.library("libaa.so.1", symbols=["aa", "more"]))
    (tmp_path / "libbb.so.2").write_bytes(
        elf.library("libbb.so.2", needed=["libaa.so.1"], runpath="$ORIGIN", symbols=["bb"])
    )
    library = ctypes.CDLL(str(tmp_path / "libbb.so.2"), mode=2)  # RTLD_NOW
    assert [library.bb(), library.aa(), library.more()] == [0, 0, 0]
    with pytest.raises(AttributeError):
        library.absent  # noqa: B018


def test_what_is_needed_and_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "libcc.so").write_bytes(elf.library("libcc.so", needed=["libwarmstart-absent.so.9"]))
    with pytest.raises(OSError, match=r"libwarmstart-absent\.so\.9"):
        ctypes.CDLL(str(tmp_path / "libcc.so"))


def test_an_extension_module_runs_its_source(tmp_path: Path) -> None:
    source = "import enum\n\n\nclass Kind(enum.IntEnum):\n    No = -1\n    Some = 3\n"
    (tmp_path / "module_one.so").write_bytes(elf.library("module_one.so", module="module_one", source=source))
    module = imported(tmp_path / "module_one.so")
    assert {k: int(v) for k, v in module.Kind.__members__.items()} == {"No": -1, "Some": 3}


def test_an_error_in_its_source_is_raised(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(elf.library("broken.so", module="broken", source="1 / 0\n"))
    with pytest.raises(ZeroDivisionError):
        imported(tmp_path / "broken.so")


def test_sections_and_device_code_can_be_read() -> None:
    # A code object as far as its reader looks: ELF header of AMD's ABI, machine 224, the arch in the flags.
    objects = {
        arch: (b"\x7fELF\x02\x01\x01\x40".ljust(18, b"\0") + (224).to_bytes(2, "little")).ljust(48, b"\0")
        + flags.to_bytes(4, "little") + bytes(100)
        for arch, flags in (("gfx942", 0x4C), ("gfx1151", 0x4A))
    }  # fmt: skip
    data = elf.library("libdd.so", device_code=devicecode.bundle(objects))
    names = [name for name, _, _ in sections(data)]
    assert ".hip_fatbin" in names
    assert ".dynsym" in names
    assert {(o.target, o.size) for o in code_objects(data)} == {("gfx942", 152), ("gfx1151", 152)}


def test_the_same_library_has_the_same_bytes() -> None:
    assert elf.library("a.so", needed=["b.so"]) == elf.library("a.so", needed=["b.so"])
