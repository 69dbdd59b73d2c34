"""Secrets are never printed: whatever shows a preset, an environment or a run line shows it masked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

MASK = "***"

# Names by their parts. Whatever stands beside one of the first is secret, too; one of the second may be harmless: a
# number, as in TOKEN_LIMIT, or where one lies, as in KEY_PATH. Several tokens are a text's (MAX_TOKENS).
_SECRET = frozenset(
    "apikey secret secrets password passwd pass pwd passphrase passcode pat credential credentials".split()
)
_DOUBTFUL = frozenset("token key keys auth".split())
_JOINED = re.compile(r"(?:password|passwd|(?<!^tik)token|secret|apikey)$")  # HFTOKEN, but TIKTOKEN_ENCODINGS_BASE
_COUNT = frozenset("max min num total length len limit count threshold".split())
_PLACE = frozenset("path file dir sock parser mode".split())
_PASSES = re.compile(r"pass_config(?![a-z])")  # of a compiler

# Tokens that name their kind by their first letters: Hugging Face, GitHub, OpenAI-like API keys.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,})"
)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+:[^/\s@]+(?=@)")  # user:password in an address
_HEADER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")
_ASSIGNED = re.compile(r"^(-{0,2}[A-Za-z_][\w.-]*)=(.*)$", re.DOTALL)
_ENV_OPTIONS = frozenset(("-e", "--env", "--set"))


def secret(name: str) -> bool:
    """Whether a variable, flag or key of that name holds a secret: HF_TOKEN, api-key, env.MY_PASSWORD."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    parts = re.findall(r"[a-z]+", _PASSES.sub("", spaced))
    if any(part in _SECRET or (part not in _DOUBTFUL and _JOINED.search(part)) for part in parts):
        return True
    return bool(_DOUBTFUL & set(parts)) and not _harmless(parts)


def text(value: str) -> str:
    """A text with every token masked that can be told by its form, wherever it stands."""
    value = _TOKEN.sub(lambda found: found[0][: 3 if found[0][2] in "_-" else 4] + MASK, value)
    return _HEADER.sub(rf"\1{MASK}", _USERINFO.sub(MASK, value))


def value(name: str, held: str) -> str:
    """The value of a named setting as it may be shown: masked whole when the name says that it is secret."""
    return MASK if held and secret(name) else text(held)


def env(held: Mapping[str, str]) -> dict[str, str]:
    """An environment as it may be shown."""
    return {name: value(name, one) for name, one in held.items()}


def words(command: Sequence[str]) -> list[str]:
    """A command as it may be shown: `--api-key X`, `--env=TOKEN=X`, `-e TOKEN=X` and `TOKEN=X` without the X."""
    shown: list[str] = []
    hidden = False  # the word before was a flag whose value is secret: all values behind it are
    for word in command:
        option = word.startswith("-") and len(word) > 1
        if hidden and not option:
            shown.append(MASK)
            continue
        hidden = option and "=" not in word and word not in _ENV_OPTIONS and secret(word)
        shown.append(_word(word))
    return shown


def _harmless(parts: Sequence[str]) -> bool:
    """Whether tokens and keys are only counted in a name of these parts, or it says where one lies."""
    beside = {near for one, two in pairwise(parts) for near in (one, two) if {one, two} & _DOUBTFUL}
    return parts[-1] in _PLACE or bool(beside & _COUNT)


def _word(word: str) -> str:
    found = _ASSIGNED.match(word)
    if not found:
        return text(word)
    name, held = found.groups()
    return f"{name}={_word(held) if name in _ENV_OPTIONS else value(name, held)}"
