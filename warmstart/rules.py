"""Combinations that are known to fail, refused with the reason and where it was seen.

What is known lies in `arch/rules.toml`; here is only how it is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from warmstart import toml
from warmstart.errors import ProfileError, RuleError
from warmstart.known import AiterFacts, Known
from warmstart.profile import Profile

FILE = Path(__file__).parents[1] / "arch" / "rules.toml"

Values = dict[str, str]  # what a rule's reason is filled with; "link" replaces the rule's own link
Rule = Callable[[Profile, Known], Iterator[Values]]


class Finding(msgspec.Struct, frozen=True):
    """A rule that a profile breaks."""

    rule: str
    reason: str
    link: str


def check(profile: Profile) -> None:
    """Raise RuleError for a profile that breaks a rule: the first in its message, any others in its hint.

    Raises ProfileError for what is wrong in rules.toml, or in the data that the image's build will read.
    """
    if profile.aiter.mode != "off":
        toml.read(FILE.with_name("aiter.toml"), AiterFacts)
    if found := findings(profile):
        others = "".join(f"; also: {f.reason} ({f.link})" for f in found[1:])
        raise RuleError(f"{profile.arch}: {found[0].reason}", hint=f"see {found[0].link}{others}")


def findings(profile: Profile) -> list[Finding]:
    """All rules that a profile breaks, in the order of rules.toml."""
    if profile.device is None:
        return []  # all that is known is about GPUs
    known = _known()
    about = {"arch": profile.arch, "family": profile.family, **msgspec.to_builtins(profile.versions)}
    found = []
    for name, texts in known.rule.items():
        try:
            for values in _rule(name)(profile, known):
                link = values.get("link") or texts.link
                found.append(Finding(name, texts.reason.format(**{**about, **values}), link))
        except (ValueError, IndexError, KeyError, re.error) as bad:  # of a version, a specifier, a {…}, a name, a regex
            problem = f"there is no value for {bad}" if isinstance(bad, KeyError) else bad
            hint = "see that rule in arch/rules.toml, and the profile's versions"
            raise ProfileError(f"rule {name} can't be applied to {profile.arch}: {problem}", hint=hint) from None
    return found


def _rule(name: str) -> Rule:
    """The function of a rule's name: it yields, for each break, what the reason is filled with."""
    function = f"_{name.replace('-', '_')}"
    if function not in globals():
        raise ValueError("warmstart/rules.py has no function for it")
    return cast(Rule, globals()[function])


def _slow_warm_up(p: Profile, known: Known) -> Iterator[Values]:
    if p.family.startswith("rdna") and _within(p.versions.vllm, known.data.slow_vllm):
        yield {}


def _aiter_on_gfx11(p: Profile, known: Known) -> Iterator[Values]:
    value = p.env.get("VLLM_ROCM_USE_AITER", "0")
    if p.arch.startswith("gfx11") and value.lower() not in {"", "0", "false"}:
        yield {"value": value}


def _python_of_the_wheel(p: Profile, known: Known) -> Iterator[Values]:
    if p.lane == "wheel" and p.versions.python != known.data.wheel_python:
        yield {"wanted": known.data.wheel_python}


def _old_rocm(p: Profile, known: Known) -> Iterator[Values]:
    for row in known.rocm:
        if p.arch in row.archs and Version(p.versions.rocm) < Version(row.since):
            yield {"wanted": row.since, "link": row.link}


def _triton_breaks_aiter(p: Profile, known: Known) -> Iterator[Values]:
    if _has(p, "amd-aiter") and _within(p.versions.triton, known.data.breaking_triton):
        yield {}


def _aiter_replaces_triton(p: Profile, known: Known) -> Iterator[Values]:
    made = p.wheels.from_source.get("amd-aiter")
    careless = made is not None and made.get("AITER_USE_SYSTEM_TRITON") != "1"
    if careless and _within(p.versions.aiter, known.data.aiter_replaces_triton):
        yield {}


