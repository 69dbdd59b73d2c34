"""Print how many byte code files there are, and those that are not what their source compiles to."""

import importlib.util
import json
import pathlib
import sys

UNCHECKED_HASH = 0b01  # PEP 552: flags of a hash-based .pyc that is never checked against its source
count, wrong = 0, []
for top in sys.argv[1:]:
    for pyc in pathlib.Path(top).rglob("*.pyc"):
        count += 1
        source = pathlib.Path(importlib.util.source_from_cache(str(pyc)))
        head = pyc.read_bytes()[:16]
        if head[:4] != importlib.util.MAGIC_NUMBER:
            wrong.append(f"{pyc}: of another Python")
        elif int.from_bytes(head[4:8], "little") != UNCHECKED_HASH:
            wrong.append(f"{pyc}: not unchecked-hash")
        elif not source.exists():
            wrong.append(f"{pyc}: has no source")
        elif head[8:16] != importlib.util.source_hash(source.read_bytes()):
            wrong.append(f"{pyc}: its source changed after it was compiled")
print(json.dumps({"count": count, "wrong": wrong}))
