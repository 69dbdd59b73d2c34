"""What `gpu-check` says of the lines that a kernel's run left."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from warmstart import gpucheck
from warmstart.errors import StartFailed
from warmstart.run import Result

TORCH = {"torch": "2.9.0", "hip": "7.1"}
NAMED = {"device": "cuda:0", "name": "AMD Radeon", "arch": "gfx1151"}
RAN = {"device": "cuda:0", "ok": True}


def result(*lines: Mapping[str, object], stderr: str = "", code: int = 0) -> Result:
    return Result("".join(json.dumps(line) + "\n" for line in lines), stderr, code, 1.0)


def test_a_kernel_that_ran() -> None:
    found = gpucheck._answer("x:y", "gfx1151", result(TORCH, NAMED, RAN))
    told = "cuda:0: AMD Radeon, gfx1151: kernels ran, with the right results\ntorch 2.9.0, HIP 7.1"
    assert gpucheck.text(found) == told


def test_a_gpu_without_device_code_ends_it_without_a_word() -> None:
    with pytest.raises(StartFailed, match=r"ran on AMD Radeon \(gfx1151\): .* holds no device code") as failed:
        gpucheck._answer("x:y", "gfx1102", result(TORCH, NAMED, code=1))
    assert failed.value.hint == "`make image ARCH=gfx1151` builds the right image"


def test_wrong_results_are_no_kernel_that_ran() -> None:
    with pytest.raises(StartFailed, match="no kernel ran on AMD Radeon"):
        gpucheck._answer("x:y", "gfx1151", result(TORCH, NAMED, {"device": "cuda:0", "ok": False}))
    with pytest.raises(StartFailed, match="no kernel ran: it ended with exit code 0"):
        gpucheck._answer("x:y", "gfx1151", result(TORCH))


def test_hints_name_commands_as_the_user_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    silent = "Engine core initialization failed. Failed core proc(s): {}"
    with pytest.raises(StartFailed) as failed:
        gpucheck._answer("x:y", "gfx1151", result(TORCH, NAMED, stderr=silent, code=1))
    assert "`make gpu-check`" in failed.value.hint
    other = {"device": "cpu", "name": "processor", "arch": "cpu", "ok": True}
    with pytest.raises(StartFailed, match="the image is for gfx1151, but torch sees cpu") as unseen:
        gpucheck._answer("x:y", "gfx1151", result(TORCH, other))
    assert unseen.value.hint == "`make doctor` says which GPU is chosen"
