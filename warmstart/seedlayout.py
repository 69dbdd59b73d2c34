"""A seed as an image: one layer, its config and its manifest in an OCI image layout, the same bytes for the same files.

Form: OCI image-spec 1.0. Times are the lock's epoch, owners root, modes all the same, and files in order.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from warmstart import plan, seedfiles, seedlabels, seedtiers, unpack
from warmstart.errors import NothingToSeed, SeedDamaged, SeedMismatch
from warmstart.seedlabels import AGAIN, Facts
from warmstart.unpack import CACHE, LIST, Content, Expected, File

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
NAME = "org.opencontainers.image.ref.name"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
DIGEST = r"^sha256:[0-9a-f]{64}\Z"
SMALL = 4_000_000  # bytes that a manifest or a config may have


Digest = Annotated[str, msgspec.Meta(pattern=DIGEST)]


class _Blob(msgspec.Struct, rename="camel"):
    """What a manifest says of one of its parts."""

    media_type: str
    digest: Digest
    size: int


class _Manifest(msgspec.Struct):
    config: _Blob
    layers: list[_Blob]


class _Labels(msgspec.Struct, rename="pascal"):
    labels: dict[str, str]


class _Layers(msgspec.Struct):
    diff_ids: list[Digest]


class _Config(msgspec.Struct):
    config: _Labels
    rootfs: _Layers


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's image, as its manifest and its config tell it."""

    digest: str  # of the manifest: the seed's identity
    layer: str  # digest and size of the compressed layer
    layer_size: int
    diff_id: str
    labels: dict[str, str]
    facts: Facts

    @property
    def expected(self) -> Expected:
        """What the layer has to hold. Raises SeedDamaged."""
        size, listing = seedlabels.size(self.labels)
        facts = self.facts
        return Expected(self.diff_id, listing, size, facts.cache_key, facts.arch, facts.tiers)


def write(folder: Path, facts: Facts, copies: Mapping[str, Path], epoch: int) -> Image:
    """Write the image of these files into a new folder and return it."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    files = seedfiles.listed(copies)
    unpack.check(files, facts.tiers)
    content = Content(1, facts.cache_key, facts.arch, facts.tiers, files)
    listing = msgspec.json.encode({"vllm": [], "warmstart": content}, order="sorted")
    diff_id, layer = _layer(blobs, listing, files, copies, epoch)
    labels = seedlabels.write(
        facts,
        epoch=epoch,
        entries=seedfiles.entries(copies),
        size=sum(file.size for file in files),
        manifest=hashlib.sha256(listing).hexdigest(),
        formats=seedfiles.formats(copies),
    )
    config = _blob(blobs, CONFIG, _config(labels, diff_id, epoch))
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}
    named = _blob(blobs, MANIFEST, manifest) | {"annotations": {NAME: seedlabels.tag(facts)}}
    _json(folder / "index.json", {"schemaVersion": 2, "manifests": [named]})
    _json(folder / "oci-layout", {"imageLayoutVersion": "1.0.0"})
    return read(folder)


def read(folder: Path) -> Image:
    """The image in a layout, its manifest and config checked by digest. Raises NothingToSeed, SeedDamaged."""
    try:
        named = json.loads((folder / "index.json").read_bytes())["manifests"]
        digest = str(named[0]["digest"])
        manifest = _checked(folder, digest)
        config = _checked(folder, config_digest(manifest))
    except FileNotFoundError:
        raise NothingToSeed(f"there is no seed in {folder}", hint="seed ls lists those of here") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as bad:
        raise SeedDamaged(f"the seed in {folder} can't be read: {bad}", hint=AGAIN) from None
    return parse(digest, manifest, config)


def config_digest(manifest: bytes) -> str:
    """The digest of the config that a manifest names; raises SeedMismatch for one that is no single image's."""
    try:
        told = msgspec.json.decode(manifest, type=_Manifest)
    except (msgspec.MsgspecError, RecursionError):
        told = None
    if not told or told.config.media_type != CONFIG or not 0 < told.config.size <= SMALL:
        raise SeedMismatch("that is no seed: not a single image in OCI form", hint="seed ls lists those of here")
    return told.config.digest


