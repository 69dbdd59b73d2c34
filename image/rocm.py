"""What AMD's wheels need besides being unpacked: `rocm.py LAYER SITE`, run in the stage of that layer.

Every change looks for exactly what it expects and stops the build when the wheel has become another one: a change
that silently does nothing would be noticed by a crash on a user's GPU. Standard library only. Exit code 3: a wheel
isn't what is known here.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

REFUSED = 3


class FixError(Exception):
    """A wheel isn't what is known here; the message says in what."""


def keep_symbols_apart(site: Path) -> None:
    """Load the SDK's libraries without RTLD_GLOBAL.

    The SDK's libraries bring an LLVM, and global symbols would put it before the one in Triton's library, which then
    crashes at its first compile.
    """
    file = site / "rocm_sdk/__init__.py"
    text, count = re.subn(r"rtld_global: bool = True", "rtld_global: bool = False", file.read_text(encoding="utf-8"))
    if count != 2:  # preload_libraries and initialize_process
        raise FixError(f"{file.relative_to(site)} has {count} switches for global symbols instead of 2")
    rewrite(site, file, text)


def name_libraries(site: Path) -> None:
    """Give libraries the further names under which others look for them.

    torch is linked against the rocm_smi of an older numbering; amdsmi opens its library by the plain name.
    """
    lib = site / "_rocm_sdk_core/lib"
    if (lib / "librocm_smi64.so.1").exists() and not (lib / "librocm_smi64.so.7").exists():
        (lib / "librocm_smi64.so.7").symlink_to("librocm_smi64.so.1")
    found = sorted(p.name for p in lib.glob("libamd_smi.so.*") if re.fullmatch(r"libamd_smi\.so\.\d+", p.name))
    if len(found) != 1:
        raise FixError(f"the SDK has {len(found)} libraries libamd_smi.so.N instead of one: {' '.join(found)}")
    if not (lib / "libamd_smi.so").exists():
        (lib / "libamd_smi.so").symlink_to(found[0])


def show_amdsmi(site: Path) -> None:
    """Put the SDK's own amdsmi on sys.path where it lies: it finds its library by its own place.

    A path file and not PYTHONPATH, which children and other Pythons would inherit.
    """
    folder = "_rocm_sdk_core/share/amd_smi"
    if not (site / folder / "amdsmi/__init__.py").is_file():
        raise FixError(f"{folder} holds no amdsmi")
    (site / "amd_smi.pth").write_text(f"{folder}\n", encoding="utf-8")


def one_hip_runtime(site: Path) -> None:
    """Refuse a second HIP runtime: two in one process each see no memory of the other."""
    found = sorted({p.resolve() for p in site.rglob("libamdhip64.so*")})
    if len(found) != 1:
        names = " ".join(str(p.relative_to(site.resolve())) for p in found)
        raise FixError(f"{len(found)} HIP runtimes instead of one: {names}")


def one_triton_back_end(site: Path) -> None:
    """Take the entry point of Triton's NVIDIA part out: its folder is cut, and Triton imports all that are named."""
    files = sorted(site.glob("triton-*.dist-info/entry_points.txt"))
    if len(files) != 1:
        raise FixError(f"{len(files)} distributions of Triton instead of one")
    text, count = re.subn(r"(?m)^nvidia\s*=.*\n", "", files[0].read_text(encoding="utf-8"))
    if count != 1 or not re.search(r"(?m)^amd\s*=", text):
        raise FixError("Triton doesn't name its back ends amd and nvidia once each")
    rewrite(site, files[0], text)


def same_triton(site: Path) -> None:
    """Refuse a torch that asks for another Triton than the one beside it: a later install would replace it."""
    version = _metadata(site, "triton", "Version")
    for line in _metadata(site, "torch", "Requires-Dist").splitlines():
        if found := re.fullmatch(r"triton\s*==\s*([^\s;]+).*", line):
            if found[1] != version:
                raise FixError(f"torch asks for Triton {found[1]}, the lock has {version}")
            return
    raise FixError("torch names no exact Triton")


FIXES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "rocm": (keep_symbols_apart, name_libraries, show_amdsmi, one_hip_runtime),
    "torch": (one_triton_back_end, same_triton),
}


def rewrite(site: Path, file: Path, text: str) -> None:
    """Write a file of a distribution, and its new hash and size into the RECORD that lists it."""
    file.write_text(text, encoding="utf-8")
    name = file.relative_to(site).as_posix()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    for record in sorted(site.glob("*.dist-info/RECORD")):
        rows = list(csv.reader(io.StringIO(record.read_text(encoding="utf-8"))))
        if any(row and row[0] == name for row in rows):
            own = [name, f"sha256={digest}", str(len(text.encode()))]
            new = [own if row and row[0] == name else row for row in rows]
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows(new)
            record.write_text(out.getvalue(), encoding="utf-8")


def _metadata(site: Path, name: str, field: str) -> str:
    """All values of a field of a distribution's metadata, one a line."""
    files = sorted(site.glob(f"{name}-*.dist-info/METADATA"))
    if len(files) != 1:
        raise FixError(f"{len(files)} distributions of {name} instead of one")
    head = files[0].read_text(encoding="utf-8").partition("\n\n")[0]
    return "\n".join(re.findall(rf"(?m)^{field}: (.+)$", head))


def main(arguments: list[str]) -> int:
    """Apply the fixes of one layer; returns 0, or 3 for a wheel that isn't what is known here."""
    layer, site = arguments
    try:
        for fix in FIXES.get(layer, ()):
            fix(Path(site))
            print(f"rocm: {layer}: {fix.__name__.replace('_', ' ')}")
    except (FixError, OSError, UnicodeDecodeError) as problem:
        print(f"rocm: {layer}: {problem}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
