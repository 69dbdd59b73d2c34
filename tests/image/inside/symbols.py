"""Print the libraries below some folders with the symbols of torch that they need and torch's libraries don't have.

symbols.py TORCH FOLDER…        TORCH: the folder of torch's libraries
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import elf  # type: ignore[import-not-found]

torch, *folders = map(Path, sys.argv[1:])
brought: set[bytes] = set()
for library in torch.glob("*.so*"):
    brought |= elf.read(library).defined if elf.is_elf(library) else set()
missing = {}
files = sorted(p for folder in folders for p in folder.rglob("*.so") if p.is_file() and elf.is_elf(p))
count = 0
for file in files:
    wanted = {name for name in elf.read(file).undefined if elf.OF_TORCH.match(name)}
    count += len(wanted)
    if absent := wanted - brought:
        missing[str(file)] = sorted(name.decode() for name in absent)
print(json.dumps({"files": len(files), "symbols": count, "brought": len(brought), "missing": missing}))
