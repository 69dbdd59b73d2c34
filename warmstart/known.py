"""The types of `arch/rules.toml` and `arch/aiter.toml`: what is known of versions, as the files hold it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from warmstart.toml import Table


class Texts(Table, frozen=True):
    """What a rule says. Without a link of its own it takes that of the row it found."""

    reason: str
    link: str = ""


class Data(Table, frozen=True):
    """Single facts: version specifiers but where it says otherwise."""

    slow_vllm: str
    wheel_python: str  # a version
    breaking_triton: str
    aiter_replaces_triton: str
    aiter_needs_flydsl: str
    wave: dict[str, int]  # by family
    frozen_index: str  # a regular expression
    wheel_archs: dict[str, tuple[str, ...]]  # by the vLLM version from which on they are in the wheel


class Release(Table, frozen=True):
    """torch and what was released with it, as minor versions."""

    torch: str
    torchvision: str
    torchaudio: str


class Oldest(Table, frozen=True):
    """The oldest ROCm for some archs."""

    archs: tuple[str, ...]
    since: str = msgspec.field(name="from")
    link: str


class Baked(Table, frozen=True):
    """A variable that no image may hold."""

    name: str
    why: str
    link: str


class Gone(Table, frozen=True):
    """A variable, or a flag, that vLLM does not know any more."""

    name: str
    since: str  # the first release without it, of those that were read
    instead: str


class Needed(Table, frozen=True):
    """A variable that newer vLLM sets itself, and older ones leave to the image."""

    name: str
    value: str
    before: str  # the version that sets it
    why: str
    link: str


class Known(Table, frozen=True):
    """The content of rules.toml."""

    schema: int
    rule: dict[str, Texts]
    data: Data
    set: tuple[Release, ...]
    rocm: tuple[Oldest, ...]
    baked: tuple[Baked, ...]
    gone: tuple[Gone, ...]
    needed: tuple[Needed, ...]


Number = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?$")]


class AiterVersion(Table, frozen=True):
    """What an aiter version changed; what it leaves out is as before."""

    since: Number
    core: str = ""
    archs: tuple[str, ...] = ()
    core_env: dict[str, str] = msgspec.field(default_factory=dict)
    triton_only: bool = False
    replaces_triton: bool = False
    import_needs_gpu: bool = False
    import_hides_errors: bool = False
    stale_lock: Literal["waits", "breaks"] = "waits"
    flydsl: str = ""
    flydsl_required: bool = False
    unified_attention: tuple[str, ...] = ()


class AiterOff(Table, frozen=True):
    """What the environment of an image without aiter's modules holds."""

    env: dict[str, str]


class AiterSet(Table, frozen=True):
    """The modules that some archs need on their first start."""

    archs: tuple[str, ...]
    wheel: str
    setup_env: dict[str, str]
    missed_itfs: tuple[str, ...]
    missed_recipes: tuple[str, ...]


class AiterConflict(Table, frozen=True):
    """Versions that do not work together."""

    triton: str
    aiter: str
    why: str


class AiterFacts(Table, frozen=True):
    """The content of aiter.toml, which the build reads inside the image (`image/aiter_facts.py`)."""

    schema: int
    read_up_to: Number
    version: Annotated[tuple[AiterVersion, ...], msgspec.Meta(min_length=1)]
    conflict: tuple[AiterConflict, ...]
    off: AiterOff
    set: dict[str, AiterSet]