def _aiter_without_flydsl(p: Profile, known: Known) -> Iterator[Values]:
    alone = _has(p, "amd-aiter") and not _has(p, "flydsl")
    if alone and _within(p.versions.aiter, known.data.aiter_needs_flydsl):
        yield {}


def _aiter_mode(p: Profile, known: Known) -> Iterator[Values]:
    if (p.aiter.mode != "off") != _has(p, "amd-aiter"):
        yield {"mode": p.aiter.mode, "has": "has" if _has(p, "amd-aiter") else "does not have"}


def _baked_variable(p: Profile, known: Known) -> Iterator[Values]:
    for row in known.baked:
        if row.name in p.env:
            yield {"name": row.name, "why": row.why.format(arch=p.arch), "link": row.link}


def _unknown_set(p: Profile, known: Known) -> Iterator[Values]:
    row = next((r for r in known.set if _minor(p.versions.torch) == r.torch), None)
    for what in ("torchvision", "torchaudio"):
        found, wanted = getattr(p.versions, what), getattr(row, what, "none that is known here")
        if found and _minor(found) != wanted:
            yield {"what": what, "found": found, "wanted": wanted}


def _mixed_rocm(p: Profile, known: Known) -> Iterator[Values]:
    for what in ("torch", "torchvision", "torchaudio"):
        found = getattr(p.versions, what)
        if found and not found.endswith(f"+rocm{p.versions.rocm}"):
            yield {"what": what, "found": found}


def _arch_not_in_wheel(p: Profile, known: Known) -> Iterator[Values]:
    held = [a for since, a in known.data.wheel_archs.items() if _within(p.versions.vllm, f">={since}")]
    has = held[-1] if held else []
    if p.lane == "wheel" and p.arch not in has:
        yield {"has": ", ".join(has) or "none that is known here"}


def _wrong_wave(p: Profile, known: Known) -> Iterator[Values]:
    if p.device and p.device.wave != known.data.wave.get(p.family):
        yield {"wanted": str(known.data.wave.get(p.family)), "wave": str(p.device.wave)}


def _gone_variable(p: Profile, known: Known) -> Iterator[Values]:
    for row in known.gone:
        if row.name in p.env and _within(p.versions.vllm, f">={row.since}"):
            yield {"name": row.name, "instead": row.instead}


def _needed_variable(p: Profile, known: Known) -> Iterator[Values]:
    for row in known.needed:
        if row.name not in p.env and _within(p.versions.vllm, f"<{row.before}"):
            yield {"name": row.name, "value": row.value, "before": row.before, "why": row.why, "link": row.link}


def _frozen_index(p: Profile, known: Known) -> Iterator[Values]:
    for index in p.wheels.indexes:
        if re.search(known.data.frozen_index, index.url):
            yield {"url": index.url}


def _all_devices(p: Profile, known: Known) -> Iterator[Values]:
    for what in _devices(p):
        if "device-all" in what:
            yield {"what": what}


def _foreign_device(p: Profile, known: Known) -> Iterator[Values]:
    for what in _devices(p):
        # A package for a family (gfx110x, gfx12-0) names no LLVM target, and only targets are compared.
        for target in re.findall(r"device-(gfx[0-9a-f]{3,4})(?![\w-])", what):
            if target != p.arch:
                yield {"what": what}


def _vllm_from_anywhere(p: Profile, known: Known) -> Iterator[Values]:
    if p.lane in {"wheel", "vendor"} and not any("vllm" in index.packages for index in p.wheels.indexes):
        yield {}


def _devices(p: Profile) -> list[str]:
    return [p.device.extra if p.device else "", *p.wheels.requires]


def _has(p: Profile, name: str) -> bool:
    """Whether the profile requires a distribution, by its enabled features or otherwise."""
    return any(re.split(r"[^\w.-]", requirement)[0] == name for requirement in p.wheels.requires)


def _within(version: str, specifiers: str) -> bool:
    return SpecifierSet(specifiers).contains(Version(version).public, prereleases=True)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@cache
def _known() -> Known:
    return toml.read(FILE, Known)
