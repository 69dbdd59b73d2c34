"""Print the files below a folder that hold device code: the archs that it is for, read from the files, and the owner.

    device_code.py FOLDER MODULES        MODULES: the folder with code_objects.py

ELF files and offload bundles are read by code_objects.py. A kpack is a header ("KPAK", version, offset of its table),
compressed kernels, and a table in MessagePack that names their archs (rocm-kpack, multi_arch_packaging_with_kpack.md).
"""

import ctypes
import importlib.metadata
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[2])
import code_objects  # type: ignore[import-not-found]

STANDIN = b" standin"  # the mark of a rehearsal's stand-in, whose code object lies in it as it is


def archs(file: Path) -> list[str]:
    """The archs of a file's device code. Raises ValueError for what can't be read."""
    if file.suffix == ".kpack":
        return packed(file.read_bytes())
    if file.open("rb").read(4) != b"\x7fELF":  # rocBLAS and hipBLASLt keep bundles as files
        data = file.read_bytes()
        return sorted({one.arch for one in code_objects._bundles(data, 0, len(data))})
    return sorted({one.arch for one in code_objects.code_objects_of(file)})


def packed(data: bytes) -> list[str]:
    """The archs of a kpack: those of its table, or of the code objects that lie in it as they are."""
    if data[:4] == b"KPAK" and data[4:12] != STANDIN:
        import msgspec

        table: Any = msgspec.msgpack.decode(data[struct.unpack_from("<Q", data, 8)[0] :])
        named = set(table["gfx_arches"]) | {arch for kernels in table["toc"].values() for arch in kernels}
        return sorted({str(name).partition(":")[0] for name in named})
    first = data.find(code_objects.DEVICE_ELF)
    found = {one.arch for one in code_objects.code_objects(data[first:])} if first >= 0 else set()
    if not found:
        raise ValueError("a kpack without a table and without code objects")
    return sorted(found)


def unzstd(packed: bytes) -> bytes:
    """A zstd frame unpacked by the C library: Python has had it only since 3.14."""
    zstd = ctypes.CDLL("libzstd.so.1")
    zstd.ZSTD_getFrameContentSize.restype = ctypes.c_ulonglong
    zstd.ZSTD_decompress.restype = ctypes.c_size_t
    size = zstd.ZSTD_getFrameContentSize(packed, ctypes.c_size_t(len(packed)))
    if size >= 2**40:  # the two largest numbers mean: unknown, and no zstd
        raise ValueError("a zstd frame that does not say its size")
    out = ctypes.create_string_buffer(size)
    done = zstd.ZSTD_decompress(out, ctypes.c_size_t(size), packed, ctypes.c_size_t(len(packed)))
    if done != size:
        raise ValueError("a zstd frame that can't be unpacked")
    return out.raw


def owners(files: list[str]) -> dict[str, str]:
    """File → normalised name of the distribution that brought it."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower()
        found |= {str(path): name for f in one.files or () if (path := one.locate_file(f))}
    return {file: found.get(file, "") for file in files}


code_objects._zstd = unzstd
found: dict[str, list[str]] = {}
problems: dict[str, str] = {}
count = 0
for file in sorted(Path(sys.argv[1]).rglob("*")):
    if file.is_symlink() or not file.is_file():
        continue
    with file.open("rb") as start:
        head = start.read(5)
    if head != b"\x7fELF\x02" and file.suffix not in {".kpack", ".hsaco", ".co"}:
        continue
    count += 1
    try:
        if of_file := archs(file):
            found[str(file)] = of_file
    except Exception as problem:
        problems[str(file)] = f"{type(problem).__name__}: {problem}"
print(json.dumps({"count": count, "archs": found, "owners": owners(list(found)), "problems": problems}))
