"""What image/aiter_prebuild.py refuses, and what a build that fails or is killed leaves behind, for real."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.engine.aiter_rootfs import SITE, Box, box, rootfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mmdebstrap's root file system needs root")
PACKAGE = f"/{SITE}/aiter"


@pytest.fixture
def fresh() -> Iterator[Box]:
    """A container in which nothing was built."""
    with box(rootfs()) as inside:
        yield inside


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["core", "--arch", "gfx1151"], 3, r"does not know gfx1151 \(gfx1151 came with 0\.1\.7\.post3\)"),
        (["core", "--arch", "gfx0000"], 3, r"does not know gfx0000 \(no version does\)"),
        (["off"], 3, r"has no Triton-only mode \(0\.1\.16 brought it\): use mode core"),
        (["device", "--arch", "gfx942"], 6, r"no /dev/kfd: build with --device /dev/kfd"),
    ],
    ids=["newer arch", "no arch", "off", "no device"],
)
def test_what_can_not_be_is_refused(fresh: Box, arguments: list[str], code: int, line: str) -> None:
    done = fresh.prebuild(*arguments)
    assert done.code == code
    assert done.stdout == ""
    assert re.fullmatch(rf"aiter-prebuild: [^\n]*{line}[^\n]*\n", done.stderr)
    assert fresh.leavings() == []


def test_a_module_that_aiter_does_not_have(fresh: Box) -> None:
    done = fresh.prebuild("core", "--arch", "gfx942", "--modules", "module_nonsense")
    assert done.code == 4
    assert "error: this aiter has no module module_nonsense (log: " in done.stderr.splitlines()[-1]


def test_a_failed_build_leaves_its_log_and_no_module(fresh: Box) -> None:
    source = f"/{SITE}/aiter_meta/csrc/pybind/aiter_enum_pybind.cu"
    assert fresh.call("sed", "-i", "$ a #error broken here", source).code == 0
    done = fresh.prebuild("core", "--arch", "gfx942")
    assert done.code == 4
    line = r"aiter-prebuild: .*aiter_enum_pybind\.cu:\d+:\d+: error: broken here \(log: \S+\)"
    assert re.fullmatch(line, done.stderr.splitlines()[-1])
    assert "broken here" in fresh.call("cat", "/tmp/aiter-prebuild.log").stdout
    assert fresh.leavings() == []
    assert not [p for p in fresh.files(f"{PACKAGE}/jit") if p.endswith(".so") or "lock" in p]


# Starts a build, waits until no earlier one's folder is there and aiter holds its lock, sends the signal, and
# waits for the end.
INTERRUPT = """
earlier=$(ls -d /opt/.aiter-prebuilt.work-* 2>/dev/null)
python3 /src/aiter_prebuild.py core --arch gfx942 --data /data/aiter.toml & build=$!
until [ ! -e "$earlier" ] && ls /opt/.aiter-prebuilt.work-*/jit/build/lock_* 2>/dev/null; do sleep 0.1; done
kill -s $1 $build; wait $build; echo "code $?"
"""


def test_a_killed_build_leaves_nothing_half_done(fresh: Box) -> None:
    killed = fresh.call("bash", "-c", INTERRUPT, "bash", "KILL")
    assert "code 137" in killed.stdout
    left = fresh.files("/opt", f"{PACKAGE}/jit")
    assert not [p for p in left if p.endswith(".so")]
    assert all("/.aiter-prebuilt.work-" in p for p in left if "lock" in p)  # nowhere that aiter looks
    # The next build takes that folder away, waits for no lock of it, and when it is told to stop, tidies up.
    stopped = fresh.call("bash", "-c", INTERRUPT, "bash", "TERM")
    assert "code 143" in stopped.stdout
    assert fresh.leavings() == []
    # Dead ones may still be listed (Z): the container's first process, sleep, does not wait for them.
    running = fresh.call("ps", "-A", "-o", "stat,comm").stdout
    assert not re.findall(r"(?m)^[^Z\s]\S* +(?:ninja|clang|hipcc).*", running)
