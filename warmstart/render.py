"""From plan to Containerfile: a pure function. Same plan, same bytes; no time, no user, no path of the host."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from warmstart.gittree import folder, parse
from warmstart.names import HOME, VENV
from warmstart.plan import Plan, layers, made

if TYPE_CHECKING:
    from jinja2 import Environment


def render(root: Path, plan: Plan) -> str:
    """The Containerfile of a plan, from `Containerfile.j2`."""
    template = _templates(root).get_template("Containerfile.j2")
    return str(template.render(plan=plan, layers=layers(plan.profile), made=made(plan), venv=VENV, home=HOME))


@cache
def _templates(root: Path) -> Environment:
    """The templates of a checkout, each compiled once, and again when its file changes."""
    import jinja2  # 55 ms to import: only for verbs that render

    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    engine.filters |= {"fingerprint": fingerprint, "quoted": quoted, "short": lambda digest: digest[:16]}
    engine.filters["tree"] = lambda spec: folder(parse(spec))
    return engine


def fingerprint(*texts: str) -> str:
    """Digest of the text of stages, for the RUN line that mounts from them.

    buildah keys its cache on the text of a RUN line, not on what is mounted. A stage's text holds the digests of
    all its own inputs, so the digest of that text in the mounting line makes the cache right.
    """
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def quoted(text: str) -> str:
    """A value for ENV and LABEL: double quotes, with what a Containerfile would expand escaped."""
    return json.dumps(text, ensure_ascii=False).replace("$", "\\$")


def stages(text: str) -> dict[str, list[str]]:
    """Instructions of each stage of a rendered Containerfile, comments left out, continued lines joined."""
    found: dict[str, list[str]] = {}
    name = ""
    joined = text.replace("\\\n", " ")
    for line in (ln.strip() for ln in joined.split("\n")):
        if not line or line.startswith("#"):
            continue
        if line.startswith("FROM "):
            name = line.rpartition(" AS ")[2]
            found[name] = []
        found.setdefault(name, []).append(" ".join(line.split()))
    return found


def first_change(old: str, new: str) -> dict[str, tuple[int, int]]:
    """For each stage whose instructions differ: index of the first different one, and how many follow it."""
    before, after = stages(old), stages(new)
    changed: dict[str, tuple[int, int]] = {}
    for name, lines in after.items():
        was = before.get(name, [])
        same = next((i for i, (a, b) in enumerate(zip(was, lines, strict=False)) if a != b), min(len(was), len(lines)))
        if same < max(len(was), len(lines)):
            changed[name] = (same, len(lines) - same)
    return changed
