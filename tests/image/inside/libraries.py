"""Print every shared library under the given folders with the names it needs that nothing resolves.

A name counts as resolved when the loader finds it, or when a library of that name lies under the folders: Python
packages load each other's libraries first (torch before vllm). Those are printed too, with where they lie.
"""

import json
import pathlib
import subprocess
import sys

every = [p for top in sys.argv[1:] for p in sorted(pathlib.Path(top).rglob("*.so*"))]
files = [p for p in every if p.is_file() and not p.is_symlink()]
names = {p.name: str(p) for p in every}
missing, elsewhere = {}, {}
for file in files:
    listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    absent = sorted({ln.split()[0] for ln in listed.splitlines() if "not found" in ln})
    if unresolved := [name for name in absent if name not in names]:
        missing[str(file)] = unresolved
    if others := {name: names[name] for name in absent if name in names}:
        elsewhere[str(file)] = others
print(json.dumps({"count": len(files), "missing": missing, "elsewhere": elsewhere}))
