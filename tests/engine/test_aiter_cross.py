"""aiter's modules built without a GPU, for real: Debian's hipcc, the aiter of PyPI, aiter's own builder.

Two archs of different families, the core module and one with device code for each. 0.1.7 does not know
gfx1151, but the builder, and what we ask of it, is the same for all archs. About two minutes, and half a
minute more to make the root file system the first time.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from image import aiter_device, aiter_facts
from tests.engine.aiter_rootfs import CORE, KERNELS, ROOT, SITE, Box, box, rootfs
from warmstart import run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mmdebstrap's root file system needs root")
ARCHS = ("gfx942", "gfx1100")
PACKAGE = f"/{SITE}/aiter"
HEADER = f"/{SITE}/aiter_meta/csrc/include/aiter_enum.h"
DEST = "/opt/aiter-prebuilt"
CORE_SECONDS = 60  # of one core
IMPORT = "import aiter"


class Built(NamedTuple):
    """A container in which both modules were built for `arch`, and how that went."""

    arch: str
    box: Box
    done: run.Result


@pytest.fixture(scope="module")
def root() -> Path:
    return rootfs()


@pytest.fixture
def fresh(root: Path) -> Iterator[Box]:
    """A container in which nothing was built."""
    with box(root) as inside:
        yield inside


def prebuilt(arch: str, inside: Box) -> Built:
    """Build both modules for `arch`, beside what a killed build of another container left behind."""
    for place in (f"{PACKAGE}/jit/build", f"{DEST}/build"):  # aiter 0.1.7 waits for ever on such a file
        inside.write(f"{place}/lock_{CORE}", "1\nanother-container\n")
        inside.write(f"{place}/{CORE}/build/lock", "")
    return Built(arch, inside, inside.prebuild("core", "--arch", arch, "--modules", KERNELS, "--jobs", "1"))


@pytest.fixture(scope="module")
def builds(root: Path) -> Iterator[dict[str, Built]]:
    """One container for each arch; both build at the same time, each on one core."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        boxes = [stack.enter_context(box(root)) for _ in ARCHS]
        yield {one.arch: one for one in pool.map(prebuilt, ARCHS, boxes)}


@pytest.fixture(params=ARCHS)
def built(request: pytest.FixtureRequest, builds: dict[str, Built]) -> Built:
    """A test that takes this runs for each arch."""
    return builds[request.param]


@pytest.fixture
def one(builds: dict[str, Built]) -> Built:
    """For what does not depend on the arch."""
    return builds[ARCHS[0]]


def test_there_is_no_gpu(fresh: Box) -> None:
    assert fresh.call("sh", "-c", "ls /dev/kfd /dev/dri").code != 0


def test_it_builds(built: Built) -> None:
    assert built.done.code == 0, built.done.stderr
    assert set(seconds(built)) == {CORE, KERNELS}


