"""The files of presets, as text: which presets there are and what each says, its keys in one spelling."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path

from warmstart import masking
from warmstart.errors import PresetError
from warmstart.flags import FOLDER as FOLDER

GLOBAL = "global"
SET = "--set"

# The keys of a preset that are no flags of vLLM.
OURS = {
    "image": "the image; without one it is the image of the machine's arch",
    "model": "a name on Hugging Face, a folder of this machine (/…, ~/…, ./…), or one in the mounted cache (/models/…)",
    "archs": "the archs that the preset is for; none: any",
    "port": "the port on this machine's 127.0.0.1",
    "notes": "what was measured, and by whom",
    "weights-gb": "size of the weights in 10^9 bytes, for the guard while they are not downloaded",
    "prequantised": "a checkpoint to be used instead of quantising at every start",
    "refused": "why the preset does not work: it is kept so that nobody tries again",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMENT = re.compile(r"\s[#;]")


def scan(root: Path) -> tuple[dict[str, tuple[str, dict[str, str]]], dict[str, PresetError]]:
    """The presets of all files that can be read, and what is wrong with the others: file → error.

    A preset's name leads to its file and its keys, those of the file's [global] below its own. A preset that two files
    have is in neither: which one is meant can't be told.
    """
    found: dict[str, tuple[str, dict[str, str]]] = {}
    broken: dict[str, PresetError] = {}
    twice: set[str] = set()
    for path in sorted((root / FOLDER).glob("*.ini")):
        try:
            read = _read(path)
        except PresetError as problem:
            broken[path.name] = problem
            continue
        common = read.pop(GLOBAL, {})
        for name in read.keys() & found.keys():
            told = f"preset {name} is in {found[name][0]}, too"
            broken[path.name] = bad(path.name, told, "give one of them another name")
            twice.add(name)
        found |= {name: (path.name, common | own) for name, own in read.items() if name not in found}
    return {name: one for name, one in found.items() if name not in twice}, broken


def _read(path: Path) -> dict[str, dict[str, str]]:
    """The sections of one file, keys in one spelling. Raises PresetError for what is no such file."""
    parser = configparser.ConfigParser(
        delimiters=("=",),
        comment_prefixes=("#", ";"),
        default_section="",
        interpolation=None,
        allow_no_value=True,
        empty_lines_in_values=False,
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # variables are told apart by case
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=path.name)
    except (OSError, UnicodeDecodeError) as problem:
        raise bad(path.name, getattr(problem, "strerror", None) or "it is not UTF-8 text") from None
    except configparser.MissingSectionHeaderError as problem:
        raise bad(path.name, f"line {problem.lineno} stands below no [preset]") from None
    except configparser.ParsingError as problem:  # its own message shows the lines, and they may hold a secret
        lines = ", ".join(str(number) for number, _ in problem.errors)
        raise bad(path.name, f"line {lines} is neither key = value nor [preset]") from None
    except configparser.Error as problem:
        raise bad(path.name, " ".join(problem.message.split())) from None
    found: dict[str, dict[str, str]] = {}
    for name in parser.sections():
        where = f"{path.name} [{name}]"
        _printable(where, name)
        if not _NAME.fullmatch(name):
            raise bad(where, "a preset's name is letters, digits, points and dashes", "it is what clients ask for")
        found[name] = spelled(where, {key: value or "" for key, value in parser.items(name)})
    return found


def spelled(where: str, given: Mapping[str, str]) -> dict[str, str]:
    """Keys in one spelling (dashes), each once, values on one line. Raises PresetError."""
    found: dict[str, str] = {}
    for raw, value in given.items():
        key = raw if raw.startswith("env.") else _dashed(raw)
        value = " ".join(value.split("\n")) if key in ("notes", "refused") else value
        _printable(where, raw, value)
        if key in found:
            raise bad(where, f"{key} is there twice, also as {raw}", "leave one out")
        if where != SET and key not in OURS and _COMMENT.search(value) and not masking.secret(key):
            raise bad(where, f"{key}: a comment needs a line of its own", "what is behind = is the value, all of it")
        found[key] = value
    return found


def _dashed(key: str) -> str:
    """max_model_len and --max-model-len are max-model-len; what stands behind a point is a part of a JSON object."""
    name, point, part = key.strip().lstrip("-").partition(".")
    return name.replace("_", "-") + point + part


def _printable(where: str, name: str, value: str = "") -> None:
    if not all(c.isprintable() for c in name + value):
        raise bad(where, f"{name!r} holds a control character or spans several lines")


def bad(where: str, what: str, hint: str = "") -> PresetError:
    """What is wrong with a preset, printable and without secrets."""
    told = (masking.text("".join(c if c.isprintable() else "?" for c in text)) for text in (f"{where}: {what}", hint))
    return PresetError(next(told), hint=next(told))
