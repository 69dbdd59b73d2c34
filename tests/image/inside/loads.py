"""Load shared libraries with all symbols bound at once (RTLD_NOW) after importing a module; print what went wrong.

    loads.py MODULE FILE…        MODULE: imported first, "" for none

Each file is loaded in a process of its own: some register the same operators, and a broken one may end its process.
"""

import ctypes
import importlib
import json
import os
import sys


def load(file: str) -> str:
    """Why the file does not load; empty when it does."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            ctypes.CDLL(file, mode=os.RTLD_NOW)
        except BaseException as problem:
            os.write(writer, str(problem).encode()[:4000] or b"no message")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as text:
        told = text.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    return told or (f"loading it ended with signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")


module, *files = sys.argv[1:]
if module:
    importlib.import_module(module)
problems = {file: told for file in files if (told := load(file))}
print(json.dumps({"count": len(files), "problems": problems}))