def test_it_builds_within_its_time(built: Built) -> None:
    """Processor time, which is what it takes on one core; on a crowded machine that grows several times over."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > processors + 1:
        pytest.skip(f"load {load:.1f} on {processors} processors; it took {seconds(built)[CORE]:.0f} s")
    assert seconds(built)[CORE] <= CORE_SECONDS


def seconds(built: Built) -> dict[str, float]:
    """Processor time by module."""
    found = re.findall(r"built (\w+) in [\d.]+ s \(([\d.]+) s of processor time", built.done.stdout)
    return {name: float(number) for name, number in found}


def test_device_code_is_for_the_asked_arch_alone(built: Built) -> None:
    done = built.box.check(DEST, "--arch", built.arch, "--core", CORE, "--header", HEADER, "--load", "--json")
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)
    assert {m["name"]: m["archs"] for m in said["modules"]} == {CORE: [], KERNELS: [built.arch]}
    assert said["enums"]["ActivationType"] == {"No": -1, "Silu": 0, "Gelu": 1, "Swiglu": 2}


def test_llvm_sees_the_same_device_code(built: Built) -> None:
    bundle = "/tmp/bundle"
    dump = f"--dump-section=.hip_fatbin={bundle}"
    built.box.call("llvm-objcopy-17", dump, f"{DEST}/{KERNELS}.so", "/dev/null")
    done = built.box.call("clang-offload-bundler-17", "--list", "--type=o", f"--input={bundle}")
    targets = [line for line in done.stdout.split() if "amdgcn" in line]
    assert [t.rpartition("-")[2] for t in targets] == [built.arch], done.stderr


def test_another_arch_is_noticed(built: Built) -> None:
    done = built.box.check(DEST, "--arch", "gfx1151", "--core", CORE)
    assert done.code == 1
    assert done.stderr.splitlines() == [
        f"aiter-check: {DEST}/{KERNELS}.so: holds device code for {built.arch}, expected gfx1151 alone"
    ]


@pytest.mark.parametrize("setting", [{}, {"AITER_JIT_DIR": "/tmp/fresh"}], ids=["unset", "set"])
def test_import_compiles_nothing(one: Built, setting: dict[str, str]) -> None:
    done = one.box.call("python3", "-c", IMPORT, env={"GPU_ARCHS": one.arch, **setting})
    said = done.stdout + done.stderr
    place = DEST if setting else f"{PACKAGE}/jit"
    assert f"import [{CORE}] under {place}/{CORE}.so" in said
    assert "start build" not in said
    # The rest of this import is Triton's business, and there is none here.
    assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'triton'"


def test_without_the_prebuilt_module_import_compiles(fresh: Box) -> None:
    """The opposite of the test above, so that it means something: with a compiler that stops at once."""
    fresh.write("/tmp/bin/hipcc", "#!/bin/sh\nexit 1\n")
    fresh.call("chmod", "+x", "/tmp/bin/hipcc")
    env = {"GPU_ARCHS": "gfx942", "PATH": "/tmp/bin:/usr/bin:/bin"}
    done = fresh.call("python3", "-c", IMPORT, env=env)
    assert "start build" in done.stdout + done.stderr


def test_nothing_else_is_left(built: Built) -> None:
    jit = [p for p in built.box.files(f"{PACKAGE}/jit") if "__pycache__" not in p and "/utils" not in p]
    names = ("__init__.py", "core.py", "optCompilerConfig.json", "build")
    known = {f"{PACKAGE}/jit/{name}" for name in names}
    modules = {f"{CORE}.so", f"{KERNELS}.so"}
    assert set(jit) - known == {f"{PACKAGE}/jit"} | {f"{PACKAGE}/jit/{m}" for m in modules}
    assert set(built.box.files("/opt")) == {"/opt", DEST, f"{DEST}/build"} | {f"{DEST}/{m}" for m in modules}
    assert built.box.call("cat", f"/{SITE}/aiter-prebuilt.pth").stdout == f"{DEST}\n"


def test_the_core_module_is_the_same_file_for_every_arch(builds: dict[str, Built]) -> None:
    digests = {built.box.call("sha256sum", f"{DEST}/{CORE}.so").stdout for built in builds.values()}
    assert len(digests) == 1


def test_a_module_of_another_aiter_is_noticed(one: Built) -> None:
    header = one.box.call("cat", HEADER).stdout.replace("Swiglu = 2,", "Swiglu = 2, Situv2 = 3,")
    one.box.write("/tmp/newer.h", header)
    done = one.box.check(f"{DEST}/{CORE}.so", "--core", CORE, "--header", "/tmp/newer.h")
    assert done.code == 1
    assert "enum ActivationType differs between header and module: Situv2=3" in done.stderr


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        ("truncate -s 100000 {}", "cut short"),
        ("dd if=/dev/zero of={} bs=4096 seek=10 count=20 conv=notrunc", "(file is damaged|does not load)"),
        (": > {}", "an empty file"),
    ],
    ids=["cut short", "zeros", "empty"],
)
def test_a_damaged_module_is_noticed(one: Built, spoil: str, line: str) -> None:
    """aiter itself dies of the first two without a word."""
    copy = f"/tmp/{CORE}.so"
    assert one.box.call("sh", "-c", f"cp {DEST}/{CORE}.so {copy} && {spoil.format(copy)}").code == 0
    done = one.box.check(copy, "--core", CORE, "--header", HEADER)
    assert done.code == 1
    assert re.fullmatch(rf"aiter-check: {copy}: [^\n]*{line}[^\n]*\n", done.stderr)


ITFS = """
from jinja2 import Template
from csrc.cpp_itfs.utils import compile_template_op

SOURCE = Template('''
#include <hip/hip_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= {{width}}; }
extern "C" void {{func_name}}(float* x) { twice<<<1, {{width}}>>>(x); }
''')

def compile(width: int, folder: str = None):
    return compile_template_op(SOURCE, "probe", width=width, folder=folder)
