"""The device code inside ELF files, read from the files themselves: no GPU, no ROCm, standard library only.

Knows clang's offload bundles, plain and compressed, and code objects embedded as data.
"""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"  # clang's ClangOffloadBundler.rst: magic, u64 count, then the entries
COMPRESSED = b"CCOB"  # same document, "Compressed Offload Bundle": versions 1 to 3
DEVICE_ELF = b"\x7fELF\x02\x01\x01\x40"  # ELF64, little endian, OS ABI 64 = AMDGPU_HSA
EM_AMDGPU = 224
# EF_AMDGPU_MACH, the low byte of a code object's e_flags: what LLVM 21's assembler writes for each target
# (llvm-mc -triple=amdgcn-amd-amdhsa -mcpu=...), so that a file can't pass by its label alone.
MACH = {
    0x2F: "gfx906", 0x30: "gfx908", 0x33: "gfx1010", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031",
    0x38: "gfx1032", 0x39: "gfx1033", 0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x40: "gfx940",
    0x41: "gfx1100", 0x43: "gfx1150", 0x44: "gfx1103", 0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102",
    0x48: "gfx1200", 0x49: "gfx1250", 0x4A: "gfx1151", 0x4B: "gfx941", 0x4C: "gfx942", 0x4E: "gfx1201",
    0x4F: "gfx950", 0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic",
    0x54: "gfx11-generic", 0x55: "gfx1152", 0x58: "gfx1153", 0x59: "gfx12-generic", 0x5F: "gfx9-4-generic",
}  # fmt: skip
Bytes = bytes | mmap.mmap


class CodeObject(NamedTuple):
    """One piece of device code: its target ("gfx942", "gfx90a:xnack+"), its size and offset in bytes."""

    target: str
    size: int
    offset: int

    @property
    def arch(self) -> str:
        """The target without features."""
        return self.target.split(":")[0]


def sections(data: Bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a little-endian ELF64 file that has bytes in the file.

    Raises ValueError when the file is no such ELF or is cut short.
    """
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise ValueError("no little-endian ELF64 file")
    table, entry, count, names_at = struct.unpack_from("<Q", data, 40) + struct.unpack_from("<HHH", data, 58)
    if count and table + entry * count > len(data):
        raise ValueError("cut short: the section table lies past the end of the file")
    rows = [struct.unpack_from("<IIQQQQ", data, table + entry * i) for i in range(count)]
    names = rows[names_at][4] if rows else 0
    for name, kind, _flags, _address, offset, size in rows:
        if kind in (0, 8):  # SHT_NULL, SHT_NOBITS: nothing in the file
            continue
        if offset + size > len(data):
            raise ValueError("cut short: a section lies past the end of the file")
        end = data.find(b"\0", names + name)
        yield bytes(data[names + name : end]).decode("ascii", "replace"), offset, size


def code_objects(data: Bytes) -> list[CodeObject]:
    """All device code in an ELF file: offload bundles in .hip_fatbin, objects embedded as data, or the file.

    Offsets inside a compressed bundle are relative to the unpacked bundle. Raises ValueError when the file is
    cut short, a bundle can't be read, or a bundle's label differs from the code object under it.
    """
    found: list[CodeObject] = []
    for name, start, size in sections(data):
        if name.startswith(".hip_fatbin"):
            found += _bundles(data, start, start + size)
    known = {o.offset for o in found}
    at = data.find(DEVICE_ELF)
    while at >= 0:
        if at not in known and struct.unpack_from("<H", data, at + 18)[0] == EM_AMDGPU:
            found.append(CodeObject(_mach(data, at), len(data) - at, at))
        at = data.find(DEVICE_ELF, at + 4)
    return found


def _bundles(data: Bytes, start: int, end: int) -> list[CodeObject]:
    found: list[CodeObject] = []
    seen = False
    at = start
    while at < end:
        plain, packed = data.find(BUNDLE, at, end), data.find(COMPRESSED, at, end)
        if plain < 0 and packed < 0:
            break
        seen = True
        if packed < 0 or 0 <= plain < packed:
            objects, at = _bundle(data, plain, end)
        else:
            raw, at = _unpack(data, packed, end)
            objects = _bundle(raw, 0, len(raw))[0]
        found += objects
    if not seen and any(data[start:end]):
        raise ValueError("a .hip_fatbin section without an offload bundle")
    return found


def _bundle(data: Bytes, at: int, end: int) -> tuple[list[CodeObject], int]:
    """The device entries of the bundle at `at`, and the offset of its end."""
    try:
        (count,) = struct.unpack_from("<Q", data, at + len(BUNDLE))
        head = at + len(BUNDLE) + 8
        found, last = [], head
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, head)
            label = bytes(data[head + 24 : head + 24 + length]).decode("ascii")
            head += 24 + length
            last = max(last, head, at + offset + size)
            if last > end:
                raise ValueError("an offload bundle lies past the end of its section")
            device = re.search(r"amdgcn-amd-amdhsa-[^-]*-(gfx\S+)$", label)
            if device and size:
                found.append(_labelled(data, CodeObject(device[1], size, at + offset)))
    except (struct.error, UnicodeDecodeError):
        raise ValueError("an offload bundle can't be read") from None
    return found, last


def _labelled(data: Bytes, one: CodeObject) -> CodeObject:
    if data[one.offset : one.offset + 8] == DEVICE_ELF:
        inside = _mach(data, one.offset)
        if inside.startswith("gfx") and inside != one.arch:
            raise ValueError(f"a bundle entry is labelled {one.target} but its code object is for {inside}")
    return one


def _mach(data: Bytes, at: int) -> str:
    (flags,) = struct.unpack_from("<I", data, at + 48)
    return MACH.get(flags & 0xFF, f"unknown-0x{flags & 0xFF:02x}")


def _unpack(data: Bytes, at: int, end: int) -> tuple[bytes, int]:
    """The bundle inside the compressed bundle at `at`, and the offset of its end."""
    version, method = struct.unpack_from("<HH", data, at + 4)
    sizes = {1: "<I", 2: "<II", 3: "<QQ"}.get(version)
    if sizes is None:
        raise ValueError(f"a compressed bundle of version {version}, which this check does not know")
    body = at + 8 + struct.calcsize(sizes) + 8  # the 8 after the sizes are a hash
    total = struct.unpack_from(sizes, data, at + 8)[0] if version > 1 else 0
    following = data.find(COMPRESSED, body, end)
    stop = at + total if total else following if following >= 0 else end
    packed = bytes(data[body:stop])
    return (zlib.decompressobj().decompress(packed) if method == 0 else _zstd(packed)), stop


def _zstd(packed: bytes) -> bytes:
    for name in ("compression.zstd", "zstandard"):  # the standard library has it from Python 3.14 on
        try:
            module: Any = __import__(name, fromlist=["ZstdDecompressor"])
        except ImportError:
            continue
        decompressor = module.ZstdDecompressor()
        one_shot = decompressor if name == "compression.zstd" else decompressor.decompressobj()
        return bytes(one_shot.decompress(packed))
    raise ValueError("compressed with zstd: reading it needs Python 3.14 or the package zstandard")


def code_objects_of(path: Path) -> list[CodeObject]:
    """All device code in the ELF file at `path`, which is mapped, not read. Raises OSError and ValueError."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("an empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return code_objects(data)
