"""What Python loads first in every process of the image. Standard library only; a failure here costs nothing.

Installed as site-packages/warmstart_hooks.py with `warmstart.pth`, because Debian's and Ubuntu's Python has a
sitecustomize.py of its own that hides any other.

Hook `lost`: the image leaves out distributions that serving does not need. Importing one of them says, in one
line, which feature it belongs to; code that tries an import and goes on without it is not disturbed.

The other hooks wait, each in a file of its own that is not read before the module it changes has been imported.
WARMSTART_HOOKS=0 switches all of them off, WARMSTART_HOOK_<NAME>=0 one (LOST, BENCH, COMPILE; WORKERS: compile, but in
threads instead of processes).
"""

import os
import sys

LOST = "/opt/warmstart/lost.json"

# name of the hook, module that it waits for, file, function in it that takes the module once it is imported
WAITING = (
    ("bench", "triton.testing", "warmstart_bench", "replace"),
    ("bench", "triton.runtime.autotuner", "warmstart_bench", "guard"),
    ("compile", "triton.runtime.autotuner", "warmstart_compile", "install"),
)
AWAITED = frozenset(row[1] for row in WAITING)


class LostFinder:
    """Last on sys.meta_path: asked only for modules that nobody else has."""

    messages: dict[str, str] | None = None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        # A submodule's parent was found, so it is not ours. And each start of Python asks for these two, in vain where
        # the distribution has none: reading the messages then would cost more than the rest of the start.
        if path is not None or name in ("sitecustomize", "usercustomize"):
            return
        if cls.messages is None:
            cls.messages = read_messages(LOST)
        # Only a real import is answered: importlib.util.find_spec asks whether a feature is there, and must hear no.
        if name in cls.messages and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(cls.messages[name], name=name)
        return


class AwaitedFinder:
    """First on sys.meta_path: finds nothing itself, but has the hooks called after a module they wait for."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
        if name not in AWAITED:  # this line is what all other imports pay
            return None
        others: list[object] = [*sys.meta_path]
        for finder in others:
            if finder is not cls and (find := getattr(finder, "find_spec", None)):
                spec = find(name, path, target)
                if spec is not None:
                    return followed(spec)
        return None


def followed(spec: object) -> object:
    """The spec, its loader calling the hooks once the module's code has run."""
    loader = getattr(spec, "loader", None)
    try:
        run = loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: object) -> None:
            run(module)
            call_hooks(module)

        # On the one loader of this one module, so that all else that asks a loader (its source, its data) is served.
        loader.exec_module = exec_module  # type: ignore[union-attr]
    except Exception as problem:
        warn(f"hooks on {getattr(spec, 'name', '?')} are off: {problem}")
    return spec


def call_hooks(module: object) -> None:
    """Call the hooks that wait for this module; one that fails leaves it as it is."""
    for hook, awaited, file, function in WAITING:
        if awaited == getattr(module, "__name__", "") and wanted(hook):
            try:
                getattr(__import__(file), function)(module)
            except Exception as problem:
                warn(f"hook {hook} is off: {problem}")


def wanted(hook: str) -> bool:
    """Whether a hook is not switched off by its variable."""
    return os.environ.get(f"WARMSTART_HOOK_{hook.upper()}") != "0"


def warn(text: str) -> None:
    """One line on stderr: stdout belongs to the program."""
    try:
        sys.stderr.write(f"warmstart: {text}\n")
    except Exception:
        return  # stderr is closed


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
    if os.environ.get("WARMSTART_HOOKS") == "0":
        return
    finders: list[object] = sys.meta_path  # type: ignore[assignment]
    if LostFinder not in finders and wanted("lost"):
        finders.append(LostFinder)
    if AwaitedFinder not in finders:
        for name in AWAITED & sys.modules.keys():  # imported before this file
            call_hooks(sys.modules[name])
        finders.insert(0, AwaitedFinder)


try:
    install()
except Exception as problem:  # fail open: a start without hooks is slower, not broken
    warn(f"hooks are off: {problem}")
