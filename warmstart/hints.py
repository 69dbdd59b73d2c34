"""A command as a hint names it: in the words of make when make started this process, else of the command line."""

from __future__ import annotations

import os
import re

_COMMAND = re.compile(r"`warmstart ([a-z-]+)(?: -- ([^`]*))?`")


def command(verb: str, preset: str = "") -> str:
    """The command of a verb, of a preset if given: `make logs PRESET=x`, or `warmstart logs x`."""
    if _by_make():
        return f"make {verb} PRESET={preset}" if preset else f"make {verb}"
    return f"warmstart {verb} {preset}".rstrip()


def options(words: str) -> str:
    """More options of the same command: `ARGS='--set port=8001'`, or the words themselves."""
    return f"ARGS='{words}'" if _by_make() else words


def execute(words: str, preset: str = "") -> str:
    """The command that runs another one inside an engine."""
    if _by_make():
        return f"{command('exec', preset)} CMD='{words}'"
    return f"{command('exec', preset)} -- {words}"


def reworded(text: str) -> str:
    """A text of a data file; the commands of warmstart that it names stand between backticks."""
    return _COMMAND.sub(lambda found: f"`{execute(found[2]) if found[2] else command(found[1])}`", text)


def _by_make() -> bool:
    return "MAKELEVEL" in os.environ
