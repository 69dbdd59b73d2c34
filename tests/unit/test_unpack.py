"""A layer that nobody vouches for: every form but the one that is made here is refused, whatever it claims."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import seed_cache
from tests.seed_cache import Change, archive, expected, listed, listing, members, name
from warmstart import seedtiers, unpack
from warmstart.errors import SeedDamaged, SeedUnsafe
from warmstart.unpack import CACHE, LIST, Content

FILES = {
    f"triton/{name(1)}/__grp__k.json": b'{"child_paths": {}}',
    f"triton/{name(1)}/k.hsaco": b"\x7fELF" * 300,
    f"verdicts/cu40/{name(2)}/k.autotune.json": b"{}",
}
FIRST = next(iter(FILES))
SIZE = sum(map(len, FILES.values()))


def read(tar: bytes, listed: bytes = b"", size: int = SIZE, *, packed: bytes = b"", **more: Any) -> Content:
    """Unpack a layer; with no other list it is the honest one."""
    told = expected(tar, listed or honest(), size)
    layer = io.BytesIO(packed or gzip.compress(tar, 1))
    return unpack.unpack(layer, msgspec.structs.replace(told, **more))


def honest() -> bytes:
    return listing(listed(FILES))


def changed(path: str, change: Change) -> bytes:
    """The honest archive with one member's header changed."""
    return archive([(n, data, change if n == CACHE + path else old) for n, data, old in members(FILES, honest())])


def test_an_honest_layer_is_read_whole() -> None:
    placed: dict[int, io.BytesIO] = {}

    class Kept(io.BytesIO):
        def close(self) -> None: ...

    def place(number: int) -> IO[bytes]:
        placed[number] = Kept()
        return placed[number]

    tar = archive(members(FILES, honest()))
    content = unpack.unpack(io.BytesIO(gzip.compress(tar)), expected(tar, honest(), SIZE), place)
    assert {content.files[n].path: sink.getvalue() for n, sink in placed.items()} == FILES


@pytest.mark.parametrize("below", ["y", "y/z"])
def test_a_path_below_a_file_of_the_seed_is_refused(below: str) -> None:
    files = listed({"inductor/ab/x": b"1", "inductor/ab/x-": b"2", f"inductor/ab/x/{below}": b"3"})
    with pytest.raises(SeedUnsafe, match="below a file"):
        unpack.check(files, ("artefacts",))


def test_a_long_name_is_read() -> None:
    path = f"triton/{name(1)}/{'k' * 300}.hsaco"
    files = {path: b"\x7fELF"}
    told = listing(listed(files))
    assert read(archive(members(files, told)), told, 4).files[0].path == path


def form(kind: bytes, link: str = "") -> Change:
    def change(member: tarfile.TarInfo) -> None:
        member.type, member.linkname = kind, link
        member.size = 0 if kind != tarfile.GNUTYPE_SPARSE else member.size

    return change


def with_(**values: Any) -> Change:
    def change(member: tarfile.TarInfo) -> None:
        for key, value in values.items():
            setattr(member, key, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (form(tarfile.SYMTYPE, "/etc/passwd"), "a symbolic link"),
        (form(tarfile.LNKTYPE, "other"), "a hard link"),
        (form(tarfile.CHRTYPE), "a device"),
        (form(tarfile.BLKTYPE), "a device"),
        (form(tarfile.FIFOTYPE), "a pipe"),
        (form(tarfile.DIRTYPE), "a folder"),
        (form(tarfile.CONTTYPE), "form b'7'"),
        (form(tarfile.AREGTYPE), "form"),
        (form(b"S"), "form b'S'"),
        (form(b"V"), "form b'V'"),
        (with_(mode=0o4644), "mode 4644"),
        (with_(mode=0o2755), "mode 2755"),
        (with_(mode=0o755), "mode 755"),
        (with_(uid=1000), "an owner"),
        (with_(gid=4), "an owner"),
        (with_(name="/etc/cron.d/x"), "outside of the cache"),
        (with_(name=f"{CACHE}../../../etc/x"), "outside of the cache"),
        (with_(name=f"{CACHE}triton/../../x"), "outside of the cache"),
        (with_(name=f"{CACHE}host.json"), "where its list has"),
        (with_(name=f"etc/{FIRST}"), "where its list has"),
        (with_(name="io.vllm.cache"), "where its list has"),
        (with_(name=f"{CACHE}triton/kernel\u00e9.json"), "more than a path|no cache file has"),
        (with_(name=f"{CACHE}triton/a\nb"), "no cache file has"),
        (with_(pax_headers={"GNU.sparse.size": "99999999"}), "more than a path"),
        (with_(pax_headers={"size": "1"}), "more than a path"),
        (with_(pax_headers={"SCHILY.xattr.security.capability": "x"}), "more than a path"),
        (with_(pax_headers={"comment": "x" * 5000}), "extended header of"),
    ],
)
def test_forms_that_no_seed_has(change: Change, said: str) -> None:
    with pytest.raises(SeedUnsafe, match=said):
        read(changed(FIRST, change))


