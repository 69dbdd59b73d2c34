"""A command as a hint names it: in the words of make when make started this process, else of build.py."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

PROGRAM = ".venv/bin/python build.py"

_COMMAND = re.compile(r"`warmstart ([a-z-]+)(?: -- ([^`]*))?`")


def call(verb: str, more: str = "", **variables: str) -> str:
    """The command of a verb with what it is given: a variable of make each, in the order of build.py's own words, and
    `more` options: `make seed DO=push REF=x ARGS='--seed y'`, or `… build.py seed push x --seed y`."""
    if by_make():
        given = [f"{name}={value}" for name, value in variables.items() if value]
        return " ".join(["make", verb, *given, *([options(more)] if more else [])])
    return " ".join(word for word in (PROGRAM, verb, *variables.values(), more) if word)


def command(verb: str, preset: str = "", more: str = "") -> str:
    """The command of a verb, of a preset if given: `make logs PRESET=x`, or `… build.py logs x`."""
    return call(verb, more, PRESET=preset)


def usage(verb: str = "") -> str:
    """The command that shows what a verb takes, or all verbs."""
    if by_make():
        return "make help" if verb in ("", "exec") else f"make {verb} ARGS=--help"
    return " ".join([PROGRAM, *([verb] if verb else []), "--help"])


def word(variable: str, value: str) -> str:
    """A word that a verb is given: `ARCH=cpu`, or the word itself."""
    return f"{variable}={value}" if by_make() else value


def presets(names: Sequence[str]) -> str:
    """Presets to choose one of: `PRESET=a or PRESET=b`, or their names."""
    return " or ".join(word("PRESET", name) for name in names)


def options(words: str) -> str:
    """More options of the same command: `ARGS='--set port=8001'`, or the words themselves."""
    return f"ARGS='{words}'" if by_make() else words


def execute(words: str, preset: str = "") -> str:
    """The command that runs another one inside an engine."""
    if by_make():
        return f"{command('exec', preset)} CMD='{words}'"
    return f"{command('exec', preset)} -- {words}"


def reworded(text: str) -> str:
    """A text of a data file; the commands of warmstart that it names stand between backticks."""
    return _COMMAND.sub(lambda found: f"`{execute(found[2]) if found[2] else command(found[1])}`", text)


def by_make() -> bool:
    """Whether make started this process."""
    return "MAKELEVEL" in os.environ
