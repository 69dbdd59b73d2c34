"""Open libraries by the names that programs use; print what went wrong.

opens.py NAME…
"""

import ctypes
import json
import sys

problems = {}
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as problem:
        problems[name] = str(problem)
print(json.dumps(problems))