"""


def test_one_library_of_the_cpp_itfs_family(one: Built) -> None:
    """With a template of our own: those of 0.1.7 want a newer HIP than Debian 13 has."""
    one.box.write(f"/{SITE}/aiter_meta/csrc/cpp_itfs/probe.py", ITFS)
    one.box.call("ln", "-s", "/usr", "/opt/rocm")  # this version of the family looks for hipconfig there
    one.box.write("/tmp/ck/include/empty.h", "")  # instead of 50 MB of headers that it would copy
    arguments = ["core", "--arch", one.arch, "--itfs", "probe:width=4", "--jobs", "1"]
    done = one.box.prebuild(*arguments, env={"CK_DIR": "/tmp/ck"})
    assert done.code == 0, done.stderr
    assert f"built {CORE}" not in done.stdout  # the core module was there already
    (library,) = [p for p in one.box.files(f"{DEST}/itfs") if p.endswith("/lib.so")]
    done = one.box.check(library, "--arch", one.arch, "--load", "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["modules"][0]["archs"] == [one.arch]
    # Found again by aiter's own look-up, which builds nothing then.
    again = "import sys; sys.path.insert(0, sys.argv[1]); from csrc.cpp_itfs.probe import compile; compile(4)"
    env = {"AITER_ROOT_DIR": f"{DEST}/itfs", "GPU_ARCHS": one.arch, "PATH": "/nowhere"}
    done = one.box.call("/usr/bin/python3", "-c", again, f"/{SITE}/aiter_meta", env=env)
    assert done.code == 0, done.stderr
    assert one.box.call("rm", "-r", f"{DEST}/itfs", "/opt/rocm").code == 0


def test_the_data_agree_with_the_package(fresh: Box) -> None:
    """arch/aiter.toml lists exactly the archs that this aiter's builder lets through."""
    rows = tomllib.loads((ROOT / "arch" / "aiter.toml").read_text(encoding="utf-8"))
    code = fresh.call("cat", f"{PACKAGE}/jit/core.py").stdout
    allowed = re.search(r"allowed_archs = \[(.*?)\]", code, re.DOTALL)
    assert allowed
    known = aiter_facts.facts(rows, "0.1.7.post2.dev18")["archs"]
    assert sorted(re.findall(r'"(gfx\w+)"', allowed[1])) == sorted(known)


@pytest.mark.parametrize(
    ("said", "passes"),
    [("import [module_x] under /x", True), ("start build [module_x]\nimport [module_x]", False), ("", False)],
)
def test_the_import_test_of_mode_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, passes: bool
) -> None:
    """What it makes of aiter's log lines, with a package that only prints them: there is no GPU here."""
    (tmp_path / "aiter.py").write_text(f"print({said!r})\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if passes:
        aiter_device.import_test("module_x")
    else:
        with pytest.raises(aiter_facts.Stop, match="AITER_JIT_DIR unset, failed or compiled"):
            aiter_device.import_test("module_x")


def test_modules_that_came_with_the_package_are_taken(one: Built) -> None:
    """As from a vendor's wheel: real files in the package's own folder."""
    jit = f"{PACKAGE}/jit"
    move = f"for m in {CORE} {KERNELS}; do mv {DEST}/$m.so {jit}/$m.so; done; rm -r {DEST}"
    assert one.box.call("sh", "-c", f"{move} /{SITE}/aiter-prebuilt.pth").code == 0
    done = one.box.prebuild("set", "--arch", one.arch)
    assert done.code == 0, done.stderr
    assert "modules that are there already: 2" in done.stdout
    assert "built" not in done.stdout
    assert one.box.call("readlink", f"{DEST}/{CORE}.so").stdout == f"{jit}/{CORE}.so\n"
    assert one.box.call("cat", f"/{SITE}/aiter-prebuilt.pth").stdout == f"{DEST}\n"
    done = one.box.prebuild("set", "--arch", ARCHS[1])
    assert done.code == 5
    assert f"holds device code for {one.arch}, expected {ARCHS[1]} at least" in done.stderr


def test_the_import_needs_little_of_the_sources(one: Built) -> None:
    """After the test above, and the last of its container: what an image may leave out of aiter_meta."""
    meta = f"/{SITE}/aiter_meta"
    spare = f"find {meta} -type f ! -path {HEADER} ! -path '{meta}/csrc/cpp_itfs/*.py' -delete"
    assert one.box.call("sh", "-c", spare).code == 0
    done = one.box.call("python3", "-c", IMPORT, env={"GPU_ARCHS": one.arch})
    assert f"import [{CORE}]" in done.stderr + done.stdout
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'triton'"
