"""Reading the layer of a seed that nobody vouches for: nothing but the one form that `seed make` writes.

A layer is a gzip stream with a tar archive: the list of files first, then exactly these files in that order, all of
them regular. Anything else (links, devices, folders, other names, twice the same, one byte more than announced) ends
it at once. What a header may claim is bounded before memory or disk is given for it. Form of tar: POSIX.1-2001.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import IO, Any

import msgspec

from warmstart import seedtiers
from warmstart.errors import SeedDamaged, SeedUnsafe
from warmstart.seedlabels import AGAIN

BLOCK, RECORD = 512, 10240  # bytes: of a header, and what an archive's length is a multiple of
CHUNK = 1 << 20
CACHE, LIST = "io.vllm.cache/", "io.vllm.manifest/manifest.json"  # where MCV looks for them, too
MODE = 0o644
PAX = 2048  # bytes of an extended header: one long path

KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
}


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a seed: its path below the cache key."""

    path: str
    size: int
    sha256: str


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of files, and whom they are for."""

    schema: int
    cache_key: str
    arch: str
    tiers: tuple[str, ...]
    files: tuple[File, ...]


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """io.vllm.manifest/manifest.json: MCV's own list, empty, and ours."""

    vllm: tuple[Any, ...]
    warmstart: Content


class Expected(msgspec.Struct, frozen=True):
    """What the image says of its layer, before it is read."""

    diff_id: str  # sha256:… of the archive
    listing: str  # sha256 of the list of files
    bytes: int  # of all cache files
    cache_key: str
    arch: str
    tiers: tuple[str, ...]


def unpack(layer: IO[bytes], expected: Expected, place: Callable[[int], IO[bytes]] | None = None) -> Content:
    """Read a whole layer and return its list of files; each file's bytes go to what `place(its number)` opens.

    Raises SeedUnsafe or SeedDamaged at the first thing that is not as announced; what was placed by then must not be
    used.
    """
    limits = seedtiers.table().limits
    stream = _Inflated(layer, limits.manifest + 4 * BLOCK)
    content = _listing(stream, expected)
    stream.limit = archive_size(content.files) + stream.count
    for number, file in enumerate(content.files):
        name, size = _member(stream, file.size)
        if name != CACHE + file.path:
            raise SeedUnsafe(f"the seed holds {_shown(name)} where its list has {_shown(file.path)}", hint=AGAIN)
        if size != file.size:
            raise SeedDamaged(f"{file.path} has {size} bytes, {file.size} were announced", hint=AGAIN)
        with place(number) if place else _Nothing() as sink:
            _copy(stream, file, sink)
    _end(stream, expected)
    return content


def archive_size(files: tuple[File, ...]) -> int:
    """The most bytes that an archive of these files can have, without the list of them."""
    return sum(_padded(file.size) + 3 * BLOCK + PAX for file in files) + 2 * RECORD


def check(files: tuple[File, ...], tiers: tuple[str, ...]) -> None:
    """Raises SeedUnsafe unless all paths are of known kinds and of these tiers, each once and in order."""
    limits = seedtiers.table().limits
    if len(files) > limits.files:
        raise SeedUnsafe(f"the seed lists {len(files)} files, {limits.files} are the most", hint=AGAIN)
    last, paths = "", {file.path for file in files}
    for file in files:
        kind = seedtiers.kind(file.path)
        if kind is None or kind.tier not in tiers:
            raise SeedUnsafe(f"the seed lists {_shown(file.path)}, which is no cache file of {', '.join(tiers)}")
        if file.path <= last:
            raise SeedUnsafe(f"the seed lists {_shown(file.path)} twice or out of order", hint=AGAIN)
        parents = file.path.split("/")[:-1]
        if not paths.isdisjoint("/".join(parents[: depth + 1]) for depth in range(len(parents))):
            raise SeedUnsafe(f"the seed lists {_shown(file.path)} below a file", hint=AGAIN)
        if not 0 <= file.size <= limits.bytes or len(file.sha256) != 64:
            raise SeedUnsafe(f"the seed lists {_shown(file.path)} with {file.size} bytes", hint=AGAIN)
        last = file.path


class _Inflated:
    """The archive inside a gzip stream; reads exactly what is asked for, never past `limit` bytes in all."""

    def __init__(self, layer: IO[bytes], limit: int) -> None:
        self.layer, self.limit, self.count = layer, limit, 0
        self.total = hashlib.sha256()
        self.inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self.packed = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes. Raises SeedDamaged when there are fewer, SeedUnsafe past the limit."""
        if self.count + size > self.limit:
            raise SeedUnsafe("the seed unpacks to more than it announces", hint=AGAIN)
        parts, missing = [], size
        while missing:
            part = self._more(missing)
            if not part:
                raise SeedDamaged("the seed's layer ends too early", hint=AGAIN)
            parts.append(part)
            missing -= len(part)
        data = b"".join(parts)
        self.count += size
        self.total.update(data)
        return data

    def end(self) -> None:
        """Raises SeedUnsafe unless both the archive and the gzip stream end here."""
        if self._more(1) or self.packed or self.inflate.unused_data or self.layer.read(1):
            raise SeedUnsafe("the seed's layer goes on behind its end", hint=AGAIN)
        if not self.inflate.eof:
            raise SeedDamaged("the seed's layer ends too early", hint=AGAIN)

    def _more(self, most: int) -> bytes:
        """Up to `most` bytes; none at the end."""
        while not self.inflate.eof:
            packed = self.packed or self.layer.read(CHUNK)
            try:
                part = self.inflate.decompress(packed, most)
            except zlib.error:
                raise SeedDamaged("the seed's layer is no gzip stream, or a damaged one", hint=AGAIN) from None
            self.packed = self.inflate.unconsumed_tail
            if part or not packed:
                return part
        return b""


class _Nothing:
    """Where the bytes go when a seed is only looked at."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> int:
        return len(data)


