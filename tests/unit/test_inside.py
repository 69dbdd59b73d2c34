"""The programs that image tests run inside an image, on files made here: they must see what is wrong."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.util
import json
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from image.code_objects import BUNDLE, COMPRESSED, DEVICE_ELF, EM_AMDGPU, MACH

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "tests" / "image" / "inside"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run one of the programs in this process; what it prints, as JSON."""

    def call(name: str, *arguments: str | Path) -> Any:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        runpy.run_path(str(INSIDE / name), run_name="__main__")
        for module in ("elf", "code_objects"):
            sys.modules.pop(module, None)
        return json.loads(capsys.readouterr().out)

    return call


# --- elf.py, symbols.py -----------------------------------------------------------


def library(symbols: dict[bytes, tuple[int, int]], *, needed: bytes = b"", soname: bytes = b"") -> bytes:
    """An ELF64 file with a dynamic section and symbols: name → (info, section)."""
    names = b"\0" + needed + b"\0" + soname + b"\0"
    table = bytes(24)
    for name, (info, section) in symbols.items():
        table += struct.pack("<IBBHQQ", len(names), info, 0, section, 0, 0)
        names += name + b"\0"
    dynamic = struct.pack("<qQ", 1, 1) if needed else b""
    dynamic += struct.pack("<qQ", 14, 2 + len(needed)) if soname else b""
    parts = [(0, b"", 0), (3, names, 0), (11, table, 1), (6, dynamic, 1)]
    body, rows = b"", b""
    for kind, data, link in parts:
        rows += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, 64 + len(body), len(data), link, 0, 1, 0)
        body += data
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, 64 + len(body))
    return head + struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, len(parts), 0) + body + rows


def elf() -> Any:
    spec = importlib.util.spec_from_file_location("elf", INSIDE / "elf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["elf"] = module
    spec.loader.exec_module(module)
    sys.modules.pop("elf")
    return module


def test_the_reader_on_a_real_library() -> None:
    """libstdc++ or libc of this machine, as the loader found them for this process."""
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line]
    found = elf().read(Path(paths[0]))
    assert found.soname.startswith("libc.so")
    assert {b"malloc", b"printf"} <= found.defined
    assert found.undefined <= {b"__tls_get_addr", b"_dl_argv", b"_rtld_global"} | {
        name for name in found.undefined if name.startswith((b"_", b"__"))
    }


def test_weak_symbols_may_stay_without(tmp_path: Path) -> None:
    file = tmp_path / "a.so"
    file.write_bytes(
        library({b"have": (0x12, 5), b"want": (0x12, 0), b"may": (0x22, 0)}, needed=b"b.so", soname=b"a.so")
    )
    assert elf().read(file) == ("a.so", ["b.so"], {b"have"}, {b"want"})


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01" + bytes(100), b"text" * 99, library({b"x": (0x12, 0)})[:-40]])
def test_what_is_no_library_says_so(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.so").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.so"):
        elf().read(tmp_path / "a.so")


@pytest.mark.parametrize(
    ("name", "torchs"),
    [
        ("_ZN3c105ErrorC1Ev", True),
        ("_ZNK2at10TensorBase4sizeEl", True),
        ("_ZTIN5torch8autograd4NodeE", True),
        ("_ZN4vllm3c105ErrorE", False),
        ("_ZNSt6vectorIN2at6TensorEE", False),
        ("aoti_torch_empty_strided", True),
        ("malloc", False),
        ("_ZN2at", False),
    ],
)
def test_names_in_torchs_namespaces(name: str, torchs: bool) -> None:
    assert bool(elf().OF_TORCH.match(name.encode())) is torchs


def test_a_symbol_that_torch_lacks_is_found(tmp_path: Path, inside: Any) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "vllm" / "deep").mkdir(parents=True)
    have, lack, other = b"_ZN3c105ErrorC1Ev", b"_ZN2at4gone4callEv", b"_ZN4vllm4mineEv"
    (tmp_path / "torch" / "libc10.so").write_bytes(library({have: (0x12, 3)}))
    (tmp_path / "torch" / "libtorch.so.txt").write_text("no library")
    file = tmp_path / "vllm" / "deep" / "_C.abi3.so"
    file.write_bytes(library({have: (0x12, 0), lack: (0x12, 0), other: (0x12, 0), b"_ZN2at4weakE1": (0x22, 0)}))
    found = inside("symbols.py", tmp_path / "torch", tmp_path / "vllm")
    assert found["missing"] == {str(file): [lack.decode()]}
    assert (found["files"], found["symbols"], found["brought"]) == (1, 2, 1)


# --- device_code.py ---------------------------------------------------------------------


def code_object(arch: str) -> bytes:
    """The head of a code object for `arch`, without sections."""
    mach = next(number for number, name in MACH.items() if name == arch)
    head = DEVICE_ELF + bytes(8) + struct.pack("<HHIQQQI", 3, EM_AMDGPU, 1, 0, 0, 64, mach)
    return head + struct.pack("<HHHHHH", 64, 0, 0, 64, 0, 0)


