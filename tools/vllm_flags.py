"""The flags and variables of the vLLM that is installed here, as presets/flags/<version>.toml wants them.

Runs inside an image, and needs nothing but what the image holds:

    podman run --rm -i --entrypoint python localhost/warmstart/vllm:cpu - < tools/vllm_flags.py > 0.32.0.toml

For a version that no image here has, its source archive is enough: unpack it, and add to the above
`--volume /the/unpacked/archive:/src:ro --env PYTHONPATH=/src --env VLLM_TARGET_DEVICE=cpu`, with the image of the
version before it. Data is made anew by this, never edited. The parser asks no device, so one lane's image is as good
as another's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

INLINE = 116  # characters of a line

# Where vLLM keeps its parser and what fills it, newest first: both have moved.
PARSERS = ("vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser")
MAKERS = tuple(f"vllm.entrypoints.{folder}.cli_args:make_arg_parser" for folder in ("common", "launchers", "openai"))


def first(places: Sequence[str]) -> Any:
    """What lies in the first of some places, written module:name, that this vLLM has."""
    problems = []
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as problem:
            problems.append(f"{place}: {problem}")
    raise SystemExit("this vLLM keeps its parser elsewhere\n" + "\n".join(problems))


def kind(action: argparse.Action) -> str:
    """What stands behind a flag: see Flags in warmstart/flags.py."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if action.nargs == 0:
        return "plain"
    if "JSON" in (action.help or "") and "keys" in (action.help or ""):
        return "json"
    return "several" if action.nargs in ("+", "*") or isinstance(action.nargs, int) else "one"


def flags(parser: argparse.ArgumentParser) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, str]]:
    """All flags by kind, the values that some are limited to, and other names of a flag."""
    kinds: dict[str, list[str]] = {name: [] for name in ("switch", "plain", "one", "several", "json")}
    choices: dict[str, list[str]] = {}
    alias: dict[str, str] = {}
    for action in parser._actions:
        words = [word[2:] for word in action.option_strings if word.startswith("--")]
        off = {word[2:] for word in getattr(action, "negative_option_strings", ())}  # since 0.33: --disable-x
        if isinstance(action, argparse.BooleanOptionalAction):
            off |= {word for word in words if word.startswith("no-") and word[3:] in words}
        if not words or action.dest == "help":
            continue
        on = [word for word in words if word not in off]
        name = next((word for word in on if word.replace("-", "_") == action.dest), on[0])
        kinds[kind(action)].append(name)
        alias |= {word: name for word in on if word != name}
        alias |= {word: f"no-{name}" for word in off if not word.startswith("no-")}
        if action.choices:
            choices[name] = [str(choice) for choice in action.choices if choice is not None]
    return kinds, choices, alias


def toml_list(name: str, values: Iterable[str]) -> str:
    """An array of TOML, folded."""
    lines, line = [], ""
    for value in sorted(set(values)):
        word = json.dumps(value) + ","
        if len(line) + len(word) > INLINE:
            lines.append(line)
            line = ""
        line += f" {word}" if line else word
    body = "\n".join(f"  {one}" for one in [*lines, line] if one)
    return f"{name} = [\n{body}\n]" if body else f"{name} = []"


def main() -> None:
    """Print the file."""
    with contextlib.redirect_stdout(io.StringIO()):  # whatever an import says is no part of the file
        envs = importlib.import_module("vllm.envs")
        parser = first(PARSERS)()
        kinds, choices, alias = flags(first(MAKERS)(parser))
        methods = importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
        choices["quantization"] = list(methods)  # its parser takes any word, and the engine refuses it a minute later
        version = importlib.import_module("vllm").__version__.partition("+")[0]
        names = [name for name in envs.environment_variables if name.startswith("VLLM_")]
    told = ["# Made by tools/vllm_flags.py in an image of that version; not edited by hand.", f'version = "{version}"']
    told += [toml_list(name, found) for name, found in kinds.items()]
    told += [toml_list("env", names), "\n[alias]"]
    told += [f"{json.dumps(name)} = {json.dumps(flag)}" for name, flag in sorted(alias.items())]
    told += ["\n[choices]", *(toml_list(json.dumps(name), found) for name, found in sorted(choices.items()))]
    sys.stdout.write("\n".join(told) + "\n")


if __name__ == "__main__":
    main()