@pytest.mark.parametrize("member", [LIST, CACHE + FIRST])
def test_gnu_long_names_and_links_are_refused(member: str) -> None:
    long = "x" * 200
    tar = archive([(long if n == member else n, d, c) for n, d, c in members(FILES, honest())], form=tarfile.GNU_FORMAT)
    with pytest.raises((SeedUnsafe, SeedDamaged), match=r"form b'L'|no tar archive"):
        read(tar)


def test_a_global_header_is_refused() -> None:
    tar = tarfile.TarInfo.create_pax_global_header({"path": "x"}) + archive(members(FILES, honest()))
    with pytest.raises(SeedUnsafe, match="form b'g'"):
        read(tar)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "triton/../x",
        "host.json",
        "home/.bashrc",
        "aiter/module.so",
        "triton/x.json",
        f"triton/{name(1)}/k.sh",
        f"triton/{name(1)}/.k.json",
        f"triton/{name(1)}/a/b.json",
        f"verdicts/cu0/{name(1)}/k.autotune.json",
        f"verdicts/cu40/{name(1)}/../k.autotune.json",
        "vllm/modelinfos/x.json",  # of a tier that the labels don't name
        "inductor/ab/x.py",
        "x" * 600,
    ],
)
def test_a_list_with_a_path_of_no_cache_file(path: str) -> None:
    files = {path: b"x"}
    told = listing(listed(files))
    with pytest.raises(SeedUnsafe, match="no cache file of"):
        read(archive(members(files, told)), told, 1)


def test_the_same_file_twice_in_the_list() -> None:
    one = listed({FIRST: b"x"})[0]
    told = listing([one, one])
    with pytest.raises(SeedUnsafe, match="twice"):
        read(archive([(LIST, told, None), *[(CACHE + FIRST, b"x", None)] * 2]), told, 2)


def test_the_same_file_twice_in_the_archive() -> None:
    first, *rest = members(FILES, honest())
    with pytest.raises(SeedUnsafe, match="where its list has"):
        read(archive([first, rest[0], rest[0], *rest[1:]]))


def test_a_file_more_than_the_list() -> None:
    tar = archive([*members(FILES, honest()), (f"{CACHE}triton/more", b"x", None)])
    with pytest.raises(SeedUnsafe, match="more files than its list"):
        read(tar)


def test_a_file_less_than_the_list() -> None:
    with pytest.raises(SeedDamaged, match="lacks files"):
        read(archive(members(FILES, honest())[:-1]))


def test_the_list_is_not_first() -> None:
    first, *rest = members(FILES, honest())
    with pytest.raises(SeedUnsafe, match="not with the list"):
        read(archive([*rest, first]))


def test_another_list_than_the_labels_name() -> None:
    with pytest.raises(SeedDamaged, match="not the one that the labels name"):
        read(archive(members(FILES, honest())), listing=hashlib.sha256(b"other").hexdigest())


@pytest.mark.parametrize(
    "more", [{"cache_key": "gfx1151-ba9876543210"}, {"arch": "gfx1100"}, {"tiers": ("kernels",)}, {"schema": 2}]
)
def test_a_list_for_another_seed(more: dict[str, Any]) -> None:
    told = listing(listed(FILES), **more)
    with pytest.raises(SeedDamaged, match="for another seed"):
        read(archive(members(FILES, told)), told)


@pytest.mark.parametrize("told", [b"", b"[]", b"{", b'{"vllm": [], "warmstart": {}}', b"\xff", b"[" * 100_000])
def test_a_list_that_is_none(told: bytes) -> None:
    with pytest.raises(SeedDamaged, match="can't be read"):
        read(archive(members(FILES, told)), told or b" ", listing=hashlib.sha256(told).hexdigest())


def test_a_file_with_other_content() -> None:
    other = {path: data[:-1] + b"!" for path, data in FILES.items()}
    with pytest.raises(SeedDamaged, match="is not the file that was packed"):
        read(archive(members(other, honest())))


def test_a_file_of_another_size() -> None:
    shorter = {**FILES, FIRST: b"{}"}
    with pytest.raises(SeedDamaged, match="has 2 bytes"):
        read(archive(members(shorter, honest())))
    with pytest.raises(SeedUnsafe, match="were announced"):
        read(archive(members({**FILES, FIRST: b"x" * 5000}, honest())))


def test_more_bytes_than_the_labels_say() -> None:
    with pytest.raises(SeedUnsafe, match="of files, the labels"):
        read(archive(members(FILES, honest())), size=SIZE - 1)


