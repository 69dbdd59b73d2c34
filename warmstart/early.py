"""Ctrl-C and SIGTERM while nothing runs yet: one line and the shell's exit code, instead of Python's traceback.

`build.py` calls this before it imports anything else, so only what costs nothing is imported here.
"""

import os
import sys

# What the module `signal` is made of; that one imports enum first, which takes longer than all else here.
from _signal import SIGINT, SIGTERM, signal  # type: ignore[import-not-found]

HINT = "it is safe to run it again"
TOLD = {int(SIGINT): "stopped by Ctrl-C", int(SIGTERM): "stopped by SIGTERM"}


def catch() -> None:
    """From now on SIGINT and SIGTERM end this process at once, with 128 and the signal's number as exit code."""
    for number in TOLD:
        signal(number, _end)


def _end(number: int, _frame: object) -> None:
    code, told = 128 + number, TOLD[number]
    if "--json" in sys.argv:  # the command line isn't parsed, and the json module may be half imported
        _write(1, f'{{"event": "error", "message": "{told}", "hint": "{HINT}", "code": {code}}}\n')
    _write(2, f"error: {told}\n  hint: {HINT}\n")
    os._exit(code)  # an exception could be swallowed by whatever is being imported


def _write(descriptor: int, text: str) -> None:
    try:  # noqa: SIM105 - contextlib takes longer to import than all that is here
        os.write(descriptor, text.encode())
    except OSError:  # nobody reads it
        pass
