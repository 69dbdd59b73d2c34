"""Print facts about the loader and the HIP runtime of the image.

runtime.py SITE
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import elf  # type: ignore[import-not-found]

SEEN_ELSEWHERE = ("/proc", "/sys", "/dev", "/mnt", "/run")


def copies(prefix: str) -> list[str]:
    """One path of each file on the image whose name begins so; links to one file are one."""
    found: dict[tuple[int, int], str] = {}
    for folder, folders, names in os.walk("/"):
        folders[:] = [f for f in folders if os.path.join(folder, f) not in SEEN_ELSEWHERE]
        for name in names:
            path = Path(folder, name)
            if name.startswith(prefix) and path.is_file():
                status = path.stat()
                found.setdefault((status.st_dev, status.st_ino), str(path.resolve()))
    return sorted(found.values())


def cache() -> dict[str, object]:
    """How /etc/ld.so.cache differs from the folders that /etc/ld.so.conf.d/rocm.conf names."""
    folders = [Path(line) for line in Path("/etc/ld.so.conf.d/rocm.conf").read_text().split()]
    known = {p for p in Path("/etc/ld.so.cache").read_bytes().split(b"\0") if p.startswith(b"/") and b".so" in p}
    expected = set()
    for folder in folders:
        for file in folder.glob("lib*.so*"):
            if elf.is_elf(file) and (name := elf.read(file).soname):
                expected.add(str(folder / name).encode())
    gone = [name for name in known if not Path(os.fsdecode(name)).exists()]
    return {
        "folders": list(map(str, folders)),
        "absent": sorted(map(str, (f for f in folders if not f.is_dir()))),
        "unknown": sorted(os.fsdecode(name) for name in expected - known),
        "gone": sorted(map(os.fsdecode, gone)),
        "count": len(expected),
    }


site = Path(sys.argv[1])
smi = site / "_rocm_sdk_core/lib/librocm_smi64.so.7"
print(
    json.dumps(
        {
            "hip": copies("libamdhip64.so"),
            "hsa": copies("libhsa-runtime64.so"),
            "cache": cache(),
            "aux": sorted(map(str, Path("/var/cache").glob("ldconfig/*"))),
            "smi": str(smi.resolve()) if smi.exists() else "",
            "static": sorted(map(str, site.glob("_rocm_sdk_*/**/*.a"))),
            "devel": sorted(map(str, site.glob("*rocm_sdk_devel*"))),
        }
    )
)