def test_another_archive_digest() -> None:
    with pytest.raises(SeedDamaged, match="another digest than the image names"):
        read(archive(members(FILES, honest())), diff_id="sha256:" + "0" * 64)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_layer_that_is_cut_off(share: float) -> None:
    packed = gzip.compress(archive(members(FILES, honest())), 1)
    with pytest.raises(SeedDamaged, match=r"ends too early|lacks"):
        read(b"", packed=packed[: int(len(packed) * share)])


def test_a_layer_without_its_last_byte() -> None:
    tar = archive(members(FILES, honest()))
    with pytest.raises(SeedDamaged, match="ends too early"):
        read(tar, packed=gzip.compress(tar)[:-1])


@pytest.mark.parametrize("behind", [b"\0", b"x" * 10, gzip.compress(b"second member")])
def test_a_layer_that_goes_on(behind: bytes) -> None:
    tar = archive(members(FILES, honest()))
    with pytest.raises(SeedUnsafe, match="goes on behind its end"):
        read(tar, packed=gzip.compress(tar) + behind)


def test_an_archive_that_goes_on() -> None:
    tar = archive(members(FILES, honest()))
    with pytest.raises(SeedUnsafe, match=r"more files|goes on behind|more than it announces"):
        read(tar + tar)
    with pytest.raises(SeedUnsafe, match=r"goes on behind|more than it announces"):
        read(tar + bytes(unpack.RECORD))


def test_no_gzip_and_no_tar() -> None:
    with pytest.raises(SeedDamaged, match="no gzip stream"):
        read(b"", packed=archive(members(FILES, honest())))
    with pytest.raises(SeedDamaged, match="no tar archive"):
        read(b"x" * 20480)
    tar = bytearray(archive(members(FILES, honest())))
    tar[0] ^= 1
    with pytest.raises(SeedDamaged, match="damaged"):
        read(bytes(tar))


def peak(work: Callable[[], object]) -> int:
    """The most bytes of memory that `work` had at a time."""
    tracemalloc.start()
    try:
        with pytest.raises(SeedUnsafe):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_costs_no_memory() -> None:
    """200 MB of zeros in 200 kB: as the list, as a file behind an honest one, as an extended header."""
    empty = gzip.compress(b"", 9)

    def bomb(start: bytes) -> bytes:
        packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
        data = empty[:10] + packer.compress(start)
        data += b"".join(packer.compress(bytes(1 << 20)) for _ in range(200))
        return data + packer.flush() + empty[-8:]

    def header(path: str, kind: bytes = b"0") -> bytes:
        member = tarfile.TarInfo(path)
        member.size, member.mode, member.type = 200 << 20, 0o644, kind
        return member.tobuf(tarfile.USTAR_FORMAT)

    begun = archive(members(FILES, honest())[:1]).rstrip(b"\0")
    begun += bytes(-len(begun) % 512)
    for start in (header(LIST), header("x", b"x"), begun + header(CACHE + FIRST), begun + header("x", b"x")):
        packed = bomb(start)
        assert len(packed) < 1 << 20
        assert peak(lambda packed=packed: read(b"", packed=packed)) < 20 << 20  # type: ignore[misc]


def test_a_stream_has_a_limit_whatever_its_headers_say() -> None:
    stream = unpack._Inflated(io.BytesIO(gzip.compress(bytes(1000))), 600)
    stream.read(600)
    with pytest.raises(SeedUnsafe, match="unpacks to more than it announces"):
        stream.read(1)


@pytest.mark.parametrize("data", [b"99 path=abc\n", b"12 path=abc", b"path=abc\n", b"12 size=123\n", b""])
def test_an_extended_header_has_one_record(data: bytes) -> None:
    assert unpack._pax(b"12 path=abc\n") == "abc"
    with pytest.raises(SeedUnsafe, match="more than a path"):
        unpack._pax(data)


def test_a_list_of_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = msgspec.structs.replace(seedtiers.table().limits, files=2)
    table = msgspec.structs.replace(seedtiers.table(), limits=limits)
    monkeypatch.setattr(seedtiers, "table", lambda: table)
    with pytest.raises(SeedUnsafe, match="3 files, 2 are the most"):
        read(archive(members(FILES, honest())))


@given(st.integers(0, 40_000), st.integers(1, 255))
def test_any_changed_byte_is_found(place: int, change: int) -> None:
    tar = bytearray(archive(members(FILES, honest())))
    tar[place % len(tar)] ^= change
    told = expected(archive(members(FILES, honest())), honest(), SIZE)
    with pytest.raises((SeedDamaged, SeedUnsafe)):
        unpack.unpack(io.BytesIO(gzip.compress(bytes(tar), 1)), told)


def test_the_helper_makes_what_is_honest(tmp_path: Path) -> None:
    assert read(archive(members(FILES, honest()))).cache_key == seed_cache.KEY
