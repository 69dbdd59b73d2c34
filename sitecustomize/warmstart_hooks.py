"""What Python loads first in every process of the image. Standard library only; a failure here costs nothing.

Installed as site-packages/warmstart_hooks.py with `warmstart.pth`, because Debian's and Ubuntu's Python has a
sitecustomize.py of its own that hides any other.

Hook `lost`: the image leaves out distributions that serving does not need. Importing one of them says, in one
line, which feature it belongs to; code that tries an import and goes on without it is not disturbed.
"""

import os
import sys

LOST = "/opt/warmstart/lost.json"


class LostFinder:
    """Last on sys.meta_path: asked only for modules that nobody else has."""

    messages: dict[str, str] | None = None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if path is not None:  # a submodule: its parent was found, so it is not ours
            return
        if cls.messages is None:
            cls.messages = read_messages(LOST)
        # Only a real import is answered: importlib.util.find_spec asks whether a feature is there, and must hear no.
        if name in cls.messages and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(cls.messages[name], name=name)
        return


def read_messages(file: str) -> dict[str, str]:
    """Module name → message; empty when there is no such file."""
    import json

    try:
        with open(file, encoding="utf-8") as text:
            messages: dict[str, str] = json.load(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return messages if isinstance(messages, dict) else {}


def install() -> None:
    """Put the hooks in place, unless WARMSTART_HOOKS=0. Runs once however often it is called."""
    if os.environ.get("WARMSTART_HOOKS") != "0" and LostFinder not in sys.meta_path:
        sys.meta_path.append(LostFinder)


try:
    install()
except Exception as problem:  # fail open: a start without hooks is slower, not broken
    sys.stderr.write(f"warmstart: hooks are off: {problem}\n")
