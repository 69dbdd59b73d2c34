"""What the dynamic loader reads in a shared library: its name, needs and symbols. The image has no binutils.

Format: the generic System V ABI (gABI 4.1), chapters 4 and 5.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import NamedTuple

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_NEEDED, DT_SONAME = 1, 14
STB_WEAK = 2
# A C++ name whose outermost namespace is one of torch's: _ZN3c10…, _ZNK2at…, _ZTIN5torch… (Itanium C++ ABI, 5.1), or a
# function of torch's stable ABI, which is C (torch/csrc/inductor/aoti_torch/c/shim.h).
OF_TORCH = re.compile(rb"_Z(T[VTISW]|GV)?N?[rVKRO]*(3c10|2at|5torch)\d|aoti_torch_")


class Library(NamedTuple):
    """The dynamic part of one shared library; symbols are mangled names without versions."""

    soname: str
    needed: list[str]
    defined: set[bytes]
    undefined: set[bytes]  # what some other library must bring; weak ones may stay without


def read(path: Path) -> Library:
    """The dynamic part of the ELF64 file at `path`. Raises ValueError for any other file."""
    with path.open("rb") as file:
        if path.stat().st_size < 64:
            raise ValueError(f"{path} is no ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path} is no little-endian ELF64 file")
            try:
                return _read(data)
            except (struct.error, IndexError):
                raise ValueError(f"{path} is cut short") from None


def is_elf(path: Path) -> bool:
    """Whether the file begins as an ELF file does."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _read(data: mmap.mmap) -> Library:
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQI", data, table + entry * i) for i in range(count)]
    found = Library("", [], set(), set())
    for _name, kind, _flags, _address, offset, size, link in sections:
        names = sections[link][4] if link < count else 0
        if kind == SHT_DYNAMIC:
            found = _entries(found, data, offset, size, names)
        elif kind == SHT_DYNSYM:
            _symbols(found, data, offset, size, names)
    return found


def _entries(found: Library, data: mmap.mmap, offset: int, size: int, names: int) -> Library:
    for at in range(offset, offset + size, 16):
        tag, value = struct.unpack_from("<qQ", data, at)
        if tag == DT_NEEDED:
            found.needed.append(_text(data, names + value).decode())
        elif tag == DT_SONAME:
            found = found._replace(soname=_text(data, names + value).decode())
    return found


def _symbols(found: Library, data: mmap.mmap, offset: int, size: int, names: int) -> None:
    for name, info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", data[offset : offset + size]):
        if section:
            found.defined.add(_text(data, names + name))
        elif name and info >> 4 != STB_WEAK:
            found.undefined.add(_text(data, names + name))


def _text(data: mmap.mmap, at: int) -> bytes:
    return data[at : data.find(b"\0", at)]
