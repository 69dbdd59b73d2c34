"""The options of the verbs that control engines, for the table in build.py."""

from __future__ import annotations

from warmstart.cli import Option

_PRESET: Option = ("preset", {"nargs": "?", "default": "", "help": "a preset; default: the only engine there is"})

UP: tuple[Option, ...] = (
    ("preset", {"help": "a preset of presets/*.ini"}),
    ("--set", {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "over the preset: port=8001"}),
    ("--stop", {"action": "append", "default": [], "metavar": "UNIT", "help": "stop this service until down"}),
    ("--force", {"action": "store_true", "help": "start although memory or another program speaks against it"}),
    ("--detach", {"action": "store_true", "help": "return when the container runs, not when the engine is ready"}),
    ("--no-follow", {"dest": "detach", "action": "store_true", "help": "the same"}),
    ("--profile", {"action": "store_true", "help": "with a stack of its Python (py-spy) when it is silent"}),
    ("--silence", {"type": float, "default": 30.0, "metavar": "SECONDS", "help": "after which it is looked at; 30"}),
)
DOWN: tuple[Option, ...] = (_PRESET,)
LOGS: tuple[Option, ...] = (_PRESET, ("-f", {"dest": "follow", "action": "store_true", "help": "follow it"}))
EXEC: tuple[Option, ...] = (("words", {"nargs": "...", "metavar": "[PRESET] -- COMMAND", "help": "what to run in it"}),)
WATCH: tuple[Option, ...] = (
    ("preset", {"help": "an engine's preset"}),
    ("--record", {"action": "store_true", "help": "nobody else follows its start"}),
)