def parse(digest: str, manifest: bytes, config: bytes) -> Image:
    """The image of these bytes, judged in every field. Raises SeedDamaged, SeedMismatch."""
    for data, name in ((manifest, digest), (config, config_digest(manifest))):
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != name:
            raise SeedDamaged(f"what came is not {name[:19]}…", hint="the registry, or the way from it, changed it")
    layers = msgspec.json.decode(manifest, type=_Manifest).layers
    try:
        told = msgspec.json.decode(config, type=_Config)
    except (msgspec.MsgspecError, RecursionError):
        raise SeedMismatch("that is no seed: its config has no labels", hint="seed ls lists those of here") from None
    facts = seedlabels.read(told.config.labels)
    seedlabels.size(told.config.labels)
    if len(layers) != 1 or layers[0].media_type != LAYER or len(told.rootfs.diff_ids) != 1:
        raise SeedDamaged("a seed has one layer, compressed by gzip", hint="push it as it is: seed push")
    if not 0 < layers[0].size <= seedtiers.table().limits.bytes:
        raise SeedDamaged(f"the seed's layer has {layers[0].size} bytes", hint=AGAIN)
    return Image(
        digest=digest,
        layer=layers[0].digest,
        layer_size=layers[0].size,
        diff_id=told.rootfs.diff_ids[0],
        labels=told.config.labels,
        facts=facts,
    )


@contextmanager
def layer(folder: Path, image: Image) -> Iterator[IO[bytes]]:
    """The compressed layer in a layout, after its size and digest were checked. Raises SeedDamaged."""
    file = folder / "blobs" / "sha256" / image.layer.removeprefix("sha256:")
    if not file.is_file() or file.stat().st_size != image.layer_size:
        raise SeedDamaged("the seed's layer is not whole", hint=AGAIN)
    with file.open("rb") as data:
        if f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}" != image.layer:
            raise SeedDamaged("the seed's layer has another digest than its manifest names", hint=AGAIN)
        data.seek(0)
        yield data


def _layer(
    blobs: Path, listing: bytes, files: tuple[File, ...], copies: Mapping[str, Path], epoch: int
) -> tuple[str, dict[str, Any]]:
    """Write the layer; return the digest of its archive and its descriptor."""
    part = blobs / "part"
    with part.open("wb") as packed, gzip.GzipFile("", "wb", 6, packed, mtime=0) as file:
        archive = _Hashed(file)
        with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(_member(LIST, len(listing), epoch), io.BytesIO(listing))
            for one in files:
                with copies[one.path].open("rb") as data:
                    tar.addfile(_member(CACHE + one.path, one.size, epoch), data)
    with part.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    size = part.stat().st_size
    part.rename(blobs / digest)
    return archive.digest, {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size}


class _Hashed(io.RawIOBase):
    """A file that is written through, and the digest of all that was."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file, self.total = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.total.update(data)
        self.file.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        """As an image names it."""
        return f"sha256:{self.total.hexdigest()}"


def _member(name: str, size: int, epoch: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, epoch, unpack.MODE
    return member


def _config(labels: dict[str, str], diff_id: str, epoch: int) -> dict[str, Any]:
    created = plan.created(epoch)
    return {
        "created": created,
        "architecture": MACHINES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": created, "created_by": "warmstart seed make"}],
    }


def _blob(blobs: Path, kind: str, value: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, sort_keys=True), encoding="utf-8")


def _checked(folder: Path, digest: str) -> bytes:
    if not re.fullmatch(DIGEST, digest):
        raise ValueError(f"{digest!r} is no digest")
    file = folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
    if file.stat().st_size > SMALL:
        raise ValueError(f"{digest} is too large")
    data = file.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ValueError(f"{digest[:19]}… has other content")
    return data