def bundle(*archs: str) -> bytes:
    """A plain offload bundle."""
    labels = [f"hipv4-amdgcn-amd-amdhsa--{arch}".encode() for arch in archs]
    head = len(BUNDLE) + 8 + sum(24 + len(label) for label in labels)
    table, body = BUNDLE + struct.pack("<Q", len(labels)), b""
    for arch, label in zip(archs, labels, strict=True):
        table += struct.pack("<QQQ", head + len(body), 64, len(label)) + label
        body += code_object(arch)
    return table + body


def kpack(archs: list[str], kernels: dict[str, Any]) -> bytes:
    """A kpack without kernels: its header and its table."""
    return (
        b"KPAK" + struct.pack("<IQ", 1, 64) + bytes(48) + msgspec.msgpack.encode({"gfx_arches": archs, "toc": kernels})
    )


def zstd(data: bytes) -> bytes:
    """A zstd frame that holds `data` as it is (RFC 8878, sections 3.1.1 and 3.1.1.2): one raw block, size told."""
    frame = struct.pack("<IB", 0xFD2FB528, 0xA0) + struct.pack("<I", len(data))
    return frame + struct.pack("<I", len(data) << 3 | 1)[:3] + data


def compressed(data: bytes) -> bytes:
    """A compressed offload bundle, version 2, by zstd."""
    packed = zstd(data)
    return COMPRESSED + struct.pack("<HHIIQ", 2, 1, 24 + len(packed), len(data), 0) + packed


def test_archs_are_read_from_every_kind_of_file(tmp_path: Path, inside: Any) -> None:
    (tmp_path / "site" / ".kpack").mkdir(parents=True)
    for name, data in {
        "raw.hsaco": code_object("gfx1151"),
        "tensile.co": bundle("gfx1151", "gfx942"),
        ".kpack/torch_gfx1151.kpack": kpack(["gfx1151"], {"libtorch_hip.so": {"gfx1151": {}}}),
        ".kpack/sneaky_gfx1151.kpack": kpack(["gfx1151"], {"libtorch_hip.so": {"gfx90a:xnack+": {}}}),
        ".kpack/plain.kpack": b"KPAK standin\0\0\0\0" + code_object("gfx1100"),
        "host.so": library({}),
        "text.txt": b"gfx1151",
    }.items():
        (tmp_path / "site" / name).write_bytes(data)
    found = inside("device_code.py", tmp_path / "site", ROOT / "image")
    assert found["problems"] == {}
    assert {Path(file).name: archs for file, archs in found["archs"].items()} == {
        "raw.hsaco": ["gfx1151"],
        "tensile.co": ["gfx1151", "gfx942"],
        "torch_gfx1151.kpack": ["gfx1151"],
        "sneaky_gfx1151.kpack": ["gfx1151", "gfx90a"],
        "plain.kpack": ["gfx1100"],
    }
    assert found["count"] == 6


@pytest.mark.parametrize(
    "data",
    [b"", b"KPAK", b"KPAK" + struct.pack("<IQ", 1, 9999), kpack([], {})[:-1], b"no mark at all"],
)
def test_a_pack_that_cannot_be_read_is_told(tmp_path: Path, inside: Any, data: bytes) -> None:
    file = tmp_path / "torch_gfx1151.kpack"
    file.write_bytes(data)
    found = inside("device_code.py", tmp_path, ROOT / "image")
    assert list(found["problems"]) == [str(file)]


def test_vllms_libraries_are_compressed_by_zstd(tmp_path: Path, inside: Any) -> None:
    """Its build asks for --offload-compress; the C library unpacks what Python can't."""
    try:
        ctypes.CDLL("libzstd.so.1")
    except OSError:
        pytest.skip("no libzstd here")
    (tmp_path / "ops.co").write_bytes(compressed(bundle("gfx1201")))
    found = inside("device_code.py", tmp_path, ROOT / "image")
    assert (found["problems"], list(found["archs"].values())) == ({}, [["gfx1201"]])
    (tmp_path / "ops.co").write_bytes(compressed(bundle("gfx1201"))[:-90])
    assert inside("device_code.py", tmp_path, ROOT / "image")["problems"]


# --- records.py ---------------------------------------------------------------------------


def test_a_changed_and_a_missing_file_are_told(tmp_path: Path, inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    info = tmp_path / "probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\nRequires-Dist: torch==2.13\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nprobe = probe:run\n[triton.backends]\namd = probe\n")
    (info / "RECORD").write_text(
        line("probe/a.py", b"a") + line("probe/b.py", b"b") + line("probe/c.py", b"c") + "../../../bin/tool,,\n"
    )
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "a.py").write_bytes(b"a")
    (tmp_path / "probe" / "b.py").write_bytes(b"B")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = inside("records.py", "probe")["probe"]
    assert (found["right"], found["changed"], found["missing"][0]) == (1, ["probe/b.py"], "probe/c.py")
    assert (found["requires"], found["back_ends"]) == (["torch==2.13"], ["amd"])
    assert {"tool", "probe"} <= set(found["programs"])


def test_a_library_that_opens_and_one_that_does_not(inside: Any) -> None:
    found = inside("opens.py", "libc.so.6", "libwarmstart-is-not-here.so")
    assert list(found) == ["libwarmstart-is-not-here.so"]
