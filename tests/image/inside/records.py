"""Print how the files of some distributions differ from what their RECORD says, and their requirements and programs.

    records.py DISTRIBUTION…

A wheel's RECORD holds the hash of each of its files (PEP 376); the build writes it anew where it changes one.
"""

import base64
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any


def check(name: str) -> dict[str, Any]:
    """Files that are missing, files with another hash, and how many have the right one."""
    one = importlib.metadata.distribution(name)
    found: dict[str, Any] = {"missing": [], "changed": [], "right": 0, "requires": one.requires or [], "programs": []}
    for file in one.files or ():
        path = one.locate_file(file)
        if "/bin/" in str(file) and ".." in file.parts:
            found["programs"].append(file.name)
        try:
            data = Path(str(path)).read_bytes()
        except FileNotFoundError:
            found["missing"].append(str(file))
            continue
        if not file.hash:
            continue
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).rstrip(b"=").decode()
        if digest == file.hash.value:
            found["right"] += 1
        else:
            found["changed"].append(str(file))
    found["programs"] += [e.name for e in one.entry_points if e.group == "console_scripts"]
    found["back_ends"] = sorted(e.name for e in one.entry_points if e.group == "triton.backends")
    return found


print(json.dumps({name: check(name) for name in sys.argv[1:]}))