def _listing(stream: _Inflated, expected: Expected) -> Content:
    """The first member: the list of files, checked against the labels."""
    name, size = _member(stream, seedtiers.table().limits.manifest)
    if name != LIST:
        raise SeedUnsafe(f"the seed begins with {_shown(name)}, not with the list of its files", hint=AGAIN)
    data = stream.read(size)
    _skip(stream, size)
    if hashlib.sha256(data).hexdigest() != expected.listing:
        raise SeedDamaged("the list of files is not the one that the labels name", hint=AGAIN)
    try:
        content = msgspec.json.decode(data, type=Listing).warmstart
    except (msgspec.MsgspecError, RecursionError) as bad:
        raise SeedDamaged(f"the list of files can't be read: {bad}", hint=AGAIN) from None
    told = (content.schema, content.cache_key, content.arch, content.tiers)
    if told != (1, expected.cache_key, expected.arch, expected.tiers):
        raise SeedDamaged("the list of files is for another seed than the labels", hint=AGAIN)
    check(content.files, content.tiers)
    if (total := sum(file.size for file in content.files)) != expected.bytes:
        raise SeedUnsafe(f"the list has {total} bytes of files, the labels {expected.bytes}", hint=AGAIN)
    return content


def _member(stream: _Inflated, most: int, path: str = "") -> tuple[str, int]:
    """Name and size of the next member, which has to be a regular file of at most `most` bytes."""
    head = stream.read(BLOCK)
    if not head.strip(b"\0"):
        raise SeedDamaged("the seed lacks files that its list has", hint=AGAIN)
    if head[257:265] != b"ustar\x0000" or _number(head[148:156]) != sum(head[:148]) + 8 * 32 + sum(head[156:]):
        raise SeedDamaged("the seed's layer is no tar archive, or a damaged one", hint=AGAIN)
    size, form = _number(head[124:136]), head[156:157]
    name = path or "/".join(_text(part) for part in (head[345:500], head[:100]) if part[:1] != b"\0")
    if form == b"x" and not path:
        if size > PAX:
            raise SeedUnsafe(f"the seed has an extended header of {size} bytes", hint=AGAIN)
        data = stream.read(size)
        _skip(stream, size)
        return _member(stream, most, _pax(data))
    if form != b"0":
        told = KINDS.get(form, f"a member of form {form!r}")
        raise SeedUnsafe(f"the seed holds {told}: {_shown(name)}", hint="only regular files belong in a seed")
    if _number(head[100:108]) != MODE or _number(head[108:116]) or _number(head[116:124]):
        raise SeedUnsafe(f"{_shown(name)} has mode {_number(head[100:108]):o}, or an owner", hint=AGAIN)
    if name.startswith("/") or ".." in name.split("/"):
        raise SeedUnsafe(f"the seed would write outside of the cache: {_shown(name)}", hint="do not use this seed")
    if size > most:
        raise SeedUnsafe(f"{_shown(name)} has {size} bytes, {most} were announced", hint=AGAIN)
    return name, size


def _pax(data: bytes) -> str:
    """The path of an extended header that holds nothing else."""
    length, _, rest = data.partition(b" ")
    if not rest.startswith(b"path=") or not rest.endswith(b"\n") or length != str(len(data)).encode():
        raise SeedUnsafe("the seed has an extended header with more than a path", hint=AGAIN)
    return _text(rest[5:-1])


def _copy(stream: _Inflated, file: File, sink: IO[bytes] | _Nothing) -> None:
    digest, left = hashlib.sha256(), file.size
    while left:
        data = stream.read(min(left, CHUNK))
        digest.update(data)
        sink.write(data)
        left -= len(data)
    _skip(stream, file.size)
    if digest.hexdigest() != file.sha256:
        raise SeedDamaged(f"{file.path} is not the file that was packed: its sha256 differs", hint=AGAIN)


def _end(stream: _Inflated, expected: Expected) -> None:
    """Nothing but zeros to the end of the record, and then nothing at all."""
    left = RECORD - stream.count % RECORD
    if left < 2 * BLOCK:
        left += RECORD
    if stream.read(left).strip(b"\0"):
        raise SeedUnsafe("the seed holds more files than its list", hint=AGAIN)
    stream.end()
    if f"sha256:{stream.total.hexdigest()}" != expected.diff_id:
        raise SeedDamaged("the unpacked layer has another digest than the image names", hint=AGAIN)


def _skip(stream: _Inflated, size: int) -> None:
    if stream.read(_padded(size) - size).strip(b"\0"):
        raise SeedDamaged("the seed's layer is a damaged tar archive", hint=AGAIN)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _number(field: bytes) -> int:
    """An octal field. Raises SeedUnsafe for the forms that allow larger numbers: no file of a seed needs them."""
    text = field.rstrip(b"\0 ").lstrip(b" ")
    if text.strip(b"01234567"):
        raise SeedUnsafe("the seed's layer has a header with no octal number", hint=AGAIN)
    return int(text or b"0", 8)


def _text(field: bytes) -> str:
    try:
        text = field.split(b"\0")[0].decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or len(text) > seedtiers.table().limits.path + len(CACHE):
        raise SeedUnsafe("the seed has a member with a name that no cache file has", hint=AGAIN)
    return text


def _shown(name: str) -> str:
    return repr(name if len(name) < 100 else name[:97] + "…")
