"""What a seed's labels say, and whether it is for this machine: judged before a byte of it is unpacked.

The labels `cache.vllm.image/*` are those of MCV, another format of cache images, whose tools can so tell whom a seed
is for; its wave size is the arch's own (RDNA: 32).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from warmstart import cachedir, hints, masking, seedtiers
from warmstart.errors import SeedDamaged, SeedMismatch
from warmstart.names import LABEL
from warmstart.plan import Plan, created

OWN, MCV, OCI = LABEL, "cache.vllm.image/", "org.opencontainers.image."
NAMES = "cache-key arch tiers cu wave triton vllm rocm model flags gpu cpu".split()
FORMAT = "1"  # of a seed: its label io.warmstart.seed
AGAIN = "get it again, from where it was made"  # the hint for a damaged one
MACHINE = ("verdicts", "artefacts")  # tiers that are for GPUs of one number of compute units


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a seed is for."""

    cache_key: str
    arch: str
    tiers: tuple[str, ...]
    cu: int = 0  # 0: for any number of compute units
    wave: int = 0  # 0: cpu
    triton: str = ""
    vllm: str = ""
    rocm: str = ""
    model: str = ""  # this and what follows: of compile artefacts only
    flags: str = ""
    gpu: str = ""
    cpu: str = ""  # instruction sets that their machine code may use, by comma


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """The image and the GPUs that a seed would be used with."""

    cache_keys: tuple[str, ...]  # the tree's first, then those of built images
    arch: str
    wave: int
    versions: dict[str, str]
    cus: tuple[int, ...] = ()  # of this machine's GPUs of that arch, or the number that the user gave
    cpu: tuple[str, ...] | None = None  # instruction sets of the processor; None when it is another machine's


def of_plan(plan: Plan, tiers: tuple[str, ...], **more: str | int) -> Facts:
    """The facts of a seed for the image of a plan."""
    versions, device = plan.versions, plan.profile.device
    known = {
        "cache_key": plan.cache_key,
        "arch": plan.arch,
        "tiers": tiers,
        "wave": device.wave if device else 0,
        **{name: versions.get(name, "") for name in ("triton", "vllm", "rocm")},
    }
    return msgspec.convert(known | more, Facts)


def tag(facts: Facts) -> str:
    """A seed's tag: cache key, tiers if there are no kernels, compute units, and a digest of what artefacts are for."""
    parts = [facts.cache_key]
    parts += [facts.tiers[0]] if "kernels" not in facts.tiers else []
    parts += [f"cu{facts.cu}"] if facts.cu else []
    if "artefacts" in facts.tiers:
        parts.append(
            hashlib.sha256("\n".join((facts.model, facts.flags, facts.gpu, facts.cpu)).encode()).hexdigest()[:8]
        )
    return "-".join(parts)


def write(
    facts: Facts, *, epoch: int, entries: int, size: int, manifest: str, formats: Sequence[str]
) -> dict[str, str]:
    """All labels of a seed's image. `size`: bytes of its cache files; `manifest`: sha256 of the list of them."""
    told = msgspec.to_builtins(facts) | {"cache-key": facts.cache_key, "tiers": ",".join(facts.tiers)}
    labels = {f"{OWN}{name}": str(told[name]) for name in NAMES if told[name]}
    for_gpu = f", {facts.cu} compute units" if facts.cu else ""
    labels |= {
        f"{OWN}seed": FORMAT,
        f"{OWN}manifest": f"sha256:{manifest}",
        f"{MCV}entry-count": str(entries),
        f"{MCV}cache-size-bytes": str(size),
        f"{MCV}summary": summary(facts),
        f"{MCV}format": ",".join(formats) or "unpacked",
        f"{OCI}title": f"seed {tag(facts)}",
        f"{OCI}description": f"{', '.join(facts.tiers)} for {facts.arch}{for_gpu}: caches of vLLM {facts.vllm}",
        f"{OCI}created": created(epoch),
    }
    return dict(sorted(labels.items()))


