"""Small shared libraries for x86-64 Linux, written byte by byte: a rehearsal has no compiler to make them with.

The loader takes them for what they are: they have a SONAME, need other libraries, export functions that return 0,
and can carry device code in the section where HIP's tools keep it. One that is an extension module runs Python
source when it is imported. Format: the generic System V ABI (gABI 4.1, chapters 4 and 5) and its AMD64 supplement.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

PAGE = 0x1000
TEXT, DATA = PAGE, 2 * PAGE  # where code and writable data begin, in the file as in memory
GLOB_DAT, RELATIVE = 6, 8  # R_X86_64_*
# What an extension module asks of the interpreter that loads it, in the order of its table of addresses.
CALLS = ("PyModuleDef_Init", "PyModule_GetDict", "PyRun_String")
FILE_INPUT = 257  # Py_file_input: the source of a whole module
EXEC_SLOT = 2  # Py_mod_exec
# Where the parts of an extension module's data lie, from DATA on (Include/moduleobject.h).
DEFINITION, SLOTS, STRINGS = 0x20, 0x90, 0xB0
NAME_FIELD, SLOTS_FIELD = DEFINITION + 40, DEFINITION + 72

Relocation = tuple[int, int, int]  # address, symbol and type, addend


class Section(NamedTuple):
    """A section of the file: its offset is its address."""

    name: str
    data: bytes
    at: int
    kind: int  # SHT_*
    flags: int  # SHF_*
    link: str = ""
    info: int = 0
    entry: int = 0


def library(
    soname: str,
    *,
    needed: Sequence[str] = (),
    runpath: str = "",
    symbols: Sequence[str] = (),
    device_code: bytes = b"",
    module: str = "",
    source: str = "",
) -> bytes:
    """The bytes of a shared library.

    `symbols` are exported functions that return 0. `device_code` becomes the section .hip_fatbin. With `module`
    it is a Python extension module of that name, in whose namespace `source` runs.
    """
    imports = CALLS if module else ()
    exports = [*symbols, *([f"PyInit_{module}"] if module else ())]
    strings = bytearray(b"\0")
    code, data, relocations = _module(module, source) if module else (_code(), b"", [])
    names = [(1, n) for n in needed] + [(14, soname)] + ([(29, runpath)] if runpath else [])  # NEEDED, SONAME, RUNPATH
    tags = [(tag, _string(strings, name)) for tag, name in names]
    entries = [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
    entries += [struct.pack("<IBBHQQ", _string(strings, name), 0x12, 0, 0, 0, 0) for name in imports]
    for name in exports:
        at = TEXT + 0x10 if module and name == exports[-1] else TEXT
        entries.append(struct.pack("<IBBHQQ", _string(strings, name), 0x12, 0, 1, at, 3))
    dynamic_at = _up(DATA + len(data), 16)
    tables = _up(dynamic_at + 16 * (len(tags) + 9), PAGE)
    table = [("dynsym", b"".join(entries)), ("dynstr", bytes(strings)), ("hash", _hash(len(entries)))]
    table += [("rela", b"".join(struct.pack("<QQq", *r) for r in relocations)), ("fatbin", device_code)]
    at, place = tables, {}
    for name, content in table:
        place[name] = at = _up(at, PAGE if name == "fatbin" else 16)
        at += len(content)
    found = dict(table)
    tags += [(4, place["hash"]), (5, place["dynstr"]), (6, place["dynsym"]), (10, len(strings)), (11, 24)]
    tags += [(7, place["rela"]), (8, len(found["rela"])), (9, 24)] if relocations else []
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in [*tags, (0, 0)])
    sections = [
        Section(".text", code, TEXT, 1, 6),
        *([Section(".data", data, DATA, 1, 3)] if data else []),
        Section(".dynamic", dynamic, dynamic_at, 6, 3, link=".dynstr", entry=16),
        Section(".dynsym", found["dynsym"], place["dynsym"], 11, 2, link=".dynstr", info=1, entry=24),
        Section(".dynstr", found["dynstr"], place["dynstr"], 3, 2),
        Section(".hash", found["hash"], place["hash"], 5, 2, link=".dynsym", entry=4),
        *([Section(".rela.dyn", found["rela"], place["rela"], 4, 2, ".dynsym", entry=24)] if relocations else []),
        *([Section(".hip_fatbin", device_code, place["fatbin"], 1, 2)] if device_code else []),
    ]
    loads = [(5, TEXT, len(code)), (6, DATA, dynamic_at + len(dynamic) - DATA), (4, tables, at - tables)]
    return _file(sections, loads, dynamic_at, len(dynamic))


def _file(sections: Sequence[Section], loads: Sequence[tuple[int, int, int]], dynamic: int, size: int) -> bytes:
    """Header, program headers, sections at their offsets, and the section table at the end."""
    programs = [(1, 4, 0, PAGE), *((1, flags, at, length) for flags, at, length in loads)]
    programs += [(2, 6, dynamic, size), (0x6474E551, 6, 0, 0)]  # PT_DYNAMIC, PT_GNU_STACK: not executable
    strings = bytearray(b"\0")
    order = {section.name: i for i, section in enumerate(sections, 1)}
    rows = [bytes(64)]
    for s in sections:
        link = order[s.link] if s.link else 0
        name = _string(strings, s.name)
        row = (name, s.kind, s.flags, s.at, s.at, len(s.data), link, s.info, 16, s.entry)
        rows.append(struct.pack("<IIQQQQIIQQ", *row))
    end = max(s.at + len(s.data) for s in sections)
    name = _string(strings, ".shstrtab")
    rows.append(struct.pack("<IIQQQQIIQQ", name, 3, 0, 0, end, len(strings), 0, 0, 1, 0))
    table = _up(end + len(strings), 8)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, table, 0, 64, 56, len(programs), 64, len(rows), len(rows) - 1,
    )  # fmt: skip
    for kind, flags, at, length in programs:
        align = PAGE if kind == 1 else 16
        head += struct.pack("<IIQQQQQQ", kind, flags, at, at, at, length, length, align)
    content = bytearray(table)
    content[: len(head)] = head
    for s in sections:
        content[s.at : s.at + len(s.data)] = s.data
    content[end : end + len(strings)] = strings
    return bytes(content) + b"".join(rows)


def _module(name: str, source: str) -> tuple[bytes, bytes, list[Relocation]]:
    """Code, data and relocations of an extension module: its definition, whose only slot runs `source`."""
    inside = STRINGS + len(name.encode()) + 1
    data = bytearray(inside) + source.encode() + b"\0"
    struct.pack_into("<Q", data, DEFINITION, 1)  # the reference count of a static object
    struct.pack_into("<Q", data, SLOTS, EXEC_SLOT)
    data[STRINGS : inside - 1] = name.encode()
    relocations = [(DATA + 8 * i, (i + 1) << 32 | GLOB_DAT, 0) for i in range(len(CALLS))]
    pointers = ((NAME_FIELD, DATA + STRINGS), (SLOTS_FIELD, DATA + SLOTS), (SLOTS + 8, TEXT + 0x20))
    relocations += [(DATA + at, RELATIVE, target) for at, target in pointers]
    return _code(DATA + inside), bytes(data), relocations


def _code(source_at: int = 0) -> bytes:
    """A function that returns 0; after it, for an extension module, its PyInit and the function of its slot."""
    code = bytes.fromhex("31c0c3").ljust(16, b"\0")  # xor eax, eax; ret
    if not source_at:
        return code

    def relative(words: str, target: int) -> None:
        nonlocal code
        code += bytes.fromhex(words)
        code += struct.pack("<i", target - (TEXT + len(code) + 4))

    relative("488d3d", DATA + DEFINITION)  # lea rdi, definition
    relative("ff25", DATA)  # jmp PyModuleDef_Init
    code = code.ljust(32, b"\0") + bytes.fromhex("53")  # push rbx: calls want an aligned stack
    relative("ff15", DATA + 8)  # call PyModule_GetDict, the module is in rdi
    relative("488d3d", source_at)  # lea rdi, source
    code += b"\xbe" + struct.pack("<i", FILE_INPUT) + bytes.fromhex("4889c24889c1")  # mov esi, …; rdx, rcx = rax
    relative("ff15", DATA + 16)  # call PyRun_String
    return code + bytes.fromhex("4885c00f94c00fb6c0f7d85bc3")  # return rax ? 0 : -1


def _hash(count: int) -> bytes:
    """A symbol table's hash with a single bucket: all symbols in one chain."""
    return struct.pack("<III", 1, count, count - 1) + struct.pack(f"<{count}I", 0, *range(count - 1))


def _string(table: bytearray, text: str) -> int:
    at = len(table)
    table += text.encode() + b"\0"
    return at


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
