"""What the start script tells: lines on stderr, because stdout belongs to the command."""

import sys


def say(text: str) -> None:
    """One line."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    print(f"warmstart: {text}", file=sys.stderr, flush=True)
