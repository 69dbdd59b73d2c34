"""The command that a start becomes: flags of the arch that the user did not give, a hub that is not asked in vain."""

import os
import re
from pathlib import Path

SHORT = {"attention": "-ac", "compilation": "-cc", "speculative": "-sc"}  # vLLM's short names of groups of flags
CONFIG_LIMIT = 1_000_000  # characters of a configuration file that are looked at


def options(command: list[str]) -> dict[str, str]:
    """The long and short options of a command and their values ("" without one), with dashes for underscores."""
    found = {}
    for word, after in zip(command, [*command[1:], "-"], strict=False):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found[name.replace("_", "-")] = value if equals else "" if after.startswith("-") else after
    return found


def configured(file: str) -> set[str]:
    """Whatever may be a key of a configuration file of vLLM (YAML), as options."""
    try:
        if not Path(file).is_file():  # a pipe could be read only once
            return set()
        with open(file, encoding="utf-8", errors="replace") as text:
            keys = re.findall(r"([\w.-]+)[\"']?\s*:", text.read(CONFIG_LIMIT))
    except (OSError, ValueError):
        return set()  # vLLM says what is wrong with it
    return {"--" + key.lstrip("-").replace("_", "-") for key in keys}


def says(option: str, flag: str) -> bool:
    """Whether a user's option settles what `flag` would: itself, switched off, shortened, or its group's JSON.

    vLLM refuses --attention-backend beside --attention-config.backend, for example.
    """
    name = option.lstrip("-").partition(".")[0]
    first = flag.partition("-")[0]
    shortened = name.startswith(first + "-") and flag.startswith(name)
    return shortened or name in {flag, f"no-{flag}", f"{first}-config"} or option.partition(".")[0] == SHORT.get(first)


def with_flags(command: list[str], flags: dict[str, str]) -> list[str]:
    """The command with the arch's flags for `vllm serve` that the user did not give."""
    if [os.path.basename(command[0]), *command[1:2]] != ["vllm", "serve"]:
        return command
    given = options(command[2:])
    every = {*given, *configured(given.get("--config", ""))}
    added = [(flag, value) for flag, value in flags.items() if not any(says(option, flag) for option in every)]
    return command + [word for flag, value in added for word in (f"--{flag}", value) if word]


def offline_if_local(command: list[str]) -> None:
    """A model that is a folder needs no hub; without this every start asks it for updates first."""
    model = options(command).get("--model") or next((word for word in command[2:3] if not word.startswith("-")), "")
    try:
        local = bool(model) and Path(model).is_dir()
    except (OSError, ValueError):
        return  # no path at all; vLLM says what is wrong with it
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
