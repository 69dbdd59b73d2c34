"""A small cache as a GPU's first start leaves it, with what no seed may take from it, and seeds made by hand."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from warmstart.seedlabels import Facts
from warmstart.unpack import CACHE, LIST, Content, Expected, File, Listing

KEY = "gfx1151-0123456789ab"
CU = 40
FACTS = Facts(cache_key=KEY, arch="gfx1151", tiers=("kernels", "verdicts"), cu=CU, wave=32, vllm="0.32.0", triton="3.8")
TEXTS = ("source", "ttir", "ttgir", "llir", "amdgcn")


def name(number: int) -> str:
    """A folder's name as Triton makes it."""
    return base64.b32encode(hashlib.sha256(str(number).encode()).digest()).decode().rstrip("=")


def write(top: Path, path: str, content: bytes | str) -> Path:
    """A file below a folder."""
    file = top / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def kernel(top: Path, number: int, kind: str = "hsaco", texts: Sequence[str] = TEXTS) -> str:
    """A kernel in Triton's cache, with all of its forms; returns its folder."""
    folder, kernel = f"triton/{name(number)}", f"kernel_{number}"
    content = {kind: b"\x7fELF" + bytes(range(256)) * (number + 1), "json": json.dumps({"name": kernel}).encode()}
    content |= {text: f"// {text} of {kernel}".encode() for text in texts}
    for ending, data in content.items():
        write(top, f"{folder}/{kernel}.{ending}", data)
    paths = {f"{kernel}.{ending}": f"/where/it/was/made/{folder}/{kernel}.{ending}" for ending in content}
    write(top, f"{folder}/__grp__{kernel}.json", json.dumps({"child_paths": paths}))
    return folder


def cache(top: Path, arch: str = "gfx1151", cu: int = CU) -> Path:
    """The folder of a cache key with three kernels, two verdicts, artefacts, and much that is none of a seed's."""
    for number in range(3):
        kernel(top, number)
    write(top, f"triton/{name(8)}/hip_utils.so", b"\x7fELF utils")
    for number in range(2):
        write(top, f"verdicts/cu{cu}/{name(20 + number)}/kernel_{number}.autotune.json", f'{{"key": {number}}}')
    backbone = "vllm/torch_compile_cache/0123456789/rank_0_0/backbone"
    write(top, f"{backbone}/vllm_compile_cache.py", "{}")
    write(top, f"{backbone}/cache_key_factors.json", "{}")
    write(top, f"{backbone}/artifact_compile_range_1_512_subgraph_0", b"\x80\x05pickle")
    ahead = f"vllm/torch_compile_cache/torch_aot_compile/{'0a' * 32}"
    write(top, f"{ahead}/rank_0_0/model", b"\x80\x05model")
    write(top, f"{ahead}/inductor_cache/ab/cab{'x' * 50}.py", "print()")
    write(top, "vllm/modelinfos/vllm-models-Qwen3.json", "{}")
    write(top, f"inductor/fxgraph/ab/f{'a' * 51}/{'b' * 52}", b"\x80\x05graph")
    gpus = [] if arch == "cpu" else [{"arch": arch, "cu": cu}]
    write(top, "host.json", json.dumps({"schema": 1, "cpu": ["avx2", "sse2"], "gpus": gpus}))
    write(top, BROKEN, b"\x7fELF")
    for path in OTHERS:
        write(top, path, "hf_" + "a" * 34)  # a token: were it taken, making the seed would fail
    return top


BROKEN = f"triton/{name(9)}/kernel_9.hsaco"  # there is no list of the kernel's files: its compilation was broken off
OTHERS = (
    "in-use",
    "starts/20261130T000000.000-1.jsonl",
    "home/.cache/huggingface/token",
    "aiter/module.so",
    "triton/README",
    f"triton/{name(0)}/tmp.pid_7_a/kernel_0.hsaco",
    "inductor/locks/abc.lock",
    "inductor/ab/.hidden.py",
    "vllm/torch_compile_cache/torch_aot_compile/" + "0b" * 32 + "/rank_0_0/model.lock",
    "vllm/secrets.json",
    ".seed-0123/0",
    "triton.aside-20261130T000000/x.json",
)


def listed(files: Mapping[str, bytes]) -> tuple[File, ...]:
    """The list of files with these contents."""
    return tuple(File(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items())


def listing(files: Sequence[File], **more: object) -> bytes:
    """A seed's list of files, as it lies in the layer."""
    import msgspec

    content = Content(1, KEY, "gfx1151", ("kernels", "verdicts"), tuple(files))
    return msgspec.json.encode(Listing((), msgspec.structs.replace(content, **more)))


Change = Callable[[tarfile.TarInfo], None]


def archive(members: Sequence[tuple[str, bytes, Change | None]], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar archive of regular files, each changed as told before it is written."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as tar:
        for path, data, change in members:
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o644
            if change:
                change(member)
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def expected(tar: bytes, listed: bytes, size: int) -> Expected:
    """What an honest image says of such a layer."""
    digest = hashlib.sha256(listed).hexdigest()
    return Expected(f"sha256:{hashlib.sha256(tar).hexdigest()}", digest, size, KEY, "gfx1151", ("kernels", "verdicts"))


def members(files: Mapping[str, bytes], listed: bytes) -> list[tuple[str, bytes, Change | None]]:
    """The members of an honest layer."""
    return [(LIST, listed, None), *((CACHE + path, data, None) for path, data in files.items())]