def read(labels: Mapping[str, str]) -> Facts:
    """The facts in an image's labels. Raises SeedMismatch for an image that is no seed, SeedDamaged."""
    if labels.get(f"{OWN}seed") != FORMAT:
        kind = labels.get(f"{OWN}seed", "")
        told = f"a seed of format {kind}, which this version doesn't know" if kind else "no seed of warmstart"
        raise SeedMismatch(
            f"the image is {told}", hint=f"`{hints.call('seed', DO='make')}` makes one; its tag begins with a cache key"
        )
    words = {name.replace("-", "_"): labels.get(f"{OWN}{name}", "") for name in NAMES}
    if not re.fullmatch(cachedir.KEY, words["cache_key"]) or not all(word.isprintable() for word in words.values()):
        raise SeedDamaged("the seed's labels can't be read", hint=AGAIN)
    tiers = seedtiers.ordered(words["tiers"].split(","))
    if not all(re.fullmatch(r"[0-9]{0,5}", words[name]) for name in ("cu", "wave")):
        raise SeedDamaged("the seed's labels can't be read", hint=AGAIN)
    try:
        numbers = {name: int(words[name] or 0) for name in ("cu", "wave")}
        facts = msgspec.convert(words | numbers | {"tiers": tiers}, Facts)
        told = json.loads(labels.get(f"{MCV}summary", ""))
    except (ValueError, RecursionError, msgspec.ValidationError):
        raise SeedDamaged("the seed's labels can't be read", hint=AGAIN) from None
    if not tiers or ",".join(tiers) != labels[f"{OWN}tiers"]:
        raise SeedMismatch(
            f"the seed holds {labels.get(f'{OWN}tiers', '')!r}", hint=f"tiers: {', '.join(seedtiers.TIERS)}"
        )
    if told != json.loads(summary(facts)):
        raise SeedDamaged(f"the seed's labels contradict each other: {facts.arch} and {told}", hint=AGAIN)
    return facts


def size(labels: Mapping[str, str]) -> tuple[int, str]:
    """The bytes of its files and the sha256 of their list, as the labels say. Raises SeedDamaged."""
    told, digest = labels.get(f"{MCV}cache-size-bytes", ""), labels.get(f"{OWN}manifest", "")
    if not re.fullmatch(r"[0-9]{1,18}", told) or not digest.startswith("sha256:"):
        raise SeedDamaged("the seed's labels don't say what is in it", hint=AGAIN)
    return int(told), digest.removeprefix("sha256:")


def summary(facts: Facts) -> str:
    """Whom a cache image is for, in MCV's form."""
    backend = "cpu" if facts.arch == "cpu" else "hip"
    target = {"backend": backend, "arch": facts.arch, "warp_size": facts.wave or 1}
    return json.dumps({"targets": [target]}, separators=(",", ":"))


def misfit(facts: Facts, here: Here) -> str:
    """Why a seed is not for this image and these GPUs, in one line; empty when it is."""
    if facts.arch != here.arch:
        return f"it is for {facts.arch}, not {here.arch}"
    if facts.wave != here.wave:
        return f"it is for waves of {facts.wave}, {here.arch} has {here.wave}"
    if facts.cache_key not in here.cache_keys:
        mine = {name: here.versions.get(name, "") for name in ("vllm", "triton", "rocm")}
        theirs = {"vllm": facts.vllm, "triton": facts.triton, "rocm": facts.rocm}
        other = [f"{n} {theirs[n]} instead of {mine[n]}" for n in mine if theirs[n] != mine[n] and theirs[n]]
        why = f" ({', '.join(other)})" if other else ""
        return f"it is for the image with cache key {facts.cache_key}, the one here has {here.cache_keys[0]}{why}"
    if facts.cu and facts.cu not in here.cus:
        have = " and ".join(map(str, here.cus))
        return f"it is for {facts.cu} compute units, " + (f"the GPU has {have}" if have else "no such GPU is here")
    lacking = sorted({*facts.cpu.split(",")} - {"", *here.cpu}) if here.cpu is not None else []
    if lacking:
        more = " …" if len(lacking) > 3 else ""
        return f"its artefacts are machine code for a processor with {', '.join(lacking[:3])}{more}"
    return ""


def require(facts: Facts, here: Here) -> None:
    """Raises SeedMismatch with the reason when a seed is not for this image and these GPUs."""
    if why := misfit(facts, here):
        shows, makes = hints.call("seed", DO="ls"), hints.call("seed", DO="make", ARCH=here.arch)
        hint = f"`{shows}` shows what fits; `{makes}` makes one from a cache of here"
        if facts.arch != here.arch:
            named = f"ARCH={facts.arch}" if hints.by_make() else f"--arch {facts.arch}"
            hint = f"{named}, if the caches of that image are meant"
        elif facts.cu and not here.cus:
            hint = f"{hints.options(f'--cu {facts.cu}')}, if it is meant for such a GPU"
        raise SeedMismatch(f"the seed is refused: {why}", hint=hint)


def flags(words: Sequence[str]) -> str:
    """The flags of `vllm serve` that artefacts depend on, in one order and spelling: `--max-model-len=1024 …`."""
    left_out = set(seedtiers.table().flags.left_out)
    found: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if re.match(r"--?[A-Za-z]", word):
            found.append((name.lstrip("-").replace("_", "-"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    told = [(n, ",".join(values)) for n, values in found if n not in left_out and not masking.secret(n)]
    return " ".join(sorted(f"--{name}={shlex.quote(value)}" if value else f"--{name}" for name, value in told))


def processor(names: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """This processor's instruction sets among those that begin like `names` (`cpu-flags` of caches.toml)."""
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return tuple(sorted({flag for flag in value.split() if re.match(names, flag)}))
    return ()
