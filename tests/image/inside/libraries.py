"""Print every shared library under the given folders with the names it needs that nothing resolves.

A name counts as resolved when the loader finds it, or when a library of that name lies under the folders: Python
packages load each other's libraries first (torch before vllm).
"""

import json
import pathlib
import subprocess
import sys

files = [p for top in sys.argv[1:] for p in pathlib.Path(top).rglob("*.so*") if p.is_file() and not p.is_symlink()]
names = {p.name for top in sys.argv[1:] for p in pathlib.Path(top).rglob("*.so*")}
missing = {}
for file in files:
    listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    absent = [ln.split()[0] for ln in listed.splitlines() if "not found" in ln]
    if unresolved := sorted(set(absent) - names):
        missing[str(file)] = unresolved
print(json.dumps({"count": len(files), "missing": missing}))
