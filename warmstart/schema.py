"""The tables of a profile, typed. What a key means is said here, why it has its value in `arch/`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Lane = Literal["wheel", "vendor", "source", "cpu"]


# What reaches a Containerfile or a shell line unquoted holds nothing that either would read as its own.
Version = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.+_-]*$")]
Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
RESERVED = "os|venv|runtime|patched|wheels|tools|debs|trees|toolchain|made-.*|aiter-modules"  # names of other stages
LayerName = Annotated[str, msgspec.Meta(pattern=rf"^(?!({RESERVED})$)[a-z][a-z0-9_-]*$")]
EnvName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]*$")]  # one line; the engine alters control characters


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A table of a profile: unknown keys are errors."""


class Base(_Table, frozen=True, kw_only=True):
    """What the image stands on: a rootfs made from distribution packages, or a registry image by digest."""

    kind: Literal["rootfs", "image"]
    suite: Version = ""  # rootfs: the distribution's suite
    packages: tuple[str, ...] = ()  # rootfs: what is installed besides the essential packages
    components: tuple[Word, ...] = ()  # rootfs: parts of the suite; empty for the tool's own choice
    keyring: str = ""  # rootfs: file in arch/ with the keys that sign the suite; empty for the host's own
    image: str = ""  # image: registry reference; its digest is in the lock


class Versions(_Table, frozen=True, kw_only=True):
    """Versions that belong together, stored and never computed."""

    python: Version
    vllm: Version
    variant: Version = ""  # local part of the vLLM wheel's version: without it a CUDA wheel matches too
    torch: Version
    torchvision: Version = ""
    torchaudio: Version = ""
    triton: Version = ""
    rocm: Version = ""
    aiter: Version = ""


class Index(_Table, frozen=True, kw_only=True):
    """A vendor's own wheel index, and the only distributions that are looked for there."""

    name: str
    url: str
    packages: tuple[str, ...]


class Choice(_Table, frozen=True, kw_only=True):
    """Wheels of another builder in place of a profile's own."""

    why: str
    replaces: dict[str, str]  # distribution → the requirement in its place
    indexes: tuple[Index, ...] = ()  # where those are


class Wheels(_Table, frozen=True, kw_only=True):
    """Which distributions go in, and who built those that are not the upstream project's own."""

    requires: tuple[str, ...]  # top-level requirements; {vllm}, {torch} … stand for the versions above
    platform: str  # uv's name for the target platform, e.g. x86_64-manylinux_2_36
    layers: dict[LayerName, tuple[str, ...]]  # layer → distributions in it; all others are in layer "python"
    indexes: tuple[Index, ...] = ()
    builders: dict[str, str] = {}  # distribution → who built its wheel
    overrides: tuple[str, ...] = ()  # replace what any distribution requires of another, its extras with it
    choices: dict[str, Choice] = {}  # other wheels for the same thing, by the name that `lock --choose` takes
    from_source: dict[str, dict[str, str]] = {}  # offered as sources only → ENV under which its wheel is made


class Device(_Table, frozen=True, kw_only=True):
    """Facts of the GPU that images, seeds and the doctor need. Absent for `cpu`."""

    extra: str  # the one device extra of the ROCm wheels
    wave: Literal[32, 64]  # wave size in lanes
    unified_memory: bool
    products: tuple[str, ...] = ()  # names on the box
    llc_mib: float = 0.0  # largest last-level cache of the products, in MiB: what a benchmark has to flush
    min_kernel: str = ""
    bad_firmware: tuple[str, ...] = ()


class Aiter(_Table, frozen=True, kw_only=True):
    """How aiter's compiled part gets into the image."""

    mode: Literal["core", "set", "off"] = "off"


class Feature(_Table, frozen=True, kw_only=True):
    """A part that only some archs have. Its wheels join `wheels`, its environment joins `env`."""

    why: str
    enabled: bool
    layer: str = ""  # where it goes; empty for a layer of its own, named like the feature
    requires: tuple[str, ...] = ()
    indexes: dict[str, tuple[str, ...]] = {}  # index → which of them it offers
    packages: tuple[str, ...] = ()  # distribution packages, unpacked into the layer
    env: dict[str, str] = {}


class Source(_Table, frozen=True, kw_only=True):
    """Lane `source`: what the stage that builds vLLM needs besides the image's own wheels."""

    packages: tuple[str, ...]  # distribution packages
    requires: tuple[str, ...]  # distributions, each by name: what only they need as well
    archs: str  # PYTORCH_ROCM_ARCH
    env: dict[str, str] = {}
    trees: dict[str, str] = {}  # ENV that names an unpacked source tree → repository@commit/folder


class Image(_Table, frozen=True, kw_only=True):
    """Name and labels of the built image."""

    repository: Text
    title: Text
    vendor: Text
    source: Text
    licenses: Text


class Budget(_Table, frozen=True, kw_only=True):
    """The largest allowed image, in MB (10^6 bytes)."""

    unpacked_mb: Annotated[int, msgspec.Meta(ge=1)]
    pull_mb: Annotated[int, msgspec.Meta(ge=0)] = 0
    basis: Literal["measured", "computed"] = "measured"  # computed from the sizes of wheels, never built


class Profile(_Table, frozen=True, kw_only=True):
    """Everything known about one arch."""

    schema: Literal[1]
    arch: str
    family: str = ""
    summary: Text
    lane: Lane
    default_lane: Literal["", "wheel", "vendor", "source", "cpu"] = ""  # set when another lane than it was chosen
    hardware_validated: bool = False
    base: Base
    versions: Versions
    wheels: Wheels
    device: Device | None = None
    aiter: Aiter = Aiter()
    features: dict[str, Feature] = {}
    source_lane: Source | None = None
    lanes: dict[str, str] = {}  # other lanes that can be chosen → what they are for
    serve: dict[str, str] = {}  # flags that `vllm serve` gets unless the user gives them
    removals: tuple[str, ...] = ()  # files below site-packages that break this arch; large ones are cuts
    compilers: tuple[str, ...] = ()  # programs that may be in the runtime image because a JIT needs them
    patches: tuple[str, ...] = ()  # components under patches/ whose series is applied
    env: dict[EnvName, Text] = {}
    image: Image
    budget: Budget
    evidence: dict[str, str] = {}  # profile key → link to why its value is what it is

    @property
    def slug(self) -> str:
        """The arch, and the lane where it is not the arch's own: the name of its lock and its tag."""
        return f"{self.arch}.{self.lane}" if self.default_lane else self.arch

    @property
    def tag(self) -> str:
        """The name of its image on this machine; the plan gives another one with version and plan id."""
        return f"{self.image.repository}:{self.slug.replace('.', '-')}"

    @property
    def lock_command(self) -> str:
        """What makes its lock anew, for hints."""
        return f"make lock ARCH={self.arch}" + (f" ARGS='--lane {self.lane}'" if self.default_lane else "")


def json_schema() -> str:
    """The JSON Schema of a merged profile, for editors: the text of `arch/schema.json`."""
    encoded = msgspec.json.encode(msgspec.json.schema(Profile), order="sorted")
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
